"""MNIST from its files: the real ones where they are, a miniature otherwise; refusals by name."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import write_mini_mnist
from zdp_bench.data import files, mnist
from zdp_bench.data.files import Card, RemoteFile, fetch, md5
from zdp_bench.data.mnist import Mnist
from zdp_bench.data.phasemnist import RELEASED
from zdp_bench.errors import UserError

RAW = Path("MNIST/raw")


@pytest.mark.real_data
def test_official_mnist_is_what_was_released(data_root: Path) -> None:
    splits = Mnist().load(data_root)
    assert (len(splits.train), len(splits.test), splits.provenance) == (60_000, 10_000, "official")
    assert splits.train.inputs.shape == (60_000, 28, 28)
    # standardised by the published constants
    assert abs(float(splits.train.inputs.mean())) < 1e-3
    assert abs(float(splits.train.inputs.std()) - 1) < 1e-3
    assert torch.bincount(splits.train.targets).tolist() == list(RELEASED)


def test_a_file_with_another_checksum_is_refused_before_a_byte_is_unpacked(
    mini_mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "read_idx", lambda *_, **__: pytest.fail("unpacked"))
    with pytest.raises(UserError, match="bytes where"):
        Mnist().load(mini_mnist)


# ------------------------------------------------------------------------------------ downloading


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server on this machine that holds the tiny MNIST: its address and its folder."""
    folder = write_mini_mnist(tmp_path / "mirror")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()
    thread.join()


def _card(folder: Path, address: str = "") -> Card:
    described = [
        RemoteFile(str(RAW / p.name), p.stat().st_size, md5(p)) for p in sorted(folder.iterdir())
    ]
    return Card("mnist", "", "official", "", "", "", address=address, files=tuple(described))


def test_missing_files_are_fetched_and_checked(mirror: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = mirror
    root = tmp_path / "root"
    assert len(fetch(root, _card(folder, address))) == 4
    assert fetch(root, _card(folder, address)) == []  # nothing is fetched twice
    assert len(Mnist(check=False).load(root).train) == 200


def test_a_damaged_download_is_refused_and_leaves_nothing(
    mirror: tuple[str, Path], tmp_path: Path
) -> None:
    address, folder = mirror
    of = _card(folder, address)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"<html>a captive portal</html>")
    with pytest.raises(UserError, match="does not match its MD5"):
        fetch(tmp_path / "root", of)
    assert not (tmp_path / "root" / RAW / "train-images-idx3-ubyte.gz").exists()


def test_a_flipped_byte_is_refused(mirror: tuple[str, Path]) -> None:
    _, folder = mirror
    of, labels = _card(folder).files[1], folder / "t10k-labels-idx1-ubyte.gz"
    assert of.path.endswith(labels.name)
    files.verify(labels, of, "mnist")
    whole = bytearray(labels.read_bytes())
    whole[9] ^= 1  # the gzip header's operating-system byte: the content still unpacks
    labels.write_bytes(bytes(whole))
    with pytest.raises(UserError, match=r"t10k-labels.*MD5 .* was expected"):
        files.verify(labels, of, "mnist")


def test_no_network_is_one_sentence(tmp_path: Path, mirror: tuple[str, Path]) -> None:
    _, folder = mirror
    with pytest.raises(
        UserError, match=r"lacks t10k-images.*could not be reached.*zdp-bench data fetch mnist"
    ) as caught:
        fetch(tmp_path / "root", _card(folder, "http://127.0.0.1:9"))
    assert "\n" not in str(caught.value)


def test_every_card_is_whole() -> None:
    for of in files.cards():
        assert of.title
        assert of.licence
        assert of.citation
        assert of.provenance in ("official", "derived", "synthetic", "own")
        assert of.address.startswith("https://") == bool(of.files)
        for file in of.files:
            assert len(file.md5) == 32
            assert not Path(file.path).is_absolute()
            assert ".." not in file.path
