"""The process of `test_kill`: forks children that kill themselves (-9) at a chosen moment.

    python kill_driver.py FOLDER JOBS

JOBS is a JSON list of {"name", "overrides", "kills": [[moment, step], ...]}. Each job is one run;
each of its kills ends one attempt at it, and a last attempt is left alone. Prints one JSON line
for each job.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.drivers import fork, remember_epsilons
from zdp_bench.config import compose, parse
from zdp_bench.config.schema import Run
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.training import checkpoint, run
from zdp_bench.training import step as engine
from zdp_bench.training.progress import Silent

MOMENTS = (
    "in the ledger's line",
    "before the noise",
    "before the update",
    "after the update",
    "before the checkpoint",
    "in it",
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arrange(moment: str, at: int) -> None:
    """Kill this process at `moment` of step `at` (from 0), or at the first checkpoint after it."""
    here = {"step": -1}
    step_, write, noise, descend, save, replace = (
        run.private_step,
        Ledger._put,
        engine.add_noise,
        engine.descend,
        checkpoint.save,
        os.replace,
    )

    def private_step(training: Any, step: int, *rest: Any) -> None:
        here["step"] = step
        step_(training, step, *rest)
        if moment == "after the update" and step == at:
            die()

    def write_half(self: Any, body: dict[str, Any]) -> None:
        own = range(body.get("step", -1), body.get("to", body.get("step", -1) + 1))
        if moment == "in the ledger's line" and at in own and "state" not in body:
            self._file.write(b'{"sha256": "0')
            die()
        write(self, body)

    def add_noise(*arguments: Any, **options: Any) -> Any:
        if moment == "before the noise" and here["step"] == at:
            die()
        return noise(*arguments, **options)

    def go_down(*arguments: Any) -> None:
        if moment == "before the update" and here["step"] == at:
            die()
        descend(*arguments)

    def save_it(*arguments: Any) -> None:
        if moment == "before the checkpoint" and here["step"] >= at:
            die()
        save(*arguments)

    def put_in_place(source: Any, target: Any) -> None:
        if moment == "in it" and str(target).endswith("checkpoint.pt") and here["step"] >= at:
            die()
        replace(source, target)

    run.private_step = private_step
    Ledger._put = write_half  # type: ignore[method-assign]
    engine.add_noise = add_noise
    engine.descend = go_down
    checkpoint.save = save_it
    checkpoint.os.replace = put_in_place  # type: ignore[attr-defined]


def attempt(config: Run, kill: list[Any] | None) -> int:
    """Carry out the run in a child; its wait status: 0, or 9 when it killed itself."""

    def work() -> None:
        if kill:
            arrange(*kill)
        run.run(config, Silent())

    return os.waitpid(fork(work), 0)[1]


def main(folder: Path, jobs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    remember_epsilons()
    composed: dict[str, Run] = {}
    for job in jobs:
        results = folder / job["name"]
        overrides = [*job["overrides"], "threads=1"]
        if str(overrides) not in composed:
            composed[str(overrides)] = parse(compose(overrides))
        config = dataclasses.replace(
            composed[str(overrides)],
            paths=dataclasses.replace(composed[str(overrides)].paths, results=str(results)),
        )
        if job["kills"]:
            statuses = [attempt(config, kill) for kill in [*job["kills"], None]]
        else:
            run.run(config, Silent())
            statuses = [0]
        (home,) = results.glob("runs/*/*.lock")
        print(
            json.dumps(
                {"name": job["name"], "statuses": statuses, "home": str(home.with_suffix(""))}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
