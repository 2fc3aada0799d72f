"""The kinds of files that `dataset=folder` reads, what each becomes, and what reads it.

Pictures are PNG and JPEG, images DICOM of one grey frame by pydicom, volumes NIfTI, clips WAV, and
recordings WFDB. Whatever is wrong with a file is one `UserError` that names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from zdp_bench.data import nifti
from zdp_bench.data.files import require_inside
from zdp_bench.data.nifti import crop_square, resample, resample_mask, to_bytes
from zdp_bench.data.signals import read_header, read_leads, read_wav
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import expect, reading

Fit = Literal["resize", "crop"]
LARGEST = 16384  # pixels along a side
MOST_BYTES = 2**28  # of a file of one image
LONGEST = 2**28  # samples; a header that announces more is damaged
TURNED = (5, 6, 7, 8)  # orientations of a camera that swap rows and columns
ORIENTATION = 274  # EXIF's number of that tag
DEFLATED = "1.2.840.10008.1.2.1.99"  # DICOM's one syntax that is unpacked before it is read
# WFDB's formats that are read: bits of a sample on the disk.
BITS = {"80": 8, "212": 12, "16": 16, "61": 16, "24": 24, "32": 32}


@dataclass(frozen=True)
class Form:
    """What a file becomes: sizes and public constants. None is computed from the data.

    Attributes:
        size, fit: pixels along a side, and how an image becomes a square.
        channels: of an image, a volume or a recording.
        window: (low, high) in the file's units, shown as black and white; None: each plane's own
            1st and 99th percentile.
        depth: planes of a volume that are one example together; None: each plane is an example.
        length: samples of a recording, which is cut or padded with zeros.
        rate: samples a second that every recording must have; 0 where there are none.
        leads: names of a WFDB record's signals; None: its first.
        spectrum: samples of a short-time Fourier window; None: the samples themselves.
    """

    size: int = 64
    fit: Fit = "resize"
    channels: int = 1
    window: tuple[float, float] | None = None
    depth: int | None = None
    length: int = 0
    rate: int = 0
    leads: tuple[str, ...] | None = None
    spectrum: int | None = None

    @property
    def image(self) -> tuple[int, ...]:
        """Shape of a picture or a plane, or of a whole volume."""
        plane = (self.channels, self.size, self.size)
        return plane if self.depth is None else (self.depth, *plane)

    @property
    def mask(self) -> tuple[int, ...]:
        """Shape of an image's mask."""
        plane = (self.size, self.size)
        return plane if self.depth is None else (self.depth, *plane)

    @property
    def signal(self) -> tuple[int, ...]:
        """Shape of a recording, or of its spectrogram [channels, frames, bins]."""
        if self.spectrum is None:
            return self.channels, self.length
        frames = 1 + (self.length - self.spectrum) // (self.spectrum // 2)
        return self.channels, frames, self.spectrum // 2 + 1


# ------------------------------------------------------------------------------------ pictures


def read_picture(path: Path, form: Form) -> np.ndarray:
    """Return a picture as bytes [1, channels, size, size]: grey, or red, green and blue."""
    with _open_picture(path, "PNG", "JPEG") as stored:
        image = ImageOps.exif_transpose(_in_8_bits(stored))
        image = image.convert("L" if form.channels == 1 else "RGB")
        pixels = np.asarray(_fit(image, form, Image.Resampling.BILINEAR))
    return (pixels[None] if form.channels == 1 else pixels.transpose(2, 0, 1))[None]


def read_picture_mask(path: Path, form: Form) -> np.ndarray:
    """Return a PNG's mask as bytes [1, size, size]: 1 where it is not black.

    JPEG loses the edges of a mask, so it is refused.
    """
    with _open_picture(path, "PNG") as stored:
        marked = np.asarray(stored if stored.mode in ("P", "1") else _in_8_bits(stored, cut=False))
        expect(marked.ndim == 2, "is a picture in colour; a mask is a grey PNG, 0 outside")
        mask = Image.fromarray((marked > 0).astype(np.uint8))
        return np.asarray(_fit(mask, form, Image.Resampling.NEAREST))[None]


