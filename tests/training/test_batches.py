"""What each step draws, how it is cut into micro-batches, and that neither sizes nor memory that
runs out change a result."""

import gc
import logging
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.training.test_run import configured
from zdp_bench import gradients
from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.zeta_dp_sgd import ZetaDPSGD
from zdp_bench.config import compose, parse
from zdp_bench.data import Examples
from zdp_bench.errors import UserError, is_out_of_memory
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup
from zdp_bench.training import batches as memory
from zdp_bench.training import step as private
from zdp_bench.training.batches import (
    MicroBatches,
    Size,
    available_memory,
    bytes_per_example,
    draw_batch,
    initial_size,
    micro_batches,
    read_in_pieces,
)
from zdp_bench.training.build import build_optimizer
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.plan import Patients, Plan
from zdp_bench.training.step import sum_shares

CPU = torch.device("cpu")


def plan(tmp_path: Path, *overrides: str, size: int = 100) -> Plan:
    return Plan.of(configured(tmp_path, *overrides), size)


def test_poissons_rate_follows_the_expected_batch(tmp_path: Path) -> None:
    words = ["trainer.sample_rate=null", "trainer.batch_size=4", "trainer.epochs=2"]
    of = plan(tmp_path, *words)
    assert of.sampling == Sampling("poisson", 0.04, 4.0, 100)
    assert of.steps == 50
    with pytest.raises(UserError, match=r"trainer\.batch_size=4: .* 3"):
        plan(tmp_path, *words, size=3)


def test_poisson_epochs_are_expected_passes(tmp_path: Path) -> None:
    of = plan(tmp_path, "trainer.sample_rate=0.03", "trainer.epochs=10")
    assert of.steps == 333
    ends = [step for step in range(of.steps + 1) if of.epoch_ending_at(step) is not None]
    assert len(ends) == 10
    assert ends[-1] == 333
    assert [of.epoch_ending_at(step) for step in ends] == list(range(1, 11))
    assert [of.epoch_of(step) for step in ends] == list(range(1, 11))
    assert [of.epoch_of(step + 1) for step in ends[:-1]] == list(range(2, 11))
    for step in range(of.steps + 1):
        assert of.epoch_ends(step) == {end for end in ends if end <= step}
    # the divisor is the EXPECTED batch size, whatever was drawn
    assert of.draw(0, 5)[1] == pytest.approx(3.0)
    assert len({len(of.draw(0, step)[0]) for step in range(50)}) > 1


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("scheme", ["poisson", "uniform"])
def test_a_plan_draws_at_the_rate_that_is_accounted(
    tmp_path: Path, scheme: str, secure: bool
) -> None:
    """ε is computed from `sampling.sample_rate`: drawing at another one is invisible in every other
    number of a run."""
    size, rate = 400, 0.03
    words = [f"trainer.sampling={scheme}", f"trainer.sample_rate={rate}", "trainer.epochs=75"]
    of = plan(tmp_path, *words, size=size)
    assert (of.sampling.sample_rate, of.sampling.records) == (rate, size)
    assert of.steps > 2000
    taken = np.zeros((of.steps, size), dtype=bool)
    for step in range(of.steps):
        indices, divisor = of.draw("key", step, secure)
        taken[step, indices] = True
        assert taken[step].sum() == len(indices)  # no example twice
        assert divisor == pytest.approx(rate * size)
    assert_independent_at_the_rate(taken, rate, fixed_size=scheme == "uniform")


def assert_independent_at_the_rate(taken: np.ndarray, rate: float, fixed_size: bool) -> None:
    """Fail unless `taken` [steps, examples] are draws at the rate, each step's independent of the
    others'."""
    steps, size = taken.shape
    variance = rate * (1 - rate)
    batches = taken.sum(axis=1)
    if fixed_size:
        assert (batches == rate * size).all()
    else:
        assert abs(batches.mean() - rate * size) < 5 * np.sqrt(variance * size / steps)
        assert abs(batches.var() / (variance * size) - 1) < 5 * np.sqrt(2 / steps)
    # one in 10⁸ of all 400 examples would fail
    assert (np.abs(taken.mean(axis=0) - rate) < 6.5 * np.sqrt(variance / steps)).all()
    for apart in (1, 2, 16):
        both = (taken[apart:] & taken[:-apart]).sum()
        expected = rate**2 * taken[apart:].size
        assert abs(both - expected) < 5 * np.sqrt(expected)


