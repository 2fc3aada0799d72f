"""CIFAR-10 in its official binary layout, or in the Python layout that torchvision keeps; its checksums say which release it is.

    cifar-10-batches-bin/data_batch_{1..5}.bin, test_batch.bin     a record: one byte label, 3072 bytes [3, 32, 32]
    cifar-10-batches-py/data_batch_{1..5}, test_batch              pickles of {data: uint8 [n, 3072], labels: list}

A pickle is a program. One is opened only if its checksum is the released one's, `check=false` or not, and by an unpickler that
knows nothing but numpy arrays. `releases` in the card names what is known: the two official forms, and a copy whose pixels went
through JPEG, which is never called CIFAR-10.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from zdp_bench.data import DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.augmentation import augmentation
from zdp_bench.data.files import Card, card, checksum, sha256
from zdp_bench.errors import UserError
from zdp_bench.registry import register

CLASSES = 10
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes in the binary layout
# Mean and standard deviation of a channel in [0, 1], as published everywhere: public constants, so they cost no privacy.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

Layout = Literal["auto", "binary", "python"]
FOLDERS = {"binary": "cifar-10-batches-bin", "python": "cifar-10-batches-py"}
BATCHES = (
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
)
NOTES = {
    "jpeg": "CIFAR-10 (JPEG): all pixels went through lossy JPEG, the training set is in another order"
}


@dataclass(frozen=True)
class Images:
    """One file: images uint8 [n, 3, 32, 32], labels [n]."""

    images: np.ndarray
    labels: np.ndarray


def layout_of(root: Path, layout: Layout) -> Literal["binary", "python"]:
    """The layout to read; `auto` takes the binary one, which needs no pickle, where it is there.

    Raises:
        UserError: its folder is not under the data root.
    """
    wanted: tuple[Literal["binary", "python"], ...] = (
        ("binary", "python") if layout == "auto" else (layout,)
    )
    for name in wanted:
        if (root / FOLDERS[name]).is_dir():
            return name
    folders = " or ".join(FOLDERS[name] for name in wanted)
    raise UserError(
        f"CIFAR-10 is not under {root}: a folder {folders} was looked for. Unpack cifar-10-binary.tar.gz or "
        "cifar-10-python.tar.gz there, or set paths.data."
    )


def _paths(root: Path, form: Literal["binary", "python"]) -> list[Path]:
    """The six files of a layout, those to train on first."""
    return [
        root / FOLDERS[form] / (name + (".bin" if form == "binary" else "")) for name in BATCHES
    ]


def release_of(paths: list[Path], of: Card) -> str | None:
    """The release that all files belong to, by their checksums; None for one that is not known.

    Raises:
        UserError: some files are of one release, and some of another or of none.
    """
    found: dict[str, str] = {}
    for path in paths:
        for release, sums in of.releases.items():
            expected = sums.get(path.name)
            if expected and checksum(path, expected.partition(":")[0]) == expected:
                found[path.name] = release
    releases = {found.get(path.name) for path in paths}
    if len(releases) > 1:
        one = next(path for path in paths if found.get(path.name) != found.get(paths[0].name))
        first, other = (found.get(path.name) or "no known release" for path in (paths[0], one))
        raise UserError(
            f"{one}: is of {other}, but {paths[0].name} beside it is of {first}, by their checksums. Unpack one archive anew."
        )
    return releases.pop()


def read_binary(path: Path) -> Images:
    """One file of the binary layout.

    Raises:
        UserError: it holds no whole number of records, or none.
    """
    raw = path.read_bytes()
    if not raw or len(raw) % RECORD:
        raise UserError(
            f"{path}: holds {len(raw):,} bytes, which is no whole number of {RECORD}-byte records. Unpack it anew."
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, RECORD)
    return Images(records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype(np.int64))


class ArraysOnly(pickle.Unpickler):
    """An unpickler that knows numpy arrays and nothing else: not one other name is ever looked up."""

    ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_pickle(path: Path) -> Images:
    """One file of the Python layout, whose checksum has been checked before.

    Raises:
        UserError: it is no pickle of images and labels.
    """
    try:
        with path.open("rb") as file:
            content = ArraysOnly(file, encoding="bytes").load()
        pixels = np.asarray(content[b"data"], np.uint8).reshape(-1, *SHAPE)
        labels = np.asarray(content[b"labels"], np.int64)
    except (
        pickle.UnpicklingError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
    ) as error:
        raise UserError(
            f"{path}: is no pickle of CIFAR-10's images and labels ({error}). Unpack it anew."
        ) from None
    return Images(pixels, labels)


def read(
    root: Path, of: Card, layout: Layout, check: bool
) -> tuple[list[Images], str, Provenance, str]:
    """The six files, a digest of them, their provenance, and what differs from the release.

    Raises:
        UserError: a file is missing, damaged, not of a known release although `check`, or a pickle of unknown origin.
    """
    form = layout_of(root, layout)
    paths = _paths(root, form)
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: is missing. Unpack the archive anew, or set paths.data.")
    release = release_of(paths, of) if check or form == "python" else None
    if release is None and form == "python":
        raise UserError(
            f"{paths[0]}: its checksum is not the released one's. It is a pickle, which can run any program, and is not opened; "
            "use the binary layout (dataset.layout=binary) for data of your own."
        )
    files = [(read_binary if form == "binary" else read_pickle)(path) for path in paths]
    for path, part in zip(paths, files, strict=True):
        if len(part.images) != len(part.labels):
            raise UserError(
                f"{path}: holds {len(part.images):,} images, but {len(part.labels):,} labels."
            )
        if part.labels.max() >= CLASSES or part.labels.min() < 0:
            wrong = part.labels[(part.labels >= CLASSES) | (part.labels < 0)][0]
            raise UserError(
                f"{path}: holds label {wrong}, but there are only {CLASSES} classes (0 to {CLASSES - 1})."
            )
    if check and release is None:
        raise UserError(
            f"{paths[0]}: its checksum is that of no known release. Unpack the official archive, or set dataset.check=false to "
            "read it as it is; its provenance is then 'derived'."
        )
    digest = hashlib.sha256("".join(sha256(path) for path in paths).encode()).hexdigest()
    official = release in ("binary", "python")
    notes = (
        ""
        if official
        else NOTES.get(str(release), "files of no known release, in CIFAR-10's layout")
    )
    return files, digest, "official" if official else "derived", notes


def _records(files: list[Images], mean: Tensor, deviation: Tensor) -> Examples:
    images, labels = (
        np.concatenate([f.images for f in files]),
        np.concatenate([f.labels for f in files]),
    )
    pixels = torch.from_numpy(images).float().div_(255).sub_(mean).div_(deviation)
    return Examples(pixels, torch.from_numpy(labels))


@register("dataset", "cifar10")
def cifar10(
    root: Path,
    *,
    normalise: Literal["standard", "unit"] = "standard",
    augment: str | None = None,
    layout: Layout = "auto",
    check: bool = True,
) -> Splits:
    """CIFAR-10: 50,000 / 10,000 colour images as float32 [3, 32, 32]."""
    files, digest, provenance, notes = read(root, card("cifar10"), layout, check)
    mean, deviation = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, DEVIATION))
    if normalise == "unit":
        mean, deviation = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)
    train, test = _records(files[:5], mean, deviation), _records(files[5:], mean, deviation)
    return Splits(
        train,
        test,
        SHAPE,
        CLASSES,
        provenance,
        digest,
        notes,
        augment=augmentation(augment, -mean / deviation),
        unit="image",
    )


@register("outline", "cifar10")
def outline(root: Path, *, layout: Layout, **_: object) -> DatasetInfo:
    """From the sizes of the binary layout's files; the Python layout is the release or is refused."""
    released = DatasetInfo(50_000, 10_000, SHAPE, CLASSES, found=False, unit="image")
    try:
        paths = _paths(root, layout_of(root, layout))
    except UserError:
        return released
    if not all(path.is_file() for path in paths):
        return released
    if paths[0].suffix != ".bin":
        return replace(released, found=True)
    counts = [path.stat().st_size // RECORD for path in paths]
    return DatasetInfo(sum(counts[:5]), counts[5], SHAPE, CLASSES, unit="image")


@register("check", "cifar10")
def check(root: Path) -> Iterator[tuple[Path, str]]:
    """The six files of the layout that is read, held to the checksums of what is known."""
    of, whole = card("cifar10"), True
    paths = _paths(root, layout_of(root, "auto"))
    for path in paths:
        problem = ""
        if not path.is_file():
            problem = f"{path}: is missing. Unpack the archive anew."
        elif release_of([path], of) is None:
            problem = f"{path}: its checksum is that of no known release. Unpack the official archive anew."
        whole &= not problem
        yield path, problem
    if whole:
        release_of(paths, of)  # all of one
