"""Find the records that fill the cells of a paper's tables.

A recipe claims a row of a table (`claims.table`, `claims.row`). Each job of its sweep fills a cell
of this row with the records that have the job's experiment digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
from zdp_bench.config.words import parse_words, read_words, split_word, write_word
from zdp_bench.errors import UserError, unknown
from zdp_bench.experiments.times import Times, seconds_of
from zdp_bench.foreign_files import parse_as
from zdp_bench.privacy.memory import call_cached
from zdp_bench.records import Record
from zdp_bench.registry import installed, lookup
from zdp_bench.report import grids, papers, tables
from zdp_bench.report.cells import Filling
from zdp_bench.report.papers import recipes_of, rows_of
from zdp_bench.report.sheet import Sheet

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # a reference to another key


@dataclass(frozen=True)
class ClaimedJob:
    """A job of a recipe.

    Attributes:
        filling: the cell that its records fill.
        composed: configuration as Hydra composes it.
        config: the same configuration, checked.
    """

    filling: Filling
    composed: dict[str, Any]
    config: Run


@dataclass(frozen=True)
class Job:
    """A job of a recipe as plain values, which are cached.

    Attributes:
        filling: the cell that its records fill, without the time of a run.
        composed: configuration as Hydra composes it.
        resolved: configuration as its runs record it.
    """

    filling: Filling
    composed: dict[str, Any]
    resolved: dict[str, Any]


def fillings(table: str, results: Path) -> list[Filling]:
    """Return the jobs that may fill a table, on their own data and on other data.

    Args:
        table: the table, PAPER/N.
        results: results folder.
    """
    all_records = records.read_all(results)
    jobs = jobs_of_table(table)
    on_own_data = [job.filling for job in jobs]
    return [*on_own_data, *on_other_data(on_own_data, jobs, all_records)]


def jobs_of_table(table: str) -> list[Job]:
    """Return the jobs of a table's recipes.

    They are cached until a recipe or the code changes, because checking them takes seconds and
    imports torch.
    """
    return parse_as(list[Job], _call_cached(list_jobs, table))


def list_jobs(table: str, state: str = "") -> list[dict[str, Any]]:
    """Return the jobs of a table's recipes as JSON values.

    Args:
        table: the table, PAPER/N.
        state: digest of recipes and code. Unused here: it is part of the cache key.
    """
    jobs = [Job(claim.filling, claim.composed, claim.config.resolved) for claim in claims_of(table)]
    return [dataclasses.asdict(job) for job in jobs]


def _call_cached(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments, state), from the cache if recipes and code have not changed."""
    if installed():  # the state does not cover plug-ins of other packages
        return function(*arguments)
    return call_cached(function, *arguments, _state_of_code())


def _state_of_code() -> str:
    """Return a digest of the modification times and sizes of our YAML, CSV and Python files."""
    state = hashlib.sha256()
    package = Path(assets.__file__).parent
    for root in (package, assets.CONF, assets.RECIPES, assets.DATASETS, assets.PAPERS):
        for folder, _, names in sorted(os.walk(root)):
            for name in sorted(names):
                if name.endswith((".py", ".yaml", ".csv")):
                    status = os.stat(os.path.join(folder, name))
                    line = f"{folder}/{name} {status.st_mtime_ns} {status.st_size}"
                    state.update(line.encode())
    return state.hexdigest()


def build_table(name: str, results: Path) -> Sheet:
    """Return a table or figure of a paper, or one of our own, filled from a results folder."""
    build = grids.build if name in papers.ours() else tables.build
    return build(name, results, fillings(name, results))


def claims_of(
    table: str, max_jobs: int | None = None, times: Times | None = None
) -> list[ClaimedJob]:
    """Compose and check the jobs of a table's recipes.

    Args:
        table: the table, PAPER/N.
        max_jobs: maximum number of jobs of each recipe. Default: all.
        times: see `read_times`. Default: none, so the jobs' times are not known.

    Raises:
        UserError: a recipe claims a row that the table does not have.
    """
    rows = set(rows_of(table))
    claims = []
    for recipe in recipes_of(table):
        for overrides in jobs_of(recipe)[:max_jobs]:
            composed = compose_job(recipe, overrides)
            config = check(composed)
            row, variant = str(config.claims.row), config.claims.variant
            if row not in rows:
                raise unknown(f"row of {table} in recipe '{recipe}',", row, sorted(rows))
            seconds = seconds_of(config.resolved, times or {})
            digest = experiment_digest(config)
            filling = Filling(
                recipe,
                overrides,
                row,
                variant,
                digest,
                target_epsilon=config.privacy.target_epsilon or math.inf,
                seed=config.seed,
                seconds=seconds,
            )
            claims.append(ClaimedJob(filling, composed, config))
    return claims


def compose_job(recipe: str, job: Iterable[str]) -> dict[str, Any]:
    """Return the configuration that Hydra would compose, as plain Python.

    Hydra takes a tenth of a second per job, and the tables have five hundred jobs. Recipes only
    choose plug-ins and set values, so merging their files gives the same result, which a test
    compares with Hydra's.

    Args:
        recipe: name of the recipe.
        job: overrides of one job.
    """
    merged = merge_job(recipe, job)
    _resolve_references(merged)
    return merged


def merge_job(recipe: str, job: Iterable[str]) -> dict[str, Any]:
    """Return the configuration of `compose_job` before its references are resolved."""
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
    merged = {group: unset_keys(group) | _options_of(group, plugins[group]) for group in GROUPS}
    for node in (base, body, {"recipe": recipe}):
        _merge(merged, node)
    for override in parse_words(values):
        _merge(merged, _nest(override.key_or_group, override.value()))
    del merged["hydra"]
    return merged


