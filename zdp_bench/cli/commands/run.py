"""Train a recipe and write its record."""

from __future__ import annotations

import argparse
import os
import sys

from zdp_bench.cli.arguments import add_overrides, hide_environment
from zdp_bench.errors import UserError, print_message

GROUP = "run"
HELP = "train a recipe and write its record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="sweep over comma-separated values"
    )
    parser.add_argument(
        "--show-config",
        action="store_true",
        help="check and print the configuration without running it",
    )
    add_overrides(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.report.console import console

    is_first_rank = os.environ.get("RANK", "0") == "0"  # set by torchrun; torch is not loaded yet
    # On a terminal, `main` has already printed the command.
    if is_first_rank and not (options.show_config or sys.stderr.isatty()):
        # The console, unlike `print`, continues if nobody reads its output.
        console().print(" ".join(["run", *options.overrides, "..."]), highlight=False)
    from zdp_bench.config.compose import hydra_session
    from zdp_bench.config.words import read_words, readable_errors
    from zdp_bench.experiments.sweep import SweepJob, show_sweep, sweep

    if options.multirun and options.show_config:
        raise UserError("--show-config shows one run: leave -m out.")
    words = [str(word.input_line) for word in read_words(options.overrides, options.multirun)]
    if options.show_config:
        return _show(words)
    if options.multirun:
        from zdp_bench.training.distributed import is_distributed

        if is_distributed():
            raise UserError(
                "torchrun performs one run: leave -m out, "
                "or sweep with launcher=joblib or launcher=slurm."
            )
    with readable_errors(words), hydra_session() as driver:
        if not options.multirun:
            error = driver.run(
                config_name="config", task_function=SweepJob(), overrides=words
            ).return_value
            if isinstance(error, UserError):
                raise error
            return 0
        jobs = sweep(driver, words)
    failed = [job for job in jobs if isinstance(job.result, str)]
    console().print(show_sweep(jobs))
    print(f"sweep: {len(jobs)} jobs, {len(failed)} failed")
    for job in failed:
        sentence = hide_environment(f"{' '.join(job.words)}: {job.result}", options.overrides)
        print_message(sentence)
    return 2 if failed else 0


def _show(words: list[str]) -> int:
    """Print the checked configuration, which is what the run would read."""
    from omegaconf import OmegaConf

    from zdp_bench.config import configured

    print(OmegaConf.to_yaml(OmegaConf.create(configured(words).resolved)).rstrip())
    return 0
