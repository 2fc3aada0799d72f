"""Compute what the runs in a results folder have spent on each data set.

A finished run states it in its record. An unfinished run counts by its `spending.json` and its
ledgers. A site of a federation that has its own data counts each of its nodes like a run. Other
data of the site, such as more patients, have another folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zdp_bench import records
from zdp_bench.disk import walk
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import exists, is_file
from zdp_bench.privacy.composition import Spending, SpentSteps
from zdp_bench.privacy.ledger_files import drop_copies, find_ledgers, has_steps, is_ledger
from zdp_bench.privacy.ledger_lines import count_intact_steps, unreadable
from zdp_bench.privacy.tally import count_releases
from zdp_bench.records import Data, Record, Released
from zdp_bench.training.spending_file import (
    FILE,
    NODES,
    Files,
    Plan,
    find_node_homes,
    format_files,
    is_node,
    read_files,
    read_plan,
    run_of_node,
)

if TYPE_CHECKING:  # `budget` needs no torch
    from zdp_bench.config.schema import Run
    from zdp_bench.data import Splits

RECORD = "record.json"
EXPORTED = "SHA256SUMS"
EXPORT = {EXPORTED, "model.safetensors"}  # files of an exported folder, which has no `FILE`


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

    homes, ledgers = _find_homes_and_ledgers(results, leave_out_folder)
    finished = {record.path.parent: record for record in records.read_all(results) if record.path}
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
    runs_of_nodes = {run_of_node(home) for home in explained if home and is_node(home)}
    for path in ledgers:
        is_explained = not explained.isdisjoint(path.parents) or path.parent in runs_of_nodes
        if not is_explained and is_ledger(path) and has_steps(path):
            unknown.append(path)
    return spendings, unknown


def _find_homes_and_ledgers(
    results: Path, on_error: Callable[[OSError], None]
) -> tuple[list[Path], list[Path]]:
    """Return the folders of runs and nodes, originals before copies, and every ledger."""
    homes, ledgers = list[Path](), list[Path]()
    for home, files in walk(results, on_error, first="runs"):
        is_export = EXPORT.issubset(files) and FILE not in files
        if is_export:
            continue
        ledgers += [home / name for name in sorted(files) if ".jsonl" in name]
        if RECORD in files or FILE in files:
            homes.append(home)
    # The record of a federation, which is here if this machine is its server, counts its nodes.
    homes = [home for home in homes if not (is_node(home) and _has_record(run_of_node(home)))]
    return homes, ledgers


def _has_record(home: Path) -> bool:
    return is_file(home / RECORD)


def _is_copy(home: Path, same_run_homes: Sequence[Path]) -> bool:
    """Return True if another folder of the same run has the same record, apart from labels."""
    if not same_run_homes:
        return False
    document = _read_without_labels(home)
    return any(_read_without_labels(other) == document for other in same_run_homes)


def _read_without_labels(home: Path) -> str:
    document = records.read_document(home / RECORD) or {}
    return records.format_json({**document, "labels": None})  # as text, NaN equals NaN


def find_other_ledgers(results: Path, run: str, home: Path) -> list[Path]:
    """Return the ledgers of a run in other folders: it was renamed, moved, copied or deleted.

    Args:
        results: the results folder.
        run: digest of the run.
        home: the run's folder or, at a federation's node, the node's folder.
    """
    ledgers = list[Path]()
    for other, files in walk(results, on_error=_skip, first="runs"):
        names = [name for name in files if ".jsonl" in name]
        if not names or other == home or is_node(other) != is_node(home):
            continue
        is_of_same_node = not is_node(home) or other.name == home.name
        if is_of_same_node and _digest_of_run(other) == run:
            ledgers += [path for path in (other / name for name in names) if is_ledger(path)]
    return ledgers


def _skip(error: OSError) -> None:
    """Leave out a folder that cannot be read; `find_spendings` reports it."""


def _digest_of_run(home: Path) -> str | None:
    """Return the digest of the run in a folder; None if the folder does not state it."""
    folders = [home, run_of_node(home)] if is_node(home) else [home]
    for folder in folders:
        try:
            if is_file(folder / FILE) and (digest := read_plan(folder / FILE).run):
                return digest
            if record := records.read(folder / RECORD):
                return record.run
        except UserError:  # damaged; `find_spendings` reports it
            continue
    return None


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
    run = record or read_plan(home / FILE)
    planned = spending_of(run, home, read_files(home))
    is_federation = bool(run.privacy.nodes)
    max_releases = run.max_releases if isinstance(run, Plan) else None
    steps = _count_steps(planned, is_federation, record is not None, max_releases)
    return replace(
        planned,
        spent=replace(planned.spent, steps=steps),
        finished=record is not None or records.is_deleted(home),
    )


def _count_steps(
    planned: Spending, is_federation: bool, is_finished: bool, max_releases: int | None
) -> int:
    """Return the steps that a run has taken or may still take.

    Args:
        planned: the run's spending by its record or, if it has none, its `spending.json`.
        is_federation: whether each subfolder of the run has the ledgers of a node.
        is_finished: whether the run has a record.
        max_releases: see `Plan`.
    """
    home, steps = planned.home, planned.spent.steps
    if is_node(home):  # its server may request more steps than it planned
        taken = count_releases(drop_copies(find_ledgers(home, ignored=(FILE,))))
        return max(steps, taken)
    # The record of a finished run already counts its only ledger, which would be slow to read. For
    # an unfinished secure run, the steps in the ledger are added below.
    count_single = not is_finished and not planned.secure
    steps = max(steps, _steps_in_ledgers(home, is_federation, count_single))
    if is_finished:
        return steps
    ledger = home / "ledger.jsonl"
    if planned.secure and is_file(ledger):
        # Secure noise cannot be drawn again, so steps that are repeated after a kill count twice.
        taken = count_releases([ledger])
        allowed = steps + taken
        if max_releases is not None:
            allowed = min(allowed, max_releases)
        steps = max(steps, taken, allowed)
    if not is_federation:
        steps = max(steps, _steps_of_older_nodes(home))
    return steps


def _steps_of_older_nodes(home: Path) -> int:
    """Return the steps of a site's nodes whose spending older versions wrote to the run's folder.

    Each folder is of other data, and so of other noise, although the lines of its ledger may be the
    same as those of another one.
    """
    folders = [path for path in home.glob(f"{NODES}/*") if path.is_dir()]
    older = [folder for folder in folders if not exists(folder / FILE)]
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
    planned = read_plan(home / FILE) if is_file(home / FILE) else None
    node_homes = find_node_homes(home)
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
    files = format_files(Files(spending.sources, spending.owners))
    start_sources = planned.start_sources if planned else None
    digest = _digest_of_run(home)
    Plan(run.recipe, data, released, files, start_sources, digest).write(home)
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


def spending_of(
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

    A patient is at one node, which may differ between runs. So the least noise and the most steps
    of any node are combined, each of which only raises ε. Of samplings, none is always the worst: a
    node with fewer examples may draw each more often, and hold fewer of a patient's.
    """
    nodes = released.releases  # one entry, unless the run is a federation
    samplings = {node.sampling for node in nodes}
    by_rate = sorted(samplings, key=lambda sampling: (-sampling.sample_rate, sampling.records))
    sampling, *elsewhere = by_rate
    min_z = min(node.z for node in nodes)
    max_steps = max(node.steps for node in nodes)
    steps = max(max_steps, released.steps)
    return SpentSteps(min_z, sampling, steps, elsewhere=tuple(elsewhere))
