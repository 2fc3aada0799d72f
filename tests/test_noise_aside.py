"""Noise drawn by another thread is the same noise, and is not begun before the ledger has the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zdp_bench import engine
from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.zeta_dp_sgd import ZetaDPSGD
from zdp_bench.engine import Training, drawn_aside, private_step, zeros
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.noise import SeededNoise, add_noise

CPU = torch.device("cpu")


def problem() -> tuple[nn.Module, ZetaDPSGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, dtype=torch.complex64), nn.Linear(4, 2, dtype=torch.complex64))
    loss = lambda outputs, targets: outputs.abs().square().sum(dim=1)  # noqa: E731
    algorithm = ZetaDPSGD(Problem(model, loss, Sampling("poisson", 0.1, 2, 20)), noise_multiplier=1.0, max_grad_norm=1.0)
    return model, algorithm


def test_the_same_bits_as_noise_drawn_in_turn() -> None:
    _, algorithm = problem()
    mechanism = algorithm.mechanism()
    total = {name: torch.randn_like(value) for name, value in zeros(mechanism, CPU).items()}
    expected = add_noise({name: value.clone() for name, value in total.items()}, mechanism, SeededNoise(3), 7)
    with drawn_aside(mechanism, SeededNoise(3), 7, CPU) as release:
        found = release(total)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_ledger_has_the_step_before_any_noise_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model, algorithm = problem()
    order: list[str] = []

    class Ledger:
        releases = 0

        def append(self, step: int) -> None:
            order.append("ledger")

    def draw(total: dict[str, torch.Tensor], mechanism: Mechanism, source: SeededNoise, step: int) -> dict[str, torch.Tensor]:
        order.append("noise")
        return add_noise(total, mechanism, source, step)

    monkeypatch.setattr(engine, "add_noise", draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(algorithm, model, optimizer, SeededNoise(0), Ledger())  # type: ignore[arg-type]
    before = model[0].weight.detach().clone()
    private_step(training, 0, iter([]), 2.0)
    assert order == ["ledger", "noise"]
    assert not torch.equal(model[0].weight, before)  # an empty batch is a step like any other


def test_a_step_that_fails_is_followed_by_a_sound_one() -> None:
    _, algorithm = problem()
    mechanism = algorithm.mechanism()
    with pytest.raises(RuntimeError, match="lost"), drawn_aside(mechanism, SeededNoise(0), 0, CPU):
        raise RuntimeError("lost")
    with drawn_aside(mechanism, SeededNoise(0), 1, CPU) as release:
        found = release(zeros(mechanism, CPU))
    expected = add_noise(zeros(mechanism, CPU), mechanism, SeededNoise(0), 1)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_drawing_aside_leaves_the_number_of_threads_alone() -> None:
    _, algorithm = problem()
    before = torch.get_num_threads()
    with drawn_aside(algorithm.mechanism(), SeededNoise(0), 0, CPU) as release:
        release(zeros(algorithm.mechanism(), CPU))
    assert torch.get_num_threads() == before
