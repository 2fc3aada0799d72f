"""Kill a command (-9) at random moments until it has been killed often enough, for
`test_endurance`.

    python endurance_driver.py FOLDER JOBS

JOBS is a JSON list of {"name", "words", "kills", "seed"}. The command is first carried out whole;
its time T is measured. Then it is given again and again, and killed at a moment drawn from [0, T);
whenever it ends all the same, it starts in a new results folder. `RESULTS` in its words stands for
that folder. Prints one JSON line a job: the kills that landed, the folder of the whole command, and
those that were killed and finished.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.drivers import fork
from zdp_bench.cli import main as command
from zdp_bench.report import papers

TABLES = ["zeta_dp_2021/1"]  # of `reproduce`; all take ten minutes


def attempt(words: list[str], log: Path, seconds: float | None) -> int:
    """Carry out the command in a child, killed after so many seconds; return its wait status."""
    child = fork(lambda: command(words), log)
    if seconds is not None:
        ended = os.pidfd_open(child)
        select.select([ended], [], [], seconds)
        os.close(ended)
        os.kill(child, signal.SIGKILL)  # a child that has ended keeps its number until waited for
    return os.waitpid(child, 0)[1]


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    log = folder / "log.txt"

    def words(results: Path) -> list[str]:
        return [word.replace("RESULTS", str(results)) for word in job["words"]]

    def finish(results: Path, seconds: float | None) -> int:
        status = attempt(words(results), log, seconds)
        assert status in (0, signal.SIGKILL), (job["name"], results, log.read_text()[-2000:])
        return status

    whole = folder / "whole"
    began = time.monotonic()
    finish(whole, None)
    lasts = time.monotonic() - began
    rng = random.Random(f"{job['name']}{job['seed']}")
    landed, ends, at = 0, [], folder / "killed-0"
    while landed < job["kills"]:
        if finish(at, rng.uniform(0, lasts)):
            landed += 1
        else:
            ends.append(str(at))
            at = folder / f"killed-{len(ends)}"
    finish(at, None)
    return {"name": job["name"], "kills": landed, "whole": str(whole), "ends": [*ends, str(at)]}


def warm_up(words: list[str]) -> None:
    """Carry out the command in this process, so that its children have what it imported."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        command([word.replace("RESULTS", folder) for word in words])


def main(folder: Path, jobs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    papers.available = lambda: TABLES
    for job in jobs:
        warm_up(job["words"])
        print(json.dumps(carry_out(job, folder / job["name"])), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
