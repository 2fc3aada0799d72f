"""`zdp-bench data` says what is missing and where to get it, fetches and checks it."""

import errno
import functools
import gzip
import http.server
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.damage import within
from tests.data.helpers import dataset
from tests.extras.own_data.own_data import KINDS, write_classes, write_masks
from tests.test_cli import run
from zdp_bench import disk
from zdp_bench.data import cache, files, mnist, nifti
from zdp_bench.data.files import Card, RemoteFile, fetch, md5
from zdp_bench.data.mnist import Mnist
from zdp_bench.errors import UserError
from zdp_bench.report.terminal import describe_state

RAW = Path("MNIST/raw")
OWN = [of for of in files.cards() if not of.uses]
# Of the small root's sets, those that can be loaded with their default options.
COUNTED = ("chest_xray", "ham10000", "physionet2012", "msd", "roahd", "mri_sequences_from_volumes")


def test_a_file_that_would_take_minutes_to_hash_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jpeg"
    path.touch()
    os.truncate(path, 1 << 36)
    says = r"a\.jpeg: has 68,719,476,736 bytes; at most 34,359,738,368 are read"
    with within(5), pytest.raises(UserError, match=says):
        files.sha256(path)


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
    for of in OWN:
        assert bool(of.access) == bool(of.holds)
        made = of.provenance in ("synthetic", "own") or of.name == "phase_digits"
        assert of.holds or of.files or made


NEEDING_FILES = [of for of in files.cards() if of.holds or of.files or of.uses]


@pytest.mark.parametrize("of", NEEDING_FILES, ids=lambda of: of.name)
def test_what_is_not_there_is_missing_and_says_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of: Card
) -> None:
    assert describe_state(tmp_path, of).startswith("missing: ")
    code, _, err = run(capsys, "data", "check", of.name, "--root", str(tmp_path))
    assert (code, "is missing" in err) == (2, True)
    if of.holds:
        assert len(err.splitlines()) == 1
        for message in (err, run(capsys, "data", "fetch", of.name, "--root", str(tmp_path))[2]):
            assert of.source in message
            assert of.access in message
            assert "above" not in message


@pytest.mark.parametrize("of", [of for of in OWN if of.holds], ids=lambda of: of.name)
def test_hidden_files_of_macos_are_no_data_set(tmp_path: Path, of: Card) -> None:
    pattern = Path(of.holds.replace("**", "a").replace("*", "a"))
    hidden = tmp_path / pattern.with_name(f"._{pattern.name}")
    hidden.parent.mkdir(parents=True)
    hidden.write_bytes(b"\0\5\x16\7Mac OS X")
    assert not files.has_files(tmp_path, of)
    hidden.rename(tmp_path / pattern)
    assert files.has_files(tmp_path, of)


@pytest.mark.parametrize("of", [of for of in OWN if not of.files], ids=lambda of: of.name)
def test_a_set_that_is_there_is_counted_and_one_that_needs_no_files_says_so(
    of: Card, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "data", "check", of.name, "--root", str(root))
    if not of.holds:
        others = {"phase_digits": "bundled", "folder": "your own files, at dataset.path"}
        says = f"{others.get(of.name, 'generated')}; it needs no files here"
        assert (code, out) == (0, f"{of.name}: {says}\n")
        return
    assert fetch(root, of) == []
    if of.name in COUNTED:
        assert code == 0
        assert re.match(rf"{of.name}: [\d,]+ train examples, 0 not finite\n", out)
    else:  # these files are too few for the default options, and a run would say the same
        assert (code, len(err.splitlines())) == (2, 1)


