"""Examples that are not finite are counted, part by part, before a run spends ε on them."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.data.helpers import assert_refused
from tests.extras.own_data.own_data import folder, write_classes
from tests.test_cli import run
from zdp_bench import registry
from zdp_bench.data import Dataset, Examples, Source, Splits, finite
from zdp_bench.data.finite import PartCount, count_not_finite
from zdp_bench.data.phasemnist import PhaseDigits

VALUES = {"NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf}


def examples(count: int, dtype: torch.dtype = torch.float32) -> Examples:
    return Examples(torch.ones(count, 2, 3, dtype=dtype), torch.zeros(count, 2))


def splits(train: Source, test: Source, validation: Source | None = None) -> Splits:
    return Splits(train, test, (2, 3), 2, "own", "d" * 64, validation=validation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("field", ["inputs", "targets"])
def test_one_number_of_an_example_is_enough(
    field: str, value: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "BATCH_NUMEL", 12)  # two examples at a time
    bad = examples(9, dtype)
    numbers = getattr(bad, field)
    for row in (4, 8):
        numbers[row].view(-1)[-1] = VALUES[value]
    if numbers.is_complex():
        numbers[5, 0, 0] = complex(0, VALUES[value])
    counts = count_not_finite(splits(bad, examples(3), examples(0)))
    wrong = 3 if numbers.is_complex() else 2
    assert counts == [
        PartCount("train", 9, wrong, 4),
        PartCount("validation", 0, 0, None),
        PartCount("test", 3, 0, None),
    ]


def test_bytes_and_whole_numbers_are_finite_and_scaled_bytes_may_not_be() -> None:
    pixels = torch.full((4, 1, 2, 2), 255, dtype=torch.uint8)
    labels = torch.zeros(4, dtype=torch.int64)
    plain, scaled = Examples(pixels, labels), Examples(pixels, labels, pixels=(0.5, 1e-45))
    counts = count_not_finite(splits(scaled, plain))
    assert [count.not_finite for count in counts] == [4, 0]


def test_a_source_that_draws_gets_its_uniforms() -> None:
    @dataclass(frozen=True)
    class Drawing(Examples):
        is_stochastic = True

        def batch(self, indices: Tensor, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
            assert uniforms is not None
            return self.inputs[indices] / uniforms[:, :1, None], self.targets[indices]

    whole = examples(3)
    train = Drawing(whole.inputs, whole.targets)
    assert [count.not_finite for count in count_not_finite(splits(train, whole))] == [0, 0]


@dataclass(frozen=True, kw_only=True)
class Damaged(Dataset):
    """A plug-in: seven training examples, none finite, and three to test on."""

    def load(self, root: Path) -> Splits:
        train = examples(7)
        train.inputs[:] = math.nan
        return splits(train, examples(3))


@pytest.mark.parametrize("words", [["damaged"], ["recipe=quickstart"]])
def test_a_set_that_is_all_nan_is_told_before_a_run(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._builders["dataset"], "damaged", Damaged)
    monkeypatch.setattr(registry, "names_of_others", lambda kind: ["damaged"])
    monkeypatch.setattr(PhaseDigits, "load", Damaged.load)
    code, out, err = run(capsys, "data", "check", *words)
    assert code == 2
    assert re.fullmatch(
        r"(\w+): 7 train examples, 7 not finite\n\1: 3 test examples, 0 not finite\n", out
    )
    assert "7 of 7 train examples are not finite, the first of which is number 0" in err
    assert len(err.splitlines()) == 1


def test_own_data_is_counted_as_its_recipe_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scans = write_classes(tmp_path / "scans", "picture")
    words = ["recipe=quickstart", "dataset=folder", f"dataset.path={scans}", "dataset.size=8"]
    words += ["--root", str(tmp_path / "a, b")]
    code, out, _ = run(capsys, "data", "check", *words)
    assert (code, out) == (
        0,
        "folder: 20 train examples, 0 not finite\nfolder: 4 test examples, 0 not finite\n",
    )
    code, _, err = run(capsys, "data", "check", *words, "dataset.deviation=1e-45")
    assert (code, len(err.splitlines())) == (2, 2)
    assert "20 of 20 train examples are not finite" in err


@pytest.mark.parametrize(("kind", "scale"), [("clip", 1e39), ("recording", 3.4e38)])
def test_a_scale_that_leads_beyond_float32_is_refused(
    kind: str, scale: float, tmp_path: Path
) -> None:
    own = folder(write_classes(tmp_path / "d", kind), kind, scale=scale)
    says = r"not finite, with dataset\.scale=.*bad_examples=skip skips"
    assert_refused(lambda: own.load(tmp_path), "", says)


def test_a_recording_that_its_scale_leads_beyond_float32_is_skipped(tmp_path: Path) -> None:
    files = write_classes(tmp_path / "d", "recording")  # up to 1.51 mV
    own = folder(files, "recording", scale=3.4e38 / 1.505, bad_examples="skip")
    assert own.load(tmp_path).notes.endswith("1 unusable skipped")


def test_keys_without_a_recipe_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("check", "mnist", "dataset.check=false"), ("show", "mnist", "x=1")):
        code, _, err = run(capsys, "data", *words)
        assert (code, "takes keys" in err) == (2, True)
