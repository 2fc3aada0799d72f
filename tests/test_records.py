"""Records are written whole, read back as they were, and turned into one CSV of stable columns."""

import json
import math
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zdp_bench import disk, records
from zdp_bench.disk import hold_lock
from zdp_bench.errors import UserError
from zdp_bench.records import files
from zdp_bench.training.spending_file import read_plan


def record(recipe: str = "r", seed: int = 0, value: float = 0.5, **more: Any) -> records.Document:
    return {
        "recipe": recipe,
        "seed": seed,
        "run": f"{recipe}{seed}".ljust(64, "0"),
        "experiment": recipe.ljust(64, "e"),
        "config": {},
        "claims": {"table": "p/1", "row": "a", "variant": None},
        "headline": {"name": "accuracy", "value": value},
        "metrics": {"accuracy": value},
        "privacy": {
            "epsilon_tight": math.inf,
            "epsilon_claimed": 0.5,
            "claimed_by": "rdp",
            "unit": "patient",
            "epsilon_of": "example",
            "examples_per_patient": 1,
            "delta": 1e-5,
            "z": 1.0,
            "steps": 7,
            "sampling": {
                "scheme": "poisson",
                "sample_rate": 0.1,
                "expected_batch_size": 5.0,
                "records": 50,
            },
        },
        "data": {"name": "d", "provenance": "official", "digest": "d" * 64, "notes": ""},
        "stopped_by": "epochs",
        **more,
    }


def save(results: Path, *of: records.Document) -> None:
    for document in of:
        records.write(
            records.folder(results, document["recipe"], document["run"]) / "record.json", document
        )


def typed(documents: Iterable[records.Document]) -> list[records.Record]:
    return [records.Record.of(document) for document in documents]


def test_infinity_and_nan_survive(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    records.write(path, record(a=math.inf, b=[1, -math.inf], c={"d": math.nan}, e="text"))
    back = records.read_document(path)
    assert back is not None
    assert (back["a"], back["b"], back["e"]) == (math.inf, [1, -math.inf], "text")
    assert math.isnan(back["c"]["d"])
    assert "Infinity" not in path.read_text()


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "Infinity", "NaN", '"inf"', 'a"inf', "\\"])
def test_a_text_that_looks_like_a_number_stays_a_text(tmp_path: Path, text: str) -> None:
    """A run named inf could be read no more, and neither could any budget."""
    labels = {"name": text, "tags": [text, "a"], "notes": text}
    document = record(labels=labels, values=[{text: text}, math.inf, text])
    save(tmp_path, document)
    (back,) = records.read_all(tmp_path)
    assert back.document == document
    assert vars(back.labels) == labels


WORDS = st.sampled_from(["inf", "-inf", "nan", "Infinity", "NaN", '"inf"']) | st.text(max_size=5)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
def test_every_plain_value_comes_back_from_json(value: Any) -> None:
    text = records.format_json(value)
    assert records.from_json(text) == value
    json.loads(text, parse_constant=pytest.fail)  # no number that JSON lacks


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_that_differ_in_their_last_digit_do_not_tie(tmp_path: Path, dtype: Any) -> None:
    scores = [dtype(-1000.0)]
    for _ in range(5):
        scores.append(np.nextafter(scores[-1], dtype(1)))
    truth, written = np.arange(6) % 2, np.array([*scores[:-1], dtype(1e-20)])
    records.write_scores(tmp_path / "scores.csv", truth, written)
    back = records.read_scores(tmp_path / "scores.csv")
    assert back is not None
    assert back[0].tolist() == truth.tolist()
    assert back[1].astype(dtype).tolist() == written.tolist()


def test_the_first_files_of_a_data_set_name_its_owners_as_later_ones_do(tmp_path: Path) -> None:
    """One unit had two names, so the joint ε of its runs was not known."""
    records_of_data = []
    for unit in ("patient", "volume"):
        document = record(data={"name": "msd", "provenance": "official", "digest": "d" * 64})
        document["privacy"] |= {"unit": unit, "epsilon_of": unit}
        records_of_data.append(document)
    first, later = typed(records_of_data)
    assert first.privacy == later.privacy
    assert first.get("privacy.unit") == "volume"
    path = tmp_path / "spending.json"  # all that is left of a deleted run
    records.write(path, {key: records_of_data[0][key] for key in ("recipe", "data", "privacy")})
    assert read_plan(path).privacy.unit == read_plan(path).privacy.epsilon_of == "volume"
    assert records_of_data[0]["privacy"]["unit"] == "patient", "the document is as it was written"
    (patients,) = typed([record()])
    assert patients.privacy.unit == "patient"


