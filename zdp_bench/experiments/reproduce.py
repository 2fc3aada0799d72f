"""Every table of every paper in one command, resumable: `zdp-bench reproduce --profile smoke|here|paper`.

    smoke   each recipe with few steps on generated or embedded data, and of its sweep as many jobs as it takes for every setting
            to occur, a job on every core: shows that everything runs. Its runs, tables and page lie in a folder of their own and
            fill no paper's cell.
    here    as published, wherever the data root holds the data
    paper   as published, fetching what may be fetched; time and memory are estimated before it starts

What there is to do follows from the tables and recipes there are. A run that is done is found and not repeated.
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
from zdp_bench.experiments.claims import claims_of, jobs_of, on_other_data
from zdp_bench.report import curves, page, papers, tables, verdicts
from zdp_bench.report.tables import Filling, Table
from zdp_bench.training.devices import pick_device
from zdp_bench.training.progress import Silent
from zdp_bench.training.run import run
from zdp_bench.training.setup import build_dataset

PROFILES = ("smoke", "here", "paper")
SMOKE_FOLDER = "smoke"  # under the results folder
SMOKE_NOTE = (
    "SMOKE: generated or embedded data and a few steps. These rows show that the recipes run; they reproduce nothing. Of a sweep "
    "there are as many rows as it takes for every setting to occur."
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
        return " ".join(
            [f"recipe={self.filling.recipe}", *self.filling.overrides, f"seed={self.seed}"]
        )


Key = tuple[str, tuple[str, ...]]  # (recipe, overrides): what a row is filled by


@dataclass(frozen=True)
class Plan:
    """What there is to do.

    Attributes:
        missing: why a row is not to be had.
        stands: what may stand in each table once all is done.
    """

    jobs: list[Job]
    missing: dict[Key, str]
    stands: dict[str, list[Filling]]


@dataclass(frozen=True)
class Closing:
    """How it ended: the verdict on every cell, and what failed although nothing was missing."""

    verdicts: list[verdicts.Verdict]
    failed: list[tuple[str, str]]
    pages: list[Path]


def carry_out(profile: str, seeds: int, results: Path, extra: list[str], say: Say) -> Closing:
    """Run what the profile's tables lack, write them and the page, and judge every cell.

    Args:
        extra: overrides that say where and how: paths.data, threads, device.
        say: is told the progress, one line at a time.
    """
    folder = results / SMOKE_FOLDER if profile == "smoke" else results
    named = [name for name in papers.available() if papers.recipes_of(name)]
    say(f"working out what {len(named)} tables want ...")
    plan = plan_of(named, profile, seeds, folder, extra)
    if profile == "paper":
        for line in estimate(plan.jobs, results):
            say(line)
    failed = _run_all(plan, (os.cpu_count() or 1) if profile == "smoke" else 1, say)

    notes = [SMOKE_NOTE] if profile == "smoke" else []
    made = [_build(name, plan, folder, notes) for name in named if not papers.is_figure(name)]
    for table in made:
        tables.write(table, folder)
    drawn = [
        curves.build(name, folder, plan.stands[name]) for name in named if papers.is_figure(name)
    ]
    for figure in drawn:
        curves.write(dataclasses.replace(figure, notes=[*notes, *figure.notes]), folder)
    for name in [name for name in measured.available() if name not in named]:
        if not (folder / "tables" / f"{papers.file_stem(name)}.md").exists():
            say(f"measuring {name} ...")
            measured.run(name, quick=profile != "paper", threads=2, results=folder)
    pages = [page.write(made, folder, folder / "report.html")]
    found = [verdict for table in made for verdict in verdicts.of_table(table)]
    for figure in drawn:
        found += verdicts.of_curves(figure, plan.missing)
    return Closing(found, failed, pages)


# -------------------------------------------------------------------------------------------------------- what to run


def plan_of(named: list[str], profile: str, seeds: int, folder: Path, extra: list[str]) -> Plan:
    """The runs that the tables `named` want, and what they will fill; no run is wanted twice."""
    plan = Plan([], {}, {})
    known: set[Key] = set()
    for table in named:
        claims = claims_of(table, telling_jobs if profile == "smoke" else None)
        plan.stands[table] = stands = [] if profile == "smoke" else on_other_data(claims, folder)
        for claim in claims:
            filling, why = claim.filling, ""
            key = filling.recipe, filling.overrides
            words = [
                f"recipe={filling.recipe}",
                *filling.overrides,
                f"paths.results={folder}",
                *extra,
            ]
            reduced = smoke(claim.config) if profile == "smoke" else []
            configs = [
                configured([*words, *(reduced or []), f"seed={seed}"])
                for seed in range(1, seeds + 1)
            ]
            if reduced is None:
                why = f"no stand-in for data set '{claim.config.dataset.name}'"
            elif profile == "smoke":
                filling = _as_smoked(filling, configs[0])
            elif profile == "here":
                why = lacking(configs[0])
            stands.append(filling)
            if why:
                plan.missing[key] = why
            elif key not in known:
                plan.jobs.extend(
                    Job(table, filling, seed, config)
                    for seed, config in enumerate(configs, start=1)
                )
            known.add(key)
    return plan


def telling_jobs(recipe: str) -> list[tuple[str, ...]]:
    """Of a recipe's sweep, the jobs with a setting that none before them has."""
    seen: set[str] = set()
    telling = []
    for job in jobs_of(recipe):
        if not job or not seen.issuperset(job):
            telling.append(job)
        seen.update(job)
    return telling


