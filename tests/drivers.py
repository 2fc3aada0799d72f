"""Run a driver, a script beside a test, in a process of its own; and what drivers share.

A driver prints one JSON line a job, and forks its children from what it has imported.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def driven(script: str, *words: str) -> list[dict[str, Any]]:
    """Return the lines that `tests/SCRIPT` prints for these words; it must succeed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / script), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script} {words[-1]}: {done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def fork(work: Callable[[], object], log: Path | None = None) -> int:
    """Do `work` in a child, its words in `log`; return the child's number."""
    if child := os.fork():
        return child
    code = 1
    try:
        if log:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
        work()
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def remember_epsilons() -> None:
    """Let children have each ε that the parent has worked out: it follows from its arguments."""
    from zdp_bench.training import run, setup

    setup.tight_epsilon = functools.cache(setup.tight_epsilon)
    run.rdp_epsilon = functools.cache(run.rdp_epsilon)
