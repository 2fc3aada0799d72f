"""Verify an exported model: digests, weights, ledger, every ε, recipe and card.

Every number about privacy is recomputed from the configuration, the counts and the ledger, with the
code that writes records. Anything that the folder cannot prove is listed as 'not checked'.
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
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError, first_line
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.export import texts_of
from zdp_bench.extras.sharing.folder import Source
from zdp_bench.extras.sharing.loading import config_of, sketch_of
from zdp_bench.foreign_files import read_text
from zdp_bench.gradients.clipping import trainable
from zdp_bench.library.keys import randomness_kind
from zdp_bench.library.starts import Earlier, describe
from zdp_bench.nn.state import state_digest
from zdp_bench.privacy.accounting import example_epsilon
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.ledger_lines import LedgerError
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.tally import Tally
from zdp_bench.records import Document, get, to_json
from zdp_bench.registry import find_module
from zdp_bench.training.build import count_real
from zdp_bench.training.run import epsilon_of, privacy_report, released_report
from zdp_bench.training.setup import ModelSetup

State = Literal["passed", "failed", "not checked"]
TOLERANCE = 1e-6  # relative, because rounding of ε differs between machines
# Keys of your own loop's section on privacy that no other file in the folder determines.
ONLY_IN_REPORT = {
    "noise_multiplier",
    "randomness_from",
    "fixed_state",
    "examples_per_owner",
    "steps_taken",
    "delta",
}
ELSEWHERE = "their ledgers are in other folders"
# Keys of a run's section on privacy that depend on its data.
ONLY_IN_DATA = {"unit", "examples_per_patient"}
# Keys of a node's section on privacy that depend on its ledger or data, which stay at the node.
ONLY_AT_NODES = {"ledger", "steps", "answers", "examples_per_patient"}
# Keys of a node that depend on its `examples_per_patient`, which it lacks in version 0.1.
FROM_EXAMPLES = {"epsilon_patient", "epsilon_patient_at_least"}
# Keys of a record or report whose values are all compared, or named in `UNPROVABLE`.
NAMED_KEYS = {
    "config",
    "data",
    "environment",
    "experiment",
    "federation",
    "metrics",
    "owners",
    "parameters_real",
    "privacy",
    "recipe",
    "run",
    "seed",
}
UNPROVABLE = (
    "that the ledger lists every release, and that the weights come from its steps: someone may "
    "have rewritten the whole run",
    "the training data, the test metrics, the largest number of examples of one patient, versions "
    "and commit: cannot be recomputed from this folder",
)
UNPROVABLE_FOR_LOOP = "the network's size, and that the owner's loop was private outside its steps"


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        what: what was checked.
        state: the result.
        found: what is wrong, or why it was not checked.
    """

    what: str
    state: State
    found: str = ""


def verify(folder: Path) -> list[Check]:
    """Return the results of all checks of an exported model, including what cannot be checked.

    Raises:
        UserError: the folder is not an exported model, or its record or report is damaged.
    """
    source = files.read(folder)
    other_keys = ", ".join(sorted(source.keys() - NAMED_KEYS))
    unprovable = [*UNPROVABLE, f"the other values, of {other_keys[:500]}"]
    if files.is_report(source):
        unprovable.append(UNPROVABLE_FOR_LOOP)
    # Check this before reading the weights: it rejects weights that do not fit the model.
    privacy_checks = _check_privacy(folder, source)
    return [
        *_check_sums(folder),
        _check_weights(folder, source),
        *privacy_checks,
        *_check_texts(folder, source),
        *(Check(what, "not checked") for what in unprovable),
    ]


def _check_privacy(folder: Path, source: Source) -> list[Check]:
    """Check the source's section on privacy, and the values that name the run."""
    checks = list[Check]()
    try:
        if files.is_report(source):
            # This rejects a file of weights whose size differs from the size in its header.
            files.read_shapes(folder / files.WEIGHTS)
            checks += _check_loop(folder, source)
        else:
            setup = sketch_of(folder, source)
            checks.append(_check_names(source, setup))
            if setup.config.federated.nodes:
                checks += _check_federation(source, setup)
            else:
                checks += _check_run(folder, source, setup)
    except LedgerError as error:
        checks.append(Check(files.LEDGER, "failed", str(error)))
        checks.append(Check("privacy", "not checked", "it depends on the ledger"))
    return checks


def _check_sums(folder: Path) -> Iterator[Check]:
    """Check the digests of all files, and list files without one."""
    sums = files.read_sums(folder)
    if not sums:
        yield Check(files.SUMS, "failed", "is missing or empty")
    for name, expected in sums.items():
        yield _check(f"SHA-256 of {name}", files.find_mismatch(folder / name, expected))
    for path in sorted(folder.iterdir()):
        if path.name not in sums and path.name != files.SUMS:
            yield Check(path.name, "not checked", f"is not listed in {files.SUMS}")


