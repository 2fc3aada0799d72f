"""Compute what the runs in a results folder have spent on each data set.

A finished run states it in its record. Before its first step, a run also writes to `spending.json`
how many steps it may take, so that runs that were stopped or are under way count as well. That
file also identifies the files that the run reads, by their content. A record does not, because it
may be published, and anyone who has a file could see that it was used for training.

A site of a federation that has its own data counts each of its nodes like a run: the node's folder,
RUN/nodes/NN-DATA, has its ledger and its own `spending.json`. Other data of the site, such as more
patients, have another folder.
"""

from __future__ import annotations

import filecmp
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from zdp_bench import records
from zdp_bench.disk import walk
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import Unfit, parse_as, read_json
from zdp_bench.privacy.composition import Spending, SpentSteps, compose_epsilon, list_spent_steps
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
EXPORTED = "SHA256SUMS"
EXPORT = {EXPORTED, "model.safetensors"}  # files of an exported folder, which has no `FILE`
NODES = "nodes"  # folder of a federated run that has a folder for each node

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The content of `spending.json`: what a run may release, or what a deleted run has released.

    Attributes:
        recipe: name of the run's recipe.
        data: its data set.
        privacy: its releases.
        sources: names of the data's files (`Splits.sources`), separated by spaces; None if unknown.
            A file whose owner the user states is followed by a colon and the owner's number.
        start_sources: names of the files that the run's starting weights were trained on, likewise.
    """

    recipe: str
    data: Data
    privacy: Released
    sources: str | None = None
    start_sources: str | None = None

    def write(self, home: Path) -> None:
        """Write `spending.json` into a run's folder."""
        records.write(home / FILE, asdict(self))


class Files(NamedTuple):
    """The files that a run reads.

    Attributes:
        sources: their names (`Splits.sources`); None if they are not known.
        owners: the owner of each file of a single owner, if the user states the owners.
    """

    sources: frozenset[str] | None = None
    owners: Mapping[str, str] = MappingProxyType({})


def reserve(
    config: Run,
    data: Splits,
    mechanism: Mechanism,
    steps: int,
    home: Path,
    start_sources: frozenset[str] = frozenset(),
) -> None:
    """Write what a run may spend to disk, unless `privacy.total_budget` would be exceeded.

    Only one process at a time does this in a results folder, so two runs cannot both spend the rest
    of the budget.

    Args:
        config: the run's configuration.
        data: its data set.
        mechanism: mechanism of every step.
        steps: largest number of releases that the run may make.
        home: the run's folder.
        start_sources: files that the run's starting weights were trained on.

    Formal guarantees: a run with a total budget starts only if the tight ε of itself and all runs
    in the results folder that may share examples with it (`Spending.may_share`) is within the
    budget. `composition.compose_epsilon` computes the bound.

    Raises:
        UserError: the total budget would be exceeded, or the ε so far is not known.
    """
    from zdp_bench.training.run_folder import only_one_process

    plan = _plan_of(config, data, mechanism, steps)
    plan = replace(plan, start_sources=" ".join(sorted(start_sources)) or None)
    with only_one_process(config.results / "runs" / ".spending"):
        if config.privacy.total_budget is not None:
            _require_within(config, _spending_of(plan, home, _parse_files(plan.sources)))
        plan.write(home)


def plan_spending(
    config: Run, data: Splits, mechanism: Mechanism, steps: int, home: Path
) -> Spending:
    """Return what a run will spend if it takes all its steps.

    The arguments are those of `reserve`. Nothing is written.
    """
    plan = _plan_of(config, data, mechanism, steps)
    return _spending_of(plan, home, _parse_files(plan.sources))


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
            epsilon_of=data.unit if config.privacy.by_owner else "example",
            randomness="cryptographic" if config.privacy.secure else "seeded",
        ),
        _write_files(Files(data.sources, data.source_owners)),
    )