def extent_of_picture(path: Path, form: Form) -> tuple[int, ...]:
    """Return (rows, columns) by a picture's header."""
    with _open_picture(path, "PNG", "JPEG") as image:
        columns, rows = image.size
        return (columns, rows) if image.getexif().get(ORIENTATION) in TURNED else (rows, columns)


def _in_8_bits(image: Image.Image, cut: bool = True) -> Image.Image:
    """Return a picture of 16 bits in 8 of them, which PIL would cut off at 255."""
    if not image.mode.startswith("I"):
        return image
    deep = np.asarray(image)
    return Image.fromarray((deep >> 8 if cut else deep > 0).astype(np.uint8))


def _fit(image: Image.Image, form: Form, how: Image.Resampling) -> Image.Image:
    square = (form.size, form.size)
    if form.fit == "crop":
        return ImageOps.fit(image, square, how)
    return image if image.size == square else image.resize(square, how)


@contextmanager
def _open_picture(path: Path, *formats: str) -> Iterator[Image.Image]:
    with reading(path), Image.open(path, formats=list(formats)) as stored:
        wide, tall = stored.size
        expect(max(wide, tall) <= LARGEST, f"has {wide}×{tall} pixels, too many")
        yield stored


# --------------------------------------------------------------------------------------- DICOM


def read_dicom(path: Path, form: Form) -> np.ndarray:
    """Return bytes [1, 1, size, size]: pixels in the file's units, between the window's ends."""
    from pydicom.pixels import apply_modality_lut

    with _open_dicom(path) as image:
        pixels = np.asarray(apply_modality_lut(image.pixel_array, image), dtype=np.float32)
        rows, columns = image.Rows, image.Columns
        whole = pixels.shape == (rows, columns) and bool(np.isfinite(pixels).all())
        expect(whole, f"has pixels that are no {rows}×{columns} numbers")
        inverted = image.PhotometricInterpretation == "MONOCHROME1"  # large values are dark
    planes = to_bytes(torch.from_numpy(pixels)[None], form.window)
    planes = crop_square(planes) if form.fit == "crop" else planes
    made = resample(planes, (form.size, form.size)).round().clamp(0, 255)
    return (255 - made if inverted else made).to(torch.uint8)[None].numpy()


def extent_of_dicom(path: Path, form: Form) -> tuple[int, ...]:
    """Return (rows, columns) by the header."""
    with _open_dicom(path, stop_before_pixels=True) as image:
        return int(image.Rows), int(image.Columns)


@contextmanager
def _open_dicom(path: Path, **options: Any) -> Iterator[Any]:
    """Open the data set of a file, and refuse what is no single grey image."""
    import pydicom

    with reading(path, MOST_BYTES), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that bend the standard
        syntax = pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID")
        expect(syntax != DEFLATED, "is a deflated DICOM file; store it uncompressed")
        image = pydicom.dcmread(path, **options)
        rows, columns = int(image.Rows), int(image.Columns)
        fits = 0 < rows <= LARGEST and 0 < columns <= LARGEST
        expect(fits, f"announces {rows:,}×{columns:,} pixels")
        frames, colours = int(str(image.get("NumberOfFrames", 1))), image.PhotometricInterpretation
        one = frames == 1 and colours in ("MONOCHROME1", "MONOCHROME2")
        expect(one, f"has {frames} frames of {colours}; one grey image a file was expected")
        yield image


# --------------------------------------------------------------------------------------- NIfTI
# Planes are axial, on RAS+ axes: rows run from anterior to posterior, columns from left to right.


def count_planes(path: Path, form: Form) -> int:
    """Return how many examples a volume makes, by its header: its planes, or 1 if it is whole."""
    header = nifti.read_header(path)
    return header.shape[2] if form.depth is None else 1


def extent_of_volume(path: Path, form: Form) -> tuple[int, ...]:
    """Return the voxels along each axis, by the header."""
    return nifti.read_header(path).shape[:3]