def _check_weights(folder: Path, source: Source) -> Check:
    """Check that the weights are those of the record or report."""
    what = "weights are those that were exported"
    try:
        digest = state_digest(files.read_weights(folder / files.WEIGHTS))
    except UserError as error:
        return Check(what, "failed", str(error))
    return _compare(what, digest, source["measured"]["weights"]["digest"])


def _check_names(record: Document, setup: ModelSetup) -> Check:
    """Check that configuration, seed and the data's digest give the digest that names the run."""
    config, start = config_of(record), record.get("start")
    data = record["data"]["digest"]
    if start:
        data = f"{data}:{start['weights']}"
    plugins, weights_files = record["environment"].get("plugins"), record["model"].get("files")
    computed = {
        "run": run_digest(config, data, plugins, weights_files),
        "experiment": experiment_digest(config),
        "recipe": config.recipe,
        "seed": config.seed,
        "data.name": config.dataset.name,
        "model.parameters_real": count_real(trainable(setup.model).values()),
    }
    stated = {key: get(record, key) for key in computed}
    return _compare("configuration, seed and data name the run", computed, stated)


def _check_run(
    folder: Path,
    record: Document,
    setup: ModelSetup,
) -> Iterator[Check]:
    """Recompute a record's section on privacy, and compare every value."""
    privacy, config = record["privacy"], setup.config
    with torch.device("meta"):
        planned = setup.with_plan()
    facts = {"epsilon_of": epsilon_of(config, privacy["unit"])}
    ledger = _read_ledger(folder, planned.mechanism, not config.privacy.secure, facts)
    computed = privacy_report(planned, ledger, privacy["examples_per_patient"], privacy["unit"])
    # A ledger of an earlier version states fewer facts.
    unknown = ONLY_IN_DATA | (facts.keys() - ledger.facts.keys())
    yield from _compare_each(computed, privacy, "privacy", unknown)


def _check_loop(folder: Path, report: Source) -> Iterator[Check]:
    """Recompute ε, z and the steps of your own loop from its mechanism and ledger alone."""
    privacy, owners = report["privacy"], report["owners"]
    kind, delta = randomness_kind(privacy["randomness_from"]), privacy["delta"]
    facts = {"randomness": kind}
    try:
        mechanism = Mechanism.from_dict(privacy["mechanism"])
    except ValueError as error:
        raise LedgerError(str(error)) from None
    ledger = _read_ledger(folder, mechanism, False, facts, owners)
    steps = ledger.releases
    this_training = Earlier("", owners, mechanism.z, mechanism.sampling, steps, id="")
    computed = {
        **released_report(mechanism, ledger, delta, kind),
        "epsilon_of": "owner" if owners else "example",
        "epsilon_part": example_epsilon(mechanism, steps, delta),
        "start": describe(this_training, _earlier_of(privacy), delta),
    }
    unknown = ONLY_IN_REPORT | (facts.keys() - ledger.facts.keys())
    yield Check("earlier trainings of the starting weights", "not checked", ELSEWHERE)
    yield from _compare_each(computed, privacy, "privacy", unknown)


def _earlier_of(privacy: dict[str, Any]) -> list[Earlier]:
    """Return the earlier trainings of the starting weights that a report states."""
    trainings = (privacy.get("start") or {}).get("trainings") or ()
    try:
        return [Earlier.from_dict(training) for training in trainings]
    except ValueError as error:
        raise LedgerError(f"privacy.start: {error}") from None


def _read_ledger(
    folder: Path,
    mechanism: Mechanism,
    repeatable: bool,
    facts: dict[str, str],
    identity: str = "",
) -> Ledger:
    """Return the ledger in the folder, including the ledgers that were set aside.

    The files are copied first, because opening a ledger may repair its file.

    Args:
        folder: the exported model.
        mechanism: mechanism of every step.
        repeatable: whether a step that is taken again has the same noise.
        facts: properties that the ledger must state; see `Ledger`.
        identity: what the ledger must state about owners. Default: nothing.

    Raises:
        LedgerError: the ledger is missing, damaged, or of another mechanism.
    """
    if not (folder / files.LEDGER).is_file():
        raise LedgerError(f"{files.LEDGER}: is missing")
    with tempfile.TemporaryDirectory() as temporary:
        files.copy_ledger(folder / files.LEDGER, Path(temporary))
        path = Path(temporary) / files.LEDGER
        try:
            ledger = Ledger(path, mechanism, repeatable, identity=identity, facts=facts)
        except LedgerError as error:
            raise LedgerError(str(error).replace(f"{temporary}/", "")) from None
        ledger.close()
        return ledger


