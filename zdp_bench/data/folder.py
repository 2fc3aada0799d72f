"""A person's own pictures: class folders or a CSV, split by patient.

Nothing is computed from the training set to prepare it: pixels are normalised by constants of the
recipe. The record's notes name the classes and no count of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from zdp_bench.data import Dataset, DatasetInfo, Examples, Splits
from zdp_bench.data.augmentation import augmentation
from zdp_bench.data.cache import load_or_make
from zdp_bench.data.files import digest, sha256, try_each
from zdp_bench.data.formats.class_folders import PARTS, Item, find_items
from zdp_bench.data.formats.pictures import SUFFIXES, Fit, read_picture
from zdp_bench.data.owners import hold_out_owners
from zdp_bench.errors import UserError, require
from zdp_bench.registry import register

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listing:
    """The files that are used, the part of each, and the classes in order of their number."""

    items: list[Item]
    parts: list[str]
    classes: list[str]

    def rows(self, part: str) -> list[int]:
        """Return the places of a part's files."""
        return [row for row, of in enumerate(self.parts) if of == part]

    @property
    def unit(self) -> str:
        """Who owns examples: a patient, or a picture where no patient is known."""
        return "patient" if any(item.patient != item.name for item in self.items) else "picture"

    @property
    def most_of_one(self) -> int:
        """The most training files of any one patient."""
        return max(Counter(self.items[row].patient for row in self.rows("train")).values())


