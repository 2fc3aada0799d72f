"""Check an exported folder: digests, weights, ledger, every ε, recipe and card.

Every number on privacy is computed again from the configuration, the counts and the ledger, by the
code that made the record. What no file of the folder can prove is listed as not checked.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from zdp_bench import __version__
from zdp_bench.config.digests import experiment_digest, run_digest
from zdp_bench.errors import UserError, first_line
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.export import texts_of
from zdp_bench.extras.sharing.folder import Source
from zdp_bench.extras.sharing.loading import config_of, sketch_of
from zdp_bench.foreign_files import read_text
from zdp_bench.gradients.clipping import trainable
from zdp_bench.library.keys import kind_of
from zdp_bench.library.starts import Earlier, Trainings, describe
from zdp_bench.privacy.accounting import part_epsilon
from zdp_bench.privacy.ledger import Ledger, Tally
from zdp_bench.privacy.ledger_lines import LedgerError
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.records import Document, get, to_json
from zdp_bench.training.build import count_real
from zdp_bench.training.checkpoint import state_digest
from zdp_bench.training.plan import rounds_of, steps_of
from zdp_bench.training.run import epsilon_of, privacy_report, released_report
from zdp_bench.training.setup import ModelSetup

State = Literal["right", "wrong", "not checked"]
CLOSE = 1e-6  # relative: an ε of another machine differs by rounding
# Of a loop of one's own: in no file but the report.
ONLY_IN_REPORT = {
    "noise_multiplier",
    "randomness_from",
    "fixed_state",
    "examples_per_owner",
    "steps_taken",
    "delta",
}
NOT_HERE = "their ledgers are in other folders"
ONLY_IN_DATA = {"unit", "examples_per_patient"}  # of a run
# A federation's node keeps its ledger and its patients to itself.
ONLY_AT_NODES = {
    "node",
    "ledger",
    "steps",
    "epsilon_patient",
    "epsilon_patient_at_least",
    "answers",
    "unconfirmed",
}
UNPROVABLE = (
    "that the ledger lists every release, and that the weights come from its steps: someone may "
    "have rewritten the whole run",
    "the training data, the test metrics, the most examples of one patient, versions and commit: "
    "cannot be recomputed from this folder",
)
UNPROVABLE_OF_OWN = "the network's size, and that the owner's loop was private outside its steps"


@dataclass(frozen=True)
class Check:
    """One checked item; `found` states what is wrong, or why it was not checked."""

    what: str
    state: State
    found: str = ""


def verify(folder: Path) -> list[Check]:
    """Return everything that was checked, with what is wrong, and what could not be checked."""
    source = files.read(folder)
    unprovable = list(UNPROVABLE)
    if files.is_report(source):
        unprovable.append(UNPROVABLE_OF_OWN)
    # before the weights are read: they may not fit
    of_privacy = _check_privacy(folder, source)
    return [
        *_check_sums(folder),
        _check_weights(folder, source),
        *of_privacy,
        *_check_texts(folder, source),
        *(Check(what, "not checked") for what in unprovable),
    ]


def _check_privacy(folder: Path, source: Source) -> list[Check]:
    """Return what was checked of the section on privacy, and of what names the run."""
    checks = list[Check]()
    try:
        if files.is_report(source):
            files.read_shapes(folder / files.WEIGHTS)  # so that they are as long as their head says
            checks += _check_loop(folder, source)
        else:
            setup = sketch_of(folder, source)
            checks.append(_check_names(source, setup))
            if source["privacy"].get("nodes"):
                checks += _check_federation(source, setup)
            else:
                checks += _check_run(folder, source, setup)
    except LedgerError as error:
        checks.append(Check(files.LEDGER, "wrong", str(error)))
        checks.append(Check("privacy", "not checked", "it follows from the ledger"))
    return checks


def _check_sums(folder: Path) -> Iterator[Check]:
    sums = files.read_sums(folder)
    if not sums:
        yield Check(files.SUMS, "wrong", "is missing or empty")
    for name, expected in sums.items():
        yield _check(f"SHA-256 of {name}", files.misses(folder / name, expected))
    for path in sorted(folder.iterdir()):
        if path.name not in sums and path.name != files.SUMS:
            yield Check(path.name, "not checked", f"is not listed in {files.SUMS}")


def _check_weights(folder: Path, source: Source) -> Check:
    what = "weights are those that were exported"
    try:
        digest = state_digest(files.read_weights(folder / files.WEIGHTS))
    except UserError as error:
        return Check(what, "wrong", str(error))
    return _compare(what, digest, source["measured"]["weights"]["digest"])


def _check_names(record: Document, setup: ModelSetup) -> Check:
    """Check that configuration, seed and data digest are those that the run is named by."""
    config, start = config_of(record), record.get("start")
    data = record["data"]["digest"]
    if start:
        data = f"{data}:{start['weights']}"
    ours = {
        "run": run_digest(config, data, record["environment"].get("plugins")),
        "experiment": experiment_digest(config),
        "recipe": config.recipe,
        "seed": config.seed,
        "data.name": config.dataset.name,
        "model.parameters_real": count_real(trainable(setup.model).values()),
    }
    stated = {key: get(record, key) for key in ours}
    return _compare("configuration, seed and data name the run", ours, stated)


def _check_run(
    folder: Path,
    record: Document,
    setup: ModelSetup,
) -> Iterator[Check]:
    """Compute the record's section on privacy again, and compare every value."""
    privacy, config = record["privacy"], setup.config
    with torch.device("meta"):
        whole = setup.with_plan()
    facts = {"epsilon_of": epsilon_of(config, privacy["unit"])}
    ledger = _read_ledger(folder, whole.mechanism, not config.privacy.secure, facts)
    again = privacy_report(whole, ledger, privacy["examples_per_patient"], privacy["unit"])
    unknown = ONLY_IN_DATA | (facts.keys() - ledger.facts.keys())
    yield from _compare_each(again, privacy, "privacy", unknown)


