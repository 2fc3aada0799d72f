"""The kinds of files that `dataset=folder` reads, detected by content, and their examples.

Files are read by the functions of all data sets (`zdp_bench/data`). `Kind.inspect` and `Kind.read`
open a file with the same function, which checks its limits. So `inspect` rejects by the header what
`read` would reject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval

from zdp_bench.data import Window, nifti, pictures, signals
from zdp_bench.data.itk import MARKS
from zdp_bench.data.owners import spread_evenly
from zdp_bench.data.pictures import Fit
from zdp_bench.errors import UserError
from zdp_bench.extras.own_data import arrays
from zdp_bench.foreign_files import expect, reading

MAX_SAMPLES = 2**28  # a header that states more is damaged
# These text files, WFDB's headers and CSV, cannot be recognised by their content.
HEADER_SUFFIX, TABLE_SUFFIX = ".hea", ".csv"


@dataclass(frozen=True, kw_only=True)
class Form:
    """How files become examples: options of `dataset=folder`, all of them public constants.

    `datasets/folder.yaml` explains them.
    """

    size: Annotated[int, Interval(ge=1, le=4096)] = 64
    fit: Fit = "resize"
    channels: Annotated[int, Interval(ge=1, le=256)] = 1
    window: Window | None = None
    depth: Annotated[int, Interval(ge=1, le=4096)] | None = None
    length: Annotated[int, Interval(ge=1, le=2**26)] | None = None
    rate: Annotated[int, Interval(ge=1, le=2**26)] | None = None
    leads: list[str] | None = None
    spectrum: Annotated[int, Interval(ge=2, le=2**16)] | None = None

    @property
    def limits(self) -> tuple[float, float] | None:
        """The ends (low, high) of the window."""
        return (self.window[0], self.window[1]) if self.window else None

    @property
    def image(self) -> tuple[int, ...]:
        """Shape of a picture or a plane, or of a whole volume."""
        plane = (self.channels, self.size, self.size)
        return plane if self.depth is None else (self.depth, *plane)

    @property
    def mask(self) -> tuple[int, ...]:
        """Shape of an image's mask."""
        return (*self.image[:-3], self.size, self.size)

    @property
    def signal(self) -> tuple[int, ...]:
        """Shape of a recording, or of its spectrogram [channels, frames, bins]."""
        length = self.length or 0
        if self.spectrum is None:
            return self.channels, length
        frames = 1 + (length - self.spectrum) // (self.spectrum // 2)
        return self.channels, frames, self.spectrum // 2 + 1


@dataclass(frozen=True)
class Facts:
    """The facts in a file's header.

    Attributes:
        extent: rows and columns of an image or mask.
        examples: number of examples in the file.
        files: all files that hold its content. Empty: the file alone.
        volume: header of a volume, which states its position in space.
        channels: the (name, unit) of each channel that is read, as far as the file states them.
    """

    extent: tuple[int, ...] = ()
    examples: int = 1
    files: tuple[Path, ...] = ()
    volume: nifti.Header | None = None
    channels: tuple[tuple[str, str], ...] = ()

    def describe_channels(self) -> str:
        """Return the channels as text, such as 'I (mV), V5 (mV)'."""
        named = [f"{name} ({unit})" if unit else name for name, unit in self.channels]
        return ", ".join(named) or "channels without names"


def require_same_channels(path: Path, facts: Facts, first_path: Path, first: Facts) -> None:
    """Reject a recording whose channels have other names, another order or units than the first's.

    Each channel would hold one thing in some files, and another in others.
    """
    known, channels = (
        [(name.casefold(), unit) for name, unit in each.channels] for each in (first, facts)
    )
    if channels == known:
        return
    names, known_names = ([name for name, _ in each] for each in (channels, known))
    advice = "store both in the same unit"
    if names != known_names:
        advice = "set dataset.leads to the names to read"
    raise UserError(
        f"{path}: has {facts.describe_channels()} where {first_path} has "
        f"{first.describe_channels()}; {advice}."
    )