def test_an_epoch_shorter_than_a_step_still_has_one(tmp_path: Path) -> None:
    of = plan(tmp_path, "trainer.sample_rate=1", "trainer.epochs=3")
    assert of.steps == 3
    assert [of.epoch_ending_at(step) for step in range(4)] == [None, 1, 2, 3]


def test_the_shuffled_divisor_is_the_batch_there_is(tmp_path: Path) -> None:
    batches = ["trainer=shuffled", "trainer.sample_rate=null", "trainer.batch_size=30"]
    of = plan(tmp_path, "algorithm=sgd", *batches, "trainer.epochs=2")
    assert of.steps == 8
    drawn, sizes = zip(*(of.draw(0, step) for step in range(8)), strict=True)
    assert sizes == (30, 30, 30, 10) * 2
    for epoch in (drawn[:4], drawn[4:]):
        assert sorted(np.concatenate(epoch)) == list(range(100))
    assert drawn[0].tolist() != drawn[4].tolist()


def test_one_record_more_changes_no_other_records_augmentation(tmp_path: Path) -> None:
    """The seed stands in every record of a run: given it, neighbouring batches may differ in one
    share alone."""
    config = configured(tmp_path, "trainer.micro_batch=4")
    examples = Examples(torch.arange(100.0).view(100, 1), torch.zeros(100))

    def augment(inputs: Tensor, chance: Tensor) -> Tensor:
        return inputs + chance[:, :1]

    def changed(*indices: int, key: str = "key", step: int = 5) -> dict[int, float]:
        pieces = micro_batches(examples, np.array(indices), config, CPU, key, step, augment)
        values = torch.cat([inputs for inputs, _ in pieces]).flatten().tolist()
        return dict(zip(indices, values, strict=True))

    without, with_one_more = changed(3, 8, 20, 21, 50, 99), changed(2, 3, 8, 20, 21, 50, 99)
    assert with_one_more.pop(2) != 2.0
    assert with_one_more == without
    others = changed(*without, key="another's"), changed(*without, step=6)
    moved = [at - index for drawn in (without, *others) for index, at in drawn.items()]
    assert len({*moved}) == 3 * 6


def test_with_secure_randomness_augmentations_and_chosen_records_follow_from_no_key(
    tmp_path: Path,
) -> None:
    """The key of a run depends on all examples: without one of them, every other one was augmented
    in another way, and another of each owner's records was taken, as anyone can compute."""
    config = configured(tmp_path, "privacy.secure=true")
    examples = Examples(torch.zeros(100, 1), torch.zeros(100))

    def augmented() -> list[float]:
        pieces = micro_batches(
            examples, np.arange(100), config, CPU, "key", 5, lambda inputs, chance: chance[:, :1]
        )
        return torch.cat([inputs for inputs, _ in pieces]).flatten().tolist()

    assert len({*augmented(), *augmented()}) == 200
    owners = Patients.of(np.repeat(np.arange(50), 20), max_examples=1)
    plan = Plan.poisson(50, 1.0, 10)
    chosen = [
        tuple(draw_batch(plan, "key", 0, secure, Ranks(), owners)[0])
        for secure in (False, False, True, True)
    ]
    assert chosen[0] == chosen[1]
    assert len({*chosen}) == 3


def test_adam_is_fused_on_a_cpu_but_for_complex_parameters(tmp_path: Path) -> None:
    adam, fused = configured(tmp_path, "optimizer=adam"), "+optimizer.fused=true"
    assert build_optimizer(adam, nn.Linear(2, 2)).defaults["fused"]
    is_complex = nn.Linear(2, 2, dtype=torch.complex64)
    assert not build_optimizer(adam, is_complex).defaults["fused"]
    with pytest.raises(UserError, match=r"optimizer\.fused=true"):
        build_optimizer(configured(tmp_path, "optimizer=adam", fused), is_complex)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets.unsqueeze(1)).square().sum(dim=1)


@pytest.fixture(autouse=True)
def times_freed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Nothing that a test leaves behind is worth a search of all of pytest's memory."""
    times: list[None] = []
    monkeypatch.setattr(private, "free_memory", lambda: times.append(None))
    return times


