"""Count examples that are not finite (NaN, infinite) before any ε is spent on them.

A private run must not tell: whether a training example is finite is a fact about it, and a warning
out of the training would be one more release. The data's owner may look beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zdp_bench.data import N_UNIFORMS, Source, Splits

NUMBERS = 2**22  # of inputs that are looked at together


@dataclass(frozen=True)
class PartCount:
    """How many examples of a part are not finite.

    Attributes:
        part: train, validation or test.
        first: the place of the first example that is not finite; None if all are.
    """

    part: str
    examples: int
    not_finite: int
    first: int | None


def count_not_finite(splits: Splits) -> list[PartCount]:
    """Read every example once, as training gets it, and count those that are not finite."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    counts = []
    for name, source in parts.items():
        if source is None:
            continue
        is_finite = _find_finite(source)
        bad = torch.nonzero(~is_finite).flatten().tolist()
        counts.append(PartCount(name, len(source), len(bad), bad[0] if bad else None))
    return counts


def _find_finite(source: Source) -> Tensor:
    """Return True for each example [n] whose input and target are finite."""
    if not len(source):
        return torch.ones(0, dtype=torch.bool)
    first, _ = _read(source, torch.arange(1))
    rows = max(1, NUMBERS // max(1, first[0].numel()))
    finite = []
    for indices in torch.arange(len(source)).split(rows):
        inputs, targets = _read(source, indices)
        finite.append(_is_finite(inputs) & _is_finite(targets))
    return torch.cat(finite)


def _read(source: Source, indices: Tensor) -> tuple[Tensor, Tensor]:
    uniforms = torch.full((len(indices), N_UNIFORMS), 0.5, dtype=torch.float64)
    return source.batch(indices, uniforms if source.is_stochastic else None)


def _is_finite(values: Tensor) -> Tensor:
    """Return whether all numbers of each row [B, ...] are finite."""
    return values.isfinite().reshape(len(values), -1).all(dim=1)
