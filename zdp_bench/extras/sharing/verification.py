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
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.export import texts_of
from zdp_bench.extras.sharing.folder import Source
from zdp_bench.extras.sharing.loading import config_of, sketch_of
from zdp_bench.foreign_files import read_text
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
# Of a loop of one's own: in no file but the report.
UNSAID = (
    *("noise_multiplier", "randomness_from", "fixed_state", "examples_per_owner", "steps_taken"),
    "delta",
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
    unprovable: tuple[str, ...] = UNPROVABLE
    names = []
    if files.is_own(folder):
        source = files.read_report(folder)
        files.read_shapes(folder / files.WEIGHTS)  # so that they are as long as their head says
        about = _check_own_privacy(folder, source)
        unprovable += UNPROVABLE_OF_OWN
    else:
        source = files.read_record(folder)
        setup = sketch_of(folder, source)
        names = [_check_names(source, setup)]
        federated = bool(source["privacy"].get("nodes"))
        about = (
            _check_federation(source, setup) if federated else _check_privacy(folder, source, setup)
        )
    return [
        *_check_sums(folder),
        _check_weights(folder, source),
        *names,
        *about,
        *_check_texts(folder, source),
        *(Check(what, "not checked") for what in unprovable),
    ]


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
    return _check("configuration, seed and data name the run", "; ".join(wrong))


def _check_privacy(folder: Path, record: Record, setup: ModelSetup) -> Iterator[Check]:
    """Compute the record's section on privacy again, and compare every value."""
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
    yield from _compare(again, privacy, "privacy", unsaid)


def _check_own_privacy(folder: Path, report: Source) -> Iterator[Check]:
    """Compute ε, z and steps of a loop of one's own again: from its mechanism and ledger alone."""
    privacy, owners = report["privacy"], report["owners"]
    kind = kind_of(privacy["randomness_from"])
    facts = {"randomness": kind}
    try:
        mechanism = Mechanism.from_dict(privacy["mechanism"])
        ledger = _read_ledger(folder, mechanism, False, facts, owners)
    except (LedgerError, ValueError) as error:
        yield from _distrust(error)
        return
    again = {
        **released_report(
            mechanism, ledger, ledger.releases, privacy["delta"], kind == "cryptographic"
        ),
        "epsilon_of": "owner" if owners else "example",
        "epsilon_part": part_epsilon(mechanism, ledger.releases, privacy["delta"]),
    }
    yield from _compare(again, privacy, "privacy", {*UNSAID} | facts.keys() - ledger.facts.keys())


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
        yield from _compare(again, node, f"node {node['node']}", OF_NODES)
    worst = {
        key: max(node[key] for node in nodes)
        for key in privacy
        if key.startswith("epsilon_") and all(isinstance(node.get(key), float) for node in nodes)
    }
    yield from _compare(worst, {key: privacy[key] for key in worst}, "privacy")
    yield Check("the nodes' ledgers, steps and examples, and each ε of a patient", "not checked")


def _compare(
    again: dict[str, Any], stated: dict[str, Any], where: str, unsaid: Collection[str] = ()
) -> Iterator[Check]:
    """Compare what is stated with what was computed again, but for what nothing else says."""
    for key, value in stated.items():
        if key in unsaid:
            yield Check(f"{where}.{key}", "not checked", "it is nowhere else")
            continue
        wrong = _differences(to_json(again.get(key)), to_json(value), f"{where}.{key}")
        yield _check(f"{where}.{key}", "; ".join(wrong))


def _check_texts(folder: Path, source: Source) -> Iterator[Check]:
    """Compare each text with what this version writes."""
    made_by = source["environment"]["versions"]["zdp-bench"]
    for name, ours in texts_of(source).items():
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


def _differences(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    """Yield each place where two JSON values differ; floats by more than rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours.keys() | theirs.keys():
            yield from _differences(ours.get(key), theirs.get(key), f"{where}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(*pair, f"{where}[{index}]")
    elif isinstance(ours, float) and isinstance(theirs, float | int):
        if not math.isclose(ours, theirs, rel_tol=CLOSE):
            yield f"{where} says {theirs}, computed {ours:.6g}"
    elif ours != theirs:
        yield f"{where} says {theirs}, computed {ours}"


def _check(what: str, wrong: str) -> Check:
    return Check(what, "wrong" if wrong else "right", wrong[:500])