def test_a_folder_that_cannot_be_written_is_named_and_not_the_network(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    says = r"file.*: cannot be written \(.+\)\. Set paths\.data"
    for root in (tmp_path / "file", tmp_path / "file" / "root"):
        with pytest.raises(UserError, match=says) as caught:
            fetch(root, files.card("mnist"))
        assert "http" not in str(caught.value)
        with pytest.raises(UserError, match="cannot be written"):
            dataset("cpsc2018_synthetic").load(root)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_is_named_and_not_the_output(tmp_path: Path, number: int) -> None:
    """HDF5's error names no file, so that it was taken for that of the output."""
    with (
        pytest.raises(UserError, match=r"derived/k: cannot be written \(.*large|No space.*paths"),
        files.write_whole(tmp_path / "derived" / "k"),
    ):
        raise OSError(number, "Can't write data\n(errno = 28, buf = 0x5602)")
    assert not [*(tmp_path / "derived").iterdir()]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "No such file", "scan.nii"), gzip.BadGzipFile()]
)
def test_an_error_in_reading_is_not_one_of_the_folder_that_is_written(
    tmp_path: Path, error: OSError, is_there: bool
) -> None:
    """It was swallowed if another process had made the folder."""
    folder = tmp_path / "derived" / "k"
    if is_there:
        folder.mkdir(parents=True)
    with pytest.raises(type(error)) as caught, files.write_whole(folder):
        raise error
    assert caught.value is error


def test_what_a_killed_run_has_left_of_a_derived_set_goes_after_a_day(tmp_path: Path) -> None:
    old, young = (disk.name_partial(tmp_path / "derived" / name) for name in ("old", "young"))
    for folder in (old, young):
        (folder / "train").mkdir(parents=True)
        (folder / "train" / "a.h5").touch()
        for path in (folder, folder / "train", folder / "train" / "a.h5"):
            os.utime(path, (0, time.time() - disk.A_DAY - 100))
    (young / "train" / "b.h5").touch()
    with files.write_whole(tmp_path / "derived" / "k") as partial:
        (partial / "c.h5").touch()
    assert {path.name for path in (tmp_path / "derived").iterdir()} == {"k", young.name}


def test_a_folder_that_is_given_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its kind, rate and size: each file is read whole."""
    for kind, (ending, _, _) in KINDS.items():
        folder = write_classes(tmp_path / kind, kind, patients=2)
        code, out, _ = run(capsys, "data", "check", str(folder))
        assert (code, out) == (0, f"{folder}: 8 files checked, 0 refused\n")
        bad = folder / f"sick/s1/1{ending}"
        half = bad.read_bytes()[: bad.stat().st_size // 2]
        bad.write_bytes(half + b"\0")  # half a CSV file could be a whole one
        code, out, err = run(capsys, "data", "check", str(folder))
        assert (code, out) == (2, f"{folder}: 8 files checked, 1 refused\n")
        assert "s1/1" in err


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_a_check_finds_samples_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: type
) -> None:
    folder = write_classes(tmp_path / "d", "array", patients=2)
    np.save(folder / "sick/s1/1.npy", np.array([[1, np.nan, 3]], dtype))
    code, out, err = run(capsys, "data", "check", str(folder))
    assert (code, out) == (2, f"{folder}: 8 files checked, 1 refused\n")
    assert "s1/1.npy: contains samples that are not finite" in err


def test_a_check_refuses_the_masks_that_a_run_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were checked as images."""
    films = write_masks(tmp_path / "films", "picture", patients=5)
    scans = write_masks(tmp_path / "scans", "volume", patients=3)
    for home, count in ((films, 10), (scans, 6)):
        code, out, _ = run(capsys, "data", "check", str(home))
        assert (code, out) == (0, f"{home}: {count} files checked, 0 refused\n")
    Image.fromarray(np.zeros((10, 12, 3), np.uint8)).save(films / "masks/p1/scan.png")
    Image.fromarray(np.zeros((10, 12), np.uint8)).save(films / "masks/p2/scan.jpg")
    (films / "masks/p2/scan.png").unlink()
    deep = np.zeros((10, 12), np.uint16)  # as a run, the check accepts labels of 16 bits
    Image.fromarray(deep).save(films / "masks/p3/scan.png")
    code, out, err = run(capsys, "data", "check", str(films))
    assert (code, out) == (2, f"{films}: 10 files checked, 2 refused\n")
    assert "p1/scan.png: is a colour picture" in err
    assert "p2/scan.jpg: is of kind picture, not grey PNG" in err
    nifti.write(scans / "masks/p1/scan.nii", np.full((12, 10, 4), 0.3, np.float32), (1.0, 1.0, 2.0))
    code, _, err = run(capsys, "data", "check", str(scans))
    assert code == 2
    assert "p1/scan.nii: is a segmentation with values other than whole numbers" in err


