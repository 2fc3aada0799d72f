"""Micro-batches: what fits, what happens when it does not, and that neither changes a result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.training.test_run import carry_out, configured, repeatable
from zdp_bench import gradients, records
from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.zeta_dp_sgd import ZetaDPSGD
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest
from zdp_bench.data import Examples
from zdp_bench.errors import UserError
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup
from zdp_bench.training import micro_batches as memory
from zdp_bench.training.batches import (
    MicroBatches,
    Size,
    available_memory,
    bytes_per_example,
    initial_size,
    is_out_of_memory,
    micro_batches,
)
from zdp_bench.training.step import sum_contributions

CPU = torch.device("cpu")


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets.unsqueeze(1)).square().sum(dim=1)


class Greedy(ZetaDPSGD):
    """Runs out of memory over more than `room` records at once, and leaves half a sum behind."""

    def __init__(self, problem: Problem, room: int, error: Exception) -> None:
        super().__init__(problem, noise_multiplier=1.0, max_grad_norm=0.5)
        self.room, self.error = room, error

    def accumulate(self, total: dict[str, Tensor], batch: gradients.Batch) -> None:
        if len(batch[0]) > self.room:
            for value in total.values():
                value += 1e6  # what a pass that failed half way may have left
            raise self.error
        super().accumulate(total, batch)


def problem() -> Problem:
    torch.manual_seed(0)
    model = lookup("model", "complex_mlp")((3,), 2, hidden=[4])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.complex128)
    model.dtype = torch.complex128
    return Problem(model, loss, Sampling("poisson", 0.1, 10, 100))


def pieces(size: Size, records: int = 11) -> MicroBatches:
    torch.manual_seed(1)
    inputs, targets = (
        torch.randn(records, 3, dtype=torch.complex128),
        torch.randn(records, dtype=torch.float64),
    )
    return MicroBatches(records, lambda cut: (inputs[cut], targets[cut]), size)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 8 bytes"
    ),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_out_of_memory_halves_the_micro_batch_and_starts_the_sum_anew(
    error: Exception, caplog
) -> None:
    task = problem()
    whole = Greedy(task, 100, error)
    expected = sum_contributions(whole, whole.mechanism(), pieces(Size(100)), CPU)
    tight, size = Greedy(task, 3, error), Size(16)
    with caplog.at_level(logging.INFO):
        found = sum_contributions(tight, tight.mechanism(), pieces(size), CPU)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
    assert size.examples == 2  # 16, 8, 4, 2
    assert len(caplog.records) == 3
    sum_contributions(tight, tight.mechanism(), pieces(size), CPU)
    assert size.examples == 2  # and the next step begins with what fits


def test_a_sum_that_failed_after_some_records_does_not_count_them_twice() -> None:
    task = problem()
    algorithm = ZetaDPSGD(task, noise_multiplier=1.0, max_grad_norm=0.5)
    expected = sum_contributions(algorithm, algorithm.mechanism(), pieces(Size(4)), CPU)
    failures = iter([True])
    steady = pieces(Size(4))

    def piece(cut: slice) -> gradients.Batch:
        if cut.start == 8 and next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return steady.piece(cut)

    found = sum_contributions(
        algorithm, algorithm.mechanism(), MicroBatches(11, piece, Size(4)), CPU
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


def test_one_record_that_does_not_fit_ends_in_a_sentence() -> None:
    greedy = Greedy(problem(), 0, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(UserError, match="one record at a time"):
        sum_contributions(greedy, greedy.mechanism(), pieces(Size(4)), CPU)


def test_other_errors_are_not_taken_for_it() -> None:
    wrong = Greedy(problem(), 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        sum_contributions(wrong, wrong.mechanism(), pieces(Size(4)), CPU)
    assert not is_out_of_memory(ValueError("a wrong value"))
    greedy = Greedy(problem(), 0, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):  # a plain iterator cannot be gone through again
        sum_contributions(greedy, greedy.mechanism(), iter(pieces(Size(4))), CPU)


@pytest.mark.parametrize("records", [0, 1, 10, 11])
def test_every_record_is_in_one_piece(records: int) -> None:
    config = parse(compose(["recipe=quickstart", "trainer.micro_batch=5"]))
    found = Examples(torch.arange(20.0).unsqueeze(1), torch.zeros(20, dtype=torch.long))
    drawn = np.arange(records)[::-1].copy()
    parts = list(micro_batches(found, drawn, config, CPU, "key"))
    assert [len(inputs) for inputs, _ in parts] == [5] * (records // 5) + [records % 5] * (
        records % 5 > 0
    )
    assert (
        torch.cat([torch.empty(0, 1), *(inputs for inputs, _ in parts)]).flatten().tolist()
        == drawn.tolist()
    )


def test_micro_batches_change_no_result_and_no_digest(tmp_path: Path) -> None:
    choices = {"whole": "null", "auto": "auto", "pieces": "7"}
    made = {
        name: carry_out(tmp_path / name, f"trainer.micro_batch={value}").record
        for name, value in choices.items()
    }
    assert made["pieces"]["measured"]["micro_batch"] == 7
    assert (
        made["auto"]["measured"]["micro_batch"] >= 2 * 0.1 * made["auto"]["data"]["train"]
    )  # all of it fits
    for name in ("auto", "pieces"):
        assert made[name]["run"] == made["whole"]["run"]
        assert made[name]["experiment"] == made["whole"]["experiment"]
        assert made[name]["privacy"] == made["whole"]["privacy"]
        assert made[name]["headline"]["value"] == pytest.approx(
            made["whole"]["headline"]["value"], abs=0.01
        )
    said = {name: {**repeatable(record), "config": None} for name, record in made.items()}
    assert said["auto"] == said["whole"]


def test_on_a_cpu_the_first_size_follows_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lookup("model", "complex_cnn")((2, 16, 16), 3, channels=[4, 4])
    like = torch.full((1, 2, 16, 16), torch.nan, dtype=torch.complex64), torch.zeros(1)
    a_record = bytes_per_example(model, loss, like)
    assert (
        4 * 16 * 16 * 8 <= a_record <= 50 * 4 * 16 * 16 * 8
    )  # some maps of 4 channels, and no parameters
    assert all(parameter.grad is None for parameter in model.parameters())
    for fit, expected in ((0, 1), (1, 1), (5, 4), (64, 64), (10_000, 256)):
        free = int(fit * a_record * memory.PASSES / memory.SHARE) + 1
        monkeypatch.setattr(memory, "available_memory", lambda free=free: free)
        assert initial_size(model, loss, like, 100.0, CPU).examples == expected


def test_a_record_of_a_linear_layer_takes_its_inputs() -> None:
    like = torch.zeros(1, 1000), torch.zeros(1)
    assert 4000 <= bytes_per_example(nn.Linear(1000, 1), loss, like) <= 4000 * 2 + 100


def test_free_memory_is_no_more_than_the_machine_has() -> None:
    import os

    assert 0 < available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_control_groups_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, int | None] = {
        "/proc/meminfo": 1000,
        "/sys/fs/cgroup/memory.max": 700,
        "/sys/fs/cgroup/memory.current": 600,
    }
    number: Callable[..., Any] = lambda path, *_: told[path]  # noqa: E731
    monkeypatch.setattr(memory, "_number", number)
    assert available_memory() == 100
    told["/sys/fs/cgroup/memory.max"] = None
    assert available_memory() == 1000
    told["/proc/meminfo"] = None
    assert available_memory() == 2**32


@pytest.mark.parametrize(
    ("value", "sentence"), [("aut", "auto or null"), ("0", "at least 1"), ("-3", "at least 1")]
)
def test_other_sizes_are_refused(value: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"trainer\.micro_batch={value}.*{sentence}"):
        configured(tmp_path, f"trainer.micro_batch={value}")


def test_committed_records_keep_their_digest() -> None:
    """They were made when `micro_batch` still stood in the configuration; null never was part of a
    digest."""
    committed = {
        records.read(path)["experiment"]
        for path in Path("results/runs/phasemnist").glob("*/record.json")
    }  # type: ignore[index]
    assert experiment_digest(parse(compose(["recipe=phasemnist"]))) in committed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_halving_finds_what_fits() -> None:
    device = torch.device("cuda")
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        model = lookup("model", "complex_cnn")((2, 64, 64), 3, channels=[32, 32]).to(device)
        task = Problem(model, loss, Sampling("poisson", 0.1, 2048, 20480))
        algorithm = ZetaDPSGD(task, noise_multiplier=1.0, max_grad_norm=0.5)
        inputs, targets = torch.randn(4096, 2, 64, 64, dtype=torch.complex64), torch.zeros(4096)
        size = initial_size(
            model, loss, (inputs[:1].to(device), targets[:1].to(device)), 2048, device
        )
        assert size.examples == 4096
        batches = MicroBatches(
            4096, lambda cut: (inputs[cut].to(device), targets[cut].to(device)), size
        )
        assert sum_contributions(algorithm, algorithm.mechanism(), batches, device)
        assert size.examples < 4096
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
