"""Compute what the runs in a results folder have spent on each data set.

A finished run states it in its record. Before its first step, a run also writes all the steps it
may take to `spending.json`, so that runs that were stopped or are under way count as well. That
file also identifies the files it reads, by their content. A record does not, because it is shown to
others: anyone who has a file could see that it was used for training.
"""

from __future__ import annotations

import filecmp
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import Unfit, parse_as, read_json
from zdp_bench.privacy.composition import Spending, Spent, compose_epsilon, list_spent
from zdp_bench.privacy.ledger import drop_copies, find_ledgers, has_steps, is_ledger
from zdp_bench.privacy.ledger_lines import count_intact_steps, unreadable
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.privacy.tally import count_releases
from zdp_bench.records import Data, Record, Released

if TYPE_CHECKING:  # `budget` needs no torch
    from zdp_bench.config.schema import Run
    from zdp_bench.data import Splits

FILE, RECORD = "spending.json", "record.json"
EXPORTED = "SHA256SUMS"  # in an export, lists the digests of its other files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The content of `spending.json`: what a run may release, or what a deleted run has released.

    Attributes:
        recipe: name of the run's recipe.
        data: its data set.
        privacy: its releases.
        sources: names of its data's files, separated by spaces; None if they are not known.
    """

    recipe: str
    data: Data
    privacy: Released
    sources: str | None = None

    def write(self, home: Path) -> None:
        """Write `spending.json` into a run's folder."""
        records.write(home / FILE, asdict(self))


def reserve(config: Run, data: Splits, mechanism: Mechanism, steps: int, home: Path) -> None:
    """Write what a run may spend to disk, unless `privacy.total_budget` would be exceeded.

    Only one process at a time does this in a results folder, so two runs cannot both spend what is
    left of the budget.

    Args:
        config: the run's configuration.
        data: its data set.
        mechanism: mechanism of every step.
        steps: largest number of releases that the run may make.
        home: the run's folder.

    Formal guarantees: a run with a total budget starts only if the tight ε of itself and all runs
    in the results folder that may share examples with it (`Spending.may_share`) is within the
    budget. `composition.compose_epsilon` computes the bound.

    Raises:
        UserError: the total budget would be exceeded, or the ε so far is not known.
    """
    from zdp_bench.training.run_folder import only_one_process

    plan = _plan_of(config, data, mechanism, steps)
    with only_one_process(config.results / "runs" / ".spending"):
        if config.privacy.total_budget is not None:
            _require_within(config, _spending_of(plan, home, data.sources))
        plan.write(home)


def plan_spending(
    config: Run, data: Splits, mechanism: Mechanism, steps: int, home: Path
) -> Spending:
    """Return what a run will spend if it takes all its steps."""
    return _spending_of(_plan_of(config, data, mechanism, steps), home, data.sources)


def _plan_of(config: Run, data: Splits, mechanism: Mechanism, steps: int) -> Plan:
    """Return the content of a run's `spending.json`."""
    return Plan(
        config.recipe,
        Data(config.dataset.name, data.provenance, data.digest, title=data.title),
        Released(
            z=mechanism.z,
            sampling=mechanism.sampling,
            steps=steps,
            delta=config.privacy.delta,
            examples_per_patient=data.examples_per_patient,
            unit=data.unit,
            epsilon_of=data.unit if config.privacy.by_patient else "example",
            randomness="cryptographic" if config.privacy.secure else "seeded",
        ),
        " ".join(sorted(data.sources)),
    )


def _require_within(config: Run, own: Spending) -> None:
    budget, delta = config.privacy.total_budget, config.privacy.delta
    assert budget is not None
    earlier = read_spendings(config.results, but=own.home)
    others = [other for other in earlier if other.may_share(own)]
    log.warning(
        "privacy.total_budget=%g: %d earlier runs in %s may share examples with this one; runs in "
        "other folders are not counted",
        budget,
        len(others),
        config.results,
    )
    try:
        all_spent = list_spent([*others, own], own.by_unit)
        before = compose_epsilon(all_spent[:-1], delta)
        after = compose_epsilon(all_spent, delta)
    except ValueError as error:
        raise UserError(
            f"privacy.total_budget={budget:g}: {error}, so their total ε is not known; use the "
            "earlier runs' sampling and unit, or remove the total budget."
        ) from None
    if after > budget:
        raise UserError(
            f"privacy.total_budget={budget:g}: {len(others)} runs in {config.results} on files of "
            f"this {own.shown} have a tight ε of {show_epsilon(before)}, and with "
            f"this run it would be {show_epsilon(after)} (δ {delta:g}). Add noise, take fewer "
            "steps, or stop here; `zdp-bench budget` lists the ε so far."
        )


