"""Every private algorithm on one network and data set at the same tight ε: runs the sweep of
recipe=algorithm_faceoff, with any key of the configuration, then writes a table for each setting
and draws the figure. An algorithm that does not take the network is skipped, and says why.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from typing import TYPE_CHECKING, Any

from zdp_bench.cli.arguments import add_overrides
from zdp_bench.errors import UserError

if TYPE_CHECKING:
    from zdp_bench.report.faceoff import FaceOff

GROUP = "run"
HELP = "every private algorithm at the same ε, as a table and a figure"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser, "dataset=NAME, model=NAME, and any key of the configuration")


def run(options: argparse.Namespace) -> int:
    from zdp_bench.config import configured
    from zdp_bench.config.compose import hydra_session
    from zdp_bench.config.words import read_words, readable_errors
    from zdp_bench.experiments.sweep import sweep
    from zdp_bench.report import faceoff, figures
    from zdp_bench.training.progress import console

    given = read_words([f"recipe={faceoff.RECIPE}", *options.overrides], sweep=True)
    words = [str(word.input_line) for word in given]
    with readable_errors(words), hydra_session() as driver:
        _, failed = sweep(driver, words)
    for reason in dict.fromkeys(reason for _, reason in failed):
        console().print(f"skipped: {reason}")
    where = [word for word in words if word.startswith(("recipe=", "paths."))]
    config = configured(where)
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
    return 0


def command_of(faceoff: FaceOff) -> str:
    """Return the command line: the recipe's sweep, and every key that differs from its default."""
    from zdp_bench import assets
    from zdp_bench.config import configured
    from zdp_bench.report.faceoff import RECIPE

    runs = [run for cell in faceoff.runs.values() for run in cell]
    had: dict[str, Any] = runs[0]["config"]
    recipe = f"recipe={RECIPE}"
    own = configured([recipe]).resolved
    words = [
        f"{kind}={had[kind]['name']}"
        for kind in ("dataset", "model", "task", "optimizer", "scheduler", "accountant")
        if had[kind]["name"] != own[kind]["name"]
    ]
    own = configured([recipe, *words]).resolved
    for section, options in had.items():
        if not isinstance(options, dict) or section in ("algorithm", "claims"):
            continue
        defaults = own.get(section, {}) | {"target_epsilon": options.get("target_epsilon")}
        for key, value in options.items():
            if value != defaults.get(key):
                text = value if isinstance(value, str) else json.dumps(value)
                words.append(f"{section}.{key}={text}")
    swept = {
        "privacy.target_epsilon": ",".join(
            f"{epsilon:g}" for epsilon in faceoff.epsilons if epsilon < math.inf
        ),
        "seed": ",".join(str(seed) for seed in sorted({run["seed"] for run in runs})),
    }
    params = assets.read_yaml(assets.group(assets.RECIPES)[RECIPE])["hydra"]["sweeper"]["params"]
    words += [f"{key}={values}" for key, values in swept.items() if values != params[key]]
    return shlex.join(["zdp-bench", "faceoff", *words])
