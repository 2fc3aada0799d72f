"""The kinds of files that `dataset=folder` reads: what each is called, and what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zdp_bench.data.formats import nifti
from zdp_bench.errors import UserError
from zdp_bench.extras.own_data import dicom, pictures, recordings, volumes
from zdp_bench.extras.own_data.form import Form

Read = Callable[[Path, Form], np.ndarray]


@dataclass(frozen=True)
class Kind:
    """One kind of files.

    Attributes:
        name: what a file is, and who owns its examples where no patient is known.
        read: a file as [examples, *shape], bytes of an image or samples of a recording.
        keys: the options of `dataset=folder` that are for some kinds only, and for this one.
        count: how many examples a file makes, by its header.
        channels: how many an image may have; None: any number.
        mask: the kind of a mask's file, with what reads it; None: it has no masks.
        extent: rows and columns (and planes) of an image or its mask, by the header.
        files: everything that a file's content is in.
        version: counts up when the same file is read as other numbers.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Read
    keys: tuple[str, ...] = ()
    count: Callable[[Path, Form], int] = lambda path, form: 1
    channels: tuple[int, ...] | None = None
    mask: Mask | None = None
    extent: Callable[[Path, Form], tuple[int, ...]] = lambda path, form: ()
    files: Callable[[Path, Form], list[Path]] = lambda path, form: [path]
    version: int = 1

    @property
    def is_image(self) -> bool:
        """True if its examples are bytes of pixels."""
        return "length" not in self.keys

    def shape(self, form: Form) -> tuple[int, ...]:
        """Shape of one example."""
        return form.image if self.is_image else form.signal


@dataclass(frozen=True)
class Mask:
    """How masks are read: bytes [examples, *Form.mask], 1 inside."""

    suffixes: tuple[str, ...]
    read: Read
    extent: Callable[[Path, Form], tuple[int, ...]]


PNG = Mask((".png",), pictures.read_picture_mask, pictures.extent_of_picture)
NIFTI = Mask(volumes.SUFFIXES, volumes.read_volume_mask, volumes.extent_of_volume)
RECORDING = ("length", "rate", "scale", "spectrum")
KINDS = (
    Kind(
        "picture",
        pictures.SUFFIXES,
        pictures.read_pictures,
        channels=(1, 3),
        mask=PNG,
        extent=pictures.extent_of_picture,
    ),
    Kind(
        "image",
        dicom.SUFFIXES,
        dicom.read_dicom,
        keys=("window",),
        channels=(1,),
        mask=PNG,
        extent=dicom.extent_of_dicom,
    ),
    Kind(
        "volume",
        volumes.SUFFIXES,
        volumes.read_volume,
        keys=("window", "depth"),
        count=volumes.count_planes,
        mask=NIFTI,
        extent=volumes.extent_of_volume,
        version=nifti.READING,
    ),
    Kind("clip", (".wav",), recordings.read_wav_clip, keys=RECORDING),
    Kind(
        "recording",
        (".hea",),
        recordings.read_wfdb,
        keys=(*RECORDING, "leads"),
        count=recordings.count_record,
        files=recordings.files_of_record,
    ),
)
SUFFIXES = tuple(suffix for kind in KINDS for suffix in kind.suffixes)


def suffix_of(path: Path) -> str:
    """'.nii.gz' of scan.nii.gz, '.png' of film.PNG."""
    return ".nii.gz" if path.name.lower().endswith(".nii.gz") else path.suffix.lower()


def kind_of(path: Path) -> Kind:
    """Return the kind of a file by its name.

    Raises:
        UserError: it is of none.
    """
    for kind in KINDS:
        if suffix_of(path) in kind.suffixes:
            return kind
    raise UserError(f"{path}: is none of {', '.join(SUFFIXES)}; no other file can be read.")


def common_kind(paths: Iterable[Path]) -> Kind:
    """Return the one kind of all files.

    Raises:
        UserError: they are of several kinds, or one is of none.
    """
    first, *others = paths
    kind = kind_of(first)
    for path in others:
        if (other := kind_of(path)) is not kind:
            raise UserError(
                f"{path}: is a {other.name}, and {first.name} a {kind.name}; a data set holds one "
                "kind of files."
            )
    return kind
