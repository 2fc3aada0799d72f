"""The kinds of files that `dataset=folder` reads, detected by content, and what each becomes.

The readers are those of all data sets (`zdp_bench/data`). What `Kind.inspect` finds in a header,
`Kind.read` reads: both open a file by the same function, where its limits stand.
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
from zdp_bench.data.pictures import Fit
from zdp_bench.errors import UserError
from zdp_bench.extras.own_data import arrays
from zdp_bench.foreign_files import expect, reading

LONGEST = 2**28  # samples; a header that announces more is damaged
# Endings of kinds whose text has no mark of its own: WFDB's headers and tables.
HEADER, TABLE_SUFFIX = ".hea", ".csv"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a file becomes: the options that `datasets/folder.yaml` explains, public constants."""

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
        """The window's ends."""
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
    """The facts in a file's header."""

    extent: tuple[int, ...] = ()  # rows and columns of an image or its mask
    examples: int = 1  # that the file makes
    files: tuple[Path, ...] = ()  # everything that its content is in; none: the file alone
    volume: nifti.Header | None = None  # of a volume, which lies somewhere in space


def require_same_place(path: Path, facts: Facts, image: Facts) -> None:
    """Reject a mask or reference of another extent, or from another place, than its image's."""
    if facts.volume and image.volume:
        nifti.require_same_place(path, facts.volume, image.volume)
        return
    with reading(path):
        own, wanted = ("×".join(map(str, of.extent)) for of in (facts, image))
        expect(own == wanted, f"has {own} pixels, but its image {wanted}")


# --------------------------------------------------------------------------------------- NIfTI
# Planes are axial, on RAS+ axes: rows run from anterior to posterior, columns from left to right.


def inspect_volume(path: Path, form: Form, is_complex: bool = False) -> Facts:
    header = nifti.read_header(path)
    found = (*header.shape, 1)[3]
    with reading(path):
        rule = "has complex voxels, but other files have real ones"
        expect(header.is_complex == is_complex, rule)
        rule = f"has {found} channels where dataset.channels={form.channels}"
        expect(found == form.channels, rule)
    examples = header.shape[2] if form.depth is None else 1
    return Facts(examples=examples, volume=header)


def read_volume(path: Path, form: Form) -> np.ndarray:
    """Return bytes [planes, channels, size, size], or [1, depth, channels, size, size]."""
    planes = _choose(nifti.read(path), form)
    made = nifti.fit_planes(planes.flatten(0, 1), form.size, form.fit, form.limits)
    return made.numpy().reshape(-1, *form.image)


def read_complex_volume(path: Path, form: Form) -> np.ndarray:
    """Return complex64 planes, each in units of its own standard deviation."""
    planes = _choose(nifti.read_complex(path), form)
    made = nifti.fit_complex(planes.flatten(0, 1), form.size, form.fit)
    return made.numpy().reshape(-1, *form.image)


def inspect_volume_mask(path: Path, form: Form) -> Facts:
    header = nifti.read_header(path)
    with reading(path):
        rule = f"has shape {list(header.shape)}; a mask has three dimensions"
        expect(header.shape[3:] in ((), (1,)), rule)
    return Facts(volume=header)


def read_volume_mask(path: Path, form: Form) -> np.ndarray:
    """Return labels as bytes [planes, size, size], or [1, depth, size, size]."""
    planes = _choose(nifti.read_labels(path), form)[:, 0].float()
    planes = nifti.crop_square(planes) if form.fit == "crop" else planes
    mask = nifti.resample_mask(planes, (form.size, form.size))
    return mask.byte().numpy().reshape(-1, *form.mask)


def _choose(data: np.ndarray, form: Form) -> torch.Tensor:
    """Turn voxels into planes [n, channels, Y, X]: all, or `depth` of them in even steps."""
    planes = nifti.turn_planes(data[..., None] if data.ndim == 3 else data)
    if form.depth is None:
        return planes
    places = np.linspace(0, len(planes) - 1, form.depth).round().astype(int)
    return planes[torch.from_numpy(places)]


# ----------------------------------------------------------------------------------- recordings


def inspect_sound(path: Path, form: Form) -> Facts:
    with signals.open_sound(path, form.rate or 0, form.channels, LONGEST):
        return Facts()


def inspect_record(path: Path, form: Form) -> Facts:
    record, _ = _open_record(path, form)
    return Facts(files=tuple(record.files))


def read_record(path: Path, form: Form) -> np.ndarray:
    """Return samples in the header's units: float32 [1, channels, length], or `to_spectrum`'s."""
    record, chosen = _open_record(path, form)
    return _shape(signals.read_leads(record, chosen, form.length).astype(np.float32).T, form)


def _open_record(path: Path, form: Form) -> tuple[signals.Record, list[int]]:
    """Open a record, and find the leads that are asked for."""
    record = signals.open_record(path, form.rate or 0, LONGEST)
    names = record.leads
    with reading(path):
        for lead in form.leads or ():
            rule = f"has the leads {', '.join(names)}, and '{lead}' was expected"
            expect(names.count(lead) == 1, rule)
        rule = f"has {len(names)} leads where dataset.channels={form.channels} were expected"
        expect(len(names) >= form.channels, rule)
    if form.leads:
        return record, [names.index(lead) for lead in form.leads]
    return record, list(range(form.channels))


def inspect_table(path: Path, form: Form) -> Facts:
    arrays.read_table(path, form.channels, form.leads)  # a text has no header that tells its size
    return Facts()


def read_table(path: Path, form: Form) -> np.ndarray:
    """Return the columns of a CSV as float32 [1, channels, length], or as `to_spectrum` does."""
    return _shape(arrays.read_table(path, form.channels, form.leads), form)