def read_volume(path: Path, form: Form) -> np.ndarray:
    """Return bytes [planes, channels, size, size], or [1, depth, channels, size, size]."""
    data = nifti.read(path).data
    data = data[..., None] if data.ndim == 3 else data
    with reading(path):
        rule = f"has {data.shape[3]} channels where dataset.channels={form.channels}"
        expect(data.shape[3] == form.channels, rule)
    planes = _choose(_turn(data), form)  # [planes, channels, Y, X]
    image = to_bytes(planes.flatten(0, 1), form.window)
    image = crop_square(image) if form.fit == "crop" else image
    made = resample(image, (form.size, form.size)).round().clamp(0, 255).to(torch.uint8)
    return made.numpy().reshape(-1, *form.image)


def read_volume_mask(path: Path, form: Form) -> np.ndarray:
    """Return bytes [planes, size, size], or [1, depth, size, size]: 1 where a label is above 0."""
    labels = nifti.read_labels(path).data
    with reading(path):
        rule = f"has shape {list(labels.shape)}; a mask has three dimensions"
        expect(labels.shape[3:] in ((), (1,)), rule)
    planes = _choose(_turn((labels > 0).reshape(*labels.shape[:3], 1)), form)[:, 0].float()
    mask = crop_square(planes) if form.fit == "crop" else planes
    return resample_mask(mask, (form.size, form.size)).byte().numpy().reshape(-1, *form.mask)


def _turn(data: np.ndarray) -> Tensor:
    """Turn voxels [X, Y, Z, C] into planes [Z, C, Y, X]."""
    return torch.from_numpy(np.ascontiguousarray(data[:, ::-1].transpose(2, 3, 1, 0)))


def _choose(planes: Tensor, form: Form) -> Tensor:
    """Keep all planes, or `depth` of them from the first to the last, the nearest to even steps."""
    if form.depth is None:
        return planes
    places = np.linspace(0, len(planes) - 1, form.depth).round().astype(int)
    return planes[torch.from_numpy(places)]


# -------------------------------------------------------------------------------- WAV and WFDB


def read_clip(path: Path, form: Form) -> np.ndarray:
    """Return samples between -1 and 1: float32 [1, channels, length], or `to_spectrum`'s."""
    samples = read_wav(path, form.rate, form.channels, LONGEST)
    return _shape(samples.T[:, : form.length] / np.float32(2**15), form)


def read_record(path: Path, form: Form) -> np.ndarray:
    """Return samples in the header's units: float32 [1, channels, length], or `to_spectrum`'s.

    Args:
        path: the header, .hea.
    """
    header = _open_record(path, form)
    names = list(header.sig_name)
    with reading(path):
        for lead in form.leads or ():
            rule = f"has the leads {', '.join(names)}, and '{lead}' was expected"
            expect(names.count(lead) == 1, rule)
        rule = f"has {len(names)} leads where dataset.channels={form.channels} were expected"
        expect(len(names) >= form.channels, rule)
    chosen = [names.index(lead) for lead in form.leads] if form.leads else [*range(form.channels)]
    end = min(form.length, header.sig_len)
    return _shape(read_leads(path, header, chosen, end).astype(np.float32).T, form)


def count_record(path: Path, form: Form) -> int:
    """Return 1, the examples of a record, if its header can be read."""
    _open_record(path, form)
    return 1


def files_of_record(path: Path, form: Form) -> list[Path]:
    """Return a record's header and the files that it names."""
    named = dict.fromkeys(_open_record(path, form).file_name)
    return [path, *(path.parent / name for name in named)]


