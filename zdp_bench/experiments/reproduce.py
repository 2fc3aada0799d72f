"""Every table of every paper in one command: `zdp-bench reproduce --profile smoke|here|paper`.

    smoke   each recipe with few steps on generated or embedded data, a job on every core; of its
            sweep, as many jobs as it takes for every setting to occur. Shows that everything
            runs. Runs, tables and page go to a folder of their own and fill no paper's cell.
    here    as published, wherever the data root holds the data
    paper   as published, fetching what may be fetched; estimates time and memory first

The tables and recipes say what there is to do. A run that has a record, under any recipe, is not
repeated, so the command can be stopped and given again. Of several equal runs one is made.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from zdp_bench import assets, records
from zdp_bench.bench import tables as measured
from zdp_bench.config import configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import files
from zdp_bench.errors import UserError
from zdp_bench.experiments import cost
from zdp_bench.experiments.claims import Equals, claims_of, jobs_of, on_other_data
from zdp_bench.report import curves, page, papers, tables, verdicts
from zdp_bench.report.tables import Filling
from zdp_bench.training.devices import pick_device
from zdp_bench.training.progress import Silent
from zdp_bench.training.run import run
from zdp_bench.training.setup import build_dataset

PROFILES = ("smoke", "here", "paper")
SMOKE_FOLDER = "smoke"  # under the results folder
SMOKE_NOTE = (
    "SMOKE: generated or embedded data and a few steps. These rows show that the recipes run; "
    "they reproduce nothing. Of a sweep there are as many rows as it takes for every setting to "
    "occur."
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One run that a table wants."""

    table: str
    filling: Filling
    seed: int
    config: Run

    def __str__(self) -> str:
        job = self.filling
        return " ".join([f"recipe={job.recipe}", *job.overrides, f"seed={self.seed}"])


@dataclass(frozen=True)
class Plan:
    """What there is to do.

    Attributes:
        missing: why a row cannot be filled, by experiment digest.
        fillings: what may stand in each table once all is done.
    """

    jobs: list[Job]
    missing: dict[str, str]
    fillings: dict[str, list[Filling]]


@dataclass(frozen=True)
class Outcome:
    """The verdict on every cell, the (job, reason) of runs that failed, and the pages written."""

    verdicts: list[verdicts.Verdict]
    failed: list[tuple[str, str]]
    pages: list[Path]


def reproduce_all(profile: str, seeds: int, results: Path, extra: list[str], say: Say) -> Outcome:
    """Run what the profile's tables lack, write the tables and the page, and judge every cell.

    Args:
        extra: overrides that say where and how: paths.data, threads, device.
        say: takes the progress, one line at a time.
    """
    smoke = profile == "smoke"
    folder = results / SMOKE_FOLDER if smoke else results
    names = [name for name in papers.available() if papers.recipes_of(name)]
    say(f"working out what {len(names)} tables want ...")
    plan = make_plan(names, profile, seeds, folder, extra)
    if profile == "paper":
        for line in estimate(plan.jobs, results):
            say(line)
    failed = _run_all(plan, (os.cpu_count() or 1) if smoke else 1, say)

    notes = [SMOKE_NOTE] if smoke else []
    made, drawn = [], []
    for name in names:
        if papers.is_figure(name):
            figure = curves.build(name, folder, plan.fillings[name])
            drawn.append(dataclasses.replace(figure, notes=[*notes, *figure.notes]))
        else:
            table = tables.build(name, folder, plan.fillings[name], plan.missing)
            made.append(dataclasses.replace(table, notes=[*notes, *table.notes]))
    for table in made:
        table.write(folder)
    for figure in drawn:
        figure.write(folder)
    for name in [name for name in measured.available() if name not in names]:
        if not (folder / "tables" / f"{papers.file_stem(name)}.md").exists():
            say(f"measuring {name} ...")
            measured.run(name, quick=profile != "paper", threads=2, results=folder)
    pages = [page.write(made, folder, folder / "report.html")]
    found = [verdict for table in made for verdict in verdicts.of_table(table)]
    for figure in drawn:
        found += verdicts.of_curves(figure, plan.missing)
    return Outcome(found, failed, pages)


# ------------------------------------------------------------------------------------ planning