def _check_federation(record: Document, setup: ModelSetup) -> Iterator[Check]:
    """Recompute every node's section on privacy from its stated counts, and combine the sections.

    The nodes' ledgers and patients are not in the folder.
    """
    privacy, config = record["privacy"], setup.config
    nodes = privacy.get("nodes") or []
    numbers = list(range(config.federated.nodes or 0))
    is_complete = _compare("numbers of the nodes", numbers, [node["node"] for node in nodes])
    yield is_complete
    if is_complete.state == "failed":
        yield Check("privacy", "not checked", "it depends on the nodes")
        return
    sizes = [node["sampling"]["records"] for node in nodes]
    if config.federated.patients == "split" and not config.privacy.by_owner:
        yield _compare("records of the nodes", record["data"]["train"], sum(sizes))
    federation = find_module("runner", "federated")
    rounds = federation.rounds_of(config, sizes).steps
    yield from _check_rounds(record, config, rounds)
    # Cached, because nodes of the same size have the same setup.
    setup_of = cache(lambda size: setup.with_plan(federation.steps_of(config, size, rounds)))
    unknown, unknown_at_node = {"unit"}, ONLY_AT_NODES
    if any("examples_per_patient" not in node for node in nodes):
        unknown, unknown_at_node = ONLY_IN_DATA, ONLY_AT_NODES | FROM_EXAMPLES
    reports = []
    for node in nodes:
        with torch.device("meta"):
            node_setup = setup_of(node["sampling"]["records"])
        ledger, examples = Tally(True, node["steps"]), node.get("examples_per_patient", 1)
        computed = {
            **privacy_report(node_setup, ledger, examples, privacy["unit"]),
            "node": node["node"],
            "unconfirmed": node["steps"] - node["ledger"]["entries"],
        }
        yield from _compare_each(computed, node, f"node {node['node']}", unknown_at_node)
        reports.append(computed | node)  # the values that were compared, or cannot be
    combined = federation.combine_nodes(reports)
    stated = {key: value for key, value in privacy.items() if key != "nodes"}
    yield from _compare_each(combined, stated, "privacy", unknown)


def _check_rounds(
    record: Document,
    config: Run,
    planned: int,
) -> Iterator[Check]:
    """Check the number of rounds, and that no node states fewer steps than it must have taken.

    Args:
        record: the record of a federation.
        config: its configuration.
        planned: number of rounds of a run that its budget does not stop.
    """
    stated = record.get("federation") or {"rounds": 0, "asked": 0}
    what = "federation.rounds"
    if config.privacy.max_epsilon is not None and record["stopped_by"] == "budget":
        yield Check(what, "not checked", "the budget stopped the run")
    else:
        yield _compare(what, planned, stated["rounds"])
    rounds = max(stated["rounds"], stated["asked"])
    for node in record["privacy"]["nodes"]:
        fewest = max(rounds * config.federated.local_steps, node["ledger"]["entries"])
        is_enough = node["steps"] >= fewest
        fault = f"says {node['steps']}, but rounds and ledger have {fewest}"
        yield _check(f"fewest steps of node {node['node']}", "" if is_enough else fault)


def _check_texts(folder: Path, source: Source) -> Iterator[Check]:
    """Compare recipe and card with the texts that this version writes."""
    version = source["environment"]["versions"]["zdp-bench"]
    try:
        texts = texts_of(source)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A report of unknown origin may have any values at keys whose form is not checked.
        reason = f"cannot be made from the report: {first_line(error)}"
        yield Check("texts of recipe and card", "failed", reason)
        return
    for name, text in texts.items():
        what = f"text of {name}"
        try:
            is_same = read_text(folder / name) == text
        except UserError as error:
            yield Check(what, "failed", str(error))
            continue
        if version != __version__:
            yield Check(what, "not checked", f"zdp-bench {version} wrote it")
        else:
            yield _check(what, "" if is_same else "was edited after the export")


def _compare_each(
    computed: dict[str, Any],
    stated: dict[str, Any],
    where: str,
    unknown: Collection[str],
) -> Iterator[Check]:
    """Compare each stated value with the recomputed value.

    Args:
        computed: the recomputed values.
        stated: the values in the record or report.
        where: the section's name in the checks.
        unknown: the keys that cannot be recomputed.
    """
    for key, value in stated.items():
        if key in unknown:
            yield Check(f"{where}.{key}", "not checked", "cannot be recomputed from this folder")
        else:
            yield _compare(f"{where}.{key}", computed.get(key), value)


def _compare(
    what: str,
    computed: Any,
    stated: Any,
) -> Check:
    """Compare a stated value with the recomputed value."""
    computed, stated = to_json(computed), to_json(stated)
    is_same = _is_equal(computed, stated)
    return _check(what, "" if is_same else f"says {stated}, computed {computed}")


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal, with floats equal up to rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, float) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=TOLERANCE)
    return bool(a == b)


def _check(what: str, fault: str) -> Check:
    """Return a check that failed if a fault is given, and passed if it is empty."""
    return Check(what, "failed" if fault else "passed", fault[:500])