def test_a_check_tells_of_a_missing_window_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_classes(tmp_path / "d", "picture")
    for name in "01":  # of 16 bits that do not say how many are used
        Image.fromarray(np.full((8, 8), 4000, np.uint16)).save(folder / f"sick/s3/{name}.png")
    code, out, err = run(capsys, "data", "check", str(folder))
    assert (code, out) == (2, f"{folder}: 24 files checked, 1 refused\n")
    assert "dataset.window, such as" in err


def test_the_cache_says_what_it_takes_and_is_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(cache, "MAX_SILENT", 100)
    for kind in ("folder", "films"):
        cache.load_or_make(kind, "d" * 64, (10, 40), np.uint8, iter([np.zeros((10, 40))]))
    assert "will take 0.0 GB; `zdp-bench data cache --delete`" in caplog.text
    for words, says in ((["data", "cache"], "in all"), (["data", "cache", "--delete"], "deleted")):
        code, out, _ = run(capsys, *words)
        assert code == 0
        assert "folder: 1 files" in out
        assert out.strip().endswith(says)
    assert not list((tmp_path / "cache").rglob("*.npy"))


# ------------------------------------------------------------------------------------ downloading


def _card(folder: Path, address: str = "") -> Card:
    paths = sorted(folder.iterdir())
    described = tuple(RemoteFile(str(RAW / p.name), p.stat().st_size, md5(p)) for p in paths)
    return Card("mnist", "", "official", "", "", "", address=address, files=described)


def test_missing_files_are_fetched_and_damaged_ones_refused(
    mini_mnist: Path, tmp_path: Path
) -> None:
    folder, root, images = mini_mnist / RAW, tmp_path / "root", "train-images-idx3-ubyte.gz"
    answer = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        of = _card(folder, f"http://127.0.0.1:{server.server_port}")
        assert len(fetch(root, of)) == 4
        assert fetch(root, of) == []  # nothing is fetched twice
        assert len(Mnist(check=False).load(root).train) == 200
        (root / RAW / images).unlink()
        (folder / images).write_bytes(b"<html>a captive portal</html>")
        with pytest.raises(UserError, match="does not match its MD5"):
            fetch(root, of)
        assert not (root / RAW / images).exists()
        server.shutdown()


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a broken link": lambda path: path.symlink_to("none"),
}


@pytest.mark.parametrize("put", NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_is_neither_read_nor_replaced(
    mini_mnist: Path, put: Callable[[Path], object]
) -> None:
    of = _card(mini_mnist / RAW, "http://127.0.0.1:9")
    path = mini_mnist / RAW / "t10k-labels-idx1-ubyte.gz"
    path.unlink()
    put(path)
    says = r"labels.*is not a regular file, or is a broken link"
    with within(5), pytest.raises(UserError, match=says):
        fetch(mini_mnist, of)
    assert os.path.lexists(path)


def test_no_network_is_one_sentence(mini_mnist: Path, tmp_path: Path) -> None:
    of = _card(mini_mnist / RAW, "http://127.0.0.1:9")
    says = r"lacks t10k-images.*could not be reached.*zdp-bench data fetch mnist"
    with pytest.raises(UserError, match=says) as caught:
        fetch(tmp_path / "root", of)
    assert "\n" not in str(caught.value)


def test_a_file_with_another_checksum_is_refused_before_a_byte_is_unpacked(
    mini_mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "read_idx", lambda *_, **__: pytest.fail("unpacked"))
    with pytest.raises(UserError, match="bytes where"):
        Mnist().load(mini_mnist)
    of, labels = _card(mini_mnist / RAW).files[1], mini_mnist / RAW / "t10k-labels-idx1-ubyte.gz"
    assert of.path.endswith(labels.name)
    files.verify(labels, of, "mnist")
    whole = bytearray(labels.read_bytes())
    whole[9] ^= 1  # the gzip header's operating-system byte: the content still unpacks
    labels.write_bytes(bytes(whole))
    with pytest.raises(UserError, match=r"t10k-labels.*MD5 .* was expected"):
        files.verify(labels, of, "mnist")
