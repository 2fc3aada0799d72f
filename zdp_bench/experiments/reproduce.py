"""Runs what tables lack, and writes them: one table, or every table of every paper.

    smoke   the first job of each recipe, one seed and few steps of it, on generated or embedded
            data, a job on every core. Shows that every recipe runs. Runs, tables and page go to a
            folder of their own and fill no paper's cell.
    here    as published, wherever the data root holds the data and the weights
    paper   as published, fetching what may be fetched

A plan holds the runs, each once, how long they take, and which to make first. A run that has a
record, under any recipe, is not repeated, so the command can be stopped and given again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from zdp_bench import assets, records
from zdp_bench.config import configured
from zdp_bench.config.compose import hydra_session
from zdp_bench.config.digests import drop_empty, experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import files
from zdp_bench.errors import UserError
from zdp_bench.experiments.claims import Equals, claims_of, on_other_data
from zdp_bench.experiments.sweep import launch
from zdp_bench.experiments.validate import validate
from zdp_bench.models.resnet import UNTRAINED, missing_weights
from zdp_bench.registry import find
from zdp_bench.report import curves, papers, tables
from zdp_bench.report.cells import Filling, Verdict
from zdp_bench.report.sheet import Sheet
from zdp_bench.report.terminal import duration
from zdp_bench.training.interrupts import Stopped, end_with_parent
from zdp_bench.training.progress import Silent
from zdp_bench.training.run import run
from zdp_bench.training.setup import build_dataset

SMOKE_FOLDER = "smoke"  # under the results folder
SMOKE_HIDDEN = 256  # the widest fully connected layers of a smoke run
SMOKE_NOTE = (
    "SMOKE: generated or embedded data and a few steps. These rows show that the recipes run; "
    "they reproduce nothing. Of a sweep there is the first job."
)

Say = Callable[[str], None]
Failures = list[tuple[str, str]]  # (job, reason)
TRIALS = 15.0  # seconds after which a plan times no more steps

# Options that do not change how long a step takes.
AS_LONG = ("noise", "noise_multiplier", "max_grad_norm", "error_clip")
DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?")


@dataclass(frozen=True)
class Job:
    """One run that a table wants.

    Attributes:
        row: the run that the recipe describes, whatever its seed.
        words: overrides, without the seed.
    """

    table: str
    filling: Filling
    seed: int
    row: Run
    words: tuple[str, ...]

    @cached_property
    def config(self) -> Run:
        """The run itself, composed when it is asked for: a plan holds hundreds."""
        return configured([*self.words, f"seed={self.seed}"])

    def __str__(self) -> str:
        return " ".join(self.overrides)

    @property
    def overrides(self) -> list[str]:
        """The words that make the run, without where and how."""
        job = self.filling
        return [f"recipe={job.recipe}", *job.overrides, f"seed={self.seed}"]


@dataclass(frozen=True)
class ReproductionPlan:
    """What there is to do.

    Attributes:
        missing: why a row cannot be filled, by experiment digest.
        fillings: what may stand in each table once all is done.
        merged: rows that need no run of their own: an equal one fills them.
    """

    jobs: list[Job]
    missing: dict[str, str]
    fillings: dict[str, list[Filling]]
    merged: int = 0


@dataclass(frozen=True)
class Work:
    """A run without a record.

    Attributes:
        cells: empty rows that it fills.
        seconds: how long it takes; None if that could not be told.
        lacks: what is missing for it, in words.
    """

    job: Job
    cells: int
    seconds: float | None
    lacks: str = ""


def make_plan(
    names: list[str],
    profile: str,
    seeds: int | None,
    folder: Path,
    extra: list[str],
    as_published: bool = False,
) -> ReproductionPlan:
    """Return the runs that the tables want, each once, and what they will fill.

    Args:
        seeds: of every row; None for as many as the paper has, of smoke one.
        as_published: leave variants of ours out.
    """
    jobs: list[Job] = []
    missing: dict[str, str] = {}
    wanted: dict[str, list[Filling]] = {}
    merged = 0
    planned: set[tuple[str, str]] = set()
    equals = Equals(folder)
    smoke = profile == "smoke"
    here = configured(["recipe=quickstart", f"paths.results={folder}", *extra]).paths
    for table in names:
        claims = claims_of(table, 1 if smoke else None)
        wanted[table] = fillings = [] if smoke else on_other_data(claims, folder)
        for claim in claims:
            filling, reason = claim.filling, ""
            row = dataclasses.replace(claim.config, paths=here)
            if as_published and filling.variant:
                fillings.append(filling)
                continue
            reduced = smoke_overrides(claim.config) if smoke else []
            words = [f"recipe={filling.recipe}", *filling.overrides, f"paths.results={folder}"]
            words += [*extra, *(reduced or [])]
            if reduced is None:
                reason = f"no stand-in for data set '{claim.config.dataset.name}'"
            elif smoke:
                row = configured(words)
                filling = _mark_smoke(filling, row)
            elif profile == "here":
                reason = missing_data(row)
            fillings.append(filling)
            if reason:
                missing[filling.digest] = reason
                continue
            own = [
                Job(table, filling, seed, row, tuple(words))
                for seed in range(1, (seeds or (1 if smoke else papers.seeds(table))) + 1)
                if (filling.recipe, filling.digest) not in planned
                and equals.claim(filling, seed) == filling.recipe
            ]
            planned.add((filling.recipe, filling.digest))
            merged += not own
            jobs += own
    return ReproductionPlan(jobs, missing, wanted, merged)


def _mark_smoke(filling: Filling, reduced: Run) -> Filling:
    """Mark a row as on other data, so that nothing is compared with the paper."""
    label = f"{reduced.dataset.name}, smoke"
    return dataclasses.replace(filling, on=label, digest=experiment_digest(reduced))


def missing_data(config: Run) -> str:
    """Return in words what is lacking: weights, or files of the data set; empty if nothing is."""
    if lacking := missing_weights(str(config.model.options.get("weights", UNTRAINED))):
        return lacking
    card = files.card(config.dataset.name)
    source = files.card(card.uses) if card.uses else card
    if missing := files.missing(config.data_root, source):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"the data root lacks {Path(missing[0].path).name}{more}"
    if not files.has_files(config.data_root, source):
        return f"the data root lacks {source.holds}"
    # Another task of a release may be there, or another folder of volumes.
    if source.holds and not _is_found(config):
        return f"the data root holds some of dataset '{card.name}', but not what this run reads"
    return ""


def _is_found(config: Run) -> bool:
    """Return True if a run's files are there; the run itself reports what is wrong with them."""
    try:
        return build_dataset(config).info(config.data_root).found
    except UserError:
        return True