def test_a_record_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    records.write(path, record(a=1))

    def power_cut(*_: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(OSError, match="power cut"):
        records.write(path, record(a=2))
    assert records.read_document(path) == record(a=1)
    assert records.read(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1,2]", b"\x80\x04\xff", b'{"recipe": "r"', b'{"recipe": "r", "seed": "x"}'],
)
def test_a_damaged_record_is_told_by_path_and_the_others_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    save(tmp_path, record("a"), record("b"))
    path = records.folder(tmp_path, "a", record("a")["run"]) / "record.json"
    path.write_bytes(content)
    assert [run.recipe for run in records.read_all(tmp_path)] == ["b"]
    records.rebuild_csv(tmp_path)
    assert capsys.readouterr().err.count(f"left out: {path}: ") == 1
    with pytest.raises(UserError, match=r"record\.json: .* Delete it"):
        records.read_document(path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("data.name", None),
        ("data.digest", []),
        ("data.provenance", math.nan),
        ("headline.name", "another"),
        ("headline.value", "x"),
        ("metrics.accuracy", {}),
        ("privacy.delta", None),
        ("privacy.epsilon_tight", "x"),
        ("privacy.epsilon_patient", []),
        ("privacy.claimed_by", 1),
        ("epochs", "x"),
        ("labels", "x"),
        ("labels", {"name": 1}),
        ("labels", {"tags": [1]}),
        ("epochs", [3]),
        ("epochs", [{"epoch": 1}]),
        ("epochs", [{"epoch": "1st", "step": 1}]),
        ("epochs", [{"epoch": 1, "step": 1, "accuracy": []}]),
        ("privacy.z", -1.0),
        ("privacy.steps", 10**18),
        ("privacy.nodes", [{}]),
        ("privacy.ledger", {"entries": 8, "digest": "d"}),  # and 7 steps
        ("privacy.clipping", {"quantile": 0.5}),
        ("claims", {"table": 1}),
        ("environment", {"threads": "all"}),
        ("measured", {"train_seconds": "long"}),
        ("validation", {"accuracy": []}),
        ("stopped_by", []),
        ("config", {"trainer": []}),
        ("config", {"trainer": {"epochs": "all"}}),
        ("config", {"privacy": {"target_epsilon": "low"}}),
        ("config", {"dataset": None}),
        ("config", {"federated": 3}),
    ],
)
def test_a_record_with_a_damaged_field_is_left_out(tmp_path: Path, path: str, value: Any) -> None:
    """Tables and pages would trip over it."""
    damaged = record("a")
    group, _, key = path.partition(".")
    damaged[group] = damaged[group] | {key: value} if key else value
    save(tmp_path, damaged, record("b"))
    assert [run.recipe for run in records.read_all(tmp_path)] == ["b"]


def test_the_csv_is_rebuilt_with_stable_columns_and_order(tmp_path: Path) -> None:
    save(tmp_path, record("b", 2), record("b", 1), record("a", 3))
    frame = pd.read_csv(records.rebuild_csv(tmp_path))
    assert list(frame.columns) == list(records.COLUMNS)
    # what a record means that does not name its unit
    assert set(frame["privacy_unit"]) == {"patient"}
    assert frame[["recipe", "seed"]].to_numpy().tolist() == [["a", 3], ["b", 1], ["b", 2]]
    assert math.isinf(frame["epsilon_tight"][0])
    assert frame["epsilon_tight_at_least"].isna().all()  # records of before there was one
    first = (tmp_path / "records.csv").read_bytes()
    records.rebuild_csv(tmp_path)
    assert (tmp_path / "records.csv").read_bytes() == first


@pytest.mark.parametrize("value", [[[1], {}], {"a": [1]}, [None]])
def test_whatever_stands_in_a_column_is_a_cell(tmp_path: Path, value: Any) -> None:
    save(tmp_path, record("a", model={"parameters_real": value}, environment={"commit": None}))
    assert len(records.rebuild_csv(tmp_path).read_text().splitlines()) == 2


