"""Words that nobody means, on the command line: one sentence, exit code 2, and no run is made."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zdp_bench import cli
from zdp_bench.cli.commands import COMMANDS

MANY = "9" * 400
RUN = ["run", "recipe=quickstart"]
WORDS: dict[str, tuple[list[str], str]] = {
    "400 digits": (
        [*RUN, f"trainer.sample_rate={MANY}"],
        "trainer.sample_rate: its value is too large for a number.",
    ),
    "400 digits for a plug-in": (
        [*RUN, f"algorithm.noise_multiplier={MANY}"],
        "algorithm.noise_multiplier: its value is too large for a number.",
    ),
    "a GPU's number": ([*RUN, f"device=cuda:{MANY}"], "Allowed: auto, cpu, cuda, cuda:0."),
    "a mirror": (
        ["data", "fetch", "mnist", "--mirror", "https://[::1"],
        "mirror 'https://[::1' is no address.",
    ),
    "a program": (
        [*RUN, "-m", "seed=1,2", "hydra.launcher._target_=os.system"],
        "names a program to run",
    ),
    "more jobs than anybody waits for": (
        [*RUN, "-m", "seed=range(0,1000000000)"],
        "this sweep has 1,000,000,000 jobs",
    ),
    "a deep value": (
        [*RUN, "-m", "seed=" + "sort(" * 3000 + "1" + ")" * 3000],
        "nested too deep",
    ),
    "no results folder": ([*RUN, "paths.results="], "paths.results=: must name a folder."),
    "no data root": ([*RUN, "paths.data="], "paths.data=: must name a folder."),
    "a key of no scheduler": (
        ["run", "recipe=mri_recon", "scheduler=none", "+scheduler.eta_min=0.3"],
        "scheduler.eta_min: scheduler=none reads no key",
    ),
}


def leave(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence with which a command line leaves."""
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("zdp-bench: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("what", WORDS)
def test_words_that_nobody_means_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZDP_DATA", str(tmp_path))
    words, says = WORDS[what]
    assert says in leave(words, capsys)
    assert not list(tmp_path.rglob("*.json*"))


@pytest.mark.parametrize("key", ["seed", "device", "algorithm", "paths.results"])
def test_a_secret_of_the_environment_is_in_no_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    (tmp_path / "hunter2").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "hunter2")
    said = leave([*RUN, f"{key}=${{oc.env:SECRET}}"], capsys)
    assert "hunter2" not in said
    assert "${oc.env:SECRET}" in said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_too_little_memory_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zdp_bench.experiments.sweep._carry_out", refuse)
    monkeypatch.setattr(COMMANDS["list"], "run", refuse)
    assert "the memory is not enough" in leave(RUN, capsys)
    assert "the memory is not enough" in leave(["list"], capsys)


@contextmanager
def limited(more: int) -> Iterator[None]:
    """Let this process take so many bytes more, and no others, as `ulimit -v` does."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_model_that_memory_does_not_hold_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = [*RUN, "model.hidden=[40000,3000]", f"paths.results={tmp_path}"]
    with limited(2**28):
        said = leave(large, capsys)
    assert "model=complex_mlp: needs more memory than there is (" in said


def test_a_library_that_memory_does_not_hold_is_one_sentence(tmp_path: Path) -> None:
    few = 800 * 2**20  # bytes; torch's libraries need more
    done = subprocess.run(
        [sys.executable, "-m", "zdp_bench", *RUN, f"paths.results={tmp_path}"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (few, few)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("zdp-bench: the memory is not enough.")
    assert done.stderr.count("\n") == 1
