"""Your own files, in folders or listed by a CSV, split by patient: pictures, scans, recordings.

No statistic of the training set is used to prepare it: values are scaled by constants of the
recipe, or by statistics of the same plane. The notes of a record name the classes, but not their
counts.
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
    """Images with their references, stored as bytes, for `task=reconstruction`.

    Targets [B, ..., 2, size, size] are the reference and the image itself, in [0, 1].

    Attributes:
        images: the images; their targets are the references.
    """

    images: Examples
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
    """Your own examples with classes, masks or references; `Kind.shape` gives the shape of inputs.

    Pixels are cached as bytes and converted when they are drawn (`cache.py`).

    Args:
        path: path of the folder or CSV.
        patient: regular expression whose first group is the patient in a file's name or path.
        mean, deviation: the model gets (pixel − mean) / deviation of pixels in [0, 1].
        augment: name of an augmentation; see `augmentation`. Default: none.
        test_share: fraction of the owners to test on, unless you split the files.
        split_seed: seed that draws them.
        max_per_patient: maximum number of training examples per owner. Default: all.
        bad_examples: see `read_each`.
        scale: factor on the samples of a recording.
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
        """The (mean, standard deviation) for `Examples`."""
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
        """Describe the examples, with the number of training examples per class.

        These numbers are never written to a record.
        """
        found = self.find()
        classes = dict.fromkeys(found.classes, 0)
        for item, use in zip(found.items, found.used, strict=True):
            if item.part == "train" and classes:
                classes[item.label] += len(use)
        return replace(super().info(root), classes=classes)

    def check_files(self, root: Path) -> Iterator[tuple[Path, str]]:
        """Check every listed file, with its mask or reference.

        Yields:
            The path of each file and what is wrong with it, '' if nothing.
        """
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
        """List and split the files, without damaged ones if these are skipped."""
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
        """Return the kind of the first file or, if files are skipped, of the first readable one."""
        for item in items if self.bad_examples == "skip" else ():
            with suppress(UserError):
                return readers.kind_of(item.path)
        return readers.kind_of(items[0].path)

    def prepare(self, path: Path) -> Tensor:
        """Read a file as inputs of the model, [n, *shape], for predictions."""
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
        """Reject options that do not apply to files of this kind, and missing ones."""
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
        """Check a file's header against its mask's or reference's.

        If damaged files are skipped, both are also read completely.
        """
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
        """Read the examples of a file; reject a file whose examples are not finite."""
        examples = kind.read(path, self)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = examples * np.float32(self.scale) if self.scale else examples
        with reading(path):
            rule = f"makes examples that are not finite, with dataset.scale={self.scale or 1}"
            expect(bool(np.isfinite(scaled).all()), rule)
        return scaled

    def _digest(self, found: Listing) -> str:
        """Return a digest of the files and of the options that turn them into examples."""
        kind, sums = found.kind, []
        for item, facts in zip(found.items, found.facts, strict=True):
            with files.advise_skipping():
                paths = [*(facts.files or [item.path]), *filter(None, [item.partner])]
                each = [files.sha256(path) for path in paths]
            sums.append(
                f"{item.name}:{each[0] if len(each) == 1 else files.digest(''.join(each))};"
            )
        text = f"{kind.shape(self)}:{self.fit}:{''.join(sums)}"
        if kind.name != "picture" or self.window:  # otherwise, older digests stay valid
            options = [getattr(self, key) for key in kind.keys]
            text += repr((kind.name, kind.version, options, [use.tolist() for use in found.used]))
        return files.digest(text)

    def _tell_copies(self, found: Listing, whole: Tensor) -> None:
        """Warn of equal examples of two owners, even in files with different content."""
        first: dict[bytes, Item] = {}
        copies = []
        for at, example in zip(
            found.spread([*range(len(found.items))]), whole.numpy(), strict=True
        ):
            if example.min() < example.max():  # constant planes, such as air, say nothing
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
        """Return classes [n], or masks or references as bytes."""
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
        """Load the used examples of files, [n, *shape], from the cache.

        Args:
            name: name of the folder in the cache.
            found: the listing, which says which examples of each file are used.
            kind: kind of the files.
            paths: paths of the files.
            content: digest of everything that determines the examples.
        """
        shape = (sum(map(len, found.used)), *kind.shape(self))

        def blocks() -> Iterator[np.ndarray]:
            for path, use in zip(paths, found.used, strict=True):
                with files.advise_skipping():
                    examples = self._read(kind, path)
                yield examples[use]

        dtype = kind.dtype(self)
        return torch.from_numpy(load_or_make(name, content, shape, dtype, blocks()))