def require_same_place(path: Path, facts: Facts, image: Facts) -> None:
    """Reject a mask or reference with another extent or position than its image.

    Args:
        path: path of the mask or reference.
        facts: facts of the mask or reference.
        image: facts of the image.
    """
    if facts.volume and image.volume:
        nifti.require_same_place(path, facts.volume, image.volume)
        return
    with reading(path):
        extent = "×".join(map(str, facts.extent))
        expected = "×".join(map(str, image.extent))
        expect(extent == expected, f"has {extent} pixels, but its image {expected}")


# --------------------------------------------------------------------------------------- NIfTI
# Planes are axial, on RAS+ axes: rows run from anterior to posterior, columns from left to right.


def inspect_volume(path: Path, form: Form, is_complex: bool = False) -> Facts:
    header = nifti.read_header(path)
    channels = (*header.shape, 1)[3]  # a volume with three dimensions has one channel
    with reading(path):
        rule = "has complex voxels, but other files have real ones"
        expect(header.is_complex == is_complex, rule)
        rule = f"has {channels} channels where dataset.channels={form.channels} were expected"
        expect(channels == form.channels, rule)
    examples = header.shape[2] if form.depth is None else 1
    return Facts(examples=examples, volume=header)


def read_volume(path: Path, form: Form) -> np.ndarray:
    """Return bytes [planes, channels, size, size], or [1, depth, channels, size, size]."""
    planes = _choose_planes(nifti.read(path), form)
    resized = nifti.fit_planes(planes.flatten(0, 1), form.size, form.fit, form.limits)
    return resized.numpy().reshape(-1, *form.image)


def read_complex_volume(path: Path, form: Form) -> np.ndarray:
    """Return complex64 planes, shaped as by `read_volume`, in units of their standard deviation."""
    planes = _choose_planes(nifti.read_complex(path), form)
    resized = nifti.fit_complex(planes.flatten(0, 1), form.size, form.fit)
    return resized.numpy().reshape(-1, *form.image)


def inspect_volume_mask(path: Path, form: Form) -> Facts:
    return Facts(volume=nifti.read_mask_header(path))


def read_volume_mask(path: Path, form: Form) -> np.ndarray:
    """Return labels as bytes [planes, size, size], or [1, depth, size, size]."""
    planes = _choose_planes(nifti.read_labels(path), form)[:, 0].float()
    planes = nifti.crop_square(planes) if form.fit == "crop" else planes
    mask = nifti.resample_mask(planes, (form.size, form.size))
    return mask.byte().numpy().reshape(-1, *form.mask)


def _choose_planes(voxels: np.ndarray, form: Form) -> torch.Tensor:
    """Return planes [n, channels, Y, X] of a volume: all, or `depth` of them, spread evenly."""
    planes = nifti.turn_planes(voxels[..., None] if voxels.ndim == 3 else voxels)
    if form.depth is None:
        return planes
    return planes[torch.from_numpy(spread_evenly(len(planes), form.depth))]


# ----------------------------------------------------------------------------------- recordings


def inspect_sound(path: Path, form: Form) -> Facts:
    with signals.open_sound(path, form.rate or 0, form.channels, MAX_SAMPLES):
        return Facts()


def inspect_record(path: Path, form: Form) -> Facts:
    record, indices = _open_record(path, form)
    units = record.header.units
    channels = [(record.leads[index], str(units[index] or "")) for index in indices]
    return Facts(files=tuple(record.files), channels=tuple(channels))


def read_record(path: Path, form: Form) -> np.ndarray:
    """Return samples, in the header's units, as an example; see `_to_example`."""
    record, leads = _open_record(path, form)
    samples = signals.read_leads(record, leads, form.length)
    return _to_example(samples.astype(np.float32).T, form)