def inspect_array(path: Path, form: Form, is_complex: bool = False) -> Facts:
    arrays.read_array(path, form.channels, is_complex)
    return Facts()


def read_array(path: Path, form: Form, is_complex: bool = False) -> np.ndarray:
    """Return an array as float32 or complex64 [1, channels, length], or as `to_spectrum` does."""
    samples = arrays.read_array(path, form.channels, is_complex)[:, : form.length]
    with np.errstate(over="ignore"):  # what is not finite then is refused
        return _shape(samples.astype(np.complex64 if is_complex else np.float32), form)


def _shape(samples: np.ndarray, form: Form) -> np.ndarray:
    """Cut samples [channels, n], or pad them with zeros; perhaps make their spectrogram."""
    whole = np.zeros((form.channels, form.length or 0), dtype=samples.dtype)
    kept = samples[:, : form.length]
    whole[:, : kept.shape[1]] = kept
    return (whole if form.spectrum is None else to_spectrum(whole, form.spectrum))[None]


def to_spectrum(samples: np.ndarray, window: int) -> np.ndarray:
    """Return complex64 [channels, frames, window // 2 + 1]; Hann windows overlap by half."""
    found = torch.stft(
        torch.from_numpy(samples),
        window,
        max(1, window // 2),
        window=torch.hann_window(window),
        center=False,
        return_complex=True,
    )
    return found.transpose(1, 2).contiguous().numpy()


# --------------------------------------------------------------------------------------- kinds

Inspect = Callable[[Path, Form], Facts]
Read = Callable[[Path, Form], np.ndarray]


@dataclass(frozen=True)
class Kind:
    """One kind of files.

    Attributes:
        name: what a file is, and who owns its examples where no patient is known.
        inspect: reads a header, and refuses whatever `read` would refuse by it.
        read: a file as [examples, *shape], bytes of an image, or numbers.
        marks: (place, bytes) that tell such a file.
        keys: the options of `dataset=folder` that are for some kinds only, and for this one.
        channels: how many an image may have; None: any number.
        mask: the kind of a mask's file; None: it has no masks.
        is_image: whether its examples are bytes of pixels.
        is_complex: whether its samples are complex.
        version: counts up when the same file is read as other numbers.
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
        """numpy's type of one example."""
        if self.is_image:
            return np.uint8
        is_real = self.is_recording and form.spectrum is None and not self.is_complex
        return np.float32 if is_real else np.complex64

    def shape(self, form: Form) -> tuple[int, ...]:
        """Shape of one example."""
        return form.mask if self.is_mask else form.signal if self.is_recording else form.image


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
)
VOLUME = Kind(
    "volume",
    inspect_volume,
    read_volume,
    VOLUMES,
    keys=("window", "depth"),
    mask=VOLUME_MASK,
    version=nifti.READING,
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
    lambda path, form: _shape(
        signals.read_sound(path, form.rate or 0, form.channels, LONGEST).T, form
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
    ((0, arrays.NPY),),
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
BY_SUFFIX = {HEADER: RECORD, TABLE_SUFFIX: TABLE}
NAMES = "PNG, JPEG, DICOM, NIfTI, MHA, NRRD, WAV, FLAC, OGG, NPY, CSV or WFDB header"


def fits(path: Path, kind: Kind) -> bool:
    """True if a file begins as one of this kind does."""
    if path.suffix in BY_SUFFIX or kind in BY_SUFFIX.values():
        return BY_SUFFIX.get(path.suffix) is kind
    with reading(path), path.open("rb") as file:
        head = file.read(352)
    return any(head[at:].startswith(mark) for at, mark in kind.marks)


def kind_of(path: Path) -> Kind:
    """Return the kind of a file by its content."""
    kind = next((kind for kind in KINDS if fits(path, kind)), None)
    if kind is None:
        raise UserError(f"{path}: holds no {NAMES}; if it is not damaged, move it out of the data.")
    if kind is ARRAY and arrays.read_array(path, None).dtype.kind == "c":
        return COMPLEX_ARRAY
    return COMPLEX_VOLUME if kind is VOLUME and nifti.read_header(path).is_complex else kind


def check(path: Path) -> None:
    """Read a whole file of any size, rate, number of channels and depth."""
    kind = kind_of(path)
    if kind is SOUND:
        signals.read_sound(path, 0, 0, LONGEST)
    elif kind is RECORD:
        record = signals.open_record(path, 0, LONGEST)
        signals.read_leads(record, list(range(len(record.leads))))
    elif kind is TABLE:
        arrays.read_table(path, None)
    elif kind in (ARRAY, COMPLEX_ARRAY):
        arrays.read_array(path, None)
    elif kind in (VOLUME, COMPLEX_VOLUME):
        (nifti.read if kind is VOLUME else nifti.read_complex)(path)
    else:
        kind.read(path, Form(size=8, window=[0, 2**16]))


def check_pair(image: Path, partner: Path) -> None:
    """Reject a mask or reference of another extent, or from another place, than its image's."""
    pair = []
    for path in (image, partner):
        if kind_of(path) in (VOLUME, COMPLEX_VOLUME):
            pair.append(Facts(volume=nifti.read_header(path)))
        else:
            pair.append(inspect(path, kind_of(path), Form()))
    require_same_place(partner, pair[1], pair[0])


def inspect(path: Path, kind: Kind, form: Form) -> Facts:
    """Return the facts of a file of the expected kind; reject a file of another kind."""
    try:
        return kind.inspect(path, form)
    except UserError:
        if fits(path, kind):
            raise
        raise UserError(
            f"{path}: is no {kind.name} (it is of kind {kind_of(path).name}); a data set must "
            "have files of one kind."
        ) from None