def read_spendings(results: Path, but: Path | None = None) -> list[Spending]:
    """Return what every run has spent or may still spend; see `find_spendings`.

    Raises:
        UserError: the results folder contains steps whose run is not known, or a damaged run, so
            the total ε is not known.
    """
    spendings, unknown = find_spendings(results, but)
    if unknown:
        raise UserError(
            f"{unknown[0]}: contains steps of an unfinished run without its data, so the total ε "
            f"in {results} is not known. Finish that run, or move its folder away."
        )
    return spendings


def find_spendings(
    results: Path, but: Path | None = None, skip_damaged: bool = False
) -> tuple[list[Spending], list[Path]]:
    """Return what every run has spent or may still spend, and the paths whose spending is unknown.

    A run counts even if its folder was moved within `results`, and only once if it was copied. An
    export is a copy. Unknown paths are ledgers that belong to no run, and folders of runs that are
    left out because they are damaged or cannot be read.

    Args:
        results: the results folder.
        but: folder of a run to leave out.
        skip_damaged: whether to leave out a damaged run, with a warning.

    Raises:
        UserError: a run is damaged, or a folder cannot be read, so that its ε would be missing.
    """
    homes, ledgers = list[Path](), list[Path]()
    spendings, unknown = list[Spending](), list[Path]()

    def leave_out(error: UserError, path: Path) -> None:
        if not skip_damaged:
            raise error
        records.warn_left_out(str(error))
        unknown.append(path)

    def leave_out_folder(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # which another process moves or deletes
            leave_out(unreadable(error), Path(error.filename))

    for folder, subfolders, files in os.walk(results, onerror=leave_out_folder):
        subfolders.sort(key=lambda name: (name != "runs", name))  # originals before copies
        home = Path(folder)
        if EXPORTED in files:
            continue
        ledgers += [home / name for name in sorted(files) if ".jsonl" in name]
        if RECORD in files or FILE in files:
            homes.append(home)
    finished = {record.path.parent: record for record in records.read_all(results) if record.path}
    homes_of_run: dict[str, list[Path]] = defaultdict(list)
    for home in homes:
        try:
            record = finished.get(home)
            if record is None and home != but:
                record = records.read(home / RECORD)
            if record:
                others = homes_of_run[record.run]
                if _is_copy(home, others):
                    continue
                others.append(home)
            if home != but:
                spendings.append(_spending_in(home, record))
        except UserError as error:
            leave_out(error, home)
    explained = {*homes, but}
    for path in ledgers:
        if explained.isdisjoint(path.parents) and is_ledger(path) and has_steps(path):
            unknown.append(path)
    return spendings, unknown


def _is_copy(home: Path, others: Sequence[Path]) -> bool:
    """Return True if another folder of the same run has the same record."""
    record = home / RECORD
    return any(filecmp.cmp(record, other / RECORD, shallow=False) for other in others)


def read_recipes_spendings(config: Run, data: Splits) -> list[Spending]:
    """Return what the runs of a recipe have spent on `data`, as `zdp-bench budget` counts it."""
    spendings = read_spendings(config.results)
    of_recipe = [spending for spending in spendings if spending.recipe == config.recipe]
    data_set = config.dataset.name, data.digest, data.sources
    return [spending for spending in of_recipe if spending.may_read(*data_set)]


def read_spending(home: Path) -> Spending:
    """Return what the run in a folder has spent, or may still spend."""
    return _spending_in(home, records.read(home / RECORD))


def _spending_in(home: Path, record: Record | None) -> Spending:
    plan = record or _read_plan(home / FILE)
    spending = _spending_of(plan, home, read_sources(home))
    spending = replace(spending, finished=bool(record) or records.is_deleted(home))
    # Of a finished run, a single ledger is the one that its record counts, and reading it is slow.
    # To the steps of a secure run that did not finish, those of its ledger are added below.
    count_single = not record and not spending.secure
    is_federation = bool(plan.privacy.nodes)
    in_ledgers = _steps_in_ledgers(home, not spending.secure, is_federation, count_single)
    steps = max(spending.spent.steps, in_ledgers)
    ledger = home / "ledger.jsonl"
    if spending.secure and not record and ledger.is_file():
        # Secure noise cannot be drawn again, so steps that are repeated after a kill count twice.
        steps += count_releases([ledger], repeatable=False)
    return replace(spending, spent=replace(spending.spent, steps=steps))


def keep_spending(home: Path) -> Spending:
    """Write what a run has spent to its `spending.json`, before the run is deleted.

    A run that did not finish has spent the steps in its ledger, not all those it had planned.

    Raises:
        UserError: the folder does not state what the run spent.
    """
    record = records.read(home / RECORD)
    planned = _read_plan(home / FILE) if (home / FILE).is_file() else None
    whole = record or planned
    if whole is None:
        raise UserError(
            f"{home}: has neither a record nor a {FILE}, so what it spent is not known."
        )
    spending = read_spending(home)
    steps = spending.spent.steps
    if not record and not whole.privacy.nodes:
        steps = count_releases(drop_copies(find_ledgers(home)), not spending.secure)
    released = {field.name: getattr(whole.privacy, field.name) for field in fields(Released)}
    spent = Released(**released | {"steps": steps})
    data = whole.data
    data = Data(data.name, data.provenance, data.digest, title=data.title)
    Plan(whole.recipe, data, spent, planned.sources if planned else None).write(home)
    return replace(spending, spent=replace(spending.spent, steps=steps))


def _steps_in_ledgers(home: Path, repeatable: bool, is_federation: bool, count_single: bool) -> int:
    """Return the steps in the ledgers of a run's folder.

    Several ledgers may have more than the record states: in version 0.1, it lacked the steps of a
    seeded ledger that was set aside. A federation has a folder for each node. No example is at two
    nodes, so the node with the most steps counts.

    Args:
        home: the run's folder.
        repeatable: see `count_releases`.
        is_federation: whether each subfolder has the ledgers of a node.
        count_single: whether a single ledger counts too, with the lines that are not damaged: the
            plan bounds the others. If not, it counts as 0.
    """
    trainings: dict[Path, list[Path]] = defaultdict(list)
    for ledger in find_ledgers(home, ignored=(RECORD, FILE)):  # which were read as what they are
        folder = ledger.parent if is_federation else home
        trainings[folder].append(ledger)
    distinct = [drop_copies(ledgers) for ledgers in trainings.values()]
    counts = [0]
    for ledgers in distinct:
        if len(ledgers) > 1:
            counts.append(count_releases(ledgers, repeatable))
        elif count_single:
            counts.append(count_intact_steps(ledgers[0]))
    return max(counts)


def read_sources(home: Path) -> frozenset[str] | None:
    """Return the files that a run reads (`Splits.sources`), or None if they are not known."""
    path = home / FILE
    return _parse_sources(_read_plan(path).sources or "") if path.is_file() else None


@lru_cache(maxsize=64)  # runs on the same data share one set
def _parse_sources(text: str) -> frozenset[str] | None:
    return frozenset(text.split()) or None


def _read_plan(path: Path) -> Plan:
    try:
        return parse_as(Plan, read_json(path, records.from_json))
    except Unfit as error:
        why = f"{path}: is damaged: it {error}."
    except UserError as error:
        why = str(error)
    raise UserError(f"{why} So its run's ε is not known; the same run writes it again.")


def _spending_of(
    run: Record | Plan,
    home: Path,
    sources: frozenset[str] | None,
) -> Spending:
    """Return the spending of a run that takes all the steps in its record or plan."""
    released = run.privacy
    return Spending(
        home=home,
        recipe=run.recipe,
        dataset=run.data.name,
        provenance=run.data.provenance,
        data=run.data.digest,
        spent=_worst(released),
        examples=released.shares_of_one,
        unit=released.unit,
        delta=released.delta,
        secure=released.is_secure,
        finished=False,
        by_unit=released.is_of_unit,
        sources=sources,
        title=run.data.title or "",
    )


def _worst(released: Released) -> Spent:
    """Return a run's steps or, for a federation, an upper bound for every node.

    A patient is at one node, which may differ between runs. So the least noise, the highest rate
    and the most steps of any node are combined, each of which only raises ε.
    """
    each = released.releases
    samplings = [releases.sampling for releases in each]
    sampling = max(samplings, key=lambda sampling: (sampling.sample_rate, -sampling.records))
    min_z = min(releases.z for releases in each)
    max_steps = max(releases.steps for releases in each)
    return Spent(min_z, sampling, max(max_steps, released.steps))
