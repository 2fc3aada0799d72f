"""The private trainings that weights went through, whichever object of this process holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

_TRAILS: dict[Path, Trail] = {}  # by ledger


# So many numbers of each parameter are taken down. In so many dimensions, other weights come within
# `NEAR` of their length once in ten million times.
NUMBERS, NEAR = 8, 0.1


@dataclass
class Trail:
    """What the weights of a training were after each of its steps, by a few numbers of each.

    Weights that are nearer to one of these than to the start have gone through the training: in a
    copy of the model, scaled, rounded or moved a little, be it by chance.
    """

    sizes: list[int]  # how many numbers each parameter that trains has
    start: Tensor  # before the first step, [parameters, NUMBERS]
    rows: Tensor  # after each step, [steps or more, parameters, NUMBERS]
    count: int = 0
    origins: set[Path] = field(default_factory=set)  # ledgers of trainings that it started from

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the weights after a step."""
        if self.count == len(self.rows):
            self.rows = torch.cat([self.rows, torch.empty_like(self.rows)])
        self.rows[self.count] = _sample(parameters)
        self.count += 1

    def is_at(self, parameters: list[nn.Parameter]) -> bool:
        """True if these weights are those of the last step."""
        own, last = _sample(parameters), self.rows[self.count - 1]
        return self.count > 0 and own.shape == last.shape and torch.equal(own.to(last), last)

    def holds(self, parameter: nn.Parameter, own: Tensor) -> bool:
        """True if a step left numbers like these in a parameter of this size."""
        alike = [n for n, size in enumerate(self.sizes) if size == parameter.numel()]
        is_large = parameter.numel() >= NUMBERS  # few numbers are like others by chance
        own = own.double()

        def apart(held: Tensor) -> Tensor:
            held = held.to(own)
            scale = (held * own).sum(-1, keepdim=True) / held.square().sum(-1, keepdim=True)
            return (own - held * (scale if is_large else 1.0)).norm(dim=-1)

        near = apart(self.rows[: self.count, alike])
        most = (NEAR if is_large else 1e-6) * own.norm()
        return bool(((near < most) & (near < apart(self.start[alike]) / 2)).any())


def begin(ledger: Path, model: nn.Module, parameters: list[nn.Parameter]) -> Trail:
    """Return the trail of a training before its first step in this process."""
    start = _sample(parameters)
    sizes = [parameter.numel() for parameter in parameters]
    origins = through(model, ledger)
    _TRAILS[ledger] = Trail(sizes, start, torch.empty(64, *start.shape).to(start), 0, origins)
    return _TRAILS[ledger]


def note_loaded(ledger: Path, model: nn.Module) -> None:
    """Note that a model's weights come from the training of an exported ledger."""
    parameters = [parameter for parameter in model.parameters() if parameter.numel() > 1]
    rows = _sample(parameters)
    sizes = [parameter.numel() for parameter in parameters]
    _TRAILS[ledger] = Trail(sizes, torch.zeros_like(rows), rows.unsqueeze(0).clone(), 1)


def through(model: nn.Module, own: Path) -> set[Path]:
    """Return the ledgers, but for its `own`, of the trainings that a model's weights went through.

    Frozen weights count: noise of another training may be on them.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.numel() > 1]
    pairs = list(zip(parameters, _sample(parameters), strict=True))
    mine = _TRAILS.get(own)
    found = set(mine.origins) if mine else set()
    if mine and mine.is_at([p for p in parameters if p.requires_grad]):
        return found  # a training that a seed repeats leaves the same weights
    for ledger, trail in _TRAILS.items():
        if ledger != own and any(trail.holds(*pair) for pair in pairs):
            found |= {ledger} | trail.origins
    return found - {own}


@torch.no_grad()
def _sample(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return some real numbers of each, evenly spread; zeros behind those of a small one."""
    each = []
    for parameter in parameters:
        reals = torch.view_as_real(parameter) if parameter.is_complex() else parameter.detach()
        reals = reals.reshape(-1)
        missing = NUMBERS - len(reals)
        if missing > 0:
            each.append(pad(reals, (0, missing)))
        else:
            each.append(reals.as_strided((NUMBERS,), ((len(reals) - 1) // (NUMBERS - 1),)))
    return torch.cat(each).view(-1, NUMBERS) if each else torch.empty(0, NUMBERS)
