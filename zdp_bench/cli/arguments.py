"""Arguments that several commands share, and the checks that belong to them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zdp_bench.errors import UserError

if TYPE_CHECKING:
    from zdp_bench.report.sheet import Sheet

RESULTS = Path("results")
FORMS = ("md", "csv", "json")  # of `report/sheet.py`, which is not imported for --help


def add_overrides(parser: argparse.ArgumentParser, text: str = "") -> None:
    """Add the words that make up a run's configuration."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=text or "recipe=NAME, and any key of the configuration",
    )


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add --results, the folder of the records; verbs that take keys have `paths.results=DIR`."""
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="the results folder (default: results)",
    )


def add_data_root(parser: argparse.ArgumentParser) -> None:
    """Add --root; `data_root` reads it."""
    parser.add_argument(
        "--root", type=Path, help="the data root (default: $ZDP_DATA or ~/.cache/zdp-bench)"
    )


def add_format(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add --format: rich, or one of `others`; by default, any form that a table has."""
    what = "JSON" if others == ("json",) else "text for other programs"
    others = others or FORMS
    parser.add_argument(
        "--format",
        choices=["rich", *others],
        default="rich",
        help=f"a table, or {what} (default rich)",
    )


def print_sheet(sheet: Sheet, form: str) -> None:
    """Print a table in the --format: "rich", or one of `sheet.FORMS`."""
    from zdp_bench.report.console import console

    if form == "rich":
        console().print(sheet)
    else:
        print(sheet.as_text(form))


def data_root(options: argparse.Namespace) -> Path:
    """Return the folder that --root or $ZDP_DATA names."""
    root = Path(options.root or os.environ.get("ZDP_DATA") or "~/.cache/zdp-bench").expanduser()
    if root.is_file():
        raise UserError(
            f"{root}: is a file, not a folder; set the data root with --root or ZDP_DATA."
        )
    return root


def require_records(folder: Path, runs: bool = True) -> None:
    """Reject a results folder that is a file, was named but is absent, or has no run if `runs`."""
    advice = "Set the results folder of your runs (--results DIR)."
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file, not a folder, so there are no records. {advice}")
    if folder != RESULTS and not folder.exists():
        raise UserError(f"{folder}: folder not found, so there are no records. {advice}")
    if runs and not any((folder / "runs").glob("*/*/")):
        raise UserError(
            f"{folder.absolute()}: contains no runs. `zdp-bench run recipe=quickstart` creates "
            "one here; --results DIR selects another folder."
        )


def hide_environment(text: str, overrides: Sequence[str]) -> str:
    """Return a sentence without the values of environment variables that overrides name.

    `${oc.env:SECRET}` may be a password, and sentences end in logs.
    """
    named = set(re.findall(r"\$\{\s*oc\.env:\s*['\"]?(\w+)", " ".join(overrides)))
    for name in sorted(named, key=lambda name: -len(os.environ.get(name, ""))):
        if value := os.environ.get(name):
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text
