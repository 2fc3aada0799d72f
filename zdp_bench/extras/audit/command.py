"""Attack a recipe's mechanism and run for a lower bound on ε. Exits with 1 if an attack refutes the
claimed ε.

With `my_script:function` instead of a recipe, attack your own private training, written with any
library; docs/audit_own.md describes what the function takes and returns.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from zdp_bench.cli.arguments import add_format, add_overrides, print_sheet
from zdp_bench.errors import UserError

if TYPE_CHECKING:
    from zdp_bench.extras.audit.release import Finding

GROUP = "understand"
HELP = "attack a recipe or a training run for a lower bound on its ε"
NOTES = (
    "ε at least: the lower bound that the attack shows with the stated confidence. 'flagged': it "
    "exceeds the claimed ε, so the claim is false. 'passes': this attack did not refute the claim.",
    "One release: Clopper-Pearson bounds on three learned tests (a projection, distances, equal "
    "numbers), at the most revealing δ; a Gaussian release claims an ε for every δ. One run: "
    "Steinke, Nasr & Jagielski 2023, at the recipe's δ.",
)


STEPS = 1000  # of a recipe that are attacked
RUNS = 400  # of a script's function, each with and without the canary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(
        parser, "recipe=NAME, and any key of the configuration; or my_script:function alone"
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.99,
        help="confidence of every bound (default 0.99)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"of a recipe: attack at most the first N steps of the run (default {STEPS})",
    )
    parser.add_argument(
        "--runs",
        type=int,
        metavar="R",
        help=f"runs of my_script:function, each with and without the canary (default {RUNS})",
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.report.console import console

    scripts = [word for word in options.overrides if ":" in word and "=" not in word]
    if scripts and len(options.overrides) > 1:
        raise UserError(f"{scripts[0]}: audit a script's function without other arguments.")
    if scripts and options.steps is not None:
        raise UserError(f"--steps needs a recipe; {scripts[0]} takes --runs.")
    if not scripts and options.runs is not None:
        raise UserError("--runs needs my_script:function; a recipe takes --steps.")
    with console().status("attacking ..."):
        if scripts:
            from zdp_bench.extras.audit.script import audit_script

            num_runs = RUNS if options.runs is None else options.runs
            findings = [audit_script(scripts[0], num_runs, options.confidence)]
            return _show(findings, f"Audit of {scripts[0]}", options)
        from zdp_bench.config import configured
        from zdp_bench.extras.audit.recipe import audit

        config = configured(options.overrides)
        num_steps = STEPS if options.steps is None else options.steps
        findings = [*audit(config, options.confidence, num_steps)]
    return _show(findings, f"Audit of recipe {config.recipe}, seed {config.seed}", options)


def _show(
    findings: list[Finding],
    title: str,
    options: argparse.Namespace,
) -> int:
    """Print the findings; return the exit code."""
    from zdp_bench.privacy.statement import show_epsilon
    from zdp_bench.report.sheet import Sheet

    columns = (
        "case",
        "claim",
        "ε claimed",
        "ε at least",
        "δ",
        "confidence",
        "verdict",
        "evidence",
    )
    rows = [
        [
            finding.case,
            finding.claim,
            show_epsilon(finding.epsilon_claimed),
            show_epsilon(finding.lower_bound, at_least=True),
            f"{finding.delta:g}",
            f"{100 * finding.confidence:g} %",
            finding.verdict,
            finding.evidence,
        ]
        for finding in findings
    ]
    numbers = [{**dataclasses.asdict(finding), "verdict": finding.verdict} for finding in findings]
    print_sheet(Sheet(title, columns, rows, NOTES, "", numbers), options.format)
    return int(any(finding.verdict == "flagged" for finding in findings))
