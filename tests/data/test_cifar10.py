"""CIFAR-10; files that are not the release are told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from zdp_bench.data import cifar10
from zdp_bench.data.cifar10 import BATCHES, Cifar10, sorted_digest
from zdp_bench.data.files import Card, checksum
from zdp_bench.errors import UserError


def _pictures(name: str, count: int = 20) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(sum(map(ord, name)))
    labels = (np.arange(count) % 10).astype(np.uint8)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), labels


def write_binary(root: Path) -> Path:
    """A miniature in the binary layout: its folder."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name in BATCHES:
        pixels, labels = _pictures(name)
        (folder / name).write_bytes(np.hstack([labels[:, None], pixels]).tobytes())
    return folder


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    return write_binary(tmp_path)


def _known(monkeypatch: pytest.MonkeyPatch, release: str, folder: Path) -> None:
    """From here on the files of the folder, as they are, are the ones `release` names."""
    sums = {path.name: checksum(path, "sha256") for path in folder.iterdir()}
    of = Card("cifar10", "", "official", "", "", "", releases={release: sums})
    monkeypatch.setattr(cifar10, "card", lambda name: of)


def _reorder(folder: Path) -> None:
    """Shuffle the images of each part, across its files."""
    rng = np.random.default_rng(7)
    for names in (BATCHES[:5], BATCHES[5:]):
        paths = [folder / name for name in names]
        rows = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, 3073) for path in paths])
        for path, part in zip(paths, np.split(rng.permutation(rows), len(paths)), strict=True):
            part.tofile(path)


@pytest.mark.real_data
def test_the_jpeg_copy_is_never_called_official(data_root: Path) -> None:
    if not (data_root / "cifar-10-batches-bin").is_dir():
        pytest.skip("no CIFAR-10 under the data root")
    splits = Cifar10().load(data_root)
    assert splits.provenance == "official" or "CIFAR-10 (JPEG)" in splits.notes
    assert (len(splits.train), len(splits.test)) == (50_000, 10_000)
    assert torch.bincount(splits.test.targets).tolist() == [1000] * 10


def test_the_images_are_those_of_the_files(binary: Path) -> None:
    splits = Cifar10(check=False, normalise="unit").load(binary.parent)
    assert splits.provenance == "derived"
    assert "no known release" in splits.notes
    pixels, labels = _pictures("data_batch_2.bin")
    torch.testing.assert_close(splits.train.inputs[21].flatten(), torch.from_numpy(pixels[1]) / 255)
    assert splits.train.targets[21] == labels[1]


@pytest.mark.parametrize(
    ("release", "provenance", "notes"),
    [("binary", "official", ""), ("jpeg", "derived", "CIFAR-10 (JPEG)")],
)
def test_provenance_follows_the_checksums(
    binary: Path, monkeypatch: pytest.MonkeyPatch, release: str, provenance: str, notes: str
) -> None:
    _known(monkeypatch, release, binary)
    splits = Cifar10().load(binary.parent)
    assert splits.provenance == provenance
    assert splits.notes.startswith(notes)
    assert bool(splits.notes) == (provenance == "derived")


@pytest.mark.parametrize("change", [None, "pixel", "label", "part"])
def test_the_release_is_known_in_any_order_by_all_that_it_holds(
    binary: Path, monkeypatch: pytest.MonkeyPatch, change: str | None
) -> None:
    files = [cifar10.read_binary(binary / name) for name in BATCHES]
    of = cifar10.card("cifar10")
    parts = {"train": sorted_digest(files[:5]), "test": sorted_digest(files[5:])}
    of = replace(of, releases=of.releases | {"reordered": parts})
    monkeypatch.setattr(cifar10, "card", lambda name: of)
    _reorder(binary)
    if change:
        rows = np.fromfile(binary / "test_batch.bin", np.uint8)
        first = np.fromfile(binary / "data_batch_1.bin", np.uint8)
        if change == "part":  # an image to test on becomes one to train on, and the other way round
            rows[:3073], first[:3073] = first[:3073].copy(), rows[:3073].copy()
        else:
            rows[1 if change == "pixel" else 0] ^= 1
        rows.tofile(binary / "test_batch.bin")
        first.tofile(binary / "data_batch_1.bin")
    if change:
        with pytest.raises(UserError, match="not from a known release"):
            Cifar10().load(binary.parent)
    else:
        splits = Cifar10().load(binary.parent)
        found = splits.provenance, splits.notes
        assert found == ("official", "the release's pixels, in another order")


def test_files_of_no_known_release_are_refused(binary: Path) -> None:
    with pytest.raises(UserError, match=r"not from a known release.*dataset\.check=false"):
        Cifar10().load(binary.parent)


def test_a_mixture_of_releases_is_refused(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _known(monkeypatch, "binary", binary)
    raw = bytearray((binary / "data_batch_2.bin").read_bytes())
    raw[1] ^= 1  # one pixel, by one
    (binary / "data_batch_2.bin").write_bytes(bytes(raw))
    says = r"data_batch_2\.bin: is of no known .*data_batch_1\.bin beside it is of binary"
    with pytest.raises(UserError, match=says):
        Cifar10().load(binary.parent)