def _check_loop(folder: Path, report: Source) -> Iterator[Check]:
    """Compute ε, z and steps of your own loop again, from its mechanism and ledger alone."""
    privacy, owners = report["privacy"], report["owners"]
    kind, delta = kind_of(privacy["randomness_from"]), privacy["delta"]
    facts = {"randomness": kind}
    try:
        mechanism = Mechanism.from_dict(privacy["mechanism"])
    except ValueError as error:
        raise LedgerError(str(error)) from None
    ledger = _read_ledger(folder, mechanism, False, facts, owners)
    steps = ledger.releases
    own = Earlier("", owners, mechanism.z, mechanism.sampling, steps)
    again = {
        **released_report(mechanism, ledger, steps, delta, kind == "cryptographic"),
        "epsilon_of": "owner" if owners else "example",
        "epsilon_part": part_epsilon(mechanism, steps, delta),
        "start": describe(own, _earlier_of(privacy), delta),
    }
    unknown = ONLY_IN_REPORT | (facts.keys() - ledger.facts.keys())
    yield Check("earlier trainings of the starting weights", "not checked", NOT_HERE)
    yield from _compare_each(again, privacy, "privacy", unknown)


def _earlier_of(privacy: dict[str, Any]) -> Trainings:
    """Return the trainings that a report states of its starting weights."""
    stated = (privacy.get("start") or {}).get("trainings") or ()
    try:
        return frozenset(Earlier.from_dict(training) for training in stated)
    except ValueError as error:
        raise LedgerError(f"privacy.start: {error}") from None


def _read_ledger(
    folder: Path,
    mechanism: Mechanism,
    repeatable: bool,
    facts: dict[str, str],
    whose: str = "",
) -> Ledger:
    """Read a copy of the ledger and of those set aside: opening one may repair it."""
    if not (folder / files.LEDGER).is_file():
        raise LedgerError(f"{files.LEDGER}: is missing")
    with tempfile.TemporaryDirectory() as place:
        files.copy_ledger(folder / files.LEDGER, Path(place))
        path = Path(place) / files.LEDGER
        try:
            ledger = Ledger(path, mechanism, repeatable, whose=whose, facts=facts)
        except LedgerError as error:
            raise LedgerError(str(error).replace(f"{place}/", "")) from None
        ledger.close()
        return ledger


def _check_federation(record: Document, setup: ModelSetup) -> Iterator[Check]:
    """Compute the ε of every node again; their ledgers and patients are at the nodes."""
    privacy, config = record["privacy"], setup.config
    nodes = privacy["nodes"]
    plan = rounds_of(config, [node["sampling"]["records"] for node in nodes])
    own_of = cache(lambda size: setup.with_plan(steps_of(config, size, plan.steps)))
    for node in nodes:
        with torch.device("meta"):
            own = own_of(node["sampling"]["records"])
        ledger = Tally(True, node["steps"])
        again = privacy_report(own, ledger, 1, privacy["unit"])
        yield from _compare_each(again, node, f"node {node['node']}", ONLY_AT_NODES)
    for key in privacy:
        values = [node.get(key) for node in nodes]
        if key.startswith("epsilon_") and all(isinstance(value, float) for value in values):
            yield _compare(f"privacy.{key}", max(values), privacy[key])
    yield Check("the nodes' ledgers, steps and examples, and each ε of a patient", "not checked")


def _check_texts(folder: Path, source: Source) -> Iterator[Check]:
    """Compare recipe and card with what this version writes."""
    made_by = source["environment"]["versions"]["zdp-bench"]
    try:
        texts = texts_of(source)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A stranger's report may hold anything where no check needs a form.
        reason = f"cannot be made from the report: {first_line(error)}"
        yield Check("texts of recipe and card", "wrong", reason)
        return
    for name, ours in texts.items():
        what = f"text of {name}"
        try:
            same = read_text(folder / name) == ours
        except UserError as error:
            yield Check(what, "wrong", str(error))
            continue
        if made_by != __version__:
            yield Check(what, "not checked", f"zdp-bench {made_by} wrote it")
        else:
            yield _check(what, "" if same else "is not what was exported: it was edited")


def _compare_each(
    again: dict[str, Any],
    stated: dict[str, Any],
    where: str,
    unknown: Collection[str],
) -> Iterator[Check]:
    """Compare stated values with those computed again, but for keys that cannot be."""
    for key, value in stated.items():
        if key in unknown:
            yield Check(f"{where}.{key}", "not checked", "cannot be recomputed from this folder")
        else:
            yield _compare(f"{where}.{key}", again.get(key), value)


def _compare(
    what: str,
    computed: Any,
    stated: Any,
) -> Check:
    computed, stated = to_json(computed), to_json(stated)
    same = _same(computed, stated)
    return _check(what, "" if same else f"says {stated}, computed {computed}")


def _same(ours: Any, theirs: Any) -> bool:
    """True if two JSON values are equal, floats up to rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float | int):
        return math.isclose(ours, theirs, rel_tol=CLOSE)
    return bool(ours == theirs)


def _check(what: str, wrong: str) -> Check:
    return Check(what, "wrong" if wrong else "right", wrong[:500])
