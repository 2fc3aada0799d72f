"""The command that makes a face-off's table again."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from zdp_bench import assets
from zdp_bench.config import configured
from zdp_bench.report.faceoff import RECIPE, FaceOff


def command_of(faceoff: FaceOff) -> str:
    """Return the command line: the recipe's sweep, and every key that differs from its default."""
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
    return shlex.join(["zdp-bench", "run", "-m", recipe, *words])
