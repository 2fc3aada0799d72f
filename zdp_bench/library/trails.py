"""The private trainings that weights went through, whichever object of this process holds them."""

from __future__ import annotations

import math
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

    def add(self, model: nn.Module) -> None:
        """Note the weights after a step."""
        if self.count == len(self.rows):
            self.rows = torch.cat([self.rows, torch.empty_like(self.rows)])
        self.rows[self.count] = _sample(_trained(model))
        self.count += 1

    def distance(self, own: Tensor) -> float:
        """Return how far numbers of all its parameters are from those of the nearest step."""
        rows = self.rows[: self.count].flatten(1)
        return float(_apart(rows, own.flatten()).min()) if self.count else math.inf

    def holds(self, parameter: nn.Parameter, own: Tensor) -> bool:
        """True if a step left numbers like these in a parameter of this size."""
        alike = [n for n, size in enumerate(self.sizes) if size == parameter.numel()]
        is_large = parameter.numel() >= NUMBERS  # few numbers are like others by chance
        near = _apart(self.rows[: self.count, alike], own, is_large)
        most = (NEAR if is_large else 1e-6) * own.double().norm()
        return bool(((near < most) & (near < _apart(self.start[alike], own, is_large) / 2)).any())

    def is_in(self, tensors: Iterable[Tensor]) -> bool:
        """True if tensors have more of a step's numbers, in any order, than they have by chance."""
        rows, start = self.rows[: self.count].flatten(1), self.start.flatten()
        rows = rows.where(rows != start, math.nan)
        both = torch.stack([rows, rows * (1 + 2**-18)]).float()  # the same ones if they are coarse
        likely = torch.zeros(1 << 20, dtype=torch.bool, device=both.device)
        likely[_low_bits(both)] = True
        each = (_reals(tensor).to(both) for tensor in tensors)
        kept = torch.cat([reals[likely[_low_bits(reals)]] for reals in each])
        hits, others = torch.isin(both, kept).sum(dim=-1).double()
        chance = others.mean()
        return bool((hits > 7 + chance + 6 * chance.sqrt()).any())


def _apart(held: Tensor, own: Tensor, scaled: bool = True) -> Tensor:
    """Return the distance of numbers from each row of those held, scaled to fit."""
    held, own = held.to(own).double(), own.double()
    squares = held.square().sum(-1, keepdim=True).clamp(min=1e-300)
    return (own - held * ((held * own).sum(-1, keepdim=True) / squares if scaled else 1)).norm(
        dim=-1
    )


def begin(ledger: Path, model: nn.Module, resumed: Iterable[Path] | None = None) -> Trail:
    """Return the trail of a training before its first step in this process.

    Args:
        resumed: the origins of the state that it continues from.
    """
    parameters = _trained(model)
    sizes, start = [p.numel() for p in parameters], _sample(parameters)
    rows = torch.empty(64, *start.shape).to(start)
    origins = through(model, ledger) if resumed is None else set(resumed)
    trail = _TRAILS[ledger] = Trail(sizes, start, rows, 0, origins)
    if resumed is not None:  # its steps led here, from another start
        trail.start = torch.zeros_like(start)
        trail.add(model)
    return trail


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel() > 1]


def through(model: nn.Module, own: Path) -> set[Path]:
    """Return the ledgers, but for its `own`, of the trainings that a model's weights went through.

    Frozen weights and buffers count: noise of another training may be on them.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.numel() > 1]
    pairs = list(zip(parameters, _sample(parameters), strict=True))
    mine = _TRAILS.get(own)
    found = set(mine.origins) if mine else set()
    trained = _sample(_trained(model))
    if mine and torch.equal(mine.rows[: mine.count][-1:].to(trained), trained[None]):
        return found  # those of its last step, which a training that a seed repeats leaves too
    for ledger, trail in _TRAILS.items():
        held = ledger != own and any(trail.holds(*pair) for pair in pairs)
        if held and mine and trail.start.shape == mine.start.shape == trained.shape:
            # trainings from one start may go the same way
            held = trail.distance(trained) < mine.distance(trained)
        if held or (ledger != own and trail.is_in([*model.parameters(), *model.buffers()])):
            found |= {ledger} | trail.origins
    return found - {own}


@torch.no_grad()
def _sample(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return some real numbers of each, evenly spread; zeros behind those of a small one."""
    each = []
    for parameter in parameters:
        reals = _reals(parameter)
        missing = NUMBERS - len(reals)
        if missing > 0:
            each.append(pad(reals, (0, missing)))
        else:
            each.append(reals.as_strided((NUMBERS,), ((len(reals) - 1) // (NUMBERS - 1),)))
    return torch.cat(each).view(-1, NUMBERS) if each else torch.empty(0, NUMBERS)


def _reals(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)


def _low_bits(values: Tensor) -> Tensor:
    return (values.view(torch.int32) & 0xFFFFF).long()
