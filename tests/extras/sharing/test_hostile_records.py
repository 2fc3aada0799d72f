"""What a stranger's record holds reaches no terminal as a command and no sheet as a formula."""

from __future__ import annotations

import csv
import io
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_cli import run as command
from tests.test_records import record, save
from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.loading import predict_file
from zdp_bench.report.sheet import to_csv

TEXTS = ["\x1b]0;a\x07", "\x9b2J", "a\u202eb", "a\rb", "[/bold]", "[link=http://a]b[/link]"]
FORMULAS = ["=HYPERLINK(1)", "\t=1+1", "+1+1", "-1+1", "@SUM(1)", " =1", "＝1", "=\x1b[8m1"]
NUMBERS = ["-0.5", "+1", "-inf", "-1e-05", "nan"]
NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def hostile(text: str) -> records.Record:
    made = record(text, config={"model": {"name": text, text: text}})
    made |= {"metrics": {text: 0.5}, "headline": {"name": text, "value": 0.5}}
    made["claims"] |= {"variant": text}
    made["data"] |= dict.fromkeys(("name", "provenance", "notes"), text)
    made["privacy"] |= dict.fromkeys(("claimed_by", "unit"), text)
    return made


def save_two(results: Path, text: str) -> None:
    for seed in range(2):
        run = sha256(f"{text} {seed}".encode()).hexdigest()
        made = hostile(text) | {"run": run, "seed": seed}
        records.write(results / f"runs/a/{run}/record.json", made)


def cells_of(text: str) -> list[str]:
    return [cell for line in csv.reader(io.StringIO(text)) for cell in line]


def is_formula(cell: str) -> bool:
    try:
        float(cell)
        return False
    except ValueError:
        return cell.strip()[:1] in tuple("=+-@＝")


@pytest.mark.parametrize("form", ["rich", "md", "csv", "json"])
def test_a_record_s_text_is_printed_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    for text in (*TEXTS, *FORMULAS):
        save_two(tmp_path, text)
    words = ["results", "--results", str(tmp_path), "--format", form]
    for more in ([], ["--columns", "recipe,run,data_digest"], ["--by", "recipe"], ["nothing=1"]):
        _, out, err = command(capsys, *words, *more)
        assert not NOT_SHOWN.search(out + err)
        if form == "csv":
            assert not any(map(is_formula, cells_of(out)))
        if form == "rich" and not more:
            shown = [text for text in (*TEXTS, *FORMULAS) if not NOT_SHOWN.search(text)]
            assert all(text.strip()[:3] in out for text in shown)


def test_no_cell_of_a_csv_is_computed(tmp_path: Path) -> None:
    for text in FORMULAS:
        save_two(tmp_path, text)
    found = [records.rebuild_csv(tmp_path).read_text()]
    for made in found + [to_csv([{text: text, "a": -0.5}]) for text in FORMULAS]:
        assert not any(map(is_formula, cells_of(made)))
        assert not NOT_SHOWN.search(made)
    assert to_csv([{"a": number} for number in NUMBERS]).split()[1:] == NUMBERS


@pytest.mark.parametrize("kind", ["device", "fifo", "link", "folder"])
def test_an_output_replaces_nothing_but_files(
    tmp_path: Path, kind: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "results", record())
    np.save(tmp_path / "in.npy", np.zeros((1, 8, 8), np.complex64))

    def there(path: Path) -> Path:
        if kind == "device":
            path.symlink_to("/dev/null")  # of a device itself only root can make another
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(tmp_path / "in.npy")
        else:
            path.mkdir(parents=True)
        return path

    before = {path: path.read_bytes() for path in (tmp_path / "in.npy",)}
    writes: list[Any] = [
        lambda: records.write_text(there(tmp_path / "a"), ""),
        lambda: records.write_arrays(there(tmp_path / "a.npz"), {}),
        lambda: predict_file(exported, tmp_path / "in.npy", there(tmp_path / "a.npy")),
    ]
    for write in writes:
        with pytest.raises(UserError, match=r"exists but is not a regular file; choose another"):
            write()
    page = there(tmp_path / "page.html")
    words = ["report", "--results", str(tmp_path / "results"), "--output", str(page)]
    code, _, err = command(capsys, *words)
    assert code == 2
    assert "page.html: exists but is not a regular file" in err
    assert {path: path.read_bytes() for path in before} == before
    assert page.is_symlink() or page.is_fifo() or page.is_dir()
