"""What each set looks like before it is read, where no header tells: from its options and its release's published counts.

Sets whose files have headers worth reading say it themselves, beside their adapter; see `data.Outline`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from zdp_bench.data import Outline
from zdp_bench.data.files import card, missing
from zdp_bench.registry import register

COMPLEX, REAL = torch.complex64, torch.float32


def _there(root: Path, name: str) -> bool:
    """Whether the files that a card lists are under the root."""
    of = card(card(name).uses or name)
    return not missing(root, of)


def _fixed(name: str, train: int, test: int, shape: tuple[int, ...], dtype: torch.dtype = REAL) -> None:
    """Enter the outline of a release of ten classes whose counts no option changes."""

    def outline(root: Path, **_: object) -> Outline:
        return Outline(train, test, shape, 10, dtype, found=_there(root, name))

    outline.__qualname__ = name  # so that the registry tells them apart
    register("outline", name)(outline)


_fixed("mnist", 60_000, 10_000, (28, 28))
_fixed("fashion_mnist", 60_000, 10_000, (28, 28))
_fixed("phasemnist", 60_000, 10_000, (28, 28), COMPLEX)
_fixed("phase_digits", 1437, 360, (8, 8), COMPLEX)


@register("outline", "cifar10")
def cifar10(root: Path, **_: object) -> Outline:
    """50,000 and 10,000 pictures, in either of the two layouts."""
    found = any((root / folder).is_dir() for folder in ("cifar-10-batches-bin", "cifar-10-batches-py"))
    return Outline(50_000, 10_000, (3, 32, 32), 10, found=found)


@register("outline", "cpsc2018")
def cpsc2018(root: Path, *, fft_length: int, test_share: float, **_: object) -> Outline:
    """The paper's 1,125 recordings of the two diagnoses: which ones they are, stands in each recording."""
    test = round(1125 * test_share)
    found = any((root / "CPSC2018" / form).is_dir() for form in ("original_mat", "cinc2020_wfdb"))
    return Outline(1125 - test, test, (fft_length,), 1, COMPLEX, found=found)


@register("outline", "cpsc2018_synthetic")
def cpsc2018_synthetic(root: Path, *, count: int, test_share: float, **_: object) -> Outline:
    """As many as asked for; 512 samples are seen."""
    test = round(count * test_share)
    return Outline(count - test, test, (512,), 1, COMPLEX)


@register("outline", "speech_commands")
def speech_commands(
    root: Path, *, words: list[str], clips_per_word: int | None, test_share: float, bins: int = 129, **_: object
) -> Outline:
    """As many files as there are, up to the bound; without files, the release's 3,500 or so of a word."""
    folder = root / "SpeechCommands" / "speech_commands_v0.02"
    most = clips_per_word or 3500
    counts = [sum(1 for _ in (folder / word).glob("*.wav")) for word in words] if folder.is_dir() else [most] * len(words)
    clips = sum(min(most, count) for count in counts)
    test = round(clips * test_share)
    return Outline(clips - test, test, (1, 124, bins), len(words), COMPLEX, found=folder.is_dir())


@register("outline", "speech_commands_synthetic")
def speech_commands_synthetic(
    root: Path, *, words: list[str], clips_per_word: int, test_share: float, bins: int = 129, **_: object
) -> Outline:
    """As many as asked for."""
    clips = len(words) * clips_per_word
    test = round(clips * test_share)
    return Outline(clips - test, test, (1, 124, bins), len(words), COMPLEX)


def _kspace(volumes: tuple[int, int], unit: str, slices: int, height: int, width: int, found: bool) -> Outline:
    """Zero-filled complex images, and as targets two magnitudes each: the reference's and the zero-filled one's."""
    train, test = volumes
    if unit == "volume":
        return Outline(train, test, (slices, 1, height, width), 1, COMPLEX, (slices, 2, height, width), REAL, 1, found)
    return Outline(train * slices, test * slices, (1, height, width), 1, COMPLEX, (2, height, width), REAL, slices, found)


@register("outline", "fastmri")
def fastmri(root: Path, *, height: int, width: int, slices: int | None, unit: str, **_: object) -> Outline:
    """The release's 973 and 199 volumes; 34,742 and 7,135 slices, at most 50 of one volume."""
    found = (root / "fastMRI" / "singlecoil_train").is_dir()
    outline = _kspace((973, 199), unit, slices or 36, height, width, found)
    if unit == "volume" or slices:
        return outline
    return replace(outline, train=34_742, test=7_135, records_per_patient=50)


@register("outline", "kspace_from_volumes")
def kspace_from_volumes(
    root: Path, *, folder: str, height: int, width: int, slices: int | None, unit: str, test_share: float, **_: object
) -> Outline:
    """As many volumes as there are files; those that are too small are found when they are read."""
    from zdp_bench.data.nifti import paths_of

    volumes = len(paths_of(root / folder)) if (root / folder).is_dir() else 0
    test = round((volumes or 260) * test_share)
    train = (volumes or 260) - test
    return _kspace((train, test), unit, slices or 36, height, width, found=bool(volumes))


@register("outline", "kspace_phantom")
def kspace_phantom(
    root: Path, *, patients: int, height: int, width: int, slices: int, unit: str, test_share: float, **_: object
) -> Outline:
    """As many as asked for."""
    test = max(1, round(patients * test_share))
    return _kspace((patients - test, test), unit, slices, height, width, found=True)


@register("outline", "synthetic_images")
def synthetic_images(
    root: Path, *, shape: list[int], complex_valued: bool, classes: int, train: int, test: int, **_: object
) -> Outline:
    """As many as asked for."""
    return Outline(train, test, tuple(shape), classes, COMPLEX if complex_valued else REAL)
