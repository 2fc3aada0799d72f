"""What tables lack: the runs, each once, how long they take, and which of them to make first."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zdp_bench import assets, records
from zdp_bench.config import configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import files
from zdp_bench.errors import UserError
from zdp_bench.experiments.claims import Equals, claims_of, jobs_of, on_other_data
from zdp_bench.experiments.validate import validate
from zdp_bench.models.resnet18_transfer import UNTRAINED, missing_weights
from zdp_bench.report import papers
from zdp_bench.report.rows import Filling
from zdp_bench.report.sheet import Sheet
from zdp_bench.training.setup import build_dataset

# Options of an algorithm that do not change how long a step takes.
AS_LONG = ("noise_multiplier", "max_grad_norm", "error_clip")
DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?")


@dataclass(frozen=True)
class Job:
    """One run that a table wants."""

    table: str
    filling: Filling
    seed: int
    config: Run

    def __str__(self) -> str:
        return " ".join(self.overrides)

    @property
    def overrides(self) -> list[str]:
        """The words that make the run, without where and how."""
        job = self.filling
        return [f"recipe={job.recipe}", *job.overrides, f"seed={self.seed}"]


@dataclass(frozen=True)
class Plan:
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
) -> Plan:
    """Return the runs that the tables want, each once, and what they will fill.

    Args:
        seeds: of every row; None for as many as the paper has.
        as_published: leave variants of ours out.
    """
    jobs: list[Job] = []
    missing: dict[str, str] = {}
    wanted: dict[str, list[Filling]] = {}
    merged = 0
    planned: set[tuple[str, str]] = set()
    equals = Equals(folder)
    smoke = profile == "smoke"
    for table in names:
        claims = claims_of(table, jobs_with_new_settings if smoke else None)
        wanted[table] = fillings = [] if smoke else on_other_data(claims, folder)
        for claim in claims:
            filling, reason = claim.filling, ""
            if as_published and filling.variant:
                fillings.append(filling)
                continue
            reduced = smoke_overrides(claim.config) if smoke else []
            words = [f"recipe={filling.recipe}", *filling.overrides, f"paths.results={folder}"]
            words += [*extra, *(reduced or [])]
            each = range(1, (seeds or papers.seeds(table)) + 1)
            configs = [configured([*words, f"seed={seed}"]) for seed in each]
            if reduced is None:
                reason = f"no stand-in for data set '{claim.config.dataset.name}'"
            elif smoke:
                filling = _mark_smoke(filling, configs[0])
            elif profile == "here":
                reason = missing_data(configs[0])
            fillings.append(filling)
            if reason:
                missing[filling.digest] = reason
                continue
            own = [
                Job(table, filling, seed, config)
                for seed, config in enumerate(configs, 1)
                if (filling.recipe, filling.digest) not in planned
                and equals.claim(filling, seed) == filling.recipe
            ]
            planned.add((filling.recipe, filling.digest))
            merged += not own
            jobs += own
    return Plan(jobs, missing, wanted, merged)


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
    return [*words, "trainer.epochs=1", size, *weights, "threads=1"]


# ------------------------------------------------------------------------------------ choosing


def order(plan: Plan, results: Path) -> list[Work]:
    """Return the runs that have no record, most cells per hour first.

    A run that lacks data counts as one whose time cannot be told; such runs come last.
    """
    done = {(run["experiment"], run["seed"]) for run in records.read_all(results)}
    filled = {experiment for experiment, _ in done}
    rows: dict[str, set[tuple[str, str, str | None]]] = {}
    for table, fillings in plan.fillings.items():
        for one in fillings:
            rows.setdefault(one.digest, set()).add((table, one.row, one.variant))
    known = _recorded(results)
    found = []
    for job in plan.jobs:
        digest = job.filling.digest
        if (digest, job.seed) in done:
            continue
        cells = 0 if digest in filled else len(rows.get(digest, ()))
        filled.add(digest)
        lacks = missing_data(job.config)
        try:
            found.append(Work(job, cells, seconds_of(job.config, known), lacks))
        except UserError as error:
            found.append(Work(job, cells, None, lacks or str(error)))
    return sorted(found, key=_worth)


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


def seconds_of(config: Run, known: dict[str, float]) -> float:
    """Return how long a run takes, by records of runs that take as long, else by steps of it.

    Args:
        known: seconds of an epoch, by what they depend on; what is found out is added.

    Raises:
        UserError: the recipe would not run.
    """
    key = _alike(config.resolved)
    if key not in known:
        cost = validate(config).cost
        assert cost is not None
        known[key] = cost.seconds / config.trainer.epochs
    return known[key] * config.trainer.epochs


def _recorded(results: Path) -> dict[str, float]:
    """Return the seconds of an epoch of the runs that have records."""
    found = {}
    for run in records.read_all(results):
        spent, epochs = run["measured"]["train_seconds"], run["config"]["trainer"]["epochs"]
        if epochs and run["measured"].get("resumed_at_step") is None:
            found[_alike(run["config"])] = spent / epochs
    return found


def _alike(config: Mapping[str, Any]) -> str:
    """Return what the length of an epoch depends on, as text."""
    parts = [dict(config[part]) for part in ("model", "dataset", "algorithm")]
    parts.append({key: config["trainer"].get(key) for key in ("sample_rate", "batch_size")})
    parts.append({"nodes": (config.get("federated") or {}).get("nodes")})
    # Records sort their keys, and those of an earlier version lack what is null by default.
    told = [{k: v for k, v in part.items() if v is not None and k not in AS_LONG} for part in parts]
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


def show_duration(seconds: float) -> str:
    """'45 s', '12 min', '3.4 h'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def sheet(plan: Plan, ordered: Iterable[Work]) -> Sheet:
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
                show_duration(sum(known)) if known else "unknown",
                works[0].lacks,
            ]
        )
    possible = [work for work in ordered if not work.lacks]
    cells = sum(work.cells for work in possible)
    total = f"{len(possible)} runs fill {cells} empty rows in about {hours(possible):.1f} hours"
    notes = [
        f"{total}, one after another on this machine.",
        f"{len(ordered) - len(possible)} runs lack what the last column says.",
        f"{plan.merged} more rows are filled by runs that are planned or made already.",
    ]
    columns = ["table", "run", "seeds", "empty rows", "time", "lacks"]
    return Sheet("What is to be run, most rows per hour first", columns, lines, notes)