def _as_smoked(filling: Filling, reduced: Run) -> Filling:
    """What the reduced runs of a row fill: marked as on other data, so that nothing is compared with the paper."""
    return dataclasses.replace(
        filling, on=f"{reduced.dataset.name}, smoke", digest=experiment_digest(reduced)
    )


def lacking(config: Run) -> str:
    """What the data root does not hold of a run's data set, in words; empty where nothing is missing."""
    card = files.card(config.dataset.name)
    source = files.card(card.uses) if card.uses else card
    if gone := files.missing(config.data_root, source):
        return f"the data root lacks {Path(gone[0].path).name}" + (
            f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        )
    if not files.has_files(config.data_root, source):
        return f"the data root lacks {source.holds}"
    if source.holds and not _found(
        config
    ):  # another task of a release, or another folder of volumes
        return f"the data root holds some of dataset '{card.name}', but not what this run reads"
    return ""


def _found(config: Run) -> bool:
    """Whether the files of a run's data set are there; what is wrong with files that are, the run itself tells."""
    try:
        return build_dataset(config).info(config.data_root).found
    except UserError:
        return True


def smoke(config: Run) -> list[str] | None:
    """The overrides that make a run a matter of seconds; None where nothing can stand in for its data.

    The stand-in is named by the data set's card (`stand_in`), or is the one called NAME_synthetic; what is embedded or
    generated already stands for itself.
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
    trainer = config.trainer
    size = (
        "trainer.sample_rate=0.25" if trainer.sample_rate is not None else "trainer.batch_size=32"
    )
    untrained = ["model.weights=untrained"] if "weights" in config.model.options else []
    return [*words, "trainer.epochs=1", size, *untrained, "threads=1"]


# ------------------------------------------------------------------------------------------------------------ running


def _run_all(plan: Plan, workers: int, say: Say) -> list[tuple[str, str]]:
    """Run the jobs, one after another or by several processes side by side; returns those that failed, and why."""
    failed = []
    since = time.monotonic()
    for number, (job, state, error) in enumerate(_attempts(plan.jobs, workers), start=1):
        if error:
            failed.append((str(job), error))
            plan.missing.setdefault((job.filling.recipe, job.filling.overrides), error)
        left = (time.monotonic() - since) / number * (len(plan.jobs) - number)
        say(
            f"[{number:>{len(str(len(plan.jobs)))}}/{len(plan.jobs)}] {job.table}  {job}: {state}; {_duration(left)} left"
        )
    return failed


def _attempts(jobs: list[Job], workers: int) -> Iterator[tuple[Job, str, str]]:
    """Every job as it ends, with how it ended, and why it failed or ''."""
    if workers == 1:
        yield from map(_attempt, jobs)
        return
    with ProcessPoolExecutor(
        workers, get_context("spawn")
    ) as pool:  # forked, torch's threads would be missing
        for done in as_completed([pool.submit(_attempt, job) for job in jobs]):
            yield done.result()


def _attempt(job: Job) -> tuple[Job, str, str]:
    try:
        outcome = run(job.config, Silent())
    except UserError as error:
        return job, f"failed: {error}", str(error)
    headline = outcome.record["headline"]
    return (
        job,
        f"{headline['name']} {headline['value']:.4g}" + (" (done before)" if outcome.found else ""),
        "",
    )


def _build(name: str, plan: Plan, folder: Path, notes: list[str]) -> Table:
    """A table laid out; an empty cell says why it is empty."""
    made = tables.build(name, folder, plan.stands[name])
    rows = []
    for row in made.rows:
        key = (str(row.numbers["recipe"]), tuple(str(row.numbers["overrides"]).split()))
        if not row.numbers["n"] and key in plan.missing:
            row = dataclasses.replace(
                row, cells=row.cells | {"ours": f"not run: {plan.missing[key]}"}
            )
        rows.append(row)
    return dataclasses.replace(made, rows=rows, notes=[*notes, *made.notes])


# --------------------------------------------------------------------------------------------------------- estimating


def estimate(wanted: list[Job], results: Path) -> list[str]:
    """Time and memory of what is still to be run: from the records of the same experiment, else from a few timed steps."""
    known = {r["experiment"]: r for r in records.read_all(results)}
    lines, total, unknown, most = [], 0.0, 0, 0.0
    for of in {(job.filling.recipe, job.filling.overrides): job for job in wanted}.values():
        runs = [job for job in wanted if job.filling == of.filling]
        config = of.config
        done = known.get(of.filling.digest)
        device = str(pick_device(config.device))
        try:
            if done:
                seconds, memory = (
                    done["measured"]["train_seconds"],
                    done["measured"]["peak_memory_bytes"],
                )
                source = f"as on {done['environment']['device']}"
            else:
                tried, source = cost.measured(config), f"three steps on {device}"
                seconds, memory = tried.seconds, tried.bytes
        except UserError as error:
            unknown += len(runs)
            lines.append(
                f"  {of.filling.recipe} {' '.join(of.filling.overrides)}: unknown ({error})"
            )
            continue
        total, most = total + seconds * len(runs), max(most, memory / 2**30)
        lines.append(
            f"  {of.filling.recipe} {' '.join(of.filling.overrides)}: {len(runs)} runs of {_duration(seconds)}, "
            f"{memory / 2**30:.1f} GiB ({source})"
        )
    head = f"to run: {len(wanted)} runs, about {_duration(total)} one after another, up to {most:.1f} GiB"
    return [head + (f"; {unknown} runs could not be estimated" if unknown else ""), *lines]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