def smoke_overrides(config: Run) -> list[str] | None:
    """Return the overrides that make a run a matter of seconds; None if no data can stand in.

    The data set's card names the stand-in (`stand_in`), or it is the one called NAME_synthetic.
    Embedded and generated data stand for themselves.
    """
    name = config.dataset.name
    card = files.card(name)
    if card.stand_in:
        words = card.stand_in.split()
    elif f"{name}_synthetic" in assets.group(assets.DATASETS):
        words = [f"dataset={name}_synthetic", *files.card(f"{name}_synthetic").stand_in.split()]
    elif card.provenance == "synthetic" or not (card.files or card.uses or card.access):
        words = []
    else:
        return None
    by_rate = config.trainer.sample_rate is not None
    size = "trainer.sample_rate=0.25" if by_rate else "trainer.batch_size=32"
    weights = ["model.weights=untrained"] if "weights" in config.model.options else []
    weights += ["model.init_from=null"] if config.init_from else []
    if config.representation and "weights" in config.representation.options:
        weights += ["representation.weights=untrained", "representation.resize=32"]
    hidden = config.model.options.get("hidden")
    if isinstance(hidden, int) and hidden > SMOKE_HIDDEN:  # VGG-11: 8.4 GiB with its 4096
        weights.append(f"model.hidden={SMOKE_HIDDEN}")
    return [*words, "trainer.epochs=1", size, *weights, "threads=1"]


# ------------------------------------------------------------------------------------ choosing


def order(plan: ReproductionPlan, results: Path) -> list[Work]:
    """Return the runs that have no record, most cells per hour first.

    A run that lacks data counts as one whose time cannot be told; such runs come last. Times are
    those of records, then of trial steps, for `TRIALS` seconds; what is left is unknown.
    """
    every = records.read_all(results)
    done = {(one["experiment"], one["seed"]) for one in every}
    filled = {experiment for experiment, _ in done}
    rows: dict[str, set[tuple[str, str, str | None]]] = {}
    for table, fillings in plan.fillings.items():
        for one in fillings:
            rows.setdefault(one.digest, set()).add((table, one.row, one.variant))
    known, until = _recorded(every), time.monotonic() + TRIALS
    estimates: dict[str, tuple[float | None, str]] = {}
    found = []
    for job in plan.jobs:
        digest = job.filling.digest
        if (digest, job.seed) in done:
            continue
        cells = 0 if digest in filled else len(rows.get(digest, ()))
        filled.add(digest)
        if digest not in estimates:
            estimates[digest] = _estimate(job.row, known, until)
        found.append(Work(job, cells, *estimates[digest]))
    return sorted(found, key=_worth)


