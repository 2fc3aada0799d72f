"""Check an exported folder: digests, weights, ledger, every ε, recipe and card.

Every number on privacy is computed again from the configuration, the counts and the ledger, by the
code that made the record. What no file of the folder can prove is listed as not checked.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from zdp_bench import __version__
from zdp_bench.config.digests import experiment_digest, run_digest
from zdp_bench.config.schema import Run
from zdp_bench.data.files import sha256
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing import own_card
from zdp_bench.extras.sharing.card import card, head_of
from zdp_bench.extras.sharing.export import recipe_of
from zdp_bench.extras.sharing.folder import Report
from zdp_bench.extras.sharing.loading import config_of, info_of, without_download
from zdp_bench.privacy.ledger import Copy, Ledger, LedgerError, Position
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.records import Record, to_json
from zdp_bench.training.checkpoint import state_digest
from zdp_bench.training.plan import rounds_of, steps_of
from zdp_bench.training.record import privacy_report, released_report
from zdp_bench.training.setup import ModelSetup

State = Literal["right", "wrong", "not checked"]
CLOSE = 1e-6  # relative: an ε of another machine differs by rounding
NOT_IN_EPSILON = ("noise_multiplier", "randomness_from", "fixed_state", "records_per_owner")
UNPROVABLE = (
    "that the ledger lists every release, and that the weights come from its steps: a run written "
    "anew as a whole looks like a true one",
    "the training data, the test metrics and the most examples of one patient: no data is here",
)
UNPROVABLE_OF_OWN = (
    f"privacy.{', '.join(NOT_IN_EPSILON)}: no ε follows from them; and that the owner's loop was "
    "private outside of its steps",
)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `found` says what is wrong, or why it was not checked."""

    what: str
    state: State
    found: str = ""


def verify(folder: Path) -> list[Check]:
    """Return everything that was checked, with what is wrong, and what could not be checked.

    Raises:
        UserError: the folder is no exported model, or its configuration is not known here.
    """
    if files.is_own(folder):
        return _verify_own(folder)
    record = files.read_record(folder)
    config = config_of(record)
    setup = ModelSetup.of(without_download(config), info_of(record), torch.device("cpu"))
    return [
        *_check_sums(folder),
        _check_weights(folder, record),
        _check_names(config, record),
        *_check_privacy(folder, record, setup),
        _check_head(folder, head_of(record)),
        *_check_texts(folder, record, {files.RECIPE: recipe_of, files.CARD: card}),
        *(Check(what, "not checked") for what in UNPROVABLE),
    ]


def _verify_own(folder: Path) -> list[Check]:
    """Check the model of a loop of one's own: ε follows from its mechanism and ledger alone."""
    report = files.read_report(folder)
    return [
        *_check_sums(folder),
        _check_weights(folder, report, "report"),
        *_check_own_privacy(folder, report),
        _check_head(folder, own_card.head_of(report), "report"),
        *_check_texts(folder, report, {files.CARD: own_card.card}, "report"),
        *(Check(what, "not checked") for what in (*UNPROVABLE, *UNPROVABLE_OF_OWN)),
    ]


def _check_own_privacy(folder: Path, report: Report) -> Iterator[Check]:
    """Compute ε, z and steps again from the mechanism that the ledger's head names."""
    privacy = report["privacy"]
    try:
        mechanism = Mechanism.from_dict(privacy["mechanism"])
        ledger = _read_ledger(folder, mechanism, False, report["owners"])
    except (LedgerError, ValueError) as error:
        yield Check(files.LEDGER, "wrong", str(error))
        return
    secure = privacy["randomness"] == "cryptographic"
    again = released_report(mechanism, ledger, ledger.releases, privacy["delta"], secure)
    again["epsilon_of"] = "owner" if report["owners"] else "record"
    stated = {key: value for key, value in privacy.items() if key not in NOT_IN_EPSILON}
    yield from _compare_privacy(report, again, stated, "privacy")


def _check_sums(folder: Path) -> Iterator[Check]:
    sums = files.read_sums(folder)
    if not sums:
        yield Check(files.SUMS, "wrong", "is missing or empty")
    for name, expected in sums.items():
        path = folder / Path(name).name
        found = "" if path.is_file() and sha256(path) == expected else "is not the file exported"
        yield _check(f"SHA-256 of {name}", found if path.is_file() else "is missing")
    for path in sorted(folder.iterdir()):
        if path.name not in sums and path.name != files.SUMS:
            yield Check(path.name, "not checked", f"is not listed in {files.SUMS}")


def _check_weights(folder: Path, record: Record, of: str = "record") -> Check:
    what, expected = f"weights are those of the {of}", record["measured"]["weights"]["digest"]
    try:
        found = state_digest(files.read_weights(folder / files.WEIGHTS))
    except UserError as error:
        return Check(what, "wrong", str(error))
    same = found == expected
    return _check(what, "" if same else f"measured.weights.digest {expected}, file {found}")


def _check_names(config: Run, record: Record) -> Check:
    """Check that configuration, seed and data digest are those that the run is named by."""
    start, data = record.get("start"), record["data"]["digest"]
    run = run_digest(config, f"{data}:{start['weights']}" if start else data)
    same = run == record["run"] and experiment_digest(config) == record["experiment"]
    found = f"run {record['run'][:16]}, but they make {run[:16]}{_other_version(record)}"
    return _check("configuration, seed and data name the run", "" if same else found)


