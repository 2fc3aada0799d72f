"""Train a recipe and write its record."""

from __future__ import annotations

import argparse
import logging
import re
import sys

from zdp_bench.cli.arguments import add_overrides, hide_environment
from zdp_bench.errors import UserError

GROUP = "run"
HELP = "train a recipe and write its record"
SWEEPS = ("hydra.launcher.", "hydra/launcher", "hydra.sweeper.", "hydra/sweeper")


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
    from zdp_bench.config.messages import readable_errors
    from zdp_bench.experiments.sweep import Job, sweep
    from zdp_bench.training import distributed

    _check_options(options)
    if options.show_config or options.cfg or options.info:
        return _show(options)
    if options.multirun and distributed.is_distributed():
        raise UserError(
            "torchrun carries out one run: leave -m out, "
            "or sweep with launcher=joblib or launcher=slurm."
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


def _check_options(options: argparse.Namespace) -> None:
    """Refuse what would have no effect: keys of Hydra's that nothing reads here.

    Raises:
        UserError: names the first such word.
    """
    if options.resolve and not options.cfg:
        raise UserError("--resolve belongs to --cfg: add --cfg job, or say --show-config.")
    if options.multirun and (options.show_config or options.cfg or options.info):
        raise UserError("--show-config, --cfg and --info show one run: leave -m out.")
    for word in options.overrides:
        key = word.lstrip("+~").partition("=")[0]
        if key == "launcher" or key.startswith(SWEEPS):
            if not options.multirun and word != "launcher=local":
                raise UserError(f"{word}: only a sweep reads it; add -m, or leave it out.")
        elif re.split(r"[./]", key)[0] == "hydra" and key != "hydra.verbose":
            raise UserError(
                f"{word}: has no effect here. A run's folder is named by its configuration, and "
                "paths.results=DIR says where it lies; of Hydra's own keys hydra.launcher.*, "
                "hydra.sweeper.* and hydra.verbose are read."
            )


def _show(options: argparse.Namespace) -> int:
    """Print the configuration, or Hydra's information on it."""
    from omegaconf import OmegaConf

    from zdp_bench.config import compose, parse
    from zdp_bench.config.compose import hydra_session
    from zdp_bench.config.messages import readable_errors

    if options.show_config:
        composed = compose(options.overrides)
        parse(composed, options.overrides)
        plain = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(plain, dict)
        shown = {key: value for key, value in plain.items() if key not in ("hydra", "launcher")}
        print(OmegaConf.to_yaml(OmegaConf.create(shown)).rstrip())
        return 0
    with readable_errors(options.overrides), hydra_session() as driver:
        given = {"config_name": "config", "overrides": options.overrides}
        if options.cfg:
            driver.show_cfg(**given, cfg_type=options.cfg, package=None, resolve=options.resolve)
        else:
            root = logging.getLogger()
            before = root.level, list(root.handlers)
            driver.show_info(options.info, **given)
            root.setLevel(before[0])  # it makes everything log to standard output
            root.handlers = before[1]
    return 0


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
