"""Check an exported folder: digests, weights, ledger, every ε, recipe and card.

Every number on privacy is computed again from the configuration, the counts and the ledger, by the
code that made the record. What no file of the folder can prove is listed as not checked.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from zdp_bench import __version__
from zdp_bench.config.digests import experiment_digest, run_digest
from zdp_bench.data.files import sha256
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.export import texts_of
from zdp_bench.extras.sharing.folder import Report
from zdp_bench.extras.sharing.loading import config_of, sketch_of
from zdp_bench.foreign_files import parse_yaml, read_text
from zdp_bench.gradients.clipping import trainable
from zdp_bench.library.keys import kind_of
from zdp_bench.privacy.accounting import part_epsilon
from zdp_bench.privacy.ledger import Copy, Ledger, LedgerError, Position
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.records import Record, get, to_json
from zdp_bench.training.build import count_real
from zdp_bench.training.checkpoint import state_digest
from zdp_bench.training.plan import rounds_of, steps_of
from zdp_bench.training.run import epsilon_of, privacy_report, released_report
from zdp_bench.training.setup import ModelSetup

State = Literal["right", "wrong", "not checked"]
CLOSE = 1e-6  # relative: an ε of another machine differs by rounding
NOT_IN_EPSILON = (
    "noise_multiplier",
    "randomness_from",
    "fixed_state",
    "examples_per_owner",
    "steps_taken",
)
GIVEN = ("unit", "examples_per_patient")  # a run's; its data alone would show them
# A federation's node keeps its ledger and its patients to itself.
OF_NODES = (
    *("node", "ledger", "steps", "epsilon_patient", "epsilon_patient_at_least"),
    *("answers", "unconfirmed"),
)
UNPROVABLE = (
    "that the ledger lists every release, and that the weights come from its steps: a run written "
    "anew as a whole looks like a true one",
    "the training data, the test metrics, the most examples of one patient, versions and commit: "
    "they are nowhere else",
)
UNPROVABLE_OF_OWN = ("the network's size, and that the owner's loop was private outside its steps",)


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
        name, source = files.REPORT, files.read_report(folder)
        files.read_shapes(folder / files.WEIGHTS)  # so that they are as long as their head says
        about = _check_own_privacy(folder, source)
        unprovable: tuple[str, ...] = (*UNPROVABLE, *UNPROVABLE_OF_OWN)
    else:
        name, source = files.RECORD, files.read_record(folder)
        setup = sketch_of(folder, source)
        about = chain([_check_names(source, setup)], _check_privacy(folder, source, setup))
        unprovable = UNPROVABLE
    return [
        *_check_sums(folder),
        _check_weights(folder, source),
        *about,
        *_check_texts(folder, source, texts_of(name, source)),
        *(Check(what, "not checked") for what in unprovable),
    ]


def _check_own_privacy(folder: Path, report: Report) -> Iterator[Check]:
    """Compute ε, z and steps of a loop of one's own again: from its mechanism and ledger alone."""
    privacy = report["privacy"]
    kind = kind_of(privacy["randomness_from"])
    try:
        mechanism = Mechanism.from_dict(privacy["mechanism"])
        facts = {"randomness": kind}
        ledger = _read_ledger(folder, mechanism, False, facts, report["owners"])
    except (LedgerError, ValueError) as error:
        yield from _distrust(error)
        return
    secure = kind == "cryptographic"
    again = released_report(mechanism, ledger, ledger.releases, privacy["delta"], secure)
    again["epsilon_of"] = "owner" if report["owners"] else "example"
    again["epsilon_part"] = part_epsilon(mechanism, ledger.releases, privacy["delta"])
    unsaid = {*NOT_IN_EPSILON, "delta"} | facts.keys() - ledger.facts.keys()
    yield from _compare_privacy(report, again, privacy, "privacy", unsaid)


def _check_sums(folder: Path) -> Iterator[Check]:
    sums = files.read_sums(folder)
    if not sums:
        yield Check(files.SUMS, "wrong", "is missing or empty")
    for name, expected in sums.items():
        path = folder / name
        found = "is not the file exported"
        if not os.path.isfile(path):  # unlike `Path.is_file`, also of a name that is too long
            found = "is missing"
        elif name != files.WEIGHTS and path.stat().st_size > files.MOST_LEDGER:
            found = f"is larger than the {files.MOST_LEDGER:,} bytes of any file but the weights"
        elif sha256(path) == expected:
            found = ""
        yield _check(f"SHA-256 of {name}", found)
    for path in sorted(folder.iterdir()):
        if path.name not in sums and path.name != files.SUMS:
            yield Check(path.name, "not checked", f"is not listed in {files.SUMS}")


def _check_weights(folder: Path, source: Record | Report) -> Check:
    what, expected = "weights are those that were exported", source["measured"]["weights"]["digest"]
    try:
        found = state_digest(files.read_weights(folder / files.WEIGHTS))
    except UserError as error:
        return Check(what, "wrong", str(error))
    same = found == expected
    return _check(what, "" if same else f"measured.weights.digest {expected}, file {found}")


