"""What a ledger's file holds, read without the package, and what of it is on disk; what a fork of a
process says."""

import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.drivers import start
from zdp_bench.privacy import ledger


def steps_in(path: Path) -> list[int]:
    """The steps that are written down, in order."""
    lines = map(json.loads, path.read_text().splitlines())
    return [line["step"] for line in lines if "step" in line and "state" not in line]


def end_of(path: Path) -> tuple[list[int], str]:
    """The steps and the chain's end."""
    return steps_in(path), json.loads(path.read_text().splitlines()[-1])["sha256"]


class OnDisk:
    """Which lines of a ledger a power cut would leave: those at the last fsync, which waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._lines: dict[int, int] = {}  # by the file's inode
        self.checks = 0
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                self._lines[status.st_ino] = status.st_size

        patch.setattr(os, "fsync", fsync)
        patch.setattr(ledger, "MIN_SYNC_INTERVAL", 1e9)

    def check(self, path: Path) -> None:
        """Compare what is on disk with the file."""
        status = path.stat()
        assert self._lines.get(status.st_ino) == status.st_size, path
        self.checks += 1

    def before(self, act: Callable[..., Any], find: Callable[[], Iterable[Path]]) -> Any:
        """Return `act`, with a check of the ledgers before it is called."""

        def checked(*given: Any, **more: Any) -> Any:
            for path in find():
                self.check(path)
            return act(*given, **more)

        return checked


def in_a_fork(act: Callable[[], str]) -> str:
    """What `act` returns in a copy of this process."""
    return start(lambda: print(act(), end="")).wait().stdout
