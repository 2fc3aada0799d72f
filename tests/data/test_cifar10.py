"""CIFAR-10 in both layouts; files that are not the release are told apart."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from zdp_bench.data import cifar10
from zdp_bench.data.cifar10 import BATCHES, Cifar10
from zdp_bench.data.files import Card, checksum
from zdp_bench.errors import UserError


def _pictures(name: str, count: int = 20) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(sum(map(ord, name)))
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), (np.arange(count) % 10).astype(
        np.uint8
    )


def write_binary(root: Path) -> Path:
    """A miniature in the binary layout: its folder."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name in BATCHES:
        pixels, labels = _pictures(name)
        (folder / f"{name}.bin").write_bytes(np.hstack([labels[:, None], pixels]).tobytes())
    return folder


def write_python(root: Path) -> Path:
    """The same miniature in the Python layout: its folder."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for name in BATCHES:
        pixels, labels = _pictures(name)
        (folder / name).write_bytes(
            pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=2)
        )
    return folder


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    return write_binary(tmp_path)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return write_python(tmp_path)


def _known(monkeypatch: pytest.MonkeyPatch, release: str, folder: Path) -> None:
    """From here on the files of the folder, as they are, are the ones `release` names."""
    sums = {path.name: checksum(path, "sha256") for path in folder.iterdir()}
    monkeypatch.setattr(
        cifar10,
        "card",
        lambda name: Card(name, "", "official", "", "", "", releases={release: sums}),
    )


@pytest.mark.real_data
def test_the_jpeg_copy_is_never_called_official(data_root: Path) -> None:
    if not (data_root / "cifar-10-batches-bin").is_dir():
        pytest.skip("no CIFAR-10 under the data root")
    splits, info = Cifar10().load(data_root), Cifar10().info(data_root)
    assert splits.provenance == "official" or "CIFAR-10 (JPEG)" in splits.notes
    assert (len(splits.train), len(splits.test)) == (info.train, info.test) == (50_000, 10_000)
    assert torch.bincount(splits.test.targets).tolist() == [1000] * 10


def test_both_layouts_hold_the_same_examples(
    binary: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_binary = Cifar10(check=False).load(binary.parent)
    assert from_binary.provenance == "derived"
    assert "no known release" in from_binary.notes
    _known(monkeypatch, "python", python)
    from_python = Cifar10(layout="python").load(python.parent)
    assert torch.equal(from_binary.train.inputs, from_python.train.inputs)
    assert torch.equal(from_binary.test.targets, from_python.test.targets)
    assert from_python.provenance == "official"
    pixels, labels = _pictures("data_batch_2")
    unit = Cifar10(check=False, normalise="unit").load(binary.parent)
    torch.testing.assert_close(unit.train.inputs[21].flatten(), torch.from_numpy(pixels[1]) / 255)
    assert unit.train.targets[21] == labels[1]


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


def test_files_of_no_known_release_are_refused(binary: Path) -> None:
    with pytest.raises(UserError, match=r"no known release.*dataset\.check=false"):
        Cifar10().load(binary.parent)


def test_a_mixture_of_releases_is_refused(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _known(monkeypatch, "binary", binary)
    raw = bytearray((binary / "data_batch_2.bin").read_bytes())
    raw[1] ^= 1  # one pixel, by one
    (binary / "data_batch_2.bin").write_bytes(bytes(raw))
    with pytest.raises(
        UserError,
        match=r"data_batch_2\.bin: is of no known .*data_batch_1\.bin beside it is of binary",
    ):
        Cifar10().load(binary.parent)


class Evil:
    """A pickle that runs a program: it would leave a file behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("check", [True, False])
def test_a_pickle_of_unknown_origin_is_never_opened(python: Path, check: bool) -> None:
    (python / "data_batch_1").write_bytes(pickle.dumps(Evil(python / "ran")))
    with pytest.raises(
        UserError, match=r"is a pickle, which can run any program.*dataset\.layout=binary"
    ):
        Cifar10(check=check).load(python.parent)
    assert not (python / "ran").exists()