def _open_record(path: Path, form: Form) -> tuple[signals.Record, list[int]]:
    """Open a record. Return it with the indices of the leads that `form` selects."""
    record = signals.open_record(path, form.rate or 0, MAX_SAMPLES)
    names = record.leads
    with reading(path):
        if form.leads:
            return record, signals.find_channels("leads", names, form.leads)
        rule = f"has {len(names)} leads where dataset.channels={form.channels} were expected"
        expect(len(names) >= form.channels, rule)
    return record, list(range(form.channels))


def inspect_table(path: Path, form: Form) -> Facts:
    names, _ = arrays.read_table(path, form.channels, form.leads)  # a CSV states its size nowhere
    # The only column needs no name: its place cannot be another's.
    return Facts(channels=tuple((name, "") for name in names) if form.channels > 1 else ())


def read_table(path: Path, form: Form) -> np.ndarray:
    """Return the columns of a CSV, as float32, as an example; see `_to_example`."""
    _, samples = arrays.read_table(path, form.channels, form.leads)
    return _to_example(samples, form)


def inspect_array(path: Path, form: Form, is_complex: bool = False) -> Facts:
    arrays.read_array(path, form.channels, is_complex)
    return Facts()


def read_array(path: Path, form: Form, is_complex: bool = False) -> np.ndarray:
    """Return an array, as float32 or complex64, as an example; see `_to_example`."""
    samples = arrays.read_array(path, form.channels, is_complex)[:, : form.length]
    with np.errstate(over="ignore"):  # an overflow is rejected later, because it is not finite
        return _to_example(samples.astype(np.complex64 if is_complex else np.float32), form)


def _to_example(samples: np.ndarray, form: Form) -> np.ndarray:
    """Return samples [channels, n] as one example, cut or padded with zeros to `form.length`.

    Returns:
        [1, channels, length] or, with `form.spectrum`, [1, channels, frames, bins]; see
        `to_spectrogram`.
    """
    padded = np.zeros((form.channels, form.length or 0), dtype=samples.dtype)
    cut = samples[:, : form.length]
    padded[:, : cut.shape[1]] = cut
    if form.spectrum is not None:
        padded = to_spectrogram(padded, form.spectrum)
    return padded[None]


