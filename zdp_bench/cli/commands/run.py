"""Train a recipe and write its record."""

from __future__ import annotations

import argparse
import sys

from zdp_bench.cli.arguments import add_overrides, hide_environment
from zdp_bench.errors import UserError

HELP = "train a recipe and write its record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="sweep over comma-separated values"
    )
    add_overrides(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.config.compose import hydra_session
    from zdp_bench.config.messages import readable_errors
    from zdp_bench.experiments.sweep import Job, sweep
    from zdp_bench.training import distributed

    if options.multirun and distributed.is_distributed():
        raise UserError(
            "torchrun carries out one run: leave -m out, "
            "or sweep with launcher=joblib or launcher=slurm."
        )
    launchers = [
        word
        for word in options.overrides
        if word.startswith("launcher=") and word != "launcher=local"
    ]
    if launchers and not options.multirun:
        raise UserError(
            f"{launchers[-1]}: a launcher carries out a sweep; add -m, or leave it out."
        )
    with readable_errors(options.overrides), hydra_session() as driver:
        if not options.multirun:
            error = driver.run(
                config_name="config", task_function=Job(), overrides=options.overrides
            ).return_value
            if isinstance(error, UserError):
                raise error
            return 0
        count, failed = sweep(driver, options.overrides)
    if "recipe=algorithm_faceoff" in options.overrides:
        _print_faceoff(options.overrides, failed)
        return 0
    print(f"sweep: {count} jobs, {len(failed)} failed")
    for overrides, reason in failed:
        said = hide_environment(f"{' '.join(overrides)}: {reason}", options.overrides)
        print(f"zdp-bench: {said}", file=sys.stderr)
    return 2 if failed else 0


def _print_faceoff(overrides: list[str], failed: list[tuple[list[str], str]]) -> None:
    """Print which algorithms were skipped and why, and a table for each setting; draw the figure.

    Raises:
        UserError: every job failed.
    """
    from zdp_bench.config import configured
    from zdp_bench.experiments.faceoff import command_of
    from zdp_bench.report import faceoff, figures
    from zdp_bench.training.progress import console

    for reason in dict.fromkeys(reason for _, reason in failed):
        console().print(f"skipped: {reason}")
    swept = ("algorithm", "seed", "privacy.target_")
    config = configured([w for w in overrides if "," not in w and not w.startswith(swept)])
    found = faceoff.read(config.results)
    if not found:
        raise UserError("the face-off has no run to show: every job was skipped.")
    for one in found:
        sheet = one.sheet(command_of(one))
        console().print(sheet.as_rich())
        for path in sheet.write(config.results / "tables" / one.name):
            print(f"written: {path}")
    drawn = figures.draw("faceoff", config.results, config.data_root)
    for path in figures.write(drawn, "faceoff", config.results):
        print(f"written: {path}")
