"""One private step: the ledger first, then the noise; what a step adds up, and that it is all
there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ledgers import OnDisk
from zdp_bench.algorithms import Problem, mean
from zdp_bench.algorithms.zeta_dp_sgd import ZetaDPSGD
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, Shares
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.noise import (
    CorrelatedNoise,
    NoiseSource,
    SecureNoise,
    SeededNoise,
    add_noise,
)
from zdp_bench.privacy.tally import BudgetExceeded
from zdp_bench.training import step as step_module
from zdp_bench.training.batches import MicroBatches, Size, read_in_pieces
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.step import Training, private_step, sum_shares

CPU = torch.device("cpu")


def problem(kind: type[ZetaDPSGD] = ZetaDPSGD) -> tuple[nn.Module, ZetaDPSGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(torch.complex64)
    loss = lambda outputs, targets: outputs.abs().square().sum(dim=1)  # noqa: E731
    of = Problem(model, loss, Sampling("poisson", 0.1, 2, 20))
    return model, kind(of, noise_multiplier=1.0, max_grad_norm=1.0)


@contextmanager
def training(
    path: Path,
    noise: NoiseSource | None = None,
    ranks: Ranks = ALONE,
    kind: type[ZetaDPSGD] = ZetaDPSGD,
    max_releases: int | None = None,
) -> Iterator[Training]:
    """A new problem and what a step of it takes, with a ledger at `path`."""
    noise = noise or SeededNoise("key")
    model, algorithm = problem(kind)
    ledger = Ledger(path, algorithm.mechanism(), noise.repeatable)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    yield Training(algorithm, model, optimizer, noise, ledger, max_releases, ranks)
    ledger.close()


def weights(of: Training) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in of.model.parameters()]


class _Ranks(Ranks):
    """The first of several, the others of which have nothing: what is summed over ranks is divided
    afterwards."""

    def all_reduce(self, total: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return total

    def max(self, number: int) -> int:
        return number


class _OtherSum(_Ranks):
    """The first of several, the others of which have a sum of ones."""

    def all_reduce(self, total: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value + 1 for name, value in total.items()}


def pieces(count: int, size: int, shares: Shares | None = None) -> MicroBatches:
    """`count` examples in micro-batches of `size`."""
    inputs = torch.randn(count, 3, dtype=torch.complex64)
    targets = torch.zeros(count)

    def read(cut: slice) -> Batch:
        return inputs[cut], targets[cut]

    return MicroBatches(count, read, Size(size), share_sizes=shares)


def test_dividing_in_passing_gives_the_bits_of_dividing_afterwards(tmp_path: Path) -> None:
    batch = torch.randn(5, 3, dtype=torch.complex64), torch.zeros(5)
    moved = []
    for ranks in (ALONE, _Ranks(size=2)):
        with training(tmp_path / f"{len(moved)}.jsonl", ranks=ranks) as of:
            private_step(of, 0, iter([batch]), 7.0)
            moved.append(weights(of))
    assert all(torch.equal(weight, other) for weight, other in zip(*moved, strict=True))


def test_the_sum_of_every_rank_is_divided(tmp_path: Path) -> None:
    moved = []
    for ranks in (_Ranks(size=2), _OtherSum(size=2)):
        with training(tmp_path / f"{len(moved)}.jsonl", ranks=ranks) as of:
            private_step(of, 0, iter([]), 8.0)
            moved.append(weights(of))
    for weight, other in zip(*moved, strict=True):
        torch.testing.assert_close(weight - other, torch.full_like(weight, 1 / 8))


COMPLEX64, COMPLEX128 = torch.complex64, torch.complex128


@pytest.mark.parametrize(
    ("secure", "ranks", "micro_batches", "dtype", "factor"),
    [
        (False, ALONE, iter([]), COMPLEX64, 1 / 8),
        (False, ALONE, pieces(1024, 1000), COMPLEX64, 1 / 8),
        (False, ALONE, pieces(1025, 1000), COMPLEX128, 1 / 8),
        (False, _Ranks(size=2), pieces(512, 512), COMPLEX64, 1.0),
        (False, _Ranks(size=2), pieces(513, 513), COMPLEX128, 1.0),  # 1026 examples on both
        (False, _Ranks(size=2), iter(pieces(513, 513)), COMPLEX64, 1.0),
        (True, ALONE, iter([]), COMPLEX128, 1.0),
        (True, _Ranks(size=2), pieces(4, 4), COMPLEX128, 1.0),
    ],
)
def test_noise_is_added_to_a_wide_sum_if_it_is_secure_or_of_many(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    secure: bool,
    ranks: Ranks,
    micro_batches: Any,
    dtype: torch.dtype,
    factor: float,
) -> None:
    """Only a single rank divides seeded noise as it adds it."""
    given = []

    def spy(total: Any, mechanism: Any, noise: Any, step: int, by: float) -> Any:
        given.append(([*total], {value.dtype for value in total.values()}, by))
        return add_noise(total, mechanism, noise, step, by)

    monkeypatch.setattr(step_module, "add_noise", spy)
    with training(tmp_path / "ledger.jsonl", SecureNoise() if secure else None, ranks) as of:
        private_step(of, 0, micro_batches, 8.0)
        names = [block.name for block in of.mechanism().blocks]
        assert {p.dtype for p in of.model.parameters()} == {COMPLEX64}
    assert given == [(names, {dtype}, factor)]


def test_only_the_first_rank_adds_noise(tmp_path: Path) -> None:
    with training(tmp_path / "ledger.jsonl", ranks=_Ranks(rank=1, size=2)) as of:
        before = weights(of)
        private_step(of, 0, iter([]), 8.0)
        assert all(torch.equal(old, now) for old, now in zip(before, weights(of), strict=True))


def test_a_budget_ends_at_its_last_release_and_repeats_cost_nothing(tmp_path: Path) -> None:
    with training(tmp_path / "ledger.jsonl", max_releases=2) as of:
        for step in (0, 1, 1, 0):
            private_step(of, step, iter([]), 8.0)
        with pytest.raises(BudgetExceeded):
            private_step(of, 2, iter([]), 8.0)
        assert of.ledger.releases == 2


def test_noise_is_correlated_as_the_mechanism_states(tmp_path: Path) -> None:
    class Correlated(ZetaDPSGD):
        def mechanism(self) -> Mechanism:
            sampling = Sampling("poisson", 0.1, 2, 20, cycle=2)
            return replace(super().mechanism(), sampling=sampling, strategy=(1.0, 0.5))

    for kind, is_correlated in ((ZetaDPSGD, False), (Correlated, True)):
        with training(tmp_path / f"{kind.__name__}.jsonl", kind=kind) as of:
            assert isinstance(of.noise, CorrelatedNoise) == is_correlated
            assert replace(of, max_releases=3).noise is of.noise


def test_an_algorithm_may_set_the_weights_instead_of_descending(tmp_path: Path) -> None:
    class Once(ZetaDPSGD):
        sets_weights = True

        def postprocess(self, noisy: Any, expected_batch_size: float) -> Any:
            self.sets_weights = False  # in the next step
            return {name: torch.full_like(value, 3.0) for name, value in noisy.items()}

    with training(tmp_path / "ledger.jsonl", kind=Once) as of:
        private_step(of, 0, iter([]), 8.0)
        assert all(bool((value == 3).all()) for value in weights(of))


@pytest.mark.parametrize("shares", [None, (3, 1, 2)])
def test_a_step_sums_shares(shares: Shares | None) -> None:
    algorithm = problem()[1]
    micro_batches = pieces(6, 4, shares)
    inputs, targets = micro_batches.read(slice(0, 6))
    sums = sum_shares(algorithm, algorithm.mechanism(), micro_batches, CPU)
    each = algorithm.contributions((inputs, targets), shares)
    for name, value in sums.items():
        torch.testing.assert_close(value, each[name].sum(dim=0))


def test_a_single_process_does_not_wait_for_the_disk_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(tmp_path / "ledger.jsonl") as of, monkeypatch.context() as patch:
        patch.setattr(of.ledger, "sync", pytest.fail)
        private_step(of, 0, iter([]), 8.0)


def test_a_step_is_on_disk_before_its_noisy_sum_is_sent_to_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, path = OnDisk(monkeypatch), tmp_path / "ledger.jsonl"
    monkeypatch.setattr(_Ranks, "all_reduce", held.before(_Ranks.all_reduce, lambda: [path]))
    with training(path, ranks=_Ranks(size=2)) as of:
        private_step(of, 0, iter([]), 7.0)
        private_step(of, 1, iter([]), 7.0)
    assert held.checks == 2


def test_an_algorithm_that_makes_more_than_the_mean_of_its_release_is_asked(tmp_path: Path) -> None:
    class Negated(ZetaDPSGD):
        def postprocess(self, noisy: Any, expected_batch_size: float) -> Any:
            return {name: -value for name, value in mean(noisy, expected_batch_size).items()}

    moved = []
    for kind in (ZetaDPSGD, Negated):
        with training(tmp_path / f"{kind.__name__}.jsonl", kind=kind) as of:
            before = weights(of)
            private_step(of, 0, iter([]), 7.0)
            moved.append([now - old for now, old in zip(weights(of), before, strict=True)])
    for weight, other in zip(*moved, strict=True):
        torch.testing.assert_close(weight, -other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("also_fails", [False, True])
def test_no_step_is_taken_from_weights_that_its_examples_wrote(
    tmp_path: Path, also_fails: bool
) -> None:
    class Writes(ZetaDPSGD):
        def accumulate(self, total: Any, batch: Batch, *_: Any) -> None:
            with torch.no_grad():
                self.problem.model[1].bias.mul_(1.0)  # type: ignore[index]
            if also_fails:
                raise ArithmeticError

    with training(tmp_path / "ledger.jsonl", kind=Writes) as of:
        before = weights(of)
        private_step(of, 0, iter([]), 7.0)
        assert not torch.equal(weights(of)[0], before[0])
        before = weights(of)
        with pytest.raises(UserError, match=r"parameter '1\.bias' was changed"):
            private_step(of, 1, [(torch.ones(1, 3), torch.zeros(1))], 7.0)
        assert torch.equal(weights(of)[0], before[0])
        assert of.ledger.releases == 2


def test_a_step_leaves_no_gradient_and_applies_none_that_was_left(tmp_path: Path) -> None:
    with training(tmp_path / "ledger.jsonl") as of:
        frozen = of.model[0].weight  # type: ignore[index]
        frozen.requires_grad_(False)
        frozen.grad = torch.ones_like(frozen)
        before = weights(of)
        private_step(of, 0, iter([]), 7.0)
        moved = [not torch.equal(now, old) for now, old in zip(weights(of), before, strict=True)]
        assert moved == [False, True, True, True]
        assert all(parameter.grad is None for parameter in of.model.parameters())


def test_a_secure_sum_is_rounded_before_it_is_divided(tmp_path: Path) -> None:
    """See `SecureNoise`: sums and noise in float32 would show which records they come from."""
    batch = torch.randn(5, 3, dtype=torch.complex64), torch.zeros(5)
    with training(tmp_path / "ledger.jsonl", SecureNoise()) as of:
        for parameter in of.model.parameters():
            parameter.detach().zero_()
        private_step(of, 0, [batch], 8.0)
        moved = torch.cat([torch.view_as_real(value).flatten() for value in weights(of)])
    assert moved.abs().min() > 0
    sums = moved.double() * 8 * 2.0**16  # in units of the grid of std 1; both are powers of two
    assert torch.equal(sums, sums.round())
    assert not torch.equal(sums / 8, (sums / 8).round())  # as a rounded mean would be


def test_the_mechanism_is_asked_for_again_when_other_parameters_train(tmp_path: Path) -> None:
    with training(tmp_path / "ledger.jsonl") as of:
        weight = of.model[0].weight  # type: ignore[index]
        for trains in (True, False, True):
            weight.requires_grad_(trains)
            assert of.mechanism() == of.algorithm.mechanism()
            assert ("0.weight" in [block.name for block in of.mechanism().blocks]) == trains
            before = weight.detach().clone()
            private_step(of, 0, iter([]), 2.0)
            assert torch.equal(weight, before) != trains


def test_the_mean_of_complex_and_conjugated_sums() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    averaged = mean({"a": z.clone(), "b": z.clone().conj(), "c": z.real.clone()}, 4.0)
    for name, expected in (("a", z / 4), ("b", z.conj() / 4), ("c", z.real / 4)):
        torch.testing.assert_close(averaged[name], expected)


def run_out_of_memory_once(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the algorithm's next sum raise an error for lack of memory."""
    accumulate, fails = algorithm.accumulate, iter([True])

    def once_out_of_memory(total: Any, batch: Batch) -> None:
        if next(fails, False):
            raise MemoryError("out of memory")
        accumulate(total, batch)

    monkeypatch.setattr(algorithm, "accumulate", once_out_of_memory)


