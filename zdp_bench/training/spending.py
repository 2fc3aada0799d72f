"""What the runs in a results folder have spent on each data set, finished or not.

A finished run's record says it. Before its first step a run writes `spending.json`, with all the
steps it may take, so that a run that was stopped, or is under way, counts as well. That file also
names the files it reads, by their content. A record does not: it is shown to others, and whoever
has a file could see there that it was trained on.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import Shape, misfits, read_json
from zdp_bench.privacy.composition import Spending, Spent, spent_of_one, together
from zdp_bench.privacy.ledger import (
    count_releases,
    has_steps,
    is_ledger,
    ledgers_below,
    without_copies,
)
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Record, Released

if TYPE_CHECKING:  # `budget` needs no torch
    from zdp_bench.config.schema import Run
    from zdp_bench.data import Splits

FILE, RECORD = "spending.json", "record.json"
EXPORTED = "SHA256SUMS"  # in an export: digests of its other files
# Keys of a record's section on privacy that say what was spent, and of whom.
_SPENT = {"z", "sampling", "steps", "delta", "examples_per_patient", "unit", "epsilon_of"}
_SPENT |= {"randomness", "nodes"}
_OF_DATA = ("name", "title", "provenance", "digest")
_PLAN: Shape = {
    "recipe": str,
    "data": dict.fromkeys(("name", "provenance", "digest"), str),
    "privacy": {"sampling": dict, "steps": int, **dict.fromkeys(("z", "delta"), int | float)},
    "sources": str | None,
}

log = logging.getLogger(__name__)


def reserve(config: Run, data: Splits, mechanism: Mechanism, steps: int, home: Path) -> None:
    """Write what a run may spend to disk; reject it if `privacy.total_budget` would be exceeded.

    One process at a time does this in a results folder, so two runs cannot both take what is left.

    Formal guarantees: no run with a total budget starts unless the tight ε of all runs in the
    results folder that may share examples with it (`Spending.may_share`), it among them, stays
    within; `composition.together` is the bound.
    """
    from zdp_bench.training.run_folder import only_one_process

    plan = _plan_of(config, data, mechanism, steps)
    with only_one_process(config.results / "runs" / ".spending"):
        if config.privacy.total_budget is not None:
            _require_within(config, _planned_spending(plan, home, data.sources))
        records.write_text(home / FILE, json.dumps(plan, indent=1) + "\n")


def plan_spending(
    config: Run, data: Splits, mechanism: Mechanism, steps: int, home: Path
) -> Spending:
    """Return what a run that has not begun will spend if it takes all its steps."""
    plan = _plan_of(config, data, mechanism, steps)
    return _planned_spending(plan, home, data.sources)


def _plan_of(config: Run, data: Splits, mechanism: Mechanism, steps: int) -> dict[str, Any]:
    """Return what `spending.json` holds."""
    return {
        "recipe": config.recipe,
        "data": {
            "name": config.dataset.name,
            "title": data.title,
            "provenance": data.provenance,
            "digest": data.digest,
        },
        "privacy": {
            "z": mechanism.z,
            "sampling": mechanism.sampling.as_dict(),
            "steps": steps,
            "delta": config.privacy.delta,
            "examples_per_patient": data.examples_per_patient,
            "unit": data.unit,
            "epsilon_of": data.unit if config.privacy.by_patient else "example",
            "randomness": "cryptographic" if config.privacy.secure else "seeded",
        },
        "sources": " ".join(sorted(data.sources)),
    }


def _require_within(config: Run, own: Spending) -> None:
    budget, delta = config.privacy.total_budget, config.privacy.delta
    assert budget is not None
    others, unknown = read_spendings(config.results, but=own.home)
    if unknown:
        raise UserError(
            f"privacy.total_budget={budget:g}: {unknown[0]} contains steps of an unfinished run "
            "without its data. Finish that run, or move its folder away."
        )
    others = [other for other in others if other.may_share(own)]
    log.warning(
        "privacy.total_budget=%g: %d earlier runs in %s may share examples with this one; runs in "
        "other folders are not counted",
        budget,
        len(others),
        config.results,
    )
    try:
        every = spent_of_one([*others, own], own.by_unit)
        before = together(every[:-1], delta)
        after = together(every, delta)
    except ValueError as error:
        raise UserError(
            f"privacy.total_budget={budget:g}: {error}, so their total ε is not known; use the "
            "earlier runs' sampling and unit, or remove the total budget."
        ) from None
    if after > budget:
        raise UserError(
            f"privacy.total_budget={budget:g}: {len(others)} runs in {config.results} on files of "
            f"this {config.dataset.name} have a tight ε of {show_epsilon(before)}, and with "
            f"this run it would be {show_epsilon(after)} (δ {delta:g}). Add noise, take fewer "
            "steps, or stop here; `zdp-bench budget` lists the ε so far."
        )


def read_spendings(results: Path, but: Path | None = None) -> tuple[list[Spending], list[Path]]:
    """Return what every run has spent or may still spend, and ledgers that nothing explains.

    A run counts wherever below `results` its folder was moved to, and once if it was copied. An
    export is a copy.

    Args:
        but: the folder of a run to leave out.
    """
    homes, copies, ledgers, contents = list[Path](), list[Path](), list[Path](), set[bytes]()
    for folder, subfolders, files in os.walk(results):
        subfolders.sort(key=lambda name: (name != "runs", name))  # elsewhere are copies
        home = Path(folder)
        if EXPORTED in files:
            continue
        ledgers += [home / name for name in sorted(files) if ".jsonl" in name]
        if RECORD in files:
            content = (home / RECORD).read_bytes()
            (copies if content in contents else homes).append(home)
            contents.add(content)
        elif FILE in files:
            homes.append(home)
    explained = {*homes, *copies, but}
    unknown = [
        path
        for path in ledgers
        if explained.isdisjoint(path.parents) and is_ledger(path) and has_steps(path)
    ]
    finished = {record.path.parent: record for record in records.read_all(results) if record.path}
    # A damaged record, which `read_all` leaves out, is refused: its ε would be missing.
    found = [
        _spending_in(home, finished.get(home) or records.read(home / RECORD))
        for home in homes
        if home != but
    ]
    return found, unknown


def read_recipes_spendings(config: Run, data: Splits) -> list[Spending]:
    """Return what the runs of a recipe have spent of `data`: those that `budget` counts."""
    spendings, _ = read_spendings(config.results)
    its_own = [one for one in spendings if one.recipe == config.recipe]
    data_set = config.dataset.name, data.digest, data.sources
    return [one for one in its_own if one.may_read(*data_set)]


def read_spending(home: Path) -> Spending:
    """Return what the run of a folder has spent, or may still spend."""
    return _spending_in(home, records.read(home / RECORD))


def _spending_in(home: Path, record: Record | None) -> Spending:
    if record:
        found = replace(_spending_of(record, home), title=record.data.title or "")
        is_federation = bool(record.privacy.nodes)
    else:
        plan = _read_plan(home / FILE)
        found = replace(
            _planned_spending(plan, home, read_sources(home)),
            finished=records.is_deleted(home),
            title=plan["data"].get("title") or "",
        )
        is_federation = "nodes" in plan["privacy"]
    in_ledgers = _steps_in_ledgers(home, not found.secure, is_federation)
    steps = max(found.spent.steps, in_ledgers)
    ledger = home / "ledger.jsonl"
    if found.secure and not record and ledger.is_file():
        # Secure noise cannot be drawn again: what a kill makes the run repeat counts twice.
        steps += count_releases([ledger], repeatable=False)
    return replace(found, spent=replace(found.spent, steps=steps))


def keep_spending(home: Path) -> Spending:
    """Write what a run has spent to its `spending.json`, as of a run that is deleted.

    A run that did not finish has spent the steps in its ledger, and not those it had planned.
    """
    record = records.read_document(home / RECORD)
    planned = _read_plan(home / FILE) if (home / FILE).is_file() else None
    whole = record or planned
    if whole is None:
        raise UserError(
            f"{home}: has neither a record nor a {FILE}, so what it spent is not known."
        )
    spending = read_spending(home)
    steps = spending.spent.steps
    if not record and "nodes" not in whole["privacy"]:
        steps = count_releases(without_copies(ledgers_below(home)), not spending.secure)
    privacy = {key: value for key, value in whole["privacy"].items() if key in _SPENT}
    plan = {
        "recipe": whole["recipe"],
        "data": {key: whole["data"][key] for key in _OF_DATA if key in whole["data"]},
        "privacy": privacy | {"steps": steps},
        "sources": (planned or {}).get("sources"),
    }
    records.write(home / FILE, plan)
    return replace(spending, spent=replace(spending.spent, steps=steps))


def _steps_in_ledgers(home: Path, repeatable: bool, is_federation: bool) -> int:
    """Return the steps of a run that has several ledgers, wherever in its folder they are.

    A record of version 0.1 lacks the steps of a seeded ledger that was set aside. A federation has
    a folder for each node, and no example is at two.
    """
    trainings: dict[Path, list[Path]] = defaultdict(list)
    for ledger in ledgers_below(home):
        folder = ledger.parent if is_federation else home
        trainings[folder].append(ledger)
    distinct = [without_copies(ledgers) for ledgers in trainings.values()]
    several = [ledgers for ledgers in distinct if len(ledgers) > 1]
    return max((count_releases(ledgers, repeatable) for ledgers in several), default=0)


def read_sources(home: Path) -> frozenset[str] | None:
    """Return the files that a run reads (`Splits.sources`); None if its folder does not say."""
    path = home / FILE
    plan = _read_plan(path) if path.is_file() else {}
    return _parse_sources(plan.get("sources") or "")


@lru_cache(maxsize=64)  # runs on the same data share one set
def _parse_sources(text: str) -> frozenset[str] | None:
    return frozenset(text.split()) or None


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan: dict[str, Any] = read_json(path)
        damaged = list(misfits(plan, _PLAN))
        if damaged:
            raise UserError(f"{path}: is damaged (see {damaged[0]}).")
    except UserError as error:
        raise UserError(
            f"{error} So its run's ε is not known; the same run writes it again."
        ) from None
    return plan


def _spending_of(record: Record, home: Path) -> Spending:
    """Return the spending of a finished run."""
    data = record.data
    return _spending(
        home,
        record.recipe,
        (data.name, data.provenance, data.digest),
        record.privacy,
        read_sources(home),
        finished=True,
    )


def _planned_spending(
    plan: Mapping[str, Any], home: Path, sources: frozenset[str] | None
) -> Spending:
    """Return the spending of a run that takes all the steps of its plan."""
    data = plan["data"]
    return _spending(
        home,
        plan["recipe"],
        (data["name"], data["provenance"], data["digest"]),
        records.released_of(plan["privacy"]),
        sources,
        finished=False,
    )


def _spending(
    home: Path,
    recipe: str,
    data: tuple[str, str, str],
    released: Released,
    sources: frozenset[str] | None,
    finished: bool,
) -> Spending:
    name, provenance, digest = data
    return Spending(
        home=home,
        recipe=recipe,
        dataset=name,
        provenance=provenance,
        data=digest,
        spent=_worst(released),
        examples=released.shares_of_one,
        unit=released.unit,
        delta=released.delta,
        secure=released.is_secure,
        finished=finished,
        by_unit=released.is_of_unit,
        sources=sources,
    )


def _worst(released: Released) -> Spent:
    """Return a run's steps; of a federation, at least what each node has spent.

    A patient is at one node, and not the same in every run, so the least noise, the highest rate
    and the most steps of any node stand for all: each alone only raises ε.
    """
    each = released.releases
    samplings = [releases.sampling for releases in each]
    sampling = max(samplings, key=lambda sampling: (sampling.sample_rate, -sampling.records))
    least = min(releases.z for releases in each)
    most = max(releases.steps for releases in each)
    return Spent(least, sampling, max(most, released.steps))
