"""What a stranger's record holds reaches no terminal as a command and no sheet as a formula."""

import csv
import io
import os
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

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


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two runs for each hostile text, which stands wherever a record has a text."""
    for text in (*TEXTS, *FORMULAS):
        for seed in range(2):
            run = sha256(f"{text} {seed}".encode()).hexdigest()
            made = record(text, seed, config={"model": {"name": text, text: text}}, run=run)
            made |= {"metrics": {text: 0.5}, "headline": {"name": text, "value": 0.5}}
            made["claims"] |= {"variant": text}
            made["data"] |= dict.fromkeys(("name", "provenance", "notes"), text)
            made["privacy"] |= dict.fromkeys(("claimed_by", "unit"), text)
            records.write(tmp_path / f"runs/a/{run}/record.json", made)
    return tmp_path


def assert_no_formula(text: str) -> None:
    for cell in (cell for line in csv.reader(io.StringIO(text)) for cell in line):
        if cell not in NUMBERS and not re.fullmatch(r"[-+]?[\d.e+-]+", cell):
            assert not cell.strip().startswith(tuple("=+-@＝"))


@pytest.mark.parametrize("form", ["rich", "md", "csv", "json"])
def test_a_record_s_text_is_printed_as_text(
    results: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    words = ["results", "--results", str(results), "--format", form]
    for more in ([], ["--columns", "recipe,run,data_digest"], ["--by", "recipe"], ["nothing=1"]):
        _, out, err = command(capsys, *words, *more)
        assert not NOT_SHOWN.search(out + err)
        if form == "csv":
            assert_no_formula(out)
        if form == "rich" and not more:
            shown = [text for text in (*TEXTS, *FORMULAS) if not NOT_SHOWN.search(text)]
            assert all(text.strip()[:3] in out for text in shown)


def test_no_cell_of_a_csv_is_computed(results: Path) -> None:
    tables = [records.rebuild_csv(results).read_text()]
    for made in tables + [to_csv([{text: text, "a": -0.5}]) for text in FORMULAS]:
        assert_no_formula(made)
        assert not NOT_SHOWN.search(made)
    assert to_csv([{"a": number} for number in NUMBERS]).split()[1:] == NUMBERS


@pytest.mark.parametrize("kind", ["device", "fifo", "link", "folder"])
def test_an_output_replaces_nothing_but_files(
    tmp_path: Path, kind: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "results", record())
    np.save(tmp_path / "in.npy", np.zeros((1, 8, 8), np.complex64))
    before = (tmp_path / "in.npy").read_bytes()

    def there(name: str) -> Path:
        path = tmp_path / name
        {
            "device": lambda: path.symlink_to("/dev/null"),
            "fifo": lambda: os.mkfifo(path),
            "link": lambda: path.symlink_to(tmp_path / "in.npy"),
            "folder": lambda: path.mkdir(parents=True),
        }[kind]()
        return path

    writes: list[Callable[[], object]] = [
        lambda: records.write_text(there("a"), ""),
        lambda: records.write_arrays(there("a.npz"), {}),
        lambda: predict_file(exported, tmp_path / "in.npy", there("a.npy")),
    ]
    for write in writes:
        with pytest.raises(UserError, match=r"not a regular file"):
            write()
    page = there("page.html")
    words = ["report", "--results", str(tmp_path / "results"), "--output", str(page)]
    code, _, err = command(capsys, *words)
    assert (code, "page.html: exists but is not a regular file" in err) == (2, True)
    assert (tmp_path / "in.npy").read_bytes() == before
    assert page.is_symlink() or page.is_fifo() or page.is_dir()