def test_a_step_taken_again_in_smaller_pieces_ends_before_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise belongs to a sum of the pieces it was first cut into: the difference of the two
    would be no noise at all."""
    path = tmp_path / "ledger.jsonl"
    inputs = torch.randn(8, 3, dtype=torch.complex64)
    whole = MicroBatches(8, lambda cut: (inputs[cut], torch.zeros(len(inputs[cut]))), Size(8))
    with training(path) as of:
        of.ledger.choose_generation("code", 0, "new")
        private_step(of, 0, whole, 7.0)
    with training(path) as of:
        of.ledger.choose_generation("code", 0, "new")
        assert of.ledger.num_to_count_again == 0
        run_out_of_memory_once(of.algorithm, monkeypatch)
        before = weights(of)
        with pytest.raises(UserError, match=r"step 0, .*trainer\.micro_batch=4"):
            private_step(of, 0, whole, 7.0)
        assert all(torch.equal(a, b) for a, b in zip(before, weights(of), strict=True))
    with training(path) as of:
        of.ledger.choose_generation("code", 0, "new")
        assert of.ledger.num_to_count_again == 1


def test_a_new_step_in_smaller_pieces_and_a_step_taken_again_in_the_same_are_no_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(tmp_path / "ledger.jsonl") as of:
        micro_batches = pieces(8, 8)
        for _ in range(2):
            private_step(of, 0, micro_batches, 8.0)
        run_out_of_memory_once(of.algorithm, monkeypatch)
        private_step(of, 1, micro_batches, 8.0)
        assert micro_batches.size.examples == 4
        assert of.ledger.releases == 2


@pytest.mark.parametrize("count", [1000, 17_000, 200_000])
def test_one_example_more_moves_a_sum_of_many_by_its_bound(tmp_path: Path, count: int) -> None:
    """All examples are the same: rounding errors add up."""
    noise = SeededNoise("key")
    with training(tmp_path / "ledger.jsonl", noise) as of:
        row = torch.randn(1, 3, dtype=torch.complex64)
        inputs, targets = row.expand(count + 1, 3).contiguous(), torch.zeros(count + 1)
        mechanism = of.algorithm.mechanism()

        def released(count: int) -> dict[str, torch.Tensor]:
            pieces = read_in_pieces(
                lambda cut: (inputs[:count][cut], targets[:count][cut]), count, Size(5000), CPU
            )
            total = sum_shares(of.algorithm, mechanism, pieces, CPU)
            return add_noise(total, mechanism, noise, 0)

        first, other = released(count), released(count + 1)
        moved = [torch.linalg.vector_norm((other[name] - first[name]).cdouble()) for name in first]
        assert torch.stack(moved).norm() <= 1 + 1e-5
        wide = torch.complex64 if count <= 1024 else torch.complex128
        assert {value.dtype for value in first.values()} == {wide}
        pieces = zip(inputs[:count].split(1000), targets[:count].split(1000), strict=True)
        private_step(of, 0, pieces, count)
        assert {p.dtype for p in of.model.parameters()} == {torch.complex64}