def _require_within(config: Run, this_run: Spending) -> None:
    """Reject a run with which the tight ε on its data would exceed `privacy.total_budget`."""
    budget, delta = config.privacy.total_budget, config.privacy.delta
    assert budget is not None
    all_runs = read_spendings(config.results, except_home=this_run.home)
    sharing_runs = [run for run in all_runs if run.may_share(this_run)]
    log.warning(
        "privacy.total_budget=%g: %d earlier runs in %s may share examples with this one; runs in "
        "other folders are not counted",
        budget,
        len(sharing_runs),
        config.results,
    )
    try:
        spent = list_spent_steps([*sharing_runs, this_run], this_run.by_owner)
        epsilon_before = compose_epsilon(spent[:-1], delta)
        epsilon_after = compose_epsilon(spent, delta)
    except ValueError as error:
        raise UserError(
            f"privacy.total_budget={budget:g}: {error}, so their total ε is not known; use the "
            "earlier runs' sampling, unit and owners, or remove the total budget."
        ) from None
    if epsilon_after > budget:
        raise UserError(
            f"privacy.total_budget={budget:g}: {len(sharing_runs)} runs in {config.results} on "
            f"files of this {this_run.shown} have a tight ε of {show_epsilon(epsilon_before)}, and "
            f"with this run it would be {show_epsilon(epsilon_after)} (δ {delta:g}). Add noise, "
            "take fewer steps, or stop here; `zdp-bench budget` lists the ε so far."
        )


def read_spendings(results: Path, except_home: Path | None = None) -> list[Spending]:
    """Return what every run has spent or may still spend; see `find_spendings`.

    Raises:
        UserError: the results folder contains steps whose run is not known, or a damaged run, so
            the total ε is not known.
    """
    spendings, unknown = find_spendings(results, except_home)
    if unknown:
        raise UserError(
            f"{unknown[0]}: contains steps of an unfinished run without its data, so the total ε "
            f"in {results} is not known. Finish that run, or move its folder away."
        )
    return spendings


def find_spendings(
    results: Path, except_home: Path | None = None, skip_damaged: bool = False
) -> tuple[list[Spending], list[Path]]:
    """Return what every run has spent or may still spend, and the paths whose spending is unknown.

    A run counts even if its folder was moved within `results`, or is linked from there, and only
    once if it was copied. An export is a copy. Unknown paths are ledgers that belong to no run, and
    folders of runs that are left out because they are damaged or cannot be read.

    Args:
        results: the results folder.
        except_home: folder of a run to leave out.
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
        # Another process may move or delete a folder while this one walks.
        if not isinstance(error, FileNotFoundError):
            leave_out(unreadable(error), Path(error.filename))

    for home, files in walk(results, leave_out_folder, first="runs"):  # originals before copies
        is_export = EXPORT.issubset(files) and FILE not in files
        if is_export:
            continue
        ledgers += [home / name for name in sorted(files) if ".jsonl" in name]
        if RECORD in files or FILE in files:
            homes.append(home)
    finished = {record.path.parent: record for record in records.read_all(results) if record.path}
    # The record of a federation, which is here if this machine is its server, counts its nodes.
    homes = [home for home in homes if not (_is_node(home) and _has_record(_run_of(home)))]
    homes_of_run: dict[str, list[Path]] = defaultdict(list)
    for home in homes:
        try:
            record = finished.get(home)
            if record is None and home != except_home:
                record = records.read(home / RECORD)
            if record:
                same_run_homes = homes_of_run[record.run]
                if _is_copy(home, same_run_homes):
                    continue
                same_run_homes.append(home)
            if home != except_home:
                spendings.append(_spending_in(home, record))
        except UserError as error:
            leave_out(error, home)
    explained = {*homes, except_home}
    # A server's rounds are the steps of its nodes.
    runs_of_nodes = {_run_of(home) for home in explained if home and _is_node(home)}
    for path in ledgers:
        is_explained = not explained.isdisjoint(path.parents) or path.parent in runs_of_nodes
        if not is_explained and is_ledger(path) and has_steps(path):
            unknown.append(path)
    return spendings, unknown


def _is_node(home: Path) -> bool:
    """Return True if a folder is that of a federation's node, rather than that of a run."""
    return home.parent.name == NODES


def _run_of(node_home: Path) -> Path:
    """Return the folder of the run that a node's folder is in."""
    return node_home.parent.parent


def _has_record(home: Path) -> bool:
    return (home / RECORD).is_file()


def _find_node_homes(home: Path) -> list[Path]:
    """Return the folders of a run's nodes that have a `spending.json`."""
    return sorted(path.parent for path in home.glob(f"{NODES}/*/{FILE}"))


