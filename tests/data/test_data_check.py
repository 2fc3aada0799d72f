"""`zdp-bench data` says what is missing and where to get it, and names files of no release."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.helpers import dataset
from tests.extras.own_data.own_data import KINDS, write_classes
from tests.test_cli import run
from zdp_bench.data import cache, files
from zdp_bench.errors import UserError
from zdp_bench.report.terminal import say_state

OWN = [of for of in files.cards() if not of.uses]
BY_HAND = [of.name for of in OWN if of.holds]


@pytest.mark.parametrize(
    "name", [of.name for of in files.cards() if of.holds or of.files or of.uses]
)
def test_what_is_not_there_is_missing_and_says_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    of = files.card(name)
    assert say_state(tmp_path, of).startswith("missing: ")
    code, _, err = run(capsys, "data", "check", name, "--root", str(tmp_path))
    assert (code, "is missing" in err) == (2, True)
    if of.holds:
        assert len(err.splitlines()) == 1
        for said in (err, run(capsys, "data", "fetch", name, "--root", str(tmp_path))[2]):
            assert of.source in said
            assert of.access in said
            assert "above" not in said


def test_every_set_is_got_by_hand_or_fetched_or_made() -> None:
    for of in OWN:
        assert bool(of.access) == bool(of.holds)
        made = of.provenance in ("synthetic", "own") or of.name == "phase_digits"
        assert of.holds or of.files or made


@pytest.mark.parametrize("name", [of.name for of in OWN if not of.holds and not of.files])
def test_a_set_that_needs_no_files_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, out, _ = run(capsys, "data", "check", name, "--root", str(tmp_path))
    others = {"phase_digits": "bundled", "folder": "your own files, at dataset.path"}
    what = others.get(name, "generated")
    assert (code, out) == (0, f"{name}: {what}; it needs no files here\n")


def test_a_set_without_checksums_is_present_and_left_to_its_runs(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in BY_HAND:
        assert files.fetch(root, files.card(name)) == []
        code, out, _ = run(capsys, "data", "check", name, "--root", str(root))
        assert (code, out) == (0, f"{name}: present; a run checks its files\n")


def test_a_folder_that_cannot_be_written_is_named_and_not_the_network(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "root"):
        with pytest.raises(
            UserError, match=r"file.*: cannot be written \(.+\)\. Set paths\.data"
        ) as caught:
            files.fetch(root, files.card("mnist"))
        assert "http" not in str(caught.value)
        with pytest.raises(UserError, match="cannot be written"):
            dataset("cpsc2018_synthetic").load(root)


def test_a_folder_that_is_given_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its kind, rate and size: each file is read whole."""
    for kind, (ending, _, _) in KINDS.items():
        folder = write_classes(tmp_path / kind, kind)
        code, out, _ = run(capsys, "data", "check", str(folder))
        assert (code, out) == (0, f"{folder}: 24 files checked, 0 refused\n")
        bad = folder / f"sick/s3/1{ending}"
        bad.write_bytes(bad.read_bytes()[: bad.stat().st_size // 2])
        code, out, err = run(capsys, "data", "check", str(folder))
        assert (code, out) == (2, f"{folder}: 24 files checked, 1 refused\n")
        assert "s3/1" in err


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
    monkeypatch.setattr(cache, "MENTIONED", 100)
    for kind in ("folder", "films"):
        cache.load_or_make(kind, "d" * 64, (10, 40), np.uint8, iter([np.zeros((10, 40))]))
    assert "will take 0.0 GB; `zdp-bench data cache --delete`" in caplog.text
    for words, says in ((["data", "cache"], "in all"), (["data", "cache", "--delete"], "deleted")):
        code, out, _ = run(capsys, *words)
        assert code == 0
        assert "folder: 1 arrays" in out
        assert out.strip().endswith(says)
    assert not list((tmp_path / "cache").rglob("*.npy"))