@register("dataset", "folder")
@dataclass(frozen=True, kw_only=True)
class Folder(Dataset):
    """Pictures float32 [channels, size, size], in bytes until they are drawn, and their class.

    mean, deviation: of a pixel in [0, 1]; the model gets (pixel − mean) / deviation.
    """

    path: str | None = None
    patient: str | None = None
    size: int = 64
    fit: Fit = "resize"
    channels: int = 1
    mean: float | str = 0.5
    deviation: float | str = 0.25
    augment: str | None = None
    test_share: float = 0.2
    split_seed: int = 0
    max_per_patient: int | None = None
    bad_records: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        size, channels, share = self.size, self.channels, self.test_share
        most = self.max_per_patient
        require(1 <= size <= 4096, "dataset.size", size, "must lie between 1 and 4096 pixels")
        require(channels in (1, 3), "dataset.channels", channels, "must be 1 (grey) or 3 (colour)")
        require(0 < share < 1, "dataset.test_share", share, "must lie between 0 and 1")
        rule = "must be at least 1"
        require(most is None or most > 0, "dataset.max_per_patient", most, rule)
        for key in ("mean", "deviation"):
            value = getattr(self, key)
            rule = "must be a number that is public: computed from the training set, it would "
            rule += "need an ε of its own"
            require(not isinstance(value, str), f"dataset.{key}", value, rule)
        positive = isinstance(self.deviation, str) or self.deviation > 0
        require(positive, "dataset.deviation", self.deviation, "must be positive")
        augmentation(self.augment, 0.0)

    @property
    def pixels(self) -> tuple[float, float]:
        """Mean and deviation, as `Examples` takes them."""
        return float(self.mean), float(self.deviation)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one example."""
        return self.channels, self.size, self.size

    def load(self, root: Path) -> Splits:
        found = self.find()
        rows = [(item, sha256(item.path)) for item in found.items]
        names = "".join(f"{item.name}:{sum_};" for item, sum_ in rows)
        files = digest(f"{self.shape}:{self.fit}:{names}")
        blocks = (self.read(item.path)[None] for item in found.items)
        pixels = load_or_make("folder", files, (len(rows), *self.shape), np.uint8, blocks)
        whole = torch.from_numpy(pixels)
        labels = torch.tensor([found.classes.index(item.label) for item in found.items])
        people = {name: n for n, name in enumerate(sorted({i.patient for i in found.items}))}
        groups = torch.tensor([people[item.patient] for item in found.items])

        def take(part: str) -> Examples:
            chosen = torch.tensor(found.rows(part), dtype=torch.long)
            return Examples(whole[chosen], labels[chosen], groups[chosen], self.pixels)

        mean, deviation = self.pixels
        owners = "".join(
            f"{item.name}:{item.label}:{item.patient}:{part};"
            for item, part in zip(found.items, found.parts, strict=True)
        )
        return Splits(
            take("train"),
            take("test"),
            input_shape=self.shape,
            outputs=len(found.classes),
            provenance="own",
            digest=digest(f"{files}:{owners}:{self.pixels}:{self.augment}"),
            notes="classes " + ", ".join(f"{n} {name}" for n, name in enumerate(found.classes)),
            examples_per_patient=found.most_of_one,
            augment=augmentation(self.augment, (0 - mean) / deviation),
            validation=take("validation") if found.rows("validation") else None,
            unit=found.unit,
        )

    def info(self, root: Path) -> DatasetInfo:
        """Count by names; files are read only where damaged ones are skipped."""
        found = self.find()
        counts = Counter(found.items[row].label for row in found.rows("train"))
        return DatasetInfo(
            train=len(found.rows("train")),
            test=len(found.rows("test")),
            validation=len(found.rows("validation")),
            input_shape=self.shape,
            outputs=len(found.classes),
            examples_per_patient=found.most_of_one,
            unit=found.unit,
            owners=len({found.items[row].patient for row in found.rows("train")}),
            classes={name: counts[name] for name in found.classes},
        )

    def find(self) -> Listing:
        """List the files, without the damaged ones if they are skipped, and split them.

        Raises:
            UserError: no folder is named, or the files cannot be split.
        """
        if self.path is None:
            raise UserError("dataset.path=null: name your data, such as dataset.path=./scans.")
        path = Path(self.path).expanduser()
        items = find_items(path, SUFFIXES, self.patient)
        if self.bad_records == "skip":
            items = list(self._readable(items))
        parts = self._split(items)
        used, kept = Counter[str](), []
        for item, part in zip(items, parts, strict=True):
            used[item.patient] += part == "train"
            bound = self.max_per_patient or len(items)
            if part != "train" or used[item.patient] <= bound:
                kept.append((item, part))
        listing = Listing(
            [item for item, _ in kept],
            [part for _, part in kept],
            sorted({item.label for item in items}, key=_natural),
        )
        if len(listing.classes) < 2:
            raise UserError(f"dataset.path={path}: holds one class only; a classifier needs two.")
        for part in PARTS[:2]:
            there = {listing.items[row].label for row in listing.rows(part)}
            if lacking := set(listing.classes) - there:
                raise UserError(
                    f"dataset.path={path}: class {min(lacking)} has no {part} example. Change the "
                    "split, dataset.test_share or dataset.split_seed."
                )
        return listing

    def _split(self, items: list[Item]) -> list[str]:
        """Return the part of each file: its own, or drawn by patient."""
        if all(item.part for item in items):
            return [item.part for item in items]
        held = hold_out_owners([item.patient for item in items], self.test_share, self.split_seed)
        return ["test" if testing else "train" for testing in held]

    def _readable(self, items: list[Item]) -> Iterator[Item]:
        """Yield the files that can be read; the log names the others."""
        checked = try_each([item.path for item in items], self.read)
        for item, (_, wrong) in zip(items, checked, strict=True):
            if wrong:
                log.warning("%s Skipped.", wrong)
            else:
                yield item

    def read(self, path: Path) -> np.ndarray:
        """Return one picture as bytes [channels, size, size].

        Raises:
            UserError: it is damaged.
        """
        try:
            return read_picture(path, self.size, self.channels, self.fit)
        except UserError as error:
            if self.bad_records == "skip":
                raise
            raise UserError(f"{error} dataset.bad_records=skip leaves such files out.") from None


def _natural(name: str) -> tuple[bool, int, str]:
    """Sort classes that are numbers by value, before all others."""
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name