def make_plan(names: list[str], profile: str, seeds: int, folder: Path, extra: list[str]) -> Plan:
    """Return the runs that the tables want, each once, and what they will fill."""
    plan = Plan([], {}, {})
    planned: set[tuple[str, str]] = set()
    equals = Equals(folder)
    smoke = profile == "smoke"
    for table in names:
        claims = claims_of(table, jobs_with_new_settings if smoke else None)
        plan.fillings[table] = fillings = [] if smoke else on_other_data(claims, folder)
        for claim in claims:
            filling, reason = claim.filling, ""
            reduced = smoke_overrides(claim.config) if smoke else []
            words = [f"recipe={filling.recipe}", *filling.overrides, f"paths.results={folder}"]
            words += [*extra, *(reduced or [])]
            configs = [configured([*words, f"seed={seed}"]) for seed in range(1, seeds + 1)]
            if reduced is None:
                reason = f"no stand-in for data set '{claim.config.dataset.name}'"
            elif smoke:
                filling = _mark_smoke(filling, configs[0])
            elif profile == "here":
                reason = missing_data(configs[0])
            fillings.append(filling)
            if reason:
                plan.missing[filling.digest] = reason
            elif (filling.recipe, filling.digest) not in planned:
                plan.jobs.extend(
                    Job(table, filling, seed, config)
                    for seed, config in enumerate(configs, 1)
                    if equals.claim(filling, seed) == filling.recipe
                )
            planned.add((filling.recipe, filling.digest))
    return plan


def jobs_with_new_settings(recipe: str) -> list[tuple[str, ...]]:
    """Return the jobs of a recipe's sweep that have a setting which no job before them has."""
    seen: set[str] = set()
    jobs = []
    for job in jobs_of(recipe):
        if not job or not seen.issuperset(job):
            jobs.append(job)
        seen.update(job)
    return jobs


def _mark_smoke(filling: Filling, reduced: Run) -> Filling:
    """Mark a row as on other data, so that nothing is compared with the paper."""
    label = f"{reduced.dataset.name}, smoke"
    return dataclasses.replace(filling, on=label, digest=experiment_digest(reduced))


def missing_data(config: Run) -> str:
    """Return in words what the data root lacks of a run's data set; empty if it lacks nothing."""
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
    untrained = ["model.weights=untrained"] if "weights" in config.model.options else []
    return [*words, "trainer.epochs=1", size, *untrained, "threads=1"]


# ------------------------------------------------------------------------------------- running


def _run_all(plan: Plan, workers: int, say: Say) -> list[tuple[str, str]]:
    """Run the jobs; return those that failed, and why."""
    failed = []
    started = time.monotonic()
    total = len(plan.jobs)
    for number, (job, state, error) in enumerate(_run_jobs(plan.jobs, workers), start=1):
        if error:
            failed.append((str(job), error))
            plan.missing.setdefault(job.filling.digest, error)
        left = _duration((time.monotonic() - started) / number * (total - number))
        say(f"[{number:>{len(str(total))}}/{total}] {job.table}  {job}: {state}; {left} left")
    return failed


def _run_jobs(jobs: list[Job], workers: int) -> Iterator[tuple[Job, str, str]]:
    """Yield every job as it ends, with how it ended and, if it failed, why."""
    if workers == 1:
        yield from map(_run_job, jobs)
        return
    # Spawned, for torch's threads would be missing in a fork.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_run_job, job) for job in jobs]):
            yield done.result()


def _run_job(job: Job) -> tuple[Job, str, str]:
    try:
        outcome = run(job.config, Silent())
    except UserError as error:
        return job, f"failed: {error}", str(error)
    headline = outcome.record["headline"]
    before = " (done before)" if outcome.found else ""
    return job, f"{headline['name']} {headline['value']:.4g}{before}", ""


# ---------------------------------------------------------------------------------- estimating


def estimate(jobs: list[Job], results: Path) -> list[str]:
    """Return lines on the time and memory of jobs: a total, then one line for each row.

    They come from records of the same experiment, else from a few timed steps.
    """
    recorded = {record["experiment"]: record for record in records.read_all(results)}
    lines, total, unknown, most = [], 0.0, 0, 0.0
    for first in {job.filling: job for job in jobs}.values():
        runs = sum(job.filling == first.filling for job in jobs)
        label = f"  {first.filling.recipe} {' '.join(first.filling.overrides)}"
        device = str(pick_device(first.config.device))
        try:
            if record := recorded.get(first.filling.digest):
                spent = record["measured"]
                seconds, memory = spent["train_seconds"], spent["peak_memory_bytes"]
                source = f"as on {record['environment']['device']}"
            else:
                tried = cost.measure(first.config)
                seconds, memory, source = tried.seconds, tried.bytes, f"three steps on {device}"
        except UserError as error:
            unknown += runs
            lines.append(f"{label}: unknown ({error})")
            continue
        total, most = total + seconds * runs, max(most, memory / 2**30)
        size = f"{memory / 2**30:.1f} GiB"
        lines.append(f"{label}: {runs} runs of {_duration(seconds)}, {size} ({source})")
    head = (
        f"to run: {len(jobs)} runs, about {_duration(total)} one after another, "
        f"up to {most:.1f} GiB"
    )
    return [head + (f"; {unknown} runs could not be estimated" if unknown else ""), *lines]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
