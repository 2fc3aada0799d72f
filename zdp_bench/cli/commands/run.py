"""Train a recipe and write its record."""

from __future__ import annotations

import argparse
import logging
import sys

from zdp_bench.cli.arguments import add_overrides, hide_environment
from zdp_bench.errors import UserError

GROUP = "run"
HELP = "train a recipe and write its record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="sweep over comma-separated values"
    )
    parser.add_argument(
        "--show-config",
        action="store_true",
        help="print the configuration as the run would see it, checked, and run nothing",
    )
    parser.add_argument(
        "--cfg",
        choices=["job", "hydra", "all"],
        help="print the configuration as Hydra composes it, and run nothing",
    )
    parser.add_argument(
        "--resolve", action="store_true", help="with --cfg: interpolations replaced"
    )
    parser.add_argument(
        "--info",
        choices=["defaults", "defaults-tree", "searchpath", "plugins", "config", "all"],
        help="print what Hydra knows of the configuration, and run nothing",
    )
    add_overrides(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.config.compose import hydra_session
    from zdp_bench.config.words import read_words, readable_errors
    from zdp_bench.experiments.sweep import Job, sweep
    from zdp_bench.training import distributed

    shows = options.show_config or options.cfg or options.info
    if options.resolve and not options.cfg:
        raise UserError("--resolve belongs to --cfg: add --cfg job, or say --show-config.")
    if options.multirun and shows:
        raise UserError("--show-config, --cfg and --info show one run: leave -m out.")
    words = [str(word.input_line) for word in read_words(options.overrides, options.multirun)]
    if shows:
        return _show(options, words)
    if options.multirun and distributed.is_distributed():
        raise UserError(
            "torchrun carries out one run: leave -m out, "
            "or sweep with launcher=joblib or launcher=slurm."
        )
    with readable_errors(words), hydra_session() as driver:
        if not options.multirun:
            error = driver.run(
                config_name="config", task_function=Job(), overrides=words
            ).return_value
            if isinstance(error, UserError):
                raise error
            return 0
        count, failed = sweep(driver, words)
    print(f"sweep: {count} jobs, {len(failed)} failed")
    for overrides, reason in failed:
        said = hide_environment(f"{' '.join(overrides)}: {reason}", options.overrides)
        print(f"zdp-bench: {said}", file=sys.stderr)
    return 2 if failed else 0


def _show(options: argparse.Namespace, words: list[str]) -> int:
    """Print the configuration, or Hydra's information on it."""
    from omegaconf import OmegaConf

    from zdp_bench.config import compose, parse, to_plain
    from zdp_bench.config.compose import hydra_session
    from zdp_bench.config.words import readable_errors

    if options.show_config:
        composed = compose(words)
        parse(composed, words)
        print(OmegaConf.to_yaml(OmegaConf.create(to_plain(composed))).rstrip())
        return 0
    with readable_errors(words), hydra_session() as driver:
        given = {"config_name": "config", "overrides": words}
        if options.cfg:
            driver.show_cfg(**given, cfg_type=options.cfg, package=None, resolve=options.resolve)
        else:
            root = logging.getLogger()
            before = root.level, list(root.handlers)
            driver.show_info(options.info, **given)
            root.setLevel(before[0])  # it makes everything log to standard output
            root.handlers = before[1]
    return 0
