"""Count examples with NaN or infinite values, before any ε is spent on them.

Whether a training example is finite is private information, so a warning during training would be
one more release. The owner of the data may check beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zdp_bench.data import N_UNIFORMS, Source, Splits

BATCH_NUMEL = 2**22  # elements of the inputs that are checked at once


@dataclass(frozen=True)
class PartCount:
    """The number of examples of a part that are not finite.

    Attributes:
        part: "train", "validation" or "test".
        examples: number of all examples.
        not_finite: number of examples that are not finite.
        first: index of the first of them; None if all are finite.
    """

    part: str
    examples: int
    not_finite: int
    first: int | None


def count_not_finite(splits: Splits) -> list[PartCount]:
    """Read every example once, as training does, and count those that are not finite."""
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
    """Return True for each example whose input and target are finite, [n]."""
    if not len(source):
        return torch.ones(0, dtype=torch.bool)
    first, _ = _read(source, torch.arange(1))
    batch_size = max(1, BATCH_NUMEL // max(1, first[0].numel()))
    finite = []
    for indices in torch.arange(len(source)).split(batch_size):
        inputs, targets = _read(source, indices)
        finite.append(find_finite_rows(inputs) & find_finite_rows(targets))
    return torch.cat(finite)


def _read(source: Source, indices: Tensor) -> tuple[Tensor, Tensor]:
    uniforms = torch.full((len(indices), N_UNIFORMS), 0.5, dtype=torch.float64)
    return source.batch(indices, uniforms if source.is_stochastic else None)


def find_finite_rows(values: Tensor) -> Tensor:
    """Return True for each row of [B, ...] whose values are all finite, [B]."""
    return values.isfinite().reshape(len(values), -1).all(dim=1)
