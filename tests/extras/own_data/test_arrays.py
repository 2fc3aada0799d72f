"""Signals as a CSV or a `.npy` array: what they become, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.helpers import assert_refused
from tests.extras.own_data.own_data import folder
from zdp_bench.extras.own_data.arrays import read_table
from zdp_bench.extras.own_data.folder import Folder

SIGNAL = np.arange(20, dtype=np.float64).reshape(2, 10) / 4


def write_csv(path: Path, signal: np.ndarray, head: str = "", separator: str = ",") -> None:
    lines = [separator.join(map(str, row)) for row in signal.T]
    path.write_text("\n".join([head] * bool(head) + lines) + "\n")


def write_signals(home: Path, suffix: str, signal: np.ndarray, **options: Any) -> Folder:
    """Three patients of two classes, each with one file of the same signal."""
    for label in "ab":
        for patient in "xyz":
            file = home / label / f"{label}{patient}" / f"s{suffix}"
            file.parent.mkdir(parents=True)
            if suffix == ".npy":
                np.save(file, signal)
            else:
                write_csv(file, signal, "I,V5")
    kind = "array" if suffix == ".npy" else "table"
    return folder(home, kind, **{"channels": 2, "length": 8, **options})


@pytest.mark.parametrize("suffix", [".npy", ".csv"])
def test_a_signal_is_cut_padded_and_scaled(tmp_path: Path, suffix: str) -> None:
    data = write_signals(tmp_path / "d", suffix, SIGNAL, scale=4.0)
    inputs, _ = data.load(tmp_path).train.batch(torch.tensor([0]))
    assert torch.equal(inputs[0], torch.arange(20.0).reshape(2, 10)[:, :8])
    longer = folder(tmp_path / "d", "array", path=data.path, channels=2, length=12)
    inputs, _ = longer.load(tmp_path).train.batch(torch.tensor([0]))
    assert inputs.shape == (1, 2, 12)
    assert not inputs[..., 10:].any()


def test_complex_samples_stay_complex(tmp_path: Path) -> None:
    data = write_signals(tmp_path / "d", ".npy", SIGNAL * (1 + 2j))
    inputs, _ = data.load(tmp_path).train.batch(torch.tensor([0]))
    assert inputs.dtype == torch.complex64
    assert torch.equal(inputs[0, 1, 0], torch.tensor(2.5 + 5j, dtype=torch.complex64))


def test_a_spectrogram_is_made_of_real_samples_alone(tmp_path: Path) -> None:
    data = write_signals(tmp_path / "d", ".npy", SIGNAL, spectrum=4)
    assert data.load(tmp_path).input_shape == (2, 3, 3)
    data = write_signals(tmp_path / "c", ".npy", SIGNAL * 1j, spectrum=4)
    assert_refused(lambda: data.load(tmp_path), "dataset.spectrum", "is a complex array")


@pytest.mark.parametrize("head", ["", "I;V5", "V5;I", '"I";"V5"', '"V5" ;I', "\nI;V5"])
def test_columns_have_names_or_none(tmp_path: Path, head: str) -> None:
    leads = {"leads": ["V5"], "channels": 1} if head else {"channels": 2}
    data = write_signals(tmp_path / "d", ".csv", SIGNAL, **leads)
    for file in (tmp_path / "d").rglob("*.csv"):
        write_csv(file, SIGNAL, head, ";")
    inputs, _ = data.load(tmp_path).train.batch(torch.tensor([0]))
    plain_head = head.replace('"', "").replace(" ", "").strip()
    row = {"I;V5": [1], "V5;I": [0]}.get(plain_head, [0, 1])
    assert torch.equal(inputs[0], torch.from_numpy(SIGNAL[row, :8]).float())


# what stands in a file -> what the sentence says
REFUSED: dict[str, tuple[np.ndarray | str, str]] = {
    "a transposed array": (SIGNAL.T, r"shape \[10, 2\]; \[2, samples\] was expected"),
    "a volume": (np.zeros((2, 3, 4)), r"shape \[2, 3, 4\]"),
    "an empty array": (np.zeros((2, 0)), r"shape \[2, 0\]"),
    "an array of text": (np.array([["a"], ["b"]]), "numbers were expected"),
    "objects": (np.array([[None], [1]]), "cannot be read"),
    "an array that is not finite": (SIGNAL + np.inf, "not finite"),
    "too large": (SIGNAL * 1e300, "not finite"),
    "complex among real": (SIGNAL * 1j, "complex samples, but other files have real ones"),
    "a word": ("1,2\n3,x\n", "cannot be read"),
    "a hole": ("1,2\n3,\n", "cannot be read"),
    "a short line": ("1,2\n3\n", "cannot be read"),
    "three columns": ("1,2,4\n", "has 3 columns where dataset.channels=2 were expected"),
    "a header alone": ("I,V5\n", "has no line of numbers"),
    "no text": ("", "is empty"),
    "a text of nan": ("1,nan\n", "not finite"),
    "row numbers without a name": ("I,V5\n1,2,3\n2,3,4\n", "names I, V5 .* has 3 columns"),
    "a name without a column": ("time,I,V5\n1,2\n2,3\n", "names time, I, V5 .* has 2 columns"),
    "decimal commas": ("I\n1,5\n2,5\n", "names I in its first line, and has 2 columns"),
    "a hole in the first line": (",2\n3,4\n", "cannot be read"),
    "a first line of holes": (",\n3,4\n", "cannot be read"),
    "a missing value in the first line": ("NA,NA\n3,4\n", "cannot be read"),
    "a word in the first line": ("x,2\n3,4\n", "line x,2, which has words beside numbers"),
    "NA in the first line": ("NA,2\n3,4\n", "cannot be read"),
    "numbered columns": ("0,1\n1.5,2.5\n", "line 0,1, which may number the columns"),
    "columns numbered from 1": ("1,2,3\n5,6,7\n", "line 1,2,3, which may number the columns"),
    "row numbers of pandas": (",I\n0,1.5\n1,2.5\n", "line ,I, which does not name every column"),
    "numbered columns of integers": ("0,1\n1,2\n", "line 0,1, which may number the columns"),
    "a numbered column": ("0\n1.5\n", "line 0, which may number the columns"),
    "a comment": ("1,2\n#3,4\n", "cannot be read"),
    "a comment in a line": ("1,2\n3,4 # bad\n", "cannot be read"),
}


def test_a_column_of_integers_may_begin_with_0(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("0\n-1\n2\n")
    assert read_table(path, 1)[1].tolist() == [[0, -1, 2]]
    path.write_text("0,1\n5,6\n")
    names, samples = read_table(path, 2, ["1", "0"])
    assert (names, samples.tolist()) == (["1", "0"], [[6], [5]])
    path.write_text('"a","b"\n"5","6.5"\n')  # as R writes numbers that are stored as text
    assert read_table(path, 2)[1].tolist() == [[5], [6.5]]


@pytest.mark.parametrize("case", REFUSED)
def test_something_else_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, says = REFUSED[case]
    suffix = ".csv" if isinstance(content, str) else ".npy"
    data = write_signals(tmp_path / "d", suffix, SIGNAL)
    bad = tmp_path / f"d/b/by/s{suffix}"
    if isinstance(content, str):
        bad.write_text(content)
    else:
        np.save(bad, content, allow_pickle=True)
    assert_refused(lambda: data.load(tmp_path), str(bad), says)


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_signals(tmp_path / "d", ".csv", SIGNAL)
    missing = folder(tmp_path / "d", "table", channels=1, length=8, leads=["V9"])
    assert_refused(lambda: missing.load(tmp_path), "s.csv", "columns I, V5, and 'V9' was expected")


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    """The first channel was lead I of some patients and V5 of others."""
    data = write_signals(tmp_path / "d", ".csv", SIGNAL)
    other = tmp_path / "d/b/by/s.csv"
    for head in ("V5,I", ""):
        write_csv(other, SIGNAL, head)
        assert_refused(lambda: data.load(tmp_path), str(other), "where .* has I, V5; set dataset.l")
    write_csv(other, SIGNAL[::-1], "V5,I")
    by_name = folder(tmp_path / "d", "table", channels=2, length=8, leads=["I", "V5"])
    splits = by_name.load(tmp_path)
    inputs, _ = splits.train.batch(torch.arange(len(splits.train)))
    assert torch.equal(inputs, torch.from_numpy(SIGNAL[:, :8]).float().expand_as(inputs))


def test_the_only_column_may_have_any_name(tmp_path: Path) -> None:
    data = write_signals(tmp_path / "d", ".csv", SIGNAL, channels=1)
    for number, file in enumerate(sorted((tmp_path / "d").rglob("*.csv"))):
        write_csv(file, SIGNAL[:1], f"person {number}" * (number % 2))
    assert data.load(tmp_path).input_shape == (1, 8)


def test_a_prediction_names_the_channels_that_it_takes_by_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_signals(tmp_path / "d", ".csv", SIGNAL)
    data.prepare(tmp_path / "d/b/by/s.csv")
    assert "taken by their places: I, V5" in caplog.text
