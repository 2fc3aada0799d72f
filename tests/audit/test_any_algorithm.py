"""Any registered algorithm can be audited as it is: one that nobody knows, sound, lying, and with a
block that lacks noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.audit.subjects import forget_one_bias, subject, weakened
from zdp_bench import registry
from zdp_bench.algorithms import Problem, mean
from zdp_bench.audit.canaries import attack_with_gradients, attack_with_inputs
from zdp_bench.audit.recipe import attack_recipe_release
from zdp_bench.audit.subject import Subject
from zdp_bench.gradients import Batch, reference
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.training.setup import Setup


class Invented:
    """An algorithm nobody knows: per-block bounds, a spectrum, correlated noise; `lie` times more
    than its mechanism says.
    """

    private = True
    noise_multiplier = 1.0

    def __init__(self, problem: Problem, *, lie: float = 1.0, gamma: float | None = None) -> None:
        # Hydra cannot take a key out that is null, so the group's `gamma` comes here too.
        self.problem, self.lie = problem, lie
        self.names = list(dict(problem.model.named_parameters()))

    def mechanism(self) -> Mechanism:
        shapes = {name: tuple(p.shape) for name, p in self.problem.model.named_parameters()}
        kinds: list[dict[str, Any]] = [
            {"noise": "hermitian", "fft_dims": (0, 1)},
            {"noise": "circular"},
        ]
        kinds += [{"noise": "correlated", "rho": -0.6}, {"noise": "circular"}]
        blocks = [
            Block(name, shapes[name], "complex64", bound, 3.0 * bound, **kind)
            for name, bound, kind in zip(self.names, (1.0, 0.5, 2.0, 0.1), kinds, strict=True)
        ]
        return Mechanism(tuple(blocks), self.problem.sampling, joint=False)

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        gradients = reference.per_sample_gradients(self.problem.model, self.problem.loss, batch)
        first = self.names[0]
        spectra = torch.fft.fftn(gradients[first].real, dim=(1, 2), norm="ortho")
        raw = gradients | {first: spectra}
        shares = {}
        for block in self.mechanism().blocks:
            clipped, _ = reference.clip(
                {block.name: raw[block.name]}, [([block.name], block.bound)]
            )
            shares[block.name] = self.lie * clipped[block.name]
        return shares

    def accumulate(self, total: dict[str, Tensor], batch: Batch) -> None:
        for name, share in self.contributions(batch).items():
            total[name] += share.sum(dim=0)

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        first = self.names[0]
        signal = torch.fft.ifftn(noisy[first], dim=(0, 1), norm="ortho").real
        return mean(
            noisy | {first: torch.complex(signal, torch.zeros_like(signal))}, expected_batch_size
        )


REPLACED = ("noise_multiplier", "max_grad_norm", "noise", "per_layer")


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Subject]:
    registry.names("algorithm")
    monkeypatch.setitem(registry._builders["algorithm"], "invented", Invented)
    return lambda *more: subject(
        "algorithm.name=invented",
        *(f"~algorithm.{key}" for key in REPLACED),
        *more,
    )


PLAIN = ("~algorithm.gradient", "~algorithm.gradients")


def test_an_unknown_algorithm_is_audited(invented: Callable[..., Subject]) -> None:
    findings = [
        *attack_recipe_release(invented(*PLAIN), 0.99, 4000),
        attack_with_gradients(invented(*PLAIN), 0.99, 100, 200),
        attack_with_inputs(invented(*PLAIN), 0.99, 100, 200),
    ]
    assert [finding.verdict for finding in findings] == ["passes"] * 4
    # it moves all blocks at once, along the weak direction
    assert findings[0].lower_bound > 0.4 * findings[0].epsilon_claimed


def test_contributions_beyond_the_mechanism_are_caught(
    invented: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Setup, "check_model", lambda *_: [])
    lying = invented("+algorithm.lie=4.0", *PLAIN)
    assert attack_recipe_release(lying, 0.99, 1200)[1].verdict == "flagged"


def test_a_block_without_noise_is_caught(
    invented: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    weakened(monkeypatch, forget_one_bias)
    assert attack_recipe_release(invented(*PLAIN), 0.99, 1000)[0].verdict == "flagged"