class Greedy(ZetaDPSGD):
    """Runs out of memory over more than `room` records at once, and leaves half a sum behind."""

    def __init__(self, problem: Problem, room: int, error: Exception) -> None:
        super().__init__(problem, noise_multiplier=1.0, max_grad_norm=0.5)
        self.room, self.error = room, error

    def accumulate(self, total: Any, batch: gradients.Batch, shares: Any = None) -> None:
        if len(batch[0]) > self.room:
            for value in total.values():
                value += 1e6  # what a pass that failed half way may have left
            raise self.error
        super().accumulate(total, batch, shares)


def problem() -> Problem:
    torch.manual_seed(0)
    model = lookup("model", "complex_mlp")((3,), 2, hidden=[4])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.complex128)
    model.dtype = torch.complex128
    return Problem(model, loss, Sampling("poisson", 0.1, 10, 100))


def pieces(size: Size, records: int = 11, shares: Any = None) -> MicroBatches:
    torch.manual_seed(1)
    inputs = torch.randn(records, 3, dtype=torch.complex128)
    targets = torch.randn(records, dtype=torch.float64)

    def read(cut: slice) -> tuple[Tensor, Tensor]:
        return inputs[cut], targets[cut]

    return MicroBatches(records, read, size, share_sizes=shares)


def summed(algorithm: ZetaDPSGD, batches: Any) -> dict[str, Tensor]:
    return sum_shares(algorithm, algorithm.mechanism(), batches, CPU)


NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
OUT_OF_MEMORY = [
    NO_ROOM,
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 8 bytes"
    ),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_out_of_memory_halves_the_micro_batch_and_starts_the_sum_anew(
    error: Exception, caplog, times_freed: list[None]
) -> None:
    task = problem()
    expected = summed(Greedy(task, 100, error), pieces(Size(100)))
    tight, size = Greedy(task, 3, error), Size(16)
    with caplog.at_level(logging.INFO):
        sums = summed(tight, pieces(size))
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-14)
    assert size.examples == 2  # 16, 8, 4, 2
    assert len(caplog.records) == len(times_freed) == 3
    summed(tight, pieces(size))
    assert size.examples == 2  # and the next step begins with what fits


def test_a_sum_that_failed_after_some_records_does_not_count_them_twice() -> None:
    algorithm = ZetaDPSGD(problem(), noise_multiplier=1.0, max_grad_norm=0.5)
    expected = summed(algorithm, pieces(Size(4)))
    failures, steady = iter([True]), pieces(Size(4))

    def piece(cut: slice) -> gradients.Batch:
        if cut.start == 8 and next(failures, False):
            raise NO_ROOM
        return steady.read(cut)

    sums = summed(algorithm, MicroBatches(11, piece, Size(4)))
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("shares", "what"),
    [
        (None, "one example"),
        ((1,) * 11, "one example"),
        ((9, 2), "9 examples of one share"),
        ((2, 1) * 3 + (2,), "2 examples of one share"),
    ],
)
def test_what_does_not_fit_by_itself_ends_in_a_sentence(shares: Any, what: str) -> None:
    with pytest.raises(UserError, match=f"{what} at a time"):
        summed(Greedy(problem(), 0, NO_ROOM), pieces(Size(4), shares=shares))


@pytest.mark.parametrize(
    ("shares", "size", "max_fitting", "expected"),
    [
        (None, 1024, 6, [11, 8]),
        (None, 4, 3, [4]),
        ((3,) * 4, 1024, 6, [12]),
        ((3,) * 4, 1024, 3, [12, 6]),
        ((3,) * 4, 1024, 2, [12, 6, 3]),
        ((12,), 1024, 1, [12]),
        ((12,), 2, 1, [12]),
    ],
)
def test_no_micro_batch_that_did_not_fit_is_tried_again(
    shares: Any, size: int, max_fitting: int, expected: list[int]
) -> None:
    """A share of 64 examples was tried eleven times, under ever smaller sizes."""
    too_large: list[int] = []

    class Tries(Greedy):
        def accumulate(self, total: Any, batch: gradients.Batch, shares: Any = None) -> None:
            if len(batch[0]) > max_fitting:
                too_large.append(len(batch[0]))
            super().accumulate(total, batch, shares)

    micro_batches = pieces(Size(size), sum(shares or (1,) * 11), shares)
    with suppress(UserError):
        summed(Tries(problem(), max_fitting, NO_ROOM), micro_batches)
    assert too_large == expected