def _estimate(config: Run, known: dict[str, float], until: float) -> tuple[float | None, str]:
    """Return (seconds of a run, None if they cannot be told; what it lacks)."""
    lacks = missing_data(config)
    try:
        return seconds_of(config, known, not lacks and time.monotonic() < until), lacks
    except UserError as error:
        return None, lacks or str(error)


def _worth(work: Work) -> tuple[bool, float, float]:
    """Sort key: possible runs first, then cells per second, then the shorter."""
    if work.seconds is None:
        return True, 0.0, 0.0
    return bool(work.lacks), -work.cells / max(work.seconds, 1.0), work.seconds


def within(budget: float, ordered: Iterable[Work]) -> list[Work]:
    """Return the runs that so many seconds hold, taken from the top."""
    taken = []
    for work in ordered:
        if work.seconds is not None and not work.lacks and work.seconds <= budget:
            taken.append(work)
            budget -= work.seconds
    return taken


def hours(ordered: Iterable[Work]) -> float:
    """Return how long the runs take one after another; those of unknown length count nothing."""
    return sum(work.seconds or 0.0 for work in ordered if not work.lacks) / 3600


def seconds_of(config: Run, known: dict[str, float], may_try: bool = True) -> float | None:
    """Return how long a run takes, by records of runs that take as long, else by steps of it.

    Args:
        known: seconds of an epoch, by what they depend on; what is found out is added.
        may_try: False if no step may be tried; what is not known is None then.

    Raises:
        UserError: the recipe would not run.
    """
    exact, about = _alike(config.resolved), _alike(config.resolved, batch=False)
    if exact not in known and about not in known:
        if not may_try:
            return None
        cost = validate(config).cost
        assert cost is not None
        known[exact] = known[about] = cost.seconds / config.trainer.epochs
    return known.get(exact, known.get(about, 0.0)) * config.trainer.epochs


def _recorded(every: Iterable[records.Record]) -> dict[str, float]:
    """Return the seconds of an epoch of the runs that have records.

    An epoch in batches of another size holds as many examples, and takes about as long.
    """
    found = {}
    for one in every:
        spent, epochs = one["measured"]["train_seconds"], one["config"]["trainer"]["epochs"]
        if epochs and one["measured"].get("resumed_at_step") is None:
            found[_alike(one["config"])] = spent / epochs
            found.setdefault(_alike(one["config"], batch=False), spent / epochs)
    return found


def _alike(config: Mapping[str, Any], batch: bool = True) -> str:
    """Return what the length of an epoch depends on, as text; `batch` includes the batch's size."""
    parts = [dict(config[part]) for part in ("model", "dataset", "algorithm")]
    sizes = ("sample_rate", "batch_size") if batch else ()
    parts.append({key: config["trainer"].get(key) for key in sizes})
    parts.append({"nodes": (config.get("federated") or {}).get("nodes")})
    # Records sort their keys, and those of an earlier version lack what is off by default.
    told = [drop_empty({k: v for k, v in part.items() if k not in AS_LONG}) for part in parts]
    return json.dumps(told, default=str, sort_keys=True)


def read_duration(word: str) -> float:
    """Return the seconds of '40h', '90m' or '2h30m'.

    Raises:
        UserError: it is none of these.
    """
    match = DURATION.fullmatch(word)
    if not match or not any(match.groups()):
        raise UserError(f"--budget {word}: must be a time such as 40h, 90m or 2h30m.")
    return 3600 * float(match[1] or 0) + 60 * float(match[2] or 0)


def sheet(plan: ReproductionPlan, ordered: Iterable[Work]) -> Sheet:
    """Lay the runs out, those of a row together where its first one stands."""
    ordered = list(ordered)
    rows: dict[tuple[str, str], list[Work]] = {}
    for work in ordered:
        rows.setdefault((work.job.table, work.job.filling.digest), []).append(work)
    lines = []
    for (table, _), works in rows.items():
        known = [work.seconds for work in works if work.seconds is not None]
        filling = works[0].job.filling
        lines.append(
            [
                table,
                " ".join([f"recipe={filling.recipe}", *filling.overrides]),
                " ".join(str(work.job.seed) for work in works),
                str(sum(work.cells for work in works)),
                duration(sum(known)) if known else "unknown",
                works[0].lacks,
            ]
        )
    possible = [work for work in ordered if not work.lacks]
    cells = sum(work.cells for work in possible)
    untold = sum(work.seconds is None for work in possible)
    total = f"{len(possible)} runs fill {cells} empty rows in about {hours(possible):.1f} hours"
    notes = [
        f"{total}, one after another on this machine.",
        f"{len(ordered) - len(possible)} runs lack what the last column says.",
        f"{untold} possible runs are of unknown length and not in the sum: no record tells it, "
        f"and no step was tried after {TRIALS:.0f} seconds."
        if untold
        else "",
        f"{plan.merged} more rows are filled by runs that are planned or made already.",
        *(
            f"{count} rows are left out: {why}."
            for why, count in Counter(plan.missing.values()).most_common()
        ),
    ]
    columns = ["table", "run", "seeds", "empty rows", "time", "lacks"]
    title = "What is to be run, most rows per hour first"
    return Sheet(title, columns, lines, [note for note in notes if note])