def _open_record(path: Path, form: Form) -> Any:
    """Read a header and hold its signal files to it; no file outside its folder is touched."""
    header = read_header(path)
    bits: dict[str, int] = {}  # of one moment's samples in each file
    starts: dict[str, int] = {}
    with reading(path):
        rate, length = float(header.fs), int(header.sig_len or 0)
        one_rate = {*header.samps_per_frame} == {1}
        usual = len(header.file_name) == header.n_sig and all(header.sig_name) and one_rate
        expect(usual, "has unnamed leads or leads of several rates")
        expect(rate == form.rate, f"has a rate of {rate:g} Hz where {form.rate} Hz was expected")
        expect(0 < length <= LONGEST, f"announces {length:,} samples")
        signals = zip(header.file_name, header.fmt, header.byte_offset, strict=True)
        for name, stored, offset in signals:
            beside = Path(name).name == name and ":" not in name
            expect(beside, f"names the file {name}, which is not beside it")
            expect(stored in BITS, f"is stored in format {stored}; {', '.join(BITS)} can be read")
            bits[name] = bits.get(name, 0) + BITS[stored]
            starts.setdefault(name, offset or 0)
    for name, each in bits.items():
        file = path.parent / name
        require_inside(file, path.parent)
        announced = starts[name] + each * length // 8
        with reading(file):
            size = file.stat().st_size
            rule = f"has {size:,} bytes where its header announces {announced:,}; it is cut off"
            expect(size >= announced, rule)
    return header


def _shape(samples: np.ndarray, form: Form) -> np.ndarray:
    """Pad samples [channels, up to length] with zeros at their end; or make their spectrogram."""
    whole = np.zeros((form.channels, form.length), dtype=np.float32)
    whole[:, : samples.shape[1]] = samples
    return (whole if form.spectrum is None else to_spectrum(whole, form.spectrum))[None]


def to_spectrum(samples: np.ndarray, window: int) -> np.ndarray:
    """Return complex64 [channels, frames, bins] of samples [channels, n].

    Hann windows of `window` samples, each half a window after the last; window // 2 + 1 bins.
    """
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

Read = Callable[[Path, Form], np.ndarray]


@dataclass(frozen=True)
class Mask:
    """How masks are read: bytes [examples, *Form.mask], 1 inside."""

    suffixes: tuple[str, ...]
    read: Read
    extent: Callable[[Path, Form], tuple[int, ...]]


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


PNG = Mask((".png",), read_picture_mask, extent_of_picture)
RECORDING = ("length", "rate", "scale", "spectrum")
KINDS = (
    Kind(
        "picture",
        (".png", ".jpg", ".jpeg"),
        read_picture,
        channels=(1, 3),
        mask=PNG,
        extent=extent_of_picture,
    ),
    Kind(
        "image",
        (".dcm",),
        read_dicom,
        keys=("window",),
        channels=(1,),
        mask=PNG,
        extent=extent_of_dicom,
    ),
    Kind(
        "volume",
        nifti.SUFFIXES,
        read_volume,
        keys=("window", "depth"),
        count=count_planes,
        mask=Mask(nifti.SUFFIXES, read_volume_mask, extent_of_volume),
        extent=extent_of_volume,
        version=nifti.READING,
    ),
    Kind("clip", (".wav",), read_clip, keys=RECORDING),
    Kind(
        "recording",
        (".hea",),
        read_record,
        keys=(*RECORDING, "leads"),
        count=count_record,
        files=files_of_record,
    ),
)
SUFFIXES = tuple(suffix for kind in KINDS for suffix in kind.suffixes)


def suffix_of(path: Path) -> str:
    """'.nii.gz' of scan.nii.gz, '.png' of film.PNG."""
    return ".nii.gz" if path.name.lower().endswith(".nii.gz") else path.suffix.lower()


def kind_of(path: Path) -> Kind:
    """Return the kind of a file by its name."""
    for kind in KINDS:
        if suffix_of(path) in kind.suffixes:
            return kind
    raise UserError(f"{path}: is none of {', '.join(SUFFIXES)}; no other file can be read.")


def common_kind(paths: Iterable[Path]) -> Kind:
    """Return the one kind of all files."""
    first, *others = paths
    kind = kind_of(first)
    for path in others:
        if (other := kind_of(path)) is not kind:
            raise UserError(
                f"{path}: is a {other.name}, and {first.name} a {kind.name}; a data set holds one "
                "kind of files."
            )
    return kind
