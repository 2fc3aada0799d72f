"""Measure the CPU time of commands that do not train, relative to `import torch`.

Each command runs in a separate process, on a results folder with copies of one run. Its first call
fills indexes and caches, and is not counted.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zdp_bench import records
from zdp_bench.config.words import write_word
from zdp_bench.errors import UserError
from zdp_bench.extras.bench.measure import compare_times

SIZES = (1_000, 10_000)  # records
COPIED = ("ledger.jsonl", "run.log", "spending.json")  # files of a run, in addition to its record
ROUNDS = 3  # of which the fastest counts
TORCH = "import torch"
RUN = ["run", "recipe=quickstart", "trainer.epochs=1"]
COMMANDS: dict[str, list[str]] = {
    "--help": ["--help"],
    "results": ["results"],
    "table": ["table", "zeta_dp_2021/1"],
    "budget": ["budget"],
    "compare": ["compare", "recipe=quickstart seed=1", "recipe=quickstart seed=2"],
    "report": ["report"],
    "validate": ["validate", "recipe=quickstart"],
    "run, done before": RUN,
}


def startup(quick: bool) -> Iterator[list[dict[str, Any]]]:
    """Yield the CPU time of each command as rows, for each number of records."""
    for size in (20,) if quick else SIZES:
        with tempfile.TemporaryDirectory() as temporary:
            results = Path(temporary) / "results"
            _take_time([*_ZDP, *_words(RUN, results)])
            copy_record(results, size)
            yield _compare(f"{size:,} records, processor time", results)


_ZDP = [sys.executable, "-m", "zdp_bench"]


def _compare(case: str, results: Path) -> list[dict[str, Any]]:
    """Measure all commands; return a row for each, with its ratio to `import torch`."""
    commands = {TORCH: [sys.executable, "-c", TORCH]}
    commands |= {name: [*_ZDP, *_words(words, results)] for name, words in COMMANDS.items()}
    for command in commands.values():
        _take_time(command)
    times: dict[str, list[float]] = {name: [] for name in commands}  # milliseconds in each round
    for _ in range(ROUNDS):
        for name, command in commands.items():
            times[name].append(1000 * _take_time(command))
    not_measured = dict.fromkeys(("deviation", "memory", "memory_ratio", "paper_ratio"))
    rows = []
    for name, timing in compare_times(times, TORCH).items():
        rows.append({"case": case, "side": name, **timing, "n": ROUNDS, **not_measured})
    return rows


def _words(words: list[str], results: Path) -> list[str]:
    """Return a command's words with its option for the results folder, if it has one."""
    if words[0] == "--help":
        return words
    if words[0] in ("run", "validate"):
        return [*words, write_word("paths.results", results), f"threads={torch.get_num_threads()}"]
    return [*words, "--results", str(results)]


def copy_record(results: Path, size: int) -> None:
    """Copy the only run of a results folder with other seeds, until there are `size` records.

    A copy has the run's record and its small files: ledger, log and spending.
    """
    (path,) = results.glob("runs/*/*/record.json")
    document = records.read_document(path)
    assert document is not None
    for seed in range(1, size):
        run = hashlib.sha256(f"{seed}".encode()).hexdigest()
        home = records.folder(results, document["recipe"], run)
        home.mkdir()
        for name in COPIED:
            if (path.parent / name).is_file():
                shutil.copyfile(path.parent / name, home / name)
        copy = document | {"run": run, "seed": seed}
        (home / "record.json").write_text(records.format_json(copy))


def _take_time(command: list[str]) -> float:
    """Return the CPU time in seconds of a command and the processes that it starts.

    Raises:
        UserError: the command fails.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        raise UserError(f"{' '.join(command[2:])}: failed: {process.stderr[-300:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
