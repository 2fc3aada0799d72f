"""Your own pictures, scans or recordings, in folders or listed in a CSV, split by patient.

Examples are prepared without statistics of the training set: values are scaled by constants of the
recipe, or by statistics of the same plane. The notes of a record name the classes, but not their
numbers of examples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
from zdp_bench.data.owners import MAX_MIDDLE
from zdp_bench.disk import expand_home
from zdp_bench.errors import UserError, require
from zdp_bench.extras.own_data import readers
from zdp_bench.extras.own_data.listing import (
    Item,
    Listing,
    choose_examples,
    find_items,
    list_examples,
    split_items,
)
from zdp_bench.extras.own_data.readers import Facts, Form, Kind
from zdp_bench.foreign_files import Unavailable, expect, reading
from zdp_bench.registry import register

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pairs:
    """Images with their references, stored as bytes, for `task=reconstruction`.

    Targets [B, ..., 2, size, size] are the reference and the image itself, in [0, 1].

    Attributes:
        images: the images, with the references as their targets.
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


DARK = 255 // 10  # images are dark if no pixel exceeds this, a tenth of white
# Options that apply to some kinds of files only; see `Kind.keys`.
OPTIONAL = ("window", "depth", "length", "rate", "scale", "leads", "spectrum")


@register("dataset", "folder")
@dataclass(frozen=True, kw_only=True)
class Folder(Form, Dataset):
    """Your own examples with classes, masks or references. Inputs have the shape of `Kind.shape`.

    Pixels are cached as bytes and converted when they are drawn (`cache.py`).

    Args:
        path: path of the folder or CSV. Required.
        patient: regular expression whose first group is the patient in the name or path of a file.
            Default: the folder names the patient; see `listing`.
        mean, deviation: the input is (pixel − mean) / deviation, for pixels in [0, 1]. Default: 0.5
            and 0.25.
        augment: name of an augmentation; see `augmentation`. Default: none.
        test_share: fraction of the owners to test on, unless you split the files yourself. Default:
            0.2.
        split_seed: seed that draws the test owners. Default: 0.
        max_per_patient: maximum number of training examples per owner. Default: all.
        bad_examples: what to do with unreadable files; see `read_each`. Default: "refuse".
        scale: factor by which the samples of a recording are multiplied. Default: none.
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
        is_window = self.limits is None or self.limits[0] < self.limits[1]
        require(is_window, "dataset.window", self.window, "must be [low, high] with low < high")
        fits = self.spectrum is None or self.spectrum <= (self.length or 0)
        rule = "must be at most dataset.length samples"
        require(fits, "dataset.spectrum", self.spectrum, rule)
        least = float(np.finfo(np.float32).smallest_subnormal)
        is_representable = self.scale is None or self.scale >= least
        require(is_representable, "dataset.scale", self.scale, "is 0 in float32")
        names_leads = self.leads is None or len({*self.leads}) == len(self.leads) == self.channels
        rule = f"must name as many leads as dataset.channels={self.channels}, each once"
        require(names_leads, "dataset.leads", self.leads, rule)
        augmentation(self.augment, 0.0)

    @property
    def pixels(self) -> tuple[float, float]:
        """The (mean, standard deviation) for `Examples`."""
        return float(self.mean), float(self.deviation)

    def load(self, root: Path) -> Splits:
        listing = self.find()
        content = self._digest(listing)
        paths = [item.path for item in listing.items]
        inputs = self._load("folder", listing, listing.kind, paths, content)
        if listing.kind.is_image:
            self._warn_of_darkness(inputs[listing.rows("test")])
        self._warn_of_copies(listing, inputs)
        targets = self._load_targets(listing, content)
        names = sorted({item.patient for item in listing.items})
        number_of = {name: number for number, name in enumerate(names)}
        groups = listing.spread([number_of[item.patient] for item in listing.items])
        pixels = self.pixels if listing.kind.is_image else None
        everything = Examples(inputs, targets, groups, pixels)
        source = Pairs(everything) if listing.target == "reference" else everything

        def take(part: str) -> Part:
            return Part(source, listing.rows(part))

        validation = take("validation")
        mean, deviation = self.pixels
        owners = "".join(f"{i.name}:{i.label}:{i.patient}:{i.part};" for i in listing.items)
        pairs = ":reference" if listing.target == "reference" else ""
        if listing.has_signed_or_fractional_classes:
            owners += repr(listing.classes)
        if listing.target == "label":
            classes = ", ".join(f"{n} {name}" for n, name in enumerate(listing.classes))
            note = f"classes {classes}"
        else:
            note = f"a {listing.target} for each image"
        return Splits(
            take("train"),
            take("test"),
            input_shape=listing.kind.shape(self),
            outputs=len(listing.classes) or 1,
            provenance="own",
            digest=files.digest(f"{content}:{owners}:{self.pixels}:{self.augment}{pairs}"),
            notes="; ".join(filter(None, [note, files.note_skipped(listing.skipped)])),
            augment=augmentation(self.augment, (0 - mean) / deviation),
            augment_targets=None if listing.classes else augmentation(self.augment, 0),
            validation=validation if len(validation) else None,
            unit=listing.unit,
            owner_names=names,
            title=expand_home(self.path or "").absolute().name,
        )

    def info(self, root: Path) -> DatasetInfo:
        """Describe the examples, with the number of training examples per class.

        These numbers are never written to a record.
        """
        listing = self.find()
        classes = dict.fromkeys(listing.classes, 0)
        for item, used in zip(listing.items, listing.used, strict=True):
            if item.part == "train" and classes:
                classes[item.label] += len(used)
        return replace(super().info(root), classes=classes)

    def check_files(self, root: Path) -> Iterator[tuple[Path, str]]:
        """Check every listed file, with its mask or reference.

        Yields:
            The path of each file, and its problem or ''.
        """
        if self.path is None:
            return
        picture = readers.PICTURE
        # A picture that needs an option, such as a window, is reported once, not for each file.
        has_reported_option = False
        for item in find_items(expand_home(self.path), self.patient):
            ((path, problem),) = files.try_each([item.path], readers.check)
            is_sound = not problem
            if is_sound and not has_reported_option and readers.fits(path, picture):
                ((_, problem),) = files.try_each([path], lambda p: picture.inspect(p, self))
                has_reported_option = bool(problem)
            yield path, problem
            if item.partner:
                check_partner = partial(readers.check_partner, item.path, item.target)
                check = check_partner if is_sound else readers.check
                yield from files.try_each([item.partner], check)

    def find(self) -> Listing:
        """List, check and split the files; skip or reject damaged ones, by `bad_examples`."""
        if self.path is None:
            raise UserError(
                "dataset.path=null: set the path of your data, such as dataset.path=./scans."
            )
        path = expand_home(self.path)
        items = find_items(path, self.patient)
        kind = self._find_kind(items)
        self._require_options(kind, items[0].path)
        if items[0].partner:
            readers.require_partner_kind(kind, items[0].target, items[0].partner)
        if items[0].target == "reference":
            self._require_options_of_references()
        checked = list(files.read_each(items, partial(self._check, kind), self.bad_examples))
        require(bool(checked), "dataset.path", path, "contains no readable file")
        facts = [file_facts for _, file_facts in checked]
        first, first_facts = checked[0]
        for item, file_facts in checked[1:]:
            readers.require_same_channels(item.path, file_facts, first.path, first_facts)
        num_skipped = len(items) - len(checked)
        if all(item.part for item in items):
            for key in ("test_share", "split_seed"):
                value = getattr(self, key)
                rule = "changes nothing here: the files are split already; remove it"
                require(value == getattr(Folder, key), f"dataset.{key}", value, rule)
        items = split_items([item for item, _ in checked], self.test_share, self.split_seed)
        counts = [file_facts.examples for file_facts in facts]
        used = choose_examples(items, counts, self.max_per_patient)
        return list_examples(path, kind, items, facts, used, num_skipped)

    def _find_kind(self, items: list[Item]) -> Kind:
        """Return the kind of the first file or, if files are skipped, of the first readable one."""
        for item in items if self.bad_examples == "skip" else ():
            try:
                return readers.kind_of(item.path)
            except Unavailable:
                raise
            except UserError:
                continue
        return readers.kind_of(items[0].path)

    def prepare(self, path: Path) -> Tensor:
        """Read a file as inputs of the model, [n, *shape], for predictions."""
        kind = readers.kind_of(path)
        if kind.is_recording != bool(self.length):
            inputs_of_model = "recordings" if self.length else "images"
            raise UserError(f"{path}: is a {kind.name}, and the model takes {inputs_of_model}.")
        self._require_options(kind, path)
        facts = kind.inspect(path, self)
        if facts.channels and not self.leads:
            log.warning(
                "%s: its channels are taken by their places: %s. Compare them with the training "
                "data's; dataset.leads in training chooses them by name",
                path,
                facts.describe_channels(),
            )
        inputs = torch.tensor(self._read(kind, path))  # a copy: some arrays are read-only
        if not kind.is_image:
            return inputs
        return Examples(inputs, inputs, pixels=self.pixels).batch(torch.arange(len(inputs)))[0]

    def _require_options(self, kind: Kind, first: Path) -> None:
        """Reject options that do not apply to files of a kind, and missing ones.

        Args:
            kind: kind of all files.
            first: path of the first file, which errors name.
        """
        reason = f"{first.name} is a {kind.name}"
        for key in OPTIONAL if kind.is_image else (*OPTIONAL, "augment"):
            value = getattr(self, key)
            applies = key in kind.keys
            rule = f"changes nothing here: {reason}"
            require(value is None or applies, f"dataset.{key}", value, rule)
            is_required = applies and key in ("length", "rate")
            quantity = "samples of an example" if key == "length" else "Hz of every file"
            rule = f"give the {quantity}: {reason}"
            require(value is not None or not is_required, f"dataset.{key}", value, rule)
        is_allowed = kind.channels is None or self.channels in kind.channels
        rule = f"must be 1 (grey): {reason}"
        if kind.channels == (1, 3):
            rule = "must be 1 (grey) or 3 (colour)"
        require(is_allowed, "dataset.channels", self.channels, rule)
        has_default = self.pixels == (Folder.mean, Folder.deviation)
        rule = f"is for images, as dataset.deviation is: {reason}"
        require(kind.is_image or has_default, "dataset.mean", self.mean, rule)

    def _require_options_of_references(self) -> None:
        """Reject references that are not grey, or are too small for SSIM."""
        rule = f"must be at least {SSIM_WINDOW}, the side of SSIM's window, for references"
        require(self.size >= SSIM_WINDOW, "dataset.size", self.size, rule)
        require(self.channels == 1, "dataset.channels", self.channels, "must be 1 for references")

    def _check(self, kind: Kind, item: Item) -> Facts:
        """Return the facts in a file's header, which must match that of its mask or reference.

        If damaged files are skipped, both files are also read completely, to detect damage.
        """
        facts = readers.inspect(item.path, kind, self)
        partner = item.partner
        partner_kind = kind.mask if item.target == "mask" else kind
        if partner and partner_kind:
            partner_facts = readers.inspect(partner, partner_kind, self)
            readers.require_same_place(partner, partner_facts, facts)
        if self.bad_examples == "skip":
            self._read(kind, item.path)
            if partner and partner_kind:
                self._read(partner_kind, partner)
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

    def _digest(self, listing: Listing) -> str:
        """Return a digest of the files and of the options that turn them into examples."""
        kind = listing.kind
        contents = []
        for item, facts in zip(listing.items, listing.facts, strict=True):
            with files.advise_skipping():
                paths = facts.files or [item.path]
                digests = [files.sha256(path, owner=item.patient) for path in paths]
                if item.partner:  # equal masks, such as empty ones, may have several owners
                    digests.append(files.sha256(item.partner))
            content = digests[0] if len(digests) == 1 else files.digest("".join(digests))
            contents.append(f"{item.name}:{content};")
        text = f"{kind.shape(self)}:{self.fit}:{''.join(contents)}"
        # The digest of pictures without a window stays that of earlier versions.
        if kind.name != "picture" or self.window:
            options = [getattr(self, key) for key in kind.keys]
            used = [indices.tolist() for indices in listing.used]
            text += repr((kind.name, kind.version, options, used))
        # Earlier versions took the first and the last plane of a volume if they took one or two.
        if self.depth is not None and self.depth <= MAX_MIDDLE:
            text += ", from the middle"
        return files.digest(text)

    def _warn_of_darkness(self, images: Tensor) -> None:
        """Warn if test images, which are public, are dark; a log states no pixels of others."""
        if len(images) and int(images.max()) <= DARK:
            log.warning(
                "%s: no pixel to test on is above a tenth of white; see dataset.window", self.path
            )

    def _warn_of_copies(self, listing: Listing, inputs: Tensor) -> None:
        """Warn if two owners have the same example, even in files with different content."""
        first_items: dict[bytes, Item] = {}
        copies = []
        item_indices = listing.spread([*range(len(listing.items))])
        for index, example in zip(item_indices, inputs.numpy(), strict=True):
            if example.min() == example.max():
                continue  # constant planes, such as air, do not identify anybody
            item = listing.items[int(index)]
            digest = blake2b(example.tobytes(), digest_size=16).digest()
            first_item = first_items.setdefault(digest, item)
            if first_item.patient != item.patient:
                copies.append((first_item, item))
        for first_item, item in copies[:1]:
            log.warning(
                "%s: %d examples are there under two owners, such as %s (%s) and %s (%s); if one "
                "person has two names, no ε covers both, and a test on a training example says "
                "little",
                *(self.path, len(copies), first_item.name, first_item.part, item.name, item.part),
            )

    def _load_targets(self, listing: Listing, content: str) -> Tensor:
        """Return classes [n], or masks or references as bytes [n, *shape]."""
        if listing.target == "label":
            return listing.spread([listing.classes.index(item.label) for item in listing.items])
        kind = listing.kind.mask if listing.target == "mask" else listing.kind
        assert kind
        paths = [item.partner for item in listing.items if item.partner]
        name = "folder-labels" if listing.target == "mask" else "folder-references"
        return self._load(name, listing, kind, paths, content)

    def _load(
        self, name: str, listing: Listing, kind: Kind, paths: list[Path], content: str
    ) -> Tensor:
        """Load the used examples of files, [n, *shape], from the cache.

        Args:
            name: name of the folder in the cache.
            listing: the listing, which states the used examples of each file.
            kind: kind of the files.
            paths: paths of the files.
            content: digest of everything that determines the examples.
        """
        shape = (sum(map(len, listing.used)), *kind.shape(self))

        def blocks() -> Iterator[np.ndarray]:
            for path, used in zip(paths, listing.used, strict=True):
                with files.advise_skipping():
                    examples = self._read(kind, path)
                yield examples[used]

        dtype = kind.dtype(self)
        return torch.from_numpy(load_or_make(name, content, shape, dtype, blocks()))
