"""Find the runs that tables lack, and start them with one of Hydra's launchers.

    smoke   the first job of each recipe, one seed and few steps of it, on generated or embedded
            data, in a folder of its own. Shows that every recipe runs.
    here    as published, wherever the data root holds the data and the weights
    paper   as published, fetching what may be fetched

A run that has a record, under any recipe, is not planned, and one that was stopped goes on from
its checkpoint, so the command can be stopped and given again.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zdp_bench import records
from zdp_bench.config import configured
from zdp_bench.config.compose import hydra_session
from zdp_bench.config.schema import Run
from zdp_bench.data import files
from zdp_bench.errors import UserError
from zdp_bench.experiments.claims import claims_of
from zdp_bench.experiments.sweep import launch
from zdp_bench.experiments.times import read_times
from zdp_bench.models.resnet import UNTRAINED, missing_weights
from zdp_bench.report import papers
from zdp_bench.report.cells import Filling
from zdp_bench.report.number_format import duration
from zdp_bench.report.sheet import Sheet
from zdp_bench.training.setup import build_dataset

SMOKE_FOLDER = "smoke"  # under the results folder
SMOKE_HIDDEN = 256  # the widest fully connected layers of a smoke run


@dataclass(frozen=True)
class Planned:
    """The missing runs of a row."""

    table: str
    filling: Filling
    seeds: tuple[int, ...]
    words: tuple[str, ...]  # overrides of each run but its seed

    @property
    def seconds(self) -> float | None:
        """The time of all of them, one after another; None if no record states it."""
        one = self.filling.seconds
        return None if one is None else one * len(self.seeds)


@dataclass(frozen=True)
class Plan:
    """The runs to start, the shortest first."""

    rows: list[Planned]
    left_out: Counter[str]  # why rows cannot be filled -> how many

    @property
    def runs(self) -> list[list[str]]:
        """The overrides of every run."""
        return [[*row.words, f"seed={seed}"] for row in self.rows for seed in row.seeds]

    def sheet(self) -> Sheet:
        """Return the plan as a table."""
        shown = [
            [
                row.table,
                row.filling.row,
                " ".join([f"recipe={row.filling.recipe}", *row.filling.overrides]),
                " ".join(map(str, row.seeds)),
                "not timed" if row.seconds is None else duration(row.seconds),
            ]
            for row in self.rows
        ]
        seconds = [row.seconds for row in self.rows if row.seconds is not None]
        notes = [f"{len(self.runs)} runs."]
        if seconds:
            notes.append(f"In sequence, the timed runs take {duration(sum(seconds))}.")
        notes += [f"{count} rows left out: {why}" for why, count in self.left_out.most_common()]
        if not shown:
            why = "." if self.left_out else ": every row has its runs."
            return Sheet(f"Nothing to run{why}", (), (), notes[1:])
        columns = ["table", "row", "run", "seeds", "time"]
        return Sheet("Runs to do, shortest first", columns, shown, notes)


def make_plan(
    names: list[str],
    profile: str,
    seeds: int | None,
    folder: Path,
    extra: list[str],
    as_published: bool = False,
) -> Plan:
    """Return the runs that the tables want and that have no record, each once."""
    smoke, here = profile == "smoke", configured(["recipe=quickstart", *extra])
    every = records.read_all(folder)
    done = {(run.experiment, run.seed) for run in every}
    times = {} if smoke else read_times(every, "cuda" if "cuda" in here.device else "cpu")
    rows: list[Planned] = []
    left_out: Counter[str] = Counter()
    planned: set[str] = set()
    lacking: dict[tuple[str, str], str] = {}
    for table in names:
        papers.require_recipes(table)
        for claim in claims_of(table, 1 if smoke else None, times):
            filling = claim.filling
            if filling.digest in planned or (as_published and filling.variant):
                continue
            planned.add(filling.digest)
            most = seeds or (1 if smoke else papers.seeds(table))
            wanted = [n for n in range(1, most + 1) if smoke or (filling.digest, n) not in done]
            key = filling.recipe, json.dumps(claim.config.resolved["dataset"], sort_keys=True)
            if wanted and key not in lacking:
                config = dataclasses.replace(claim.config, paths=here.paths)
                try:
                    lacking[key] = "" if smoke else missing_data(config, profile == "here")
                except UserError as error:
                    lacking[key] = str(error)
            if wanted and (why := lacking[key]):
                left_out[why] += 1
            elif wanted:
                own = [w for w in filling.overrides if not (smoke and w.startswith("dataset."))]
                words = [f"recipe={filling.recipe}", *own, f"paths.results={folder}", *extra]
                if smoke:  # a row may be named by its data set
                    words += [*smoke_overrides(claim.config), f'claims.row="{filling.row}"']
                rows.append(Planned(table, filling, tuple(wanted), tuple(words)))
    unknown = float("inf")
    rows.sort(key=lambda row: unknown if row.seconds is None else row.seconds)
    return Plan(rows, left_out)


def carry_out(
    plan: Plan, launcher: str = "local", settings: list[str] | None = None
) -> list[tuple[str, str]]:
    """Start the runs with one of Hydra's launchers; return those that failed, and why."""
    if not plan.runs:
        return []
    with hydra_session() as driver:
        failed = launch(driver, plan.runs, launcher, settings or [], show="progress")
    return [(" ".join(words), reason) for words, reason in failed]


def missing_data(config: Run, only_here: bool = True) -> str:
    """Return what is missing, in words: weights, or files of the data set; '' if nothing is."""
    card = files.card(config.dataset.name)
    source = files.card(card.uses) if card.uses else card
    there = not files.missing(config.data_root, source)
    there = there and files.has_files(config.data_root, source)
    if there and source.holds and build_dataset(config).released(config.data_root):
        return (
            f"the data root has part of dataset '{card.name}', but not the files that this run "
            "needs."
        )
    if not only_here:
        return ""
    if lacking := missing_weights(str(config.model.options.get("weights", UNTRAINED))):
        return lacking
    return "" if there else f"the data root does not have dataset '{source.name}'."


def smoke_overrides(config: Run) -> list[str]:
    """Return the overrides that make a run a matter of seconds, on the data card's stand-in."""
    words = files.card(config.dataset.name).stand_in.split()
    rate = config.trainer.sample_rate
    size = "trainer.batch_size=8" if rate is None else f"trainer.sample_rate={max(rate, 0.25)}"
    weights = ["model.weights=untrained"] if "weights" in config.model.options else []
    weights += ["model.init_from=null"] if config.init_from else []
    weights += ["federated.nodes=3"] if config.federated.nodes else []  # of few patients
    if config.representation and "weights" in config.representation.options:
        weights += ["representation.weights=untrained", "representation.resize=32"]
    if config.representation and config.representation.name == "joined":
        weights += ["representation.axes=16", "representation.pictures=32"]
    hidden = config.model.options.get("hidden")
    if isinstance(hidden, int) and hidden > SMOKE_HIDDEN:  # VGG-11: 8.4 GiB with its 4096
        weights.append(f"model.hidden={SMOKE_HIDDEN}")
    return [*words, "trainer.epochs=1", size, *weights, "threads=1"]
