"""Arguments that several commands share, and their checks."""

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
MIN_SECRET = 4  # characters; a shorter value, such as a number of a job, is no password
FORMS = ("md", "csv", "json")  # those of `report.sheet`, which is too slow to import for --help


def add_overrides(parser: argparse.ArgumentParser, text: str = "") -> None:
    """Add the overrides, such as recipe=NAME, that make up a run's configuration.

    Args:
        parser: parser of the command.
        text: help text. Default: that of a command that runs a recipe.
    """
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=text or "recipe=NAME, and any key of the configuration",
    )


def read_path(text: str) -> Path:
    """Return the path that an option gives; a shell leaves the ~ of `--results=~/runs`."""
    from zdp_bench.disk import expand_home

    try:
        return expand_home(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add --results, the folder of the records. Verbs with overrides have `paths.results=DIR`."""
    parser.add_argument(
        "--results",
        type=read_path,
        default=RESULTS,
        metavar="DIR",
        help="the results folder (default: results)",
    )


def add_data_root(parser: argparse.ArgumentParser) -> None:
    """Add --root, which `data_root` reads."""
    parser.add_argument(
        "--root", type=read_path, help="the data root (default: $ZDP_DATA or ~/.cache/zdp-bench)"
    )


def add_format(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add --format, which is "rich" by default.

    Args:
        parser: parser of the command.
        others: the other formats. Default: all formats of a table.
    """
    alternative = "JSON" if others == ("json",) else "text for other programs"
    parser.add_argument(
        "--format",
        choices=["rich", *(others or FORMS)],
        default="rich",
        help=f"a table, or {alternative} (default rich)",
    )


def print_sheet(sheet: Sheet, form: str) -> None:
    """Print a table in a --format: "rich", or one of `FORMS`."""
    from zdp_bench.report.console import console

    if form == "rich":
        console().print(sheet)
    else:
        print(sheet.as_text(form))


def data_root(options: argparse.Namespace) -> Path:
    """Return the data root: --root, else $ZDP_DATA, else a folder in the user's cache."""
    from zdp_bench.disk import expand_home
    from zdp_bench.foreign_files import is_file

    root = expand_home(options.root or os.environ.get("ZDP_DATA") or "~/.cache/zdp-bench")
    if is_file(root):
        raise UserError(
            f"{root}: is a file, not a folder; set the data root with --root or ZDP_DATA."
        )
    return root


def require_records(folder: Path, runs: bool = True) -> None:
    """Reject a results folder that cannot have records.

    Args:
        folder: the results folder. It may be absent if it is the default one.
        runs: whether it must contain a run.

    Raises:
        UserError: the folder is a file, is absent although the user named it, or lacks runs.
    """
    from zdp_bench.foreign_files import exists

    advice = "Set the results folder of your runs (--results DIR)."
    is_absent = not exists(folder)
    if not is_absent and not folder.is_dir():
        raise UserError(f"{folder}: is a file, not a folder, so there are no records. {advice}")
    if folder != RESULTS and is_absent:
        raise UserError(f"{folder}: folder not found, so there are no records. {advice}")
    if runs and not any((folder / "runs").glob("*/*/")):
        raise UserError(
            f"{folder.absolute()}: contains no runs. `zdp-bench run recipe=quickstart` creates "
            "one here; --results DIR selects another folder."
        )


def hide_environment(text: str, words: Sequence[str]) -> str:
    """Replace the values of environment variables that words refer to by their names.

    `${oc.env:SECRET}` may be a password, and messages end up in logs.
    """
    names = set(re.findall(r"\$\{\s*oc\.env:\s*['\"]?(\w+)", " ".join(words)))
    # As an error shows them, which is on one line.
    value_of = {name: str(UserError(os.environ.get(name, ""))) for name in names}
    # The longest value comes first, because a shorter one may be a part of it.
    for name in sorted(names, key=lambda name: -len(value_of[name])):
        if len(value_of[name]) >= MIN_SECRET:
            text = text.replace(value_of[name], f"${{oc.env:{name}}}")
    return text
