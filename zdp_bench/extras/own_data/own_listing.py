"""Which examples of a person's own files are used, in which part, and whose they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zdp_bench.data.owners import hold_out_owners
from zdp_bench.errors import UserError
from zdp_bench.extras.own_data.kinds import Kind
from zdp_bench.extras.own_data.own_files import PARTS, Item


@dataclass(frozen=True)
class Listing:
    """The files that are used, the part of each, and the classes in order of their number.

    Attributes:
        used: which examples of each file are used [k].
        classes: none if the files have masks or references.
        skipped: how many files were left out, because they cannot be read.
    """

    kind: Kind
    items: list[Item]
    parts: list[str]
    used: list[np.ndarray]
    classes: list[str]
    skipped: int = 0

    def count(self, part: str) -> int:
        """How many examples a part has."""
        return sum(len(use) for use, of in zip(self.used, self.parts, strict=True) if of == part)

    def rows(self, part: str) -> Tensor:
        """Return the places of a part's examples, where all examples are in one array."""
        return torch.nonzero(self.spread([of == part for of in self.parts])).flatten()

    def spread(self, values: list[int] | list[bool]) -> Tensor:
        """Return a value of each file as one of each example [n]."""
        each = torch.tensor([len(use) for use in self.used])
        return torch.tensor(values).repeat_interleave(each)

    @property
    def target(self) -> str:
        """What the files have: 'label', 'mask' or 'reference'."""
        return self.items[0].target

    @property
    def unit(self) -> str:
        """Who owns examples: a patient, or a file where no patient is known."""
        known = any(item.patient != item.name for item in self.items)
        return "patient" if known else self.kind.name

    def training(self, key: str) -> Counter[str]:
        """Count the training examples of each patient, or of each label."""
        found = Counter[str]()
        for item, use, part in zip(self.items, self.used, self.parts, strict=True):
            if part == "train":
                found[getattr(item, key)] += len(use)
        return found


def list_examples(
    path: Path, kind: Kind, items: list[Item], parts: list[str], used: list[np.ndarray]
) -> Listing:
    """Return the listing of the files of which anything is used.

    Raises:
        UserError: a part, a class, or a class in a part has no example, or some files have classes
            and others masks.
    """
    kept = [n for n, use in enumerate(used) if len(use)]
    if len(targets := sorted({item.target for item in items})) > 1:
        raise UserError(
            f"dataset.path={path}: some of its files have a {targets[0]}, and others a "
            f"{targets[1]}."
        )
    listing = Listing(
        kind,
        [items[n] for n in kept],
        [parts[n] for n in kept],
        [used[n] for n in kept],
        sorted({item.label for item in items if item.target == "label"}, key=_natural),
    )
    if len(listing.classes) == 1:
        raise UserError(f"dataset.path={path}: holds one class only; a classifier needs two.")
    advice = "Change the split, dataset.test_share or dataset.split_seed."
    for part in PARTS[:2]:
        if not listing.count(part):
            raise UserError(f"dataset.path={path}: there is no {part} example. {advice}")
        chosen = zip(listing.items, listing.parts, strict=True)
        there = {item.label for item, of in chosen if of == part}
        if lacking := set(listing.classes) - there:
            raise UserError(
                f"dataset.path={path}: class {min(lacking)} has no {part} example. {advice}"
            )
    return listing


def split_items(items: list[Item], test_share: float, seed: int) -> list[str]:
    """Return the part of each file: its own, or drawn by patient."""
    if all(item.part for item in items):
        return [item.part for item in items]
    held = hold_out_owners([item.patient for item in items], test_share, seed)
    return ["test" if testing else "train" for testing in held]


def choose_examples(
    items: list[Item], parts: list[str], counts: list[int], most: int | None
) -> list[np.ndarray]:
    """Return which examples of each file are used: all, but at most so many of a patient to train.

    These are spread evenly over the patient's files, and over the planes of each.
    """
    used = [np.arange(count) for count in counts]
    files: dict[str, list[int]] = {}
    for n, (item, part) in enumerate(zip(items, parts, strict=True)):
        if part == "train":
            files.setdefault(item.patient, []).append(n)
    for own in files.values():
        ends = np.cumsum([counts[n] for n in own])
        if most is None or ends[-1] <= most:
            continue
        kept = np.linspace(0, ends[-1] - 1, most).round().astype(int)
        for n, end in zip(own, ends, strict=True):
            start = end - counts[n]
            used[n] = kept[(start <= kept) & (kept < end)] - start
    return used


def _natural(name: str) -> tuple[bool, int, str]:
    """Sort classes that are numbers by value, before all others."""
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name
