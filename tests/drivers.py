"""Processes of a test's own: of Python, and forks, which have all that is imported."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python(
    *words: str, at: Path | None = None, leaves: int = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the package of this checkout, in the folder `at`; it must leave with this."""
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(
        [sys.executable, *words],
        cwd=at,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == leaves, (words, done.stdout[-3000:], done.stderr[-3000:])
    assert "Traceback" not in done.stderr, (words, done.stderr[-3000:])
    return done


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Child:
    """A fork at work, and the files that it writes its output into."""

    number: int
    output_files: tuple[tempfile._TemporaryFileWrapper[str], tempfile._TemporaryFileWrapper[str]]

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Return its exit code and what it said, once it has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1])
        outputs = []
        for file in self.output_files:
            file.seek(0)
            outputs.append(file.read())
            file.close()
        return subprocess.CompletedProcess([], code, *outputs)


def start(
    work: Callable[[], object], stdout: int | None = None, at: Path | None = None, **env: str
) -> Child:
    """Do `work` in a fork, in the folder `at`; `stdout` is a descriptor to write to instead."""
    output_files = tempfile.NamedTemporaryFile("w+"), tempfile.NamedTemporaryFile("w+")  # noqa: SIM115

    def begin() -> None:
        atexit._clear()  # what the tests left to be done
        os.environ.update(env)
        os.chdir(at or ".")
        os.dup2(output_files[0].fileno() if stdout is None else stdout, 1)
        os.dup2(output_files[1].fileno(), 2)
        encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
        sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding=encoding, closefd=False)  # noqa: SIM115
        try:
            work()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    return Child(fork(begin), output_files)


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