@pytest.mark.parametrize("shares", [None, ()])
def test_a_step_without_examples_whose_sum_does_not_fit_ends_in_a_sentence(
    shares: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private.Total, "all_blocks", Mock(side_effect=NO_ROOM))
    with pytest.raises(UserError, match="one example at a time"):
        summed(Greedy(problem(), 0, NO_ROOM), pieces(Size(4), 0, shares))


def test_other_errors_are_not_taken_for_it() -> None:
    wrong = Greedy(problem(), 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        summed(wrong, pieces(Size(4)))
    assert not is_out_of_memory(ValueError("a wrong value"))
    with pytest.raises(torch.OutOfMemoryError):  # a plain iterator cannot be gone through again
        summed(Greedy(problem(), 0, NO_ROOM), iter(pieces(Size(4))))


@pytest.mark.parametrize(("records", "sizes"), [(0, []), (10, [5, 5]), (11, [5, 5, 1])])
def test_every_record_is_in_one_piece(records: int, sizes: list[int]) -> None:
    config = parse(compose(["recipe=quickstart", "trainer.micro_batch=5"]))
    examples = Examples(torch.arange(20.0).unsqueeze(1), torch.zeros(20, dtype=torch.long))
    drawn = np.arange(records)[::-1].copy()
    parts = list(micro_batches(examples, drawn, config, CPU, "key"))
    assert [len(inputs) for inputs, _ in parts] == sizes
    inputs = torch.cat([torch.empty(0, 1), *(inputs for inputs, _ in parts)])
    assert inputs.flatten().tolist() == drawn.tolist()


def test_on_a_cpu_the_first_size_follows_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lookup("model", "complex_cnn")((2, 16, 16), 3, channels=[4, 4])
    like = torch.zeros(0, 2, 16, 16, dtype=torch.complex64), torch.zeros(0)
    a_record = bytes_per_example(model, loss, like)
    a_map = 4 * 16 * 16 * 8  # of 4 channels
    assert a_map <= a_record <= 50 * a_map  # some of them, and no parameters
    assert all(parameter.grad is None for parameter in model.parameters())
    for fit, expected in ((0, 1), (1, 1), (5, 4), (64, 64), (10_000, 256)):
        free = int(fit * a_record * memory.PASSES / memory.MEMORY_FRACTION) + 1
        monkeypatch.setattr(memory, "available_memory", lambda free=free: free)
        assert initial_size(model, loss, like, 100.0, CPU).examples == expected


def test_counting_the_memory_of_a_forward_pass_keeps_none_of_it() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    weight = weakref.ref(model[0].weight)
    bytes_per_example(model, lambda outputs, _: outputs.sum(1), (torch.zeros(0, 4),) * 2)
    del model
    gc.collect()
    assert weight() is None


def test_a_control_groups_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: dict[str, int | None] = {
        "/proc/meminfo": 1000,  # kB
        "/sys/fs/cgroup/memory.max": 700,
        "/sys/fs/cgroup/memory.current": 600,
    }
    monkeypatch.setattr(memory, "_read_number", lambda path, *_: numbers[path])
    assert available_memory() == 100
    numbers["/sys/fs/cgroup/memory.max"] = None
    assert available_memory() == 1000 * 1024
    numbers["/proc/meminfo"] = None
    assert available_memory() == 2**32


def test_what_is_on_a_device_already_is_not_pinned() -> None:
    there = torch.empty(4, 2, device="meta"), torch.empty(4, device="meta")
    pieces = read_in_pieces(lambda cut: there, 4, Size(4), torch.device("cuda"))
    assert pieces.read(slice(0, 4))[0] is there[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_halving_finds_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(memory, "MICRO_BATCH", 4096)
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        model = lookup("model", "complex_cnn")((2, 64, 64), 3, channels=[32, 32]).to(device)
        task = Problem(model, loss, Sampling("poisson", 0.1, 2048, 20480))
        algorithm = ZetaDPSGD(task, noise_multiplier=1.0, max_grad_norm=0.5)
        inputs, targets = torch.randn(4096, 2, 64, 64, dtype=torch.complex64), torch.zeros(4096)

        def piece(cut: slice) -> gradients.Batch:
            return inputs[cut].to(device), targets[cut].to(device)

        size = initial_size(model, loss, piece(slice(1)), 2048, device)
        assert size.examples == 4096
        batches = MicroBatches(4096, piece, size)
        assert sum_shares(algorithm, algorithm.mechanism(), batches, device)
        assert size.examples < 4096
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
