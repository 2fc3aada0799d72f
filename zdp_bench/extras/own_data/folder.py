"""Your own files, in folders or by a CSV, split by patient: pictures, scans, recordings.

Nothing is computed from the training set to prepare it: numbers are scaled by constants of the
recipe, or by what is in the one plane alone. The record's notes name the classes and no count of
them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Gt
from torch import Tensor

from zdp_bench.data import Dataset, DatasetInfo, Examples, Fraction, MaxCount, Part, Splits, files
from zdp_bench.data.augmentation import augmentation
from zdp_bench.data.cache import load_or_make
from zdp_bench.data.files import BadExamples
from zdp_bench.data.kspace import SSIM_WINDOW
from zdp_bench.errors import UserError, require
from zdp_bench.extras.own_data import listing, readers
from zdp_bench.extras.own_data.listing import Item, Listing
from zdp_bench.extras.own_data.readers import Facts, Form, Kind
from zdp_bench.foreign_files import expect, reading
from zdp_bench.registry import register

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pairs:
    """Images with their references, bytes until they are drawn, as `task=reconstruction` has them.

    Targets [B, ..., 2, size, size] are the reference and the image itself, in [0, 1].
    """

    images: Examples  # whose targets are the references
    is_stochastic = False

    @property
    def groups(self) -> Tensor | None:
        return self.images.groups

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Tensor, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        inputs, references = self.images.batch(indices)
        return inputs, torch.cat([references, self.images.inputs[indices]], dim=-3) / 255


DARK = 255 // 10
OPTIONAL = ("window", "depth", "length", "rate", "scale", "leads", "spectrum")


@register("dataset", "folder")
@dataclass(frozen=True, kw_only=True)
class Folder(Form, Dataset):
    """Examples as `Kind.shape` says, and their class, the bytes of their mask, or their reference.

    Pixels stay bytes on the disk until they are drawn (`cache.py`).

    mean, deviation: of a pixel in [0, 1]; the model gets (pixel − mean) / deviation.
    scale: a recording's samples are multiplied by it.
    """

    path: str | None = None
    patient: str | None = None
    mean: float = 0.5
    deviation: Annotated[float, Gt(0)] = 0.25
    augment: str | None = None
    test_share: Fraction = 0.2
    split_seed: int = 0
    max_per_patient: MaxCount = None
    bad_examples: BadExamples = "refuse"
    scale: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        rising = self.limits is None or self.limits[0] < self.limits[1]
        require(rising, "dataset.window", self.window, "must be [low, high] with low < high")
        fits = self.spectrum is None or self.spectrum <= (self.length or 0)
        rule = "must be at most dataset.length samples"
        require(fits, "dataset.spectrum", self.spectrum, rule)
        named = self.leads is None or len({*self.leads}) == len(self.leads) == self.channels
        rule = f"must name as many leads as dataset.channels={self.channels}, each once"
        require(named, "dataset.leads", self.leads, rule)
        augmentation(self.augment, 0.0)

    @property
    def pixels(self) -> tuple[float, float]:
        """Mean and deviation, as `Examples` takes them."""
        return float(self.mean), float(self.deviation)

    def load(self, root: Path) -> Splits:
        found = self.find()
        content = self._digest(found)
        paths = [item.path for item in found.items]
        whole = self._load("folder", found, found.kind, paths, content)
        if found.kind.is_image and int(whole.max()) <= DARK:
            log.warning("%s: no pixel is above a tenth of white; see dataset.window", self.path)
        self._tell_copies(found, whole)
        targets = self._load_targets(found, content)
        names = sorted({item.patient for item in found.items})
        people = {name: number for number, name in enumerate(names)}
        groups = found.spread([people[item.patient] for item in found.items])
        pixels = self.pixels if found.kind.is_image else None
        everything = Examples(whole, targets, groups, pixels)
        source = Pairs(everything) if found.target == "reference" else everything

        def take(part: str) -> Part:
            return Part(source, found.rows(part))

        validation = take("validation")
        mean, deviation = self.pixels
        owners = "".join(f"{i.name}:{i.label}:{i.patient}:{i.part};" for i in found.items)
        pairs = ":reference" if found.target == "reference" else ""
        classes = ", ".join(f"{n} {name}" for n, name in enumerate(found.classes))
        what = {"mask": "a mask for each image", "reference": "a reference for each image"}
        said = what.get(found.target, f"classes {classes}")
        return Splits(
            take("train"),
            take("test"),
            input_shape=found.kind.shape(self),
            outputs=len(found.classes) or 1,
            provenance="own",
            digest=files.digest(f"{content}:{owners}:{self.pixels}:{self.augment}{pairs}"),
            notes="; ".join(filter(None, [said, files.note_skipped(found.skipped)])),
            augment=augmentation(self.augment, (0 - mean) / deviation),
            augment_targets=None if found.classes else augmentation(self.augment, 0),
            validation=validation if len(validation) else None,
            unit=found.unit,
            owner_names=names,
            title=Path(self.path or "").expanduser().absolute().name,
        )

    def info(self, root: Path) -> DatasetInfo:
        """Add the training examples of each class, which a record never has."""
        found = self.find()
        classes = dict.fromkeys(found.classes, 0)
        for item, use in zip(found.items, found.used, strict=True):
            if item.part == "train" and classes:
                classes[item.label] += len(use)
        return replace(super().info(root), classes=classes)

    def check_files(self, root: Path) -> Iterator[tuple[Path, str]]:
        """Read every file that is listed, with its mask or reference."""
        if self.path is None:
            return
        picture, told = readers.PICTURE, False  # of files that no option is given for, once
        for item in listing.find_items(Path(self.path), self.patient):
            paths = [path for path in (item.path, item.partner) if path]
            for path, problem in files.try_each(paths, readers.check):
                is_sound = path == item.path and not problem
                if is_sound and not told and readers.fits(path, picture):
                    ((_, problem),) = files.try_each([path], lambda p: picture.inspect(p, self))
                    told = bool(problem)
                if path == item.partner and not problem:
                    pair = partial(readers.check_pair, item.path)
                    ((_, problem),) = files.try_each([path], pair)
                yield path, problem

    def find(self) -> Listing:
        """List the files, without the damaged ones if they are skipped, and split them."""
        if self.path is None:
            raise UserError(
                "dataset.path=null: set the path of your data, such as dataset.path=./scans."
            )
        path = Path(self.path).expanduser()
        items = listing.find_items(path, self.patient)
        kind = self._find_kind(items)
        self._require_options(kind, items[0].path)
        if items[0].target == "mask" and kind.mask is None:
            raise UserError(f"{items[0].partner}: is a mask, but a {kind.name} can have none.")
        if items[0].target == "reference":
            self._require_images(kind, items[0].partner)
        checked = list(files.read_each(items, partial(self._check, kind), self.bad_examples))
        require(bool(checked), "dataset.path", path, "contains no readable file")
        facts, skipped = [each for _, each in checked], len(items) - len(checked)
        items = listing.split_items([item for item, _ in checked], self.test_share, self.split_seed)
        counts = [each.examples for each in facts]
        used = listing.choose_examples(items, counts, self.max_per_patient)
        return listing.list_examples(path, kind, items, facts, used, skipped)

    def _find_kind(self, items: list[Item]) -> Kind:
        """Return the kind of the first file; if files are skipped, of the first of any kind."""
        for item in items if self.bad_examples == "skip" else ():
            with suppress(UserError):
                return readers.kind_of(item.path)
        return readers.kind_of(items[0].path)

    def prepare(self, path: Path) -> Tensor:
        """Return a file as the model gets it [n, *shape], for predictions."""
        kind = readers.kind_of(path)
        if kind.is_recording != bool(self.length):
            takes = "recordings" if self.length else "images"
            raise UserError(f"{path}: is a {kind.name}, and the model takes {takes}.")
        self._require_options(kind, path)
        kind.inspect(path, self)
        inputs = torch.tensor(self._read(kind, path))  # a copy: some arrays are read-only
        if not kind.is_image:
            return inputs
        return Examples(inputs, inputs, pixels=self.pixels).batch(torch.arange(len(inputs)))[0]

    def _require_options(self, kind: Kind, first: Path) -> None:
        """Reject options that do not apply to these files, and missing ones."""
        what = f"{first.name} is a {kind.name}"
        for key in OPTIONAL if kind.is_image else (*OPTIONAL, "augment"):
            value = getattr(self, key)
            takes = value is None or key in kind.keys
            require(takes, f"dataset.{key}", value, f"changes nothing here: {what}")
            needed = value is not None or key not in kind.keys or key not in ("length", "rate")
            unit = "samples of an example" if key == "length" else "Hz of every file"
            require(needed, f"dataset.{key}", value, f"give the {unit}: {what}")
        allowed = kind.channels is None or self.channels in kind.channels
        rule = "must be 1 (grey)" + (" or 3 (colour)" if kind.channels == (1, 3) else f": {what}")
        require(allowed, "dataset.channels", self.channels, rule)
        plain = kind.is_image or self.pixels == (Folder.mean, Folder.deviation)
        require(plain, "dataset.mean", self.mean, f"is for images, as dataset.deviation is: {what}")

    def _require_images(self, kind: Kind, first: Path | None) -> None:
        """Reject references that are not grey images, or are too small for SSIM."""
        if not kind.is_image:
            raise UserError(f"{first}: is a reference, but a {kind.name} can have none.")
        rule = f"must be at least {SSIM_WINDOW}, the side of SSIM's window, for references"
        require(self.size >= SSIM_WINDOW, "dataset.size", self.size, rule)
        require(self.channels == 1, "dataset.channels", self.channels, "must be 1 for references")

    def _check(self, kind: Kind, item: Item) -> Facts:
        """Compare a file's header with its partner's; if damaged files are skipped, read both."""
        facts = readers.inspect(item.path, kind, self)
        partner, reader = item.partner, kind.mask if item.target == "mask" else kind
        if partner and reader:
            own = readers.inspect(partner, reader, self)
            readers.require_same_place(partner, own, facts)
        if self.bad_examples == "skip":
            self._read(kind, item.path)
            if partner and reader:
                self._read(reader, partner)
        return facts

    def _read(self, kind: Kind, path: Path) -> np.ndarray:
        """Return the examples of a file; reject one whose examples are not finite."""
        examples = kind.read(path, self)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = examples * np.float32(self.scale) if self.scale else examples
        with reading(path):
            rule = f"makes examples that are not finite, with dataset.scale={self.scale or 1}"
            expect(bool(np.isfinite(scaled).all()), rule)
        return scaled

    def _digest(self, found: Listing) -> str:
        """Return the SHA-256 of the files, and of how they become numbers."""
        kind, sums = found.kind, []
        for item, facts in zip(found.items, found.facts, strict=True):
            with files.advise_skipping():
                paths = [*(facts.files or [item.path]), *filter(None, [item.partner])]
                each = [files.sha256(path) for path in paths]
            sums.append(
                f"{item.name}:{each[0] if len(each) == 1 else files.digest(''.join(each))};"
            )
        text = f"{kind.shape(self)}:{self.fit}:{''.join(sums)}"
        if kind.name != "picture" or self.window:  # plain pictures' digest stays what it was
            options = [getattr(self, key) for key in kind.keys]
            text += repr((kind.name, kind.version, options, [use.tolist() for use in found.used]))
        return files.digest(text)

    def _tell_copies(self, found: Listing, whole: Tensor) -> None:
        """Warn of two owners who have the same example, whatever files it is in."""
        first: dict[bytes, Item] = {}
        copies = []
        for at, example in zip(
            found.spread([*range(len(found.items))]), whole.numpy(), strict=True
        ):
            if example.min() < example.max():  # a plane of air is everybody's
                item = found.items[int(at)]
                other = first.setdefault(blake2b(example.tobytes(), digest_size=16).digest(), item)
                copies += [(other, item)] if other.patient != item.patient else []
        for other, item in copies[:1]:
            log.warning(
                "%s: %d examples are there under two owners, such as %s (%s) and %s (%s); if one "
                "person has two names, no ε covers both, and a test on a training example says "
                "little",
                *(self.path, len(copies), other.name, other.part, item.name, item.part),
            )

    def _load_targets(self, found: Listing, content: str) -> Tensor:
        """Return classes [n], masks, or references as bytes of images."""
        if found.target == "label":
            return found.spread([found.classes.index(item.label) for item in found.items])
        kind = found.kind.mask if found.target == "mask" else found.kind
        assert kind
        paths = [item.partner for item in found.items if item.partner]
        name = "folder-labels" if found.target == "mask" else "folder-references"
        return self._load(name, found, kind, paths, content)

    def _load(
        self, name: str, found: Listing, kind: Kind, paths: list[Path], content: str
    ) -> Tensor:
        """Return the examples of `paths`, one a file [n, *shape], cached as `name` by `content`."""
        shape = (sum(map(len, found.used)), *kind.shape(self))

        def blocks() -> Iterator[np.ndarray]:
            for path, use in zip(paths, found.used, strict=True):
                with files.advise_skipping():
                    examples = self._read(kind, path)
                yield examples[use]

        dtype = kind.dtype(self)
        return torch.from_numpy(load_or_make(name, content, shape, dtype, blocks()))