def to_spectrogram(samples: np.ndarray, window: int) -> np.ndarray:
    """Return the short-time Fourier transform of samples, complex64 [channels, frames, bins].

    Args:
        samples: samples [channels, n].
        window: length of the Hann windows, which overlap by half. There are window // 2 + 1 bins.
    """
    spectrogram = torch.stft(
        torch.from_numpy(samples),
        window,
        max(1, window // 2),
        window=torch.hann_window(window),
        center=False,
        return_complex=True,
    )
    return spectrogram.transpose(1, 2).contiguous().numpy()


# --------------------------------------------------------------------------------------- kinds

Inspect = Callable[[Path, Form], Facts]
Read = Callable[[Path, Form], np.ndarray]


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    Attributes:
        name: name of the kind. It is also the unit of ε if patients are not known.
        inspect: returns the facts in a file's header, and rejects by it what `read` would reject.
        read: returns a file's examples [examples, *shape]: bytes of pixels, or numbers.
        marks: (offset, bytes) by which such a file is recognised; any one is enough.
        keys: those options of `folder.OPTIONAL` that apply to this kind.
        channels: allowed numbers of channels of an image. None: any number.
        mask: kind of the files with masks. None: the kind has no masks.
        is_image: whether examples are bytes of pixels.
        is_mask: whether files are masks.
        is_complex: whether samples are complex.
        version: incremented when the same file gives other numbers; part of the cache key.
    """

    name: str
    inspect: Inspect
    read: Read
    marks: tuple[tuple[int, bytes], ...] = ()
    keys: tuple[str, ...] = ()
    channels: tuple[int, ...] | None = None
    mask: Kind | None = None
    is_image: bool = True
    is_mask: bool = False
    is_complex: bool = False
    version: int = 1

    @property
    def is_recording(self) -> bool:
        return "length" in self.keys

    def dtype(self, form: Form) -> type:
        """Return the NumPy type of the examples."""
        if self.is_image:
            return np.uint8
        is_real = self.is_recording and form.spectrum is None and not self.is_complex
        return np.float32 if is_real else np.complex64

    def shape(self, form: Form) -> tuple[int, ...]:
        """Return the shape of one example."""
        if self.is_mask:
            return form.mask
        return form.signal if self.is_recording else form.image


PNG = ((0, b"\x89PNG\r\n\x1a\n"),)
VOLUMES = ((0, b"\x1f\x8b"), (344, b"n+1\0"), (4, b"n+2\0"), *((0, mark) for mark in MARKS))
RECORDING = ("length", "rate", "scale", "spectrum")
PNG_MASK = Kind(
    "grey PNG",
    lambda path, form: Facts(pictures.inspect_mask(path)),
    lambda path, form: pictures.read_mask(path, form.size, form.fit)[None],
    PNG,
    is_mask=True,
)
VOLUME_MASK = Kind("volume", inspect_volume_mask, read_volume_mask, VOLUMES, is_mask=True)
PICTURE = Kind(
    "picture",
    lambda path, form: Facts(pictures.inspect_picture(path, form.limits)),
    lambda path, form: pictures.read_picture(path, form.size, form.channels, form.fit, form.limits)[
        None
    ],
    (*PNG, (0, b"\xff\xd8\xff")),
    keys=("window",),
    channels=(1, 3),
    mask=PNG_MASK,
)
DICOM = Kind(
    "image",
    lambda path, form: Facts(pictures.inspect_dicom(path)),
    lambda path, form: pictures.read_dicom(path, form.size, form.fit, form.limits)[None],
    ((128, b"DICM"),),
    keys=("window",),
    channels=(1,),
    mask=PNG_MASK,
    version=2,
)
VOLUME = Kind(
    "volume",
    inspect_volume,
    read_volume,
    VOLUMES,
    keys=("window", "depth"),
    mask=VOLUME_MASK,
    version=nifti.READING + 1,  # `to_bytes` has changed once
)
COMPLEX_VOLUME = replace(
    VOLUME,
    name="complex volume",
    inspect=partial(inspect_volume, is_complex=True),
    read=read_complex_volume,
    keys=("depth",),
    is_image=False,
)
SOUND = Kind(
    "clip",
    inspect_sound,
    lambda path, form: _to_example(
        signals.read_sound(path, form.rate or 0, form.channels, MAX_SAMPLES).T, form
    ),
    ((0, b"RIFF"), (0, b"fLaC"), (0, b"OggS")),
    keys=RECORDING,
    is_image=False,
)
RECORD = Kind("recording", inspect_record, read_record, keys=(*RECORDING, "leads"), is_image=False)
TABLE = Kind(
    "table",
    inspect_table,
    read_table,
    keys=("length", "scale", "spectrum", "leads"),
    is_image=False,
)
ARRAY = Kind(
    "array",
    inspect_array,
    read_array,
    ((0, arrays.NPY_MAGIC),),
    keys=("length", "scale", "spectrum"),
    is_image=False,
)
COMPLEX_ARRAY = replace(
    ARRAY,
    name="complex array",
    inspect=partial(inspect_array, is_complex=True),
    read=partial(read_array, is_complex=True),
    keys=("length", "scale"),
    is_complex=True,
)
KINDS = (PICTURE, DICOM, VOLUME, SOUND, RECORD, TABLE, ARRAY)
BY_SUFFIX = {HEADER_SUFFIX: RECORD, TABLE_SUFFIX: TABLE}
NAMES = "PNG, JPEG, DICOM, NIfTI, MHA, NRRD, WAV, FLAC, OGG, NPY, CSV or WFDB header"


def fits(path: Path, kind: Kind) -> bool:
    """Return True if a file is of this kind, judged by its first bytes or its suffix."""
    suffix = path.suffix.lower()
    if suffix in BY_SUFFIX or kind in BY_SUFFIX.values():
        return BY_SUFFIX.get(suffix) is kind
    with reading(path), path.open("rb") as file:
        head = file.read(352)
    return any(head[offset:].startswith(mark) for offset, mark in kind.marks)


def kind_of(path: Path) -> Kind:
    """Return the kind of a file, judged by its content."""
    kind = next((kind for kind in KINDS if fits(path, kind)), None)
    if kind is None:
        raise UserError(
            f"{path}: is not a readable file ({NAMES}); if it is not damaged, move it out of the "
            "data."
        )
    if kind is ARRAY and arrays.read_array(path, None).dtype.kind == "c":
        return COMPLEX_ARRAY
    return COMPLEX_VOLUME if kind is VOLUME and nifti.read_header(path).is_complex else kind


ANY_PICTURE = Form(size=8, window=[0, 2**16])  # with a window, as some pictures need


def check(path: Path) -> None:
    """Read a whole file, with any size, rate, number of channels and depth, to detect damage."""
    kind = kind_of(path)
    if kind is SOUND:
        signals.read_sound(path, 0, 0, MAX_SAMPLES)
    elif kind is RECORD:
        record = signals.open_record(path, 0, MAX_SAMPLES)
        signals.read_leads(record, list(range(len(record.leads))))
    elif kind is TABLE:
        arrays.read_table(path, None)
    elif kind in (ARRAY, COMPLEX_ARRAY):
        samples = arrays.read_array(path, None)
        with reading(path):
            expect(bool(np.isfinite(samples).all()), "contains samples that are not finite")
    elif kind in (VOLUME, COMPLEX_VOLUME):
        (nifti.read if kind is VOLUME else nifti.read_complex)(path)
    else:
        kind.read(path, ANY_PICTURE)


def check_partner(image: Path, target: str, partner: Path) -> None:
    """Read a whole mask or reference; reject one that does not fit its image, as a run does.

    Args:
        image: path of the image.
        target: "mask" or "reference".
        partner: path of the mask or reference.

    Raises:
        UserError: the mask or reference is damaged, or does not fit the image.
    """
    kind = kind_of(image)
    partner_kind = require_partner_kind(kind, target, partner)
    facts = inspect(partner, partner_kind, ANY_PICTURE)
    is_volume = kind in (VOLUME, COMPLEX_VOLUME)  # with any number of channels
    image_facts = Facts(volume=nifti.read_header(image)) if is_volume else None
    require_same_place(partner, facts, image_facts or kind.inspect(image, ANY_PICTURE))
    if partner_kind.is_mask:
        partner_kind.read(partner, ANY_PICTURE)
    else:
        check(partner)


def require_partner_kind(kind: Kind, target: str, partner: Path | None) -> Kind:
    """Return the kind of the masks or references of files of a kind, if it may have any.

    Args:
        kind: kind of the files.
        target: "mask" or "reference".
        partner: path of the first mask or reference, for the error.

    Raises:
        UserError: files of this kind can have no masks or references.
    """
    partner_kind = kind.mask if target == "mask" else kind
    if partner_kind is None or not (partner_kind.is_mask or kind.is_image):
        raise UserError(f"{partner}: is a {target}, but a {kind.name} can have none.")
    return partner_kind


def inspect(path: Path, kind: Kind, form: Form) -> Facts:
    """Return the facts of a file of the expected kind; reject a file of another kind."""
    try:
        return kind.inspect(path, form)
    except UserError:
        if fits(path, kind):
            raise
        raise UserError(
            f"{path}: is of kind {kind_of(path).name}, not {kind.name}; all files of a data set "
            "must be of one kind."
        ) from None
