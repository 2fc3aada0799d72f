"""Which cells of a paper's tables the recipes' jobs fill.

A recipe claims a table and a row (`claims.table`, `claims.row`); each job of its sweep fills the
cell of that row with the records whose experiment digest is its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from zdp_bench import assets, records
from zdp_bench.config import check, to_plain
from zdp_bench.config.compose import defaults, files, unset_keys
from zdp_bench.config.digests import drop_empty, enters_digest, experiment_digest
from zdp_bench.config.schema import GROUPS, Run
from zdp_bench.config.words import parse_words, read_words
from zdp_bench.errors import UserError, unknown
from zdp_bench.experiments.times import Times, read_times, seconds_of
from zdp_bench.privacy.memory import remember
from zdp_bench.records import Record
from zdp_bench.registry import installed, lookup
from zdp_bench.report import grids, papers, tables
from zdp_bench.report.cells import Filling
from zdp_bench.report.papers import recipes_of, rows_of
from zdp_bench.report.sheet import Sheet

_NAMED = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class ClaimedJob:
    """A job of a recipe and what it fills."""

    filling: Filling
    composed: dict[str, Any]
    config: Run


@dataclass(frozen=True)
class Job:
    """A job of a recipe as plain values, which are remembered.

    Attributes:
        digest: the experiment digest of its runs.
        composed: what Hydra composes of it.
        resolved: the configuration of its runs.
    """

    recipe: str
    overrides: tuple[str, ...]
    row: str
    variant: str | None
    digest: str
    composed: dict[str, Any]
    resolved: dict[str, Any]


def fillings(table: str, results: Path) -> list[Filling]:
    """Return the possible lines of a table: its recipes' jobs, also on other data."""
    every = records.read_all(results)
    times = read_times(every)
    jobs = jobs_of_table(table)
    on_own_data = []
    for job in jobs:
        seconds = seconds_of(job.resolved, times)
        filling = Filling(
            job.recipe, job.overrides, job.row, job.variant, job.digest, seconds=seconds
        )
        on_own_data.append(filling)
    return [*on_own_data, *on_other_data(on_own_data, jobs, every)]


def jobs_of_table(table: str) -> list[Job]:
    """Return the jobs of a table's recipes, as they are now.

    To check them takes seconds and torch. So they are remembered for as long as no recipe and no
    code changes.
    """
    plain = _remember(list_jobs, table)
    return [Job(**{**job, "overrides": tuple(job["overrides"])}) for job in plain]


def list_jobs(table: str, state: str = "") -> list[dict[str, Any]]:
    """Return the jobs of a table's recipes as JSON values; they are remembered for a `state`."""
    return [
        {
            "recipe": claim.filling.recipe,
            "overrides": claim.filling.overrides,
            "row": claim.filling.row,
            "variant": claim.filling.variant,
            "digest": claim.filling.digest,
            "composed": claim.composed,
            "resolved": claim.config.resolved,
        }
        for claim in claims_of(table)
    ]


def _remember(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), which follows from recipes and code, or remember it."""
    if installed():  # by other packages, whose code may change
        return function(*arguments)
    return remember(function, *arguments, _state_of_code())


def _state_of_code() -> str:
    """Return a digest that changes with our YAML and code; file times are enough."""
    state = hashlib.sha256()
    package = Path(assets.__file__).parent
    for folder in (package, assets.CONF, assets.RECIPES, assets.DATASETS, assets.PAPERS):
        for place, _, names in sorted(os.walk(folder)):
            for name in sorted(names):
                if name.endswith((".py", ".yaml", ".csv")):
                    file = os.stat(os.path.join(place, name))
                    state.update(f"{place}/{name} {file.st_mtime_ns} {file.st_size}".encode())
    return state.hexdigest()


def build_table(name: str, results: Path) -> Sheet:
    """Return a paper's table or figure, or one of our own, as the records of a folder give it."""
    build = grids.build if name in papers.ours() else tables.build
    return build(name, results, fillings(name, results))


def claims_of(table: str, most: int | None = None, times: Times | None = None) -> list[ClaimedJob]:
    """Return the jobs of a table's recipes as they are now, at most so many of each sweep."""
    rows = set(rows_of(table))
    claims = []
    for recipe in recipes_of(table):
        for overrides in jobs_of(recipe)[:most]:
            composed = compose_job(recipe, overrides)
            config = check(composed)
            row, variant = str(config.claims.row), config.claims.variant
            if row not in rows:
                raise unknown(f"row of {table} in recipe '{recipe}',", row, sorted(rows))
            seconds = seconds_of(config.resolved, times or {})
            digest = experiment_digest(config)
            filling = Filling(recipe, overrides, row, variant, digest, seconds=seconds)
            claims.append(ClaimedJob(filling, composed, config))
    return claims


def compose_job(recipe: str, job: Iterable[str]) -> dict[str, Any]:
    """Return what Hydra composes of a recipe and the overrides of one job, as plain Python.

    Hydra takes a tenth of a second for each, and all tables have five hundred jobs. Recipes choose
    plug-ins and set values, no more, so merging their files does. A test holds both equal.
    """
    merged = merge_job(recipe, job)
    _look_up(merged)
    return merged


