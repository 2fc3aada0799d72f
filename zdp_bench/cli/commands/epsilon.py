"""Compute ε from a noise multiplier, or the noise multiplier for a target ε. Without numbers, list
every ε of the five papers, reproduced and tight.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import RESULTS, add_format, add_results, print_sheet
from zdp_bench.errors import UserError

GROUP = "understand"
HELP = "compute ε from a few numbers, or list every ε of the papers"
SETTING = (
    *("sample_rate", "batch_size", "examples", "steps", "epochs"),
    "examples_per_patient",
    "delta",
    "sampling",
)
# Set here, so that an option that is given without numbers is noticed.
DEFAULTS = {"delta": 1e-5, "sampling": "poisson"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    per_step = "probability that a step draws an example, or batch size / examples"
    noise, batch, length = (parser.add_mutually_exclusive_group() for _ in range(3))
    for group, option, metavar, kind, text in (
        (noise, "sigma", "σ", float, "compute the ε of this noise multiplier by every accountant"),
        (noise, "target-epsilon", "E", float, "compute the noise multiplier that gives this ε"),
        (batch, "sample-rate", "Q", float, per_step),
        (batch, "batch-size", "M", int, "instead of the sample rate; needs --examples"),
        (parser, "examples", "N", int, "number of training examples"),
        (length, "steps", "T", int, "number of steps"),
        (length, "epochs", "E", int, "instead of steps"),
        (
            *(parser, "examples-per-patient", "K", int),
            "also the ε of a patient or image with K examples",
        ),
    ):
        group.add_argument(f"--{option}", metavar=metavar, type=kind, help=text)
    parser.add_argument("--delta", metavar="δ", type=float, help="default 1e-5")
    parser.add_argument(
        "--sampling",
        choices=["poisson", "uniform", "full"],
        help="default poisson; uniform draws fixed-size batches",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the papers' ε to results/tables"
    )
    add_format(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    if options.sigma is None and options.target_epsilon is None:
        return _print_papers(options)
    from zdp_bench.report import epsilon

    if options.write or options.results != RESULTS:
        raise UserError(
            "--write and --results are for the papers' ε: leave them out with --sigma or "
            "--target-epsilon."
        )
    setting = {name: getattr(options, name) for name in SETTING}
    for name, default in DEFAULTS.items():
        if setting[name] is None:
            setting[name] = default
    training = epsilon.read_training(**setting)
    sheet = epsilon.answer(training, options.sigma, options.target_epsilon)
    print_sheet(sheet, options.format)
    return 0


def _print_papers(options: argparse.Namespace) -> int:
    """Print every ε of the five papers; with --write, write them too."""
    from zdp_bench.report import epsilon
    from zdp_bench.training.interrupts import require_writable

    if options.write:
        require_writable(options.results)
    elif options.results != RESULTS:
        raise UserError(f"--results {options.results}: needs --write, which writes there.")
    for name in SETTING:
        if getattr(options, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} alone is not enough: add --sigma or --target-epsilon."
            )
    sheet = epsilon.sheet([epsilon.reproduce(line) for line in epsilon.read_quoted()])
    print_sheet(sheet, options.format)
    if options.write:
        paths = sheet.write(options.results / "tables" / "epsilon")
        print("\n".join(f"written: {path}" for path in paths))
    return 0