def _check_names(record: Record, setup: ModelSetup) -> Check:
    """Check that configuration, seed and data digest are those that the run is named by."""
    config, start, data = config_of(record), record.get("start"), record["data"]["digest"]
    plugins = record["environment"].get("plugins")
    ours = {
        "run": run_digest(config, f"{data}:{start['weights']}" if start else data, plugins),
        "experiment": experiment_digest(config),
        "recipe": config.recipe,
        "seed": config.seed,
        "data.name": config.dataset.name,
        "model.parameters_real": count_real(trainable(setup.model).values()),
    }
    wrong = [found for key in ours for found in _differences(ours[key], get(record, key), key)]
    found = "; ".join(wrong) + (_other_version(record) if wrong else "")
    return _check("configuration, seed and data name the run", found)


def _check_privacy(folder: Path, record: Record, setup: ModelSetup) -> Iterator[Check]:
    """Compute the record's section on privacy again, and compare every value."""
    if record["privacy"].get("nodes"):
        yield from _check_federation(record, setup)
        return
    privacy, config = record["privacy"], setup.config
    with torch.device("meta"):
        whole = setup.with_plan()
    facts = {"epsilon_of": epsilon_of(config, privacy["unit"])}
    try:
        ledger = _read_ledger(folder, whole.mechanism, not config.privacy.secure, facts)
    except LedgerError as error:
        yield from _distrust(error)
        return
    again = privacy_report(whole, ledger, privacy["examples_per_patient"], privacy["unit"])
    unsaid = {*GIVEN} | facts.keys() - ledger.facts.keys()
    yield from _compare_privacy(record, again, privacy, "privacy", unsaid)


def _distrust(error: Exception) -> Iterator[Check]:
    """Say what is wrong with a ledger, and that nothing is known without one."""
    yield Check(files.LEDGER, "wrong", str(error))
    yield Check("privacy", "not checked", "it follows from the ledger")


def _read_ledger(
    folder: Path, mechanism: Mechanism, repeatable: bool, facts: dict[str, str], whose: str = ""
) -> Ledger:
    """Read a copy of the ledger and of those set aside: opening one may mend it."""
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


def _check_federation(record: Record, setup: ModelSetup) -> Iterator[Check]:
    """Compute the ε of every node again; their ledgers and patients are at the nodes."""
    privacy, config = record["privacy"], setup.config
    nodes = privacy["nodes"]
    plan = rounds_of(config, [node["sampling"]["records"] for node in nodes])
    own_of = cache(lambda size: setup.with_plan(steps_of(config, size, plan.steps)))
    for node in nodes:
        with torch.device("meta"):
            own = own_of(node["sampling"]["records"])
        ledger = Copy((), Position(node["steps"], ""), True)
        again = privacy_report(own, ledger, 1, privacy["unit"])
        stated = {key: value for key, value in node.items() if key not in OF_NODES}
        yield from _compare_privacy(record, again, stated, f"node {node['node']}")
    worst = {
        key: max(node[key] for node in nodes)
        for key in (*files.NODE, *files.OF_PART)
        if key.startswith("epsilon_") and all(key in node for node in nodes)
    }
    yield from _compare_privacy(record, worst, {key: privacy[key] for key in worst}, "privacy")
    yield Check("the nodes' ledgers, steps and examples, and each ε of a patient", "not checked")


def _compare_privacy(
    record: Record,
    again: dict[str, Any],
    stated: dict[str, Any],
    where: str,
    unsaid: Collection[str] = (),
) -> Iterator[Check]:
    """Compare what is stated with what was computed again, but for what nothing else says."""
    for key, value in stated.items():
        if key == "range_test_steps" and value == 0:
            continue  # earlier versions could count further steps
        if key in unsaid:
            yield Check(f"{where}.{key}", "not checked", "it is nowhere else")
            continue
        wrong = list(_differences(to_json(again.get(key)), to_json(value), f"{where}.{key}"))
        found = "; ".join(wrong[:3]) + (_other_version(record) if wrong else "")
        yield _check(f"{where}.{key}", found)


def _check_texts(folder: Path, source: Record | Report, texts: dict[str, str]) -> Iterator[Check]:
    """Compare texts with what this version writes, and the head of a card value by value."""
    for name, ours in texts.items():
        what = f"text of {name}"
        try:
            theirs = read_text(folder / name)
            if name == files.CARD:
                wrong = [*_differences(_head_of(ours), _head_of(theirs), "")]
                yield _check(f"head of {name}", "; ".join(wrong[:5]))
        except UserError as error:
            yield Check(what, "wrong", str(error))
            continue
        if _other_version(source):
            yield Check(what, "not checked", "another version wrote it")
        else:
            yield _check(what, "" if theirs == ours else "is not what was exported: it was edited")


def _head_of(card: str) -> Any:
    """Return the YAML at the head of a card."""
    return parse_yaml(card.partition("---\n")[2].partition("---\n")[0], f"head of {files.CARD}")


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
    return Check(what, "wrong" if wrong else "right", wrong[:500])