def merge_job(recipe: str, job: Iterable[str]) -> dict[str, Any]:
    """Return the same with interpolations that are not resolved yet."""
    base = assets.read_yaml(assets.CONF / "config.yaml")
    body = assets.read_yaml(files("recipe")[recipe])
    plugins: dict[str, str] = {}  # the name chosen in each group
    for entry in base.pop("defaults") + body.pop("defaults", []):
        if isinstance(entry, dict):
            plugins |= {key.removeprefix("override /"): name for key, name in entry.items()}
    values = []
    for word in job:
        key, _, name = word.partition("=")
        if key in GROUPS:
            plugins[key] = name
        else:
            values.append(word)
    merged = {group: _options_of(group, plugins[group]) for group in GROUPS}
    for node in (base, body, {"recipe": recipe}):
        _merge(merged, node)
    for override in parse_words(values):
        _merge(merged, _nest(override.key_or_group, override.value()))
    del merged["hydra"]
    return merged


def _look_up(merged: dict[str, Any]) -> None:
    """Resolve interpolations; only they, and what they refer to, pass through slow OmegaConf."""
    flat = records.flatten(merged)
    interpolated = {key for key, value in flat.items() if "${" in str(value)}
    referred: set[str] = set()
    for key in interpolated:
        referred.update(_NAMED.findall(str(flat[key])))
    few: dict[str, Any] = {}
    for key in interpolated | (referred & flat.keys()):
        _merge(few, _nest(key, flat[key]))
    _merge(merged, to_plain(OmegaConf.create(few)))


def _nest(key: str, value: Any) -> dict[str, Any]:
    """'a.b' -> {'a': {'b': value}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _merge(into: dict[str, Any], node: Mapping[str, Any]) -> None:
    """Set the keys of one mapping in another, those of its mappings in the other's."""
    for key, value in node.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def jobs_of(recipe: str) -> list[tuple[str, ...]]:
    """Return the overrides of each job of a recipe's sweep but the seed; one without a sweep."""
    hydra = assets.read_yaml(assets.group(assets.RECIPES)[recipe]).get("hydra") or {}
    params = (hydra.get("sweeper") or {}).get("params") or {}
    choices = []  # the overrides that each axis chooses from
    for axis in parse_words([f"{key}={value}" for key, value in params.items() if key != "seed"]):
        if axis.is_sweep_override():
            values = axis.sweep_string_iterator()
            choices.append([f"{axis.key_or_group}={value}" for value in values])
        else:
            choices.append([str(axis.input_line)])
    return list(product(*choices))


def on_other_data(
    fillings: Sequence[Filling], jobs: Sequence[Job], every: Iterable[Record]
) -> list[Filling]:
    """Return the same jobs with another data set in place of the recipe's, where records exist."""
    recipes = {job.recipe for job in jobs}
    used: dict[str, list[dict[str, Any]]] = {}  # the data sets of a recipe's records, each once
    for run in every:
        if run.recipe in recipes:
            datasets = used.setdefault(run.recipe, [])
            dataset = run.config.get("dataset", {})
            if dataset and dataset not in datasets:
                datasets.append(dataset)
    own: dict[str, list[dict[str, Any]]] = {}  # a recipe that sweeps its folds has several
    for job in jobs:
        own.setdefault(job.recipe, []).append(drop_empty(job.resolved["dataset"]))
    moved = []
    for filling, job in zip(fillings, jobs, strict=True):
        others = []
        for dataset in used.get(job.recipe, []):
            # Without what is not set: a record may be older than an option that is off.
            if drop_empty(dataset) not in own[job.recipe]:
                others.append(dataset)
        if others:
            for digest, label in _remember(digests_on, others, job.composed).items():
                moved.append(dataclasses.replace(filling, digest=digest, on=label))
    return moved


def digests_on(
    datasets: list[dict[str, Any]], composed: dict[str, Any], state: str = ""
) -> dict[str, str]:
    """Return {experiment digest: label} of a recipe with each of `datasets`, for a `state`."""
    labels = {}
    for dataset in datasets:
        standard = unset_keys("dataset") | _options_of("dataset", dataset["name"])
        if not dataset.keys() <= standard.keys():
            continue  # a record of an older version, whose data set had other options
        changed = {key: value for key, value in dataset.items() if value != standard[key]}
        options = [f"{key}={value}" for key, value in changed.items()]
        digest = experiment_digest(check({**composed, "dataset": dataset}))
        labels[digest] = ", ".join([dataset["name"], *options])
    return labels


def _options_of(kind: str, name: str) -> dict[str, Any]:
    """Return a plug-in's options with their defaults; {} if there is no such plug-in now."""
    if name in files(kind):
        options = assets.read_yaml(files(kind)[name])
        options.pop("card", None)
        return options
    try:
        return {"name": name} | defaults(lookup(kind, name))
    except UserError:
        return {}


def require_unchanged(overrides: list[str]) -> None:
    """Reject overrides that change what a recipe computes, or where its record goes."""
    instead = {"seed": "say --seeds N", "recipe": "a table has its own recipes"}
    for key in sorted({str(override.key_or_group) for override in read_words(overrides)}):
        if key in instead:
            raise UserError(f"{key}: not in `zdp-bench reproduce`; {instead[key]}.")
        if enters_digest(key) or key.partition(".")[0] in ("claims", "force"):
            raise UserError(
                f"{key}: `zdp-bench reproduce` runs recipes unchanged, because other runs fill no "
                "table. You can only set paths.data, device, threads, execution.* and "
                "trainer.micro_batch. Use `zdp-bench run` to try something else."
            )