def _is_copy(home: Path, same_run_homes: Sequence[Path]) -> bool:
    """Return True if another folder of the same run has the same record."""
    return any(
        filecmp.cmp(home / RECORD, same_run_home / RECORD, shallow=False)
        for same_run_home in same_run_homes
    )


def read_spendings_of_recipe(config: Run, data: Splits) -> list[Spending]:
    """Return what the runs of a recipe have spent on `data`, as `zdp-bench budget` counts it."""
    data_set = config.dataset.name, data.digest, data.sources
    return [
        spending
        for spending in read_spendings(config.results)
        if spending.recipe == config.recipe and spending.may_read(*data_set)
    ]


def read_spending(home: Path) -> Spending:
    """Return what the run in a folder has spent, or may still spend."""
    return _spending_in(home, records.read(home / RECORD))


def _spending_in(home: Path, record: Record | None) -> Spending:
    """Return what the run in a folder has spent; `record` is None if it has not finished."""
    plan = record or _read_plan(home / FILE)
    spending = _spending_of(plan, home, _read_files(home))
    spending = replace(spending, finished=bool(record) or records.is_deleted(home))
    if _is_node(home):  # its server may request more steps than it planned
        taken = count_releases(drop_copies(find_ledgers(home, ignored=(FILE,))))
        steps = max(spending.spent.steps, taken)
        return replace(spending, spent=replace(spending.spent, steps=steps))
    # The record of a finished run already counts its only ledger, which would be slow to read. For
    # an unfinished secure run, the steps in the ledger are added below.
    count_single = not record and not spending.secure
    is_federation = bool(plan.privacy.nodes)
    in_ledgers = _steps_in_ledgers(home, is_federation, count_single)
    steps = max(spending.spent.steps, in_ledgers)
    ledger = home / "ledger.jsonl"
    if spending.secure and not record and ledger.is_file():
        # Secure noise cannot be drawn again, so steps that are repeated after a kill count twice.
        steps += count_releases([ledger])
    if not record and not is_federation:
        steps = max(steps, _steps_of_older_nodes(home))
    return replace(spending, spent=replace(spending.spent, steps=steps))


def _steps_of_older_nodes(home: Path) -> int:
    """Return the steps of a site's nodes whose spending older versions wrote to the run's folder.

    Each folder is of other data, and so of other noise, although the lines of its ledger may be the
    same as those of another one.
    """
    folders = [path for path in home.glob(f"{NODES}/*") if path.is_dir()]
    older = [folder for folder in folders if not (folder / FILE).exists()]
    return sum(count_releases(drop_copies(find_ledgers(folder))) for folder in older)


def keep_spending(home: Path) -> Spending:
    """Write what a run has spent to its `spending.json`, before the run is deleted.

    A run that did not finish has spent the steps in its ledger, not all those it had planned. If
    the run has no record, what a site's nodes have spent is kept in their folders.

    Returns:
        what the run has spent, or what the node with the most steps has.

    Raises:
        UserError: the folder does not state what the run spent.
    """
    record = records.read(home / RECORD)
    planned = _read_plan(home / FILE) if (home / FILE).is_file() else None
    node_homes = _find_node_homes(home)
    if node_homes and not record and not planned:
        kept = [keep_spending(node_home) for node_home in node_homes]
        return max(kept, key=lambda spending: spending.spent.steps)
    run = record or planned
    if run is None:
        raise UserError(
            f"{home}: has neither a record nor a {FILE}, so what it spent is not known."
        )
    spending = read_spending(home)
    steps = spending.spent.steps
    if not record and not run.privacy.nodes:
        steps = count_releases(drop_copies(find_ledgers(home)))
    # A record has more fields than `spending.json`, so copy only the fields that both have.
    released_fields = {field.name: getattr(run.privacy, field.name) for field in fields(Released)}
    released = Released(**released_fields | {"steps": steps})
    data = Data(run.data.name, run.data.provenance, run.data.digest, title=run.data.title)
    files = _write_files(Files(spending.sources, spending.owners))
    start_sources = planned.start_sources if planned else None
    Plan(run.recipe, data, released, files, start_sources).write(home)
    for node_home in node_homes:  # they would count again beside the run
        (node_home / FILE).unlink()
    return replace(spending, spent=replace(spending.spent, steps=steps))


