"""CIFAR-10; files that are not the release are told apart."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.helpers import write_cifar10
from zdp_bench.data import cifar10
from zdp_bench.data.cifar10 import BATCHES, RECORD, Cifar10, sorted_digest
from zdp_bench.data.files import Card, checksum
from zdp_bench.errors import UserError


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    return write_cifar10(tmp_path)


def _known(monkeypatch: pytest.MonkeyPatch, release: str, folder: Path) -> None:
    """From here on the files of the folder, as they are, are the ones `release` names."""
    sums = {path.name: checksum(path, "sha256") for path in folder.iterdir()}
    of = Card("cifar10", "", "official", "", "", "", releases={release: sums})
    monkeypatch.setattr(cifar10, "card", lambda name: of)


def _reorder(folder: Path) -> None:
    """Shuffle the images of each part, across its files."""
    rng = np.random.default_rng(7)
    for names in (BATCHES[:5], BATCHES[5:]):
        rows = [np.fromfile(folder / name, np.uint8).reshape(-1, RECORD) for name in names]
        shuffled = np.split(rng.permutation(np.concatenate(rows)), len(names))
        for name, part in zip(names, shuffled, strict=True):
            part.tofile(folder / name)


@pytest.mark.slow
@pytest.mark.real_data
def test_a_copy_of_other_pixels_is_never_called_official(data_root: Path) -> None:
    if not (data_root / "cifar-10-batches-bin").is_dir():
        pytest.skip("no CIFAR-10 under the data root")
    try:
        splits = Cifar10().load(data_root)
        assert splits.provenance == "official"
    except UserError:
        splits = Cifar10(check=False).load(data_root)
        assert splits.provenance == "derived"
    assert (len(splits.train), len(splits.test)) == (50_000, 10_000)
    assert torch.bincount(splits.test.targets).tolist() == [1000] * 10


def test_the_images_are_those_of_the_files(binary: Path) -> None:
    splits = Cifar10(check=False, normalise="unit").load(binary.parent)
    assert splits.provenance == "derived"
    assert "no known release" in splits.notes
    row = np.fromfile(binary / "data_batch_2.bin", np.uint8, count=RECORD, offset=RECORD)
    torch.testing.assert_close(splits.train.inputs[21].flatten(), torch.from_numpy(row[1:]) / 255)
    assert splits.train.targets[21] == row[0] == 1


def test_the_release_is_known_by_its_checksums(
    binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"dataset\.check=false"):
        Cifar10().load(binary.parent)
    _known(monkeypatch, "binary", binary)
    splits = Cifar10().load(binary.parent)
    assert (splits.provenance, splits.notes) == ("official", "")


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
            rows[:RECORD], first[:RECORD] = first[:RECORD].copy(), rows[:RECORD].copy()
        else:
            rows[1 if change == "pixel" else 0] ^= 1
        rows.tofile(binary / "test_batch.bin")
        first.tofile(binary / "data_batch_1.bin")
        with pytest.raises(UserError, match=r"dataset\.check=false"):
            Cifar10().load(binary.parent)
    else:
        splits = Cifar10().load(binary.parent)
        origin = splits.provenance, splits.notes
        assert origin == ("official", "the release's pixels, in another order")


def test_a_mixture_of_releases_is_refused(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _known(monkeypatch, "binary", binary)
    raw = np.fromfile(binary / "data_batch_2.bin", np.uint8)
    raw[1] ^= 1  # one pixel, by one
    raw.tofile(binary / "data_batch_2.bin")
    says = r"data_batch_2\.bin: is of no known .*data_batch_1\.bin beside it is of binary"
    with pytest.raises(UserError, match=says):
        Cifar10().load(binary.parent)
