"""Attack a recipe's mechanism and run: a lower bound on its ε. Exits with 1 when one is flagged.

With `my_script:function` instead of a recipe: attack a private training of your own, written with
whatever library; docs/audit_own.md says what the function takes and returns. Exits with 1 when it
is flagged.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from zdp_bench.cli.arguments import add_format, add_overrides, number, print_sheet, whole
from zdp_bench.errors import UserError

if TYPE_CHECKING:
    from zdp_bench.audit.release import Finding

GROUP = "understand"
HELP = "attack a recipe's mechanism, or your own: a lower bound on its ε"
RECIPES = {"canaries": 1000, "steps": 1000}  # what no script reads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(
        parser, "recipe=NAME, and any key of the configuration; or my_script:function alone"
    )
    parser.add_argument(
        "--confidence",
        type=number("0.5 or more, and below 1"),
        default=0.99,
        help="of every bound (default 0.99)",
    )
    parser.add_argument(
        "--canaries",
        type=whole(10),
        default=RECIPES["canaries"],
        metavar="M",
        help="in the attacks on a whole run (default 1000)",
    )
    parser.add_argument(
        "--steps",
        type=whole(1),
        default=RECIPES["steps"],
        metavar="N",
        help="at most N steps of the run (default 1000)",
    )
    parser.add_argument(
        "--runs",
        type=whole(40),
        metavar="R",
        help="of my_script:function, with the canary and without (default 400)",
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    for word in options.overrides:
        if "=" not in word and not is_script(word):
            raise UserError(
                f"'{word}' is not known: write my_script:function for a function of your own, and "
                "recipe=NAME or key=value for a recipe."
            )
    if any(is_script(word) for word in options.overrides):
        return _audit_script(options)
    return _audit_recipe(options)


def is_script(word: str) -> bool:
    """True for `module:function`, and not for `key=value`."""
    return ":" in word and "=" not in word


def _audit_script(options: argparse.Namespace) -> int:
    from zdp_bench.extras.script_audit.script import audit_script
    from zdp_bench.training.progress import console

    word = next(word for word in options.overrides if is_script(word))
    others = [other for other in options.overrides if other != word]
    others += [f"--{key}" for key, default in RECIPES.items() if getattr(options, key) != default]
    if others:
        raise UserError(
            f"{word}: a script's function is audited by itself; leave out {' '.join(others)}."
        )
    with console().status("attacking ..."):
        finding = audit_script(word, options.runs, options.confidence)
    return _show([finding], f"Audit of {word}", options)


def _audit_recipe(options: argparse.Namespace) -> int:
    from zdp_bench.audit import audit
    from zdp_bench.config import configured
    from zdp_bench.training.progress import console

    if options.runs is not None:
        raise UserError("--runs: is for my_script:function; a recipe's attacks do not read it.")
    config = configured(options.overrides)
    with console().status("attacking ..."):
        findings = [*audit(config, options.confidence, options.canaries, options.steps)]
    return _show(findings, f"Audit of recipe {config.recipe}, seed {config.seed}", options)


def _show(findings: list[Finding], title: str, options: argparse.Namespace) -> int:
    """Print the findings; return the exit code."""
    from zdp_bench.report.terminal import show_findings

    plain = [dataclasses.asdict(finding) for finding in findings]
    print_sheet(show_findings(plain, title), options.format)
    return int(not all(finding.as_expected for finding in findings))