def _steps_in_ledgers(home: Path, is_federation: bool, count_single: bool) -> int:
    """Return the steps in the ledgers of a run's folder.

    Several ledgers may have more than the record states: in version 0.1, it lacked the steps of a
    seeded ledger that was set aside. A federation has a folder for each node. No example is at two
    nodes, so the node with the most steps counts.

    Args:
        home: the run's folder.
        is_federation: whether each subfolder has the ledgers of a node.
        count_single: whether to count a folder with a single ledger as well. Only its intact lines
            count, because the plan bounds the number of all lines.
    """
    ledgers_by_folder: dict[Path, list[Path]] = defaultdict(list)
    for ledger in find_ledgers(home, ignored=(RECORD, FILE)):  # these two are known not to be any
        folder = ledger.parent if is_federation else home
        ledgers_by_folder[folder].append(ledger)
    counts = [0]
    for copied_ledgers in ledgers_by_folder.values():
        ledgers = drop_copies(copied_ledgers)
        if len(ledgers) > 1:
            counts.append(count_releases(ledgers))
        elif count_single:
            counts.append(count_intact_steps(ledgers[0]))
    return max(counts)


def read_sources(home: Path) -> frozenset[str] | None:
    """Return the files that a run reads (`Splits.sources`), or None if they are not known."""
    return _read_files(home).sources


def _read_files(home: Path) -> Files:
    """Return the files that a run reads. A federation of sites reads those of its nodes."""
    paths = [folder / FILE for folder in [home, *_find_node_homes(home)]]
    plans = [_read_plan(path) for path in paths if path.is_file()]
    if not plans or not all(plan.sources for plan in plans):
        return Files()
    if len(plans) == 1:
        return _parse_files(plans[0].sources)
    sources = set[str]()
    owners: dict[str, str] = {}
    for node, plan in enumerate(plans):
        files = _parse_files(plan.sources)
        sources |= files.sources or set()
        owners |= {source: f"{node}.{owner}" for source, owner in files.owners.items()}
    return Files(frozenset(sources), owners)


@lru_cache(maxsize=64)  # runs on the same data share one object
def _parse_files(text: str | None) -> Files:
    """Return the files that `_write_files` wrote as text."""
    words = [word.partition(":") for word in (text or "").split()]
    sources = frozenset(source for source, _, _ in words)
    owners = {source: owner for source, _, owner in words if owner}
    return Files(sources or None, owners)


def _write_files(files: Files) -> str | None:
    """Return the files of a run as text for `Plan.sources`; owners become numbers."""
    if not files.sources:
        return None
    numbers: dict[str, int] = {}
    words = []
    for source in sorted(files.sources):
        word = source
        if source in files.owners:
            number = numbers.setdefault(files.owners[source], len(numbers))
            word = f"{source}:{number}"
        words.append(word)
    return " ".join(words)


def read_start_sources(home: Path) -> frozenset[str]:
    """Return the files that a run's starting weights were trained on, as far as it states them."""
    path = home / FILE
    start_sources = _read_plan(path).start_sources if path.is_file() else None
    return _parse_files(start_sources).sources or frozenset()


def _read_plan(path: Path) -> Plan:
    try:
        return parse_as(Plan, read_json(path, records.from_json))
    except Unfit as error:
        fault = f"{path}: is damaged: it {error}."
    except UserError as error:
        fault = str(error)
    raise UserError(
        f"{fault} So the ε of its run is not known; if you start the run again, it writes this "
        "file again."
    )


def _spending_of(
    run: Record | Plan,
    home: Path,
    files: Files,
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
        shares_per_owner=released.shares_per_owner,
        unit=released.unit,
        delta=released.delta,
        secure=released.is_secure,
        finished=False,
        by_owner=released.by_owner,
        sources=files.sources,
        owners=files.owners,
        title=run.data.title or "",
    )


def _worst(released: Released) -> SpentSteps:
    """Return a run's steps or, for a federation, an upper bound for every node.

    A patient is at one node, which may differ between runs. So the least noise, the highest rate
    and the most steps of any node are combined, each of which only raises ε.
    """
    nodes = released.releases  # one entry, unless the run is a federation
    samplings = [node.sampling for node in nodes]
    # Among equal rates, take the fewest records.
    sampling = max(samplings, key=lambda sampling: (sampling.sample_rate, -sampling.records))
    min_z = min(node.z for node in nodes)
    max_steps = max(node.steps for node in nodes)
    return SpentSteps(min_z, sampling, max(max_steps, released.steps))