def test_a_run_appends_its_row_once_and_reads_no_other_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run read all records to write the file anew: 5 s at 10,000."""
    path = tmp_path / "records.csv"
    documents = [record("b"), record("a", labels={"tags": ["=1", "x"]}), record("c")]
    save(tmp_path, documents[0])
    runs = typed(documents)
    records.renew_csv(tmp_path, runs[0])
    with monkeypatch.context() as context:
        context.setattr(files, "read_all", None)
        for run in [*runs, runs[1]]:
            records.renew_csv(tmp_path, run)
    assert [line.partition(",")[0] for line in path.read_text().splitlines()[1:]] == ["b", "a", "c"]
    save(tmp_path, *documents[1:])
    appended = sorted(path.read_text().splitlines()[1:])
    assert records.rebuild_csv(tmp_path).read_text().splitlines()[1:] == appended


@pytest.mark.parametrize("other", [{"recipe": "copy"}, {"recipe": "a"}, {"seed": 5}])
def test_a_row_is_written_of_each_record_of_one_run(tmp_path: Path, other: dict[str, Any]) -> None:
    """Of two recipes that share a run, and of the later of two records."""
    documents = [record("copy_a", 1), record("copy_a", 1) | other]
    for document in documents:
        save(tmp_path, document)
        records.renew_csv(tmp_path, *typed([document]))
    appended = (tmp_path / "records.csv").read_text()
    assert appended == records.rebuild_csv(tmp_path).read_text()
    assert len(appended.splitlines()) == 1 + len({document["recipe"] for document in documents})


@pytest.mark.parametrize("damaged", ["", "recipe,seed\na,0\n", "{whole}b,0"])
def test_a_csv_that_is_cut_or_of_another_version_is_rebuilt(tmp_path: Path, damaged: str) -> None:
    save(tmp_path, record("a"), record("b"))
    whole = records.rebuild_csv(tmp_path).read_text()
    (tmp_path / "records.csv").write_text(damaged.format(whole=whole))
    records.renew_csv(tmp_path, typed([record("b")])[0])
    assert (tmp_path / "records.csv").read_text() == whole


def test_whoever_waits_for_a_lock_says_for_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disk, "PATIENCE", 0.01)
    entered = threading.Event()

    def wait() -> None:
        with hold_lock(tmp_path / "lock"):
            entered.set()

    waiting = threading.Thread(target=wait)
    with hold_lock(tmp_path / "lock"):
        waiting.start()
        while "waiting for the process that holds" not in (message := capsys.readouterr().err):
            assert not entered.wait(0.01)
    waiting.join(60)
    assert entered.is_set()
    assert str(tmp_path / "lock") in message
    with hold_lock(tmp_path / "lock"):  # free
        pass
    assert not capsys.readouterr().err


def test_many_writers_leave_a_whole_csv(tmp_path: Path) -> None:
    save(tmp_path, *(record("r", seed) for seed in range(20)))
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda _: records.write_text(tmp_path / f"x{_ % 2}.csv", "whole\n" * 1000),
                range(40),
            )
        )
    assert all((tmp_path / f"x{n}.csv").read_text() == "whole\n" * 1000 for n in range(2))
    assert not list(tmp_path.glob(".x*"))


@pytest.mark.parametrize("text", ["inf", 'a "inf"', '"nan', "\\", '\\"-inf"', "nan: 1"])
def test_no_text_or_key_is_a_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    records.write(path, record(told={"nan": [text], "inf": text}, other=[math.inf]))
    back = records.read_document(path)
    assert back is not None
    assert back["told"] == {"nan": [text], "inf": text}
    assert back["other"] == [math.inf]


def test_a_lock_follows_no_link_and_keeps_what_is_in_its_file(tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", tmp_path / "run.lock"
    victim.write_text("kept")
    lock.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), hold_lock(lock):
        pass
    lock.unlink()
    lock.write_text("kept")
    with hold_lock(lock):
        pass
    assert victim.read_text() == lock.read_text() == "kept"


DIGEST = "579a1ebe12b07310" + 48 * "c"


@pytest.mark.parametrize(
    ("word", "is_named"),
    [
        ("quickstart", True),
        (DIGEST, True),
        (DIGEST[:16], True),
        (DIGEST[:20], True),
        (DIGEST[:4], True),
        (DIGEST[:3], False),
        (f"quickstart/{DIGEST}", True),
        ("quickstart/5", True),
        (f"start/{DIGEST}", False),
        ("quick", False),
        (f"{DIGEST[:16]}.deleted-1", False),
        (f"{DIGEST[:15]}f", False),
    ],
)
def test_a_word_names_a_run_by_its_digest_or_by_its_folder(word: str, is_named: bool) -> None:
    for run in (DIGEST, DIGEST[:16]):
        assert records.is_named(word, "quickstart", run) == is_named