# ------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Reproduction:
    """The verdict on every cell, and the pages written."""

    verdicts: list[Verdict]
    pages: list[Path]


def run_jobs(jobs: Sequence[Job], workers: int, say: Say) -> Failures:
    """Run the jobs; return those that failed, and why.

    Args:
        say: takes the progress, one line at a time.
    """
    failed = []
    started = time.monotonic()
    total = len(jobs)
    with closing(_each(jobs, workers)) as ended:
        for number, (job, state, error) in enumerate(ended, start=1):
            if error:
                failed.append((str(job), error))
            left = duration((time.monotonic() - started) / number * (total - number))
            say(f"[{number:>{len(str(total))}}/{total}] {job.table}  {job}: {state}; {left} left")
    for results in {job.row.results for job in jobs}:
        records.renew_csv(results)
    return failed


def launch_jobs(
    jobs: Sequence[Job], results: Path, extra: list[str], launcher: str, settings: list[str]
) -> Failures:
    """Give the jobs to one of Hydra's launchers; return those that failed, and why.

    Raises:
        UserError: the launcher cannot work here, or lost its processes.
    """
    words = [[*job.overrides, f"paths.results={results}", *extra] for job in jobs]
    with hydra_session() as driver:
        failed = launch(driver, words, launcher, settings)
    return [(" ".join(overrides), reason) for overrides, reason in failed]


def _each(jobs: Sequence[Job], workers: int) -> Generator[tuple[Job, str, str], None, None]:
    """Yield every job as it ends, with how it ended and, if it failed, why."""
    if workers == 1:
        yield from (_run_job(job, job.config) for job in jobs)
        return
    # Spawned, for torch's threads would be missing in a fork.
    spawn, parent = get_context("spawn"), (os.getpid(),)
    with ProcessPoolExecutor(workers, spawn, end_with_parent, parent) as pool:
        try:
            for done in as_completed([pool.submit(_work, job, job.config) for job in jobs]):
                yield done.result()
        except BaseException:  # asked to stop: so are the workers, which save their runs
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise


def _work(job: Job, config: Run) -> tuple[Job, str, str]:
    """Call `_run_job` in a worker; one that is asked to stop takes no further job."""
    try:
        return _run_job(job, config)
    except Stopped as stop:
        os._exit(stop.exit_code)


def _run_job(job: Job, config: Run) -> tuple[Job, str, str]:
    try:
        outcome = run(config, Silent())
    except UserError as error:
        return job, f"failed: {error}", str(error)
    headline = outcome.record["headline"]
    before = " (done before)" if outcome.found else ""
    return job, f"{headline['name']} {headline['value']:.4g}{before}", ""


def write_all(
    plan: ReproductionPlan, failed: Failures, profile: str, folder: Path, say: Say
) -> Reproduction:
    """Write every table of the plan and the page, and judge every cell."""
    reasons = dict(failed)
    missing = dict(plan.missing)
    for job in plan.jobs:
        if reason := reasons.get(str(job)):
            missing.setdefault(job.filling.digest, reason)
    notes = [SMOKE_NOTE] if profile == "smoke" else []
    made, drawn = [], []
    for name, fillings in plan.fillings.items():
        if papers.is_figure(name):
            figure = curves.build(name, folder, fillings)
            drawn.append(dataclasses.replace(figure, notes=[*notes, *figure.notes]))
            drawn[-1].write(folder)
        else:
            table = tables.build(name, folder, fillings)
            made.append(dataclasses.replace(table, remarks=notes))
            made[-1].write(folder)
    if measure := find("function", "measure"):
        measure(folder, plan.fillings, profile != "paper", say)
    write_page = find("function", "write_page")
    pages = [write_page(made, folder, folder / "report.html")] if write_page else []
    found = [verdict for table in made for verdict in table.verdicts(missing)]
    for figure in drawn:
        found += figure.verdicts(missing)
    return Reproduction(found, pages)