def _resolve_references(merged: dict[str, Any]) -> None:
    """Resolve references to other keys, in place.

    OmegaConf is slow, so it only gets the keys with references and the keys that they refer to.
    """
    flat = records.flatten(merged)
    keys_with_references = {key for key, value in flat.items() if "${" in str(value)}
    referenced_keys: set[str] = set()
    for key in keys_with_references:
        referenced_keys.update(_REFERENCE.findall(str(flat[key])))
    needed: dict[str, Any] = {}
    for key in keys_with_references | (referenced_keys & flat.keys()):
        _merge(needed, _nest(key, flat[key]))
    _merge(merged, to_plain(OmegaConf.create(needed)))


def _nest(key: str, value: Any) -> dict[str, Any]:
    """Return a value below a dotted key: {'a': {'b': value}} for 'a.b'."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _merge(into: dict[str, Any], node: Mapping[str, Any]) -> None:
    """Set the keys of `node` in `into`, recursively for nested mappings."""
    for key, value in node.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def jobs_of(recipe: str) -> list[tuple[str, ...]]:
    """Return the overrides of each job of a recipe, without the seed.

    A recipe without a sweep has one job.
    """
    hydra = assets.read_yaml(assets.group(assets.RECIPES)[recipe]).get("hydra") or {}
    params = (hydra.get("sweeper") or {}).get("params") or {}
    words = [f"{key}={value}" for key, value in params.items() if key != "seed"]
    axes = []  # the overrides of each axis of the sweep
    for axis in parse_words(words):
        if axis.is_sweep_override():
            values = axis.sweep_string_iterator()
            axes.append([f"{axis.key_or_group}={value}" for value in values])
        else:
            axes.append([str(axis.input_line)])
    return list(product(*axes))


def on_other_data(
    fillings: Sequence[Filling], jobs: Sequence[Job], all_records: Iterable[Record]
) -> list[Filling]:
    """Return the fillings of jobs on data sets other than those of their recipe.

    Args:
        fillings: filling of each job on its own data set.
        jobs: the jobs.
        all_records: records. Each data set of a recipe's records is tried for all of its jobs.
    """
    recipes = {filling.recipe for filling in fillings}
    used_datasets: dict[str, list[dict[str, Any]]] = {}  # by recipe
    for run in all_records:
        if run.recipe in recipes:
            datasets = used_datasets.setdefault(run.recipe, [])
            dataset: Any = run.config.get("dataset")
            # A record may be foreign, so its data set may be anything.
            is_named = isinstance(dataset, dict) and isinstance(dataset.get("name"), str)
            if is_named and dataset not in datasets:
                datasets.append(dataset)
    own_datasets: dict[str, list[dict[str, Any]]] = {}  # by recipe; several if it sweeps over folds
    for job in jobs:
        own_dataset = drop_empty(job.resolved["dataset"])
        own_datasets.setdefault(job.filling.recipe, []).append(own_dataset)
    other_fillings = []
    for filling, job in zip(fillings, jobs, strict=True):
        others = []
        for dataset in used_datasets.get(filling.recipe, []):
            # Empty values are dropped, because an old record lacks newer options, which are off.
            if drop_empty(dataset) not in own_datasets[filling.recipe]:
                others.append(dataset)
        if others:
            for digest, label in _call_cached(digests_on, others, job.composed).items():
                other_fillings.append(dataclasses.replace(filling, digest=digest, substitute=label))
    return other_fillings


def digests_on(
    datasets: list[dict[str, Any]], composed: dict[str, Any], state: str = ""
) -> dict[str, str]:
    """Return the label of each data set by the experiment digest of a job on it.

    A data set on which the job cannot run has no digest: a record of the recipe on this data set
    also differs in other keys.

    Args:
        datasets: configuration of each data set.
        composed: configuration of the job.
        state: see `list_jobs`.
    """
    labels = {}
    for dataset in datasets:
        defaults_of_dataset = unset_keys("dataset") | _options_of("dataset", dataset["name"])
        if not dataset.keys() <= defaults_of_dataset.keys():
            continue  # the record is of an earlier version, whose data set had other options
        options = []
        for key, value in dataset.items():
            if value != defaults_of_dataset[key]:
                options.append(write_word(key, value))
        with suppress(UserError):
            digest = experiment_digest(check({**composed, "dataset": dataset}))
            labels[digest] = ", ".join([dataset["name"], *options])
    return labels


def _options_of(kind: str, name: str) -> dict[str, Any]:
    """Return the options of a plug-in with their defaults; empty if it no longer exists."""
    if name in files(kind):
        options = assets.read_yaml(files(kind)[name])
        options.pop("card", None)
        return options
    try:
        return {"name": name} | defaults(lookup(kind, name))
    except UserError:
        return {}


def require_unchanged(overrides: list[str]) -> None:
    """Reject overrides that change what a recipe computes, or which cell it fills."""
    hints = {
        "seed": "use --seeds N",
        "recipe": "a table has its own recipes",
        "launcher": "use --launcher NAME",
    }
    for word in overrides:
        key, _ = split_word(word)
        if key in hints:
            raise UserError(f"{key}: cannot be set in `zdp-bench reproduce`; {hints[key]}.")
    for key in sorted({str(override.key_or_group) for override in read_words(overrides)}):
        if enters_digest(key) or key.partition(".")[0] in ("claims", "force"):
            raise UserError(
                f"{key}: `zdp-bench reproduce` runs recipes unchanged, because other runs fill no "
                "table. You can only set keys that change no result, such as paths, device, "
                "threads, execution.* and trainer.micro_batch. Use `zdp-bench run` to try "
                "something else."
            )
