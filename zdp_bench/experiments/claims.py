"""Which cells of a paper's tables the recipes' jobs fill.

A recipe claims a table and a row (`claims.table`, `claims.row`); each job of its sweep fills the
cell of that row with the records whose experiment digest is its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from zdp_bench import assets, records
from zdp_bench.config import compose, parse
from zdp_bench.config.compose import defaults
from zdp_bench.config.digests import drop_empty, enters_digest, experiment_digest
from zdp_bench.config.schema import GROUPS, Run
from zdp_bench.config.words import parse_words, read_words
from zdp_bench.errors import UserError, unknown
from zdp_bench.registry import lookup
from zdp_bench.report.cells import Filling
from zdp_bench.report.papers import recipes_of, rows_of


@dataclass(frozen=True)
class ClaimedJob:
    """A job of a recipe and what it fills."""

    filling: Filling
    composed: DictConfig
    config: Run


def fillings(table: str, results: Path) -> list[Filling]:
    """Return what may stand in a table: each job of its recipes, and the same job on other data.

    Raises:
        UserError: no such table, or a recipe claims a row that the table lacks.
    """
    claims = claims_of(table)
    return [*(claim.filling for claim in claims), *on_other_data(claims, results)]


def claims_of(table: str, most: int | None = None) -> list[ClaimedJob]:
    """Return the jobs of a table's recipes as the recipes are now.

    Args:
        most: so many of a recipe's sweep; all by default.

    Raises:
        UserError: no such table, or a recipe claims a row that the table lacks.
    """
    rows = set(rows_of(table))
    claims = []
    for recipe in recipes_of(table):
        for overrides, composed in _compose(recipe, jobs_of(recipe)[:most]):
            config = parse(composed)
            row, variant = str(config.claims.row), config.claims.variant
            if row not in rows:
                raise unknown(f"row of {table} in recipe '{recipe}',", row, sorted(rows))
            filling = Filling(recipe, overrides, row, variant, experiment_digest(config))
            claims.append(ClaimedJob(filling, composed, config))
    return claims


def _compose(
    recipe: str, jobs: Iterable[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], DictConfig]]:
    """Yield each job with its configuration.

    Hydra takes a tenth of a second to compose one. Jobs that choose the same plug-ins share that,
    and set their values in a copy, as Hydra does at the end of a composition.
    """
    shared: dict[tuple[str, ...], DictConfig] = {}
    for job in jobs:
        chosen = tuple(word for word in job if word.partition("=")[0] in GROUPS)
        if chosen not in shared:
            shared[chosen] = compose([f"recipe={recipe}", *chosen])
        config = shared[chosen].copy()
        values = [word for word in job if word not in chosen]
        for override in parse_words(values):
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        yield job, config


def jobs_of(recipe: str) -> list[tuple[str, ...]]:
    """Return the overrides of each job of a recipe's sweep (`hydra.sweeper.params`) but the seed.

    A recipe without a sweep has one job without overrides.
    """
    hydra = assets.read_yaml(assets.group(assets.RECIPES)[recipe]).get("hydra") or {}
    params = (hydra.get("sweeper") or {}).get("params") or {}
    axes = parse_words([f"{key}={value}" for key, value in params.items() if key != "seed"])
    choices = [
        [f"{axis.key_or_group}={value}" for value in axis.sweep_string_iterator()]
        if axis.is_sweep_override()
        else [str(axis.input_line)]
        for axis in axes
    ]
    return list(product(*choices))


def on_other_data(claims: list[ClaimedJob], results: Path) -> list[Filling]:
    """Return the same jobs with another data set in place of the recipe's, where records exist."""
    found = []
    used: dict[str, list[dict[str, Any]]] = {}  # the data sets of a recipe's records, each once
    for run in records.read_all(results):
        datasets = used.setdefault(run["recipe"], [])
        if run["config"]["dataset"] not in datasets:
            datasets.append(run["config"]["dataset"])
    own: dict[str, list[dict[str, Any]]] = {}  # a recipe that sweeps its folds has several
    for claim in claims:
        mine = drop_empty(claim.config.resolved["dataset"])
        own.setdefault(claim.filling.recipe, []).append(mine)
    for claim in claims:
        recipe = claim.filling.recipe
        # Without what is not set: a record may be older than an option that is off.
        others = [data for data in used.get(recipe, []) if drop_empty(data) not in own[recipe]]
        for digest, label in _digests_on(others, claim.composed).items():
            found.append(dataclasses.replace(claim.filling, digest=digest, on=label))
    return found


def _digests_on(datasets: list[dict[str, Any]], composed: DictConfig) -> dict[str, str]:
    """Return {experiment digest: label} of a recipe with each of `datasets`."""
    labels = {}
    for dataset in datasets:
        standard = _options_of(dataset["name"])
        if not dataset.keys() <= standard.keys():
            continue  # a record of an older version, whose data set had other options
        moved = composed.copy()
        OmegaConf.set_struct(moved, False)
        moved.dataset = dataset
        changed = {key: value for key, value in dataset.items() if value != standard[key]}
        options = [f"{key}={value}" for key, value in changed.items()]
        labels[experiment_digest(parse(moved))] = ", ".join([dataset["name"], *options])
    return labels


def _options_of(name: str) -> dict[str, Any]:
    """Return a data set's options with their defaults; {} if there is no such data set now."""
    card = assets.group(assets.DATASETS).get(name)
    if card:
        return assets.read_yaml(card)
    try:
        return {"name": name} | defaults(lookup("dataset", name))
    except UserError:
        return {}


class Equals:
    """Runs by what they compute, so that `reproduce` makes one of several equal runs.

    Recipes may have jobs in common, and the record of one fills the cells of all.
    """

    def __init__(self, results: Path) -> None:
        self._recipes: dict[tuple[str, int], list[str]] = {}
        for run in records.read_all(results):
            self._recipes.setdefault((run["experiment"], run["seed"]), []).append(run["recipe"])

    def claim(self, filling: Filling, seed: int) -> str:
        """Return the recipe that makes the run or has made it: this one if there is no other."""
        recipes = self._recipes.setdefault((filling.digest, seed), [filling.recipe])
        return filling.recipe if filling.recipe in recipes else recipes[0]


def require_unchanged(overrides: list[str]) -> None:
    """Refuse overrides that change what a recipe computes, or where its record goes.

    Raises:
        UserError: names the first; such a run would fill no table.
    """
    instead = {
        "seed": "say --seeds N",
        "recipe": "a table has its own recipes",
    }
    for key in sorted({str(override.key_or_group) for override in read_words(overrides)}):
        if key in instead:
            raise UserError(f"{key}: not in `zdp-bench reproduce`; {instead[key]}.")
        if enters_digest(key) or key.partition(".")[0] in ("claims", "force"):
            raise UserError(
                f"{key}: `zdp-bench reproduce` runs recipes as they stand, for another run fills "
                "no table. It takes only where and how: paths.data, device, threads, execution.*, "
                "trainer.micro_batch. Use `zdp-bench run` to try something else."
            )
