"""One private step: the ledger first, then the noise; what a step adds up, and that it is all
there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zdp_bench.algorithms import Problem, mean
from zdp_bench.algorithms.zeta_dp_sgd import ZetaDPSGD
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, add_up
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SecureNoise, SeededNoise
from zdp_bench.training import step as engine
from zdp_bench.training.batches import MicroBatches, Size
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.step import Total, Training, private_step

CPU = torch.device("cpu")


def problem() -> tuple[nn.Module, ZetaDPSGD]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4, dtype=torch.complex64), nn.Linear(4, 2, dtype=torch.complex64)
    )
    loss = lambda outputs, targets: outputs.abs().square().sum(dim=1)  # noqa: E731
    algorithm = ZetaDPSGD(
        Problem(model, loss, Sampling("poisson", 0.1, 2, 20)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return model, algorithm


class _Ranks(Ranks):
    """The first of several, the others of which have nothing: what is summed over ranks is divided
    afterwards."""

    def all_reduce(self, total: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return total


def test_dividing_in_passing_gives_the_bits_of_dividing_afterwards(tmp_path: Path) -> None:
    batch = torch.randn(5, 3, dtype=torch.complex64), torch.zeros(5)
    moved = []
    for ranks in (ALONE, _Ranks(size=2)):
        torch.manual_seed(0)
        model, algorithm = problem()
        ledger = Ledger(tmp_path / f"{len(moved)}.jsonl", algorithm.mechanism(), repeatable=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        training = Training(algorithm, model, optimizer, SeededNoise(0), ledger, None, ranks)
        private_step(training, 0, iter([batch]), 7.0)
        ledger.close()
        moved.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*moved, strict=True))


def test_what_other_ranks_bring_is_divided_as_well(tmp_path: Path) -> None:
    inputs, targets = torch.randn(6, 3, dtype=torch.complex64), torch.zeros(6)
    moved = []
    for here in (6, 2):  # all examples on one rank, or some of them on another
        torch.manual_seed(0)
        model, algorithm = problem()
        mechanism = algorithm.mechanism()
        brought = engine.sum_contributions(
            algorithm, mechanism, [(inputs[here:], targets[here:])], CPU
        )

        class WithAnother(Ranks):
            def all_reduce(
                self, total: dict[str, torch.Tensor], brought: Any = brought
            ) -> dict[str, torch.Tensor]:
                return {name: value + brought[name] for name, value in total.items()}

        ledger = Ledger(tmp_path / f"{here}.jsonl", mechanism, repeatable=True)
        ranks = ALONE if here == 6 else WithAnother(size=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        training = Training(algorithm, model, optimizer, SeededNoise(0), ledger, None, ranks)
        private_step(training, 0, iter([(inputs[:here], targets[:here])]), 7.0)
        ledger.close()
        moved.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other)


def test_an_algorithm_that_makes_more_than_the_mean_of_its_release_is_asked(tmp_path: Path) -> None:
    model, _ = problem()

    class Negated(ZetaDPSGD):
        def postprocess(
            self, noisy: dict[str, torch.Tensor], expected_batch_size: float
        ) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {name: -value for name, value in mean(noisy, expected_batch_size).items()}

    moved = []
    for kind in (ZetaDPSGD, Negated):
        torch.manual_seed(0)
        model, _ = problem()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        algorithm = kind(
            Problem(model, lambda o, t: o.abs().sum(dim=1), Sampling("poisson", 0.1, 2, 20)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        ledger = Ledger(tmp_path / f"{kind.__name__}.jsonl", algorithm.mechanism(), repeatable=True)
        training = Training(
            algorithm, model, torch.optim.SGD(model.parameters(), lr=1.0), SeededNoise(0), ledger
        )
        private_step(training, 0, iter([]), 7.0)
        ledger.close()
        moved.append([p.detach() - old for p, old in zip(model.parameters(), before, strict=True)])
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, -other, rtol=1e-4, atol=1e-6)


def test_a_secure_sum_is_rounded_before_it_is_divided(tmp_path: Path) -> None:
    """See `SecureNoise`: sums and noise in float32 would show which records they come from."""
    model, algorithm = problem()
    for parameter in model.parameters():
        parameter.detach().zero_()
    ledger = Ledger(tmp_path / "ledger.jsonl", algorithm.mechanism(), repeatable=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = torch.randn(5, 3, dtype=torch.complex64), torch.zeros(5)
    private_step(Training(algorithm, model, optimizer, SecureNoise(), ledger), 0, [batch], 8.0)
    ledger.close()
    moved = torch.cat([torch.view_as_real(p.detach()).flatten() for p in model.parameters()])
    assert moved.abs().min() > 0
    sums = moved.double() * 8 * 2.0**16  # in units of the grid of std 1; both are powers of two
    assert torch.equal(sums, sums.round())
    assert not torch.equal(sums / 8, (sums / 8).round())  # as a rounded mean would be


def test_the_mechanism_is_asked_for_again_when_other_parameters_train(tmp_path: Path) -> None:
    model, algorithm = problem()
    ledger = Ledger(tmp_path / "ledger.jsonl", algorithm.mechanism(), repeatable=True)
    training = Training(
        algorithm, model, torch.optim.SGD(model.parameters(), lr=1.0), SeededNoise(0), ledger
    )
    for trains in (True, False, True):
        model[0].weight.requires_grad_(trains)
        assert training.mechanism() == algorithm.mechanism()
        assert ("0.weight" in [block.name for block in training.mechanism().blocks]) == trains
        before = model[0].weight.detach().clone()
        private_step(training, 0, iter([]), 2.0)
        assert torch.equal(model[0].weight, before) != trains
    ledger.close()


def test_a_total_is_zero_until_something_is_added_and_whole_at_the_end() -> None:
    _, algorithm = problem()
    mechanism = algorithm.mechanism()
    total = Total(mechanism, CPU)
    value = torch.full((4, 3), 1 + 2j)
    add_up(total, {"0.weight": value})
    assert total["0.weight"] is value  # taken as it is
    add_up(total, {"0.weight": torch.ones(4, 3, dtype=torch.complex64)})
    total["1.bias"] += 1
    whole = total.whole()
    assert list(whole) == [block.name for block in mechanism.blocks]
    assert (whole["0.weight"] == 2 + 2j).all()
    assert (whole["1.bias"] == 1).all()
    assert not whole["0.bias"].any()
    assert all(
        (whole[block.name].shape, str(whole[block.name].dtype))
        == (block.shape, f"torch.{block.dtype}")
        for block in mechanism.blocks
    )


def test_the_mean_of_complex_and_conjugated_sums() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    found = mean({"a": z.clone(), "b": z.clone().conj(), "c": z.real.clone()}, 4.0)
    for name, expected in (("a", z / 4), ("b", z.conj() / 4), ("c", z.real / 4)):
        torch.testing.assert_close(found[name], expected)


def test_a_step_taken_again_in_smaller_pieces_ends_before_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise belongs to a sum of the pieces it was first cut into: the difference of the two
    would be no noise at all."""
    path = tmp_path / "ledger.jsonl"
    inputs = torch.randn(8, 3, dtype=torch.complex64)
    whole = lambda cut: (inputs[cut], torch.zeros(len(inputs[cut])))  # noqa: E731
    for process in range(2):
        model, algorithm = problem()
        ledger = Ledger(path, algorithm.mechanism(), repeatable=True)
        ledger.begin("code", 0, "new")
        assert ledger.counted_again == 0
        training = Training(
            algorithm,
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            SeededNoise("key"),
            ledger,
        )
        if process:
            monkeypatch.setattr(algorithm, "accumulate", once_out_of_memory(algorithm.accumulate))
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with pytest.raises(
                UserError, match=r"out of memory in step 0, .*trainer\.micro_batch=4"
            ):
                private_step(training, 0, MicroBatches(8, whole, Size(8)), 7.0)
            assert all(
                torch.equal(one, other)
                for one, other in zip(before, model.parameters(), strict=True)
            )
        else:
            private_step(training, 0, MicroBatches(8, whole, Size(8)), 7.0)
        ledger.close()
    again = Ledger(path, algorithm.mechanism(), repeatable=True)
    again.begin("code", 0, "new")
    assert again.counted_again == 1
    again.close()


def once_out_of_memory(accumulate: Any) -> Any:
    calls = iter([True])

    def failing(total: Any, batch: Batch) -> None:
        if next(calls, False):
            raise MemoryError("out of memory")
        accumulate(total, batch)

    return failing
