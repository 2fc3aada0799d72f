"""Which private trainings some weights went through, whatever object of this process holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

_TRAILS: dict[Path, Trail] = {}  # by ledger


@dataclass
class Trail:
    """What the weights of a training were after each of its steps, by two numbers of each.

    Noise makes these unlike any others, in a copy of the model and in one that loads its state too.
    An average of weights is not recognised.

    Attributes:
        sizes: how many numbers each parameter that trains has.
        start: the two numbers of each before the first step, [parameters, 2].
        rows: those after each step, [steps or more, parameters, 2].
        origins: the ledgers of other trainings whose weights it started from.
    """

    sizes: list[int]
    start: Tensor
    rows: Tensor
    count: int = 0
    origins: set[Path] = field(default_factory=set)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the weights down after a step."""
        if self.count == len(self.rows):
            self.rows = torch.cat([self.rows, torch.empty_like(self.rows)])
        self.rows[self.count] = _ends(parameters)
        self.count += 1

    def is_at(self, parameters: list[nn.Parameter]) -> bool:
        """True if these weights are those of the last step."""
        ends = _ends(parameters)
        last = self.rows[self.count - 1]
        return self.count > 0 and ends.shape == last.shape and torch.equal(ends.to(last), last)

    def holds(self, parameter: nn.Parameter, ends: Tensor) -> bool:
        """True if a step left these numbers in a parameter of this size."""
        alike = [n for n, size in enumerate(self.sizes) if size == parameter.numel()]
        rows, start = self.rows[: self.count, alike], self.start[alike]
        found = (rows == ends.to(rows)).all(dim=2) & (rows != start).any(dim=2)
        return bool(found.any())


def begin(ledger: Path, model: nn.Module, parameters: list[nn.Parameter]) -> Trail:
    """Return the trail of a training before its first step in this process."""
    start = _ends(parameters)
    sizes = [parameter.numel() for parameter in parameters]
    origins = through(model, ledger)
    _TRAILS[ledger] = Trail(sizes, start, torch.empty(64, *start.shape).to(start), 0, origins)
    return _TRAILS[ledger]


def through(model: nn.Module, own: Path) -> set[Path]:
    """Return the ledgers, but for its `own`, of the trainings that a model's weights went through.

    Frozen weights count: noise of another training may be on them.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.numel() > 1]
    pairs = list(zip(parameters, _ends(parameters), strict=True))
    mine = _TRAILS.get(own)
    found = set(mine.origins) if mine else set()
    if mine and mine.is_at([p for p in parameters if p.requires_grad]):
        return found  # a training that a seed repeats leaves the same weights
    for ledger, trail in _TRAILS.items():
        if ledger != own and any(trail.holds(*pair) for pair in pairs):
            found |= {ledger} | trail.origins
    return found - {own}


@torch.no_grad()
def _ends(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the first and the last real number of each, [parameters, 2]."""
    each = []
    for parameter in parameters:
        reals = torch.view_as_real(parameter) if parameter.is_complex() else parameter.detach()
        last = sum((n - 1) * step for n, step in zip(reals.shape, reals.stride(), strict=True))
        each.append(reals.as_strided((2,), (last,)))
    return torch.cat(each).view(-1, 2) if each else torch.empty(0, 2)