def _check_privacy(folder: Path, record: Record, setup: ModelSetup) -> Iterator[Check]:
    """Compute the record's section on privacy again, and compare every value."""
    if "nodes" in record["privacy"]:
        yield from _check_federation(record, setup)
        return
    privacy = record["privacy"]
    whole = setup.with_plan()
    try:
        ledger = _read_ledger(folder, whole.mechanism, privacy["randomness"] == "seeded")
    except LedgerError as error:
        yield Check(files.LEDGER, "wrong", str(error))
        ledger = Copy((), Position(**privacy["ledger"]), repeatable=True)
    again = privacy_report(whole, ledger, privacy["records_per_patient"], privacy["unit"])
    yield from _compare_privacy(record, again, privacy, "privacy")


def _read_ledger(folder: Path, mechanism: Mechanism, repeatable: bool, whose: str = "") -> Ledger:
    """Read a copy of the ledger and of those set aside: opening one may mend it."""
    if not (folder / files.LEDGER).is_file():
        raise LedgerError(f"{files.LEDGER}: is missing")
    with tempfile.TemporaryDirectory() as place:
        files.copy_ledger(folder / files.LEDGER, Path(place))
        try:
            ledger = Ledger(Path(place) / files.LEDGER, mechanism, repeatable, whose=whose)
        except LedgerError as error:
            raise LedgerError(str(error).replace(f"{place}/", "")) from None
        ledger.close()
        return ledger


def _check_federation(record: Record, setup: ModelSetup) -> Iterator[Check]:
    """Compute the ε of every node again; their ledgers and patients are at the nodes."""
    privacy, config = record["privacy"], setup.config
    nodes = privacy["nodes"]
    plan = rounds_of(config, [node["sampling"]["records"] for node in nodes])
    own_of = cache(lambda size: setup.with_plan(steps_of(config, size, plan.steps)))
    skipped = ("ledger", "epsilon_patient", "epsilon_patient_at_least", "answers", "unconfirmed")
    for node in nodes:
        own = own_of(node["sampling"]["records"])
        releases = node["steps"] - own.plan.range_test_steps
        again = privacy_report(own, Copy((), Position(releases, ""), True), 1, privacy["unit"])
        stated = {key: value for key, value in node.items() if key not in (*skipped, "node")}
        yield from _compare_privacy(record, again, stated, f"node {node['node']}")
    worst = {
        key: max(node[key] for node in nodes)
        for key in nodes[0]
        if key.startswith("epsilon_") or key == "steps"
    }
    yield from _compare_privacy(record, worst, {key: privacy[key] for key in worst}, "privacy")
    yield Check("the nodes' ledgers, and each node's ε of a patient", "not checked")


def _compare_privacy(
    record: Record, again: dict[str, Any], stated: dict[str, Any], where: str
) -> Iterator[Check]:
    for key in stated:
        wrong = list(_differences(to_json(again.get(key)), to_json(stated[key]), f"{where}.{key}"))
        found = "; ".join(wrong[:3]) + (_other_version(record) if wrong else "")
        yield _check(f"{where}.{key}", found)


def _check_text(path: Path, expected: str, of: str) -> Check:
    """Check a file that follows from the record, or the report, line by line."""
    what = f"{path.name} says what the {of} says"
    if not path.is_file():
        return Check(what, "wrong", "is missing")
    lines, ours = path.read_text(encoding="utf-8").split("\n"), expected.split("\n")
    for number in range(max(len(lines), len(ours))):
        if lines[number : number + 1] != ours[number : number + 1]:
            return Check(what, "wrong", f"line {number + 1}: {''.join(lines[number : number + 1])}")
    return Check(what, "right")


def _check_head(folder: Path, expected: dict[str, Any], of: str = "record") -> Check:
    """Compare the head of the card with what it should be, value by value."""
    path = folder / files.CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        head = yaml.safe_load(text.split("---\n")[1])
    except (yaml.YAMLError, IndexError):
        head = None
    wrong = list(_differences(expected, head, "")) if isinstance(head, dict) else ["no head"]
    return _check(f"head of {path.name} says what the {of} says", "; ".join(wrong[:5]))


def _check_texts(
    folder: Path,
    record: Record,
    writers: dict[str, Callable[[Record], str]],
    of: str = "record",
) -> Iterator[Check]:
    """Compare each file with what this version would write, if it made the record."""
    for name, write in writers.items():
        if _other_version(record):
            yield Check(f"text of {name}", "not checked", "another version wrote it")
        else:
            yield _check_text(folder / name, write(record), of)


def _differences(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    """Yield each place where two JSON values differ; floats by more than rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours.keys() | theirs.keys():
            yield from _differences(ours.get(key), theirs.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(*pair, f"{where}[{index}]")
    elif isinstance(ours, float) and isinstance(theirs, float | int):
        if not math.isclose(ours, theirs, rel_tol=CLOSE):
            yield f"{where} says {theirs}, computed {ours:.6g}"
    elif ours != theirs:
        yield f"{where} says {theirs}, computed {ours}"


def _other_version(record: Record) -> str:
    """Return a remark if another version of zdp-bench made the record."""
    made_by = record["environment"]["versions"]["zdp-bench"]
    return (
        f" (made by zdp-bench {made_by}, this is {__version__})" if made_by != __version__ else ""
    )


def _check(what: str, wrong: str) -> Check:
    return Check(what, "wrong" if wrong else "right", wrong)
