"""What the attacks on a recipe are tried on: a tiny run of it, its noise sound or spoilt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zdp_bench.audit import recipe
from zdp_bench.audit.subject import Subject
from zdp_bench.config import compose, parse
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.training import step as engine

TINY = [
    "recipe=quickstart",
    "model.hidden=[6]",
    "trainer.epochs=2",
    "trainer.sample_rate=0.1",
    "threads=1",
]
UNIFORM = ["trainer.sampling=uniform", "trainer.sample_rate=null", "trainer.batch_size=144"]


def subject(*overrides: str) -> Subject:
    return Subject.prepare(parse(compose([*TINY, *overrides])))


def weakened(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor]) -> None:
    """Spoil the noise at its source, for the engine and for the attack on one release alike."""
    real = engine.add_noise

    def add_noise(
        total: dict[str, Tensor], mechanism: Mechanism, source: Any, step: int, times: float = 1.0
    ) -> dict[str, Tensor]:
        before = {name: value.clone() for name, value in total.items()}
        noisy = real(total, mechanism, source, step)
        return {name: (before[name] + spoil(noisy[name] - before[name])) * times for name in noisy}

    monkeypatch.setattr(engine, "add_noise", add_noise)
    monkeypatch.setattr(recipe, "add_noise", add_noise)


def forget_imaginary(noise: Tensor) -> Tensor:
    return torch.complex(noise.real, torch.zeros_like(noise.imag)) if noise.is_complex() else noise


def forget_one_bias(noise: Tensor) -> Tensor:
    return torch.zeros_like(noise) if noise.shape == (10,) else noise
