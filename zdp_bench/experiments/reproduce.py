"""Find the runs that tables lack, and start them with one of Hydra's launchers.

    smoke   one short run of the first job of each recipe, on generated or embedded data, in a
            separate folder; shows that every recipe runs
    here    all settings of the paper, for recipes whose data and weights are in the data root
    paper   all settings of the paper; fetches what may be fetched

A run that has a record, under any recipe, is not planned. A run that was stopped continues from its
checkpoint. So the command can be stopped and given again.
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
    """The missing runs of a row.

    Attributes:
        table: the table, PAPER/N.
        filling: the job.
        seeds: seed of each run.
        words: overrides of each run, without the seed.
    """

    table: str
    filling: Filling
    seeds: tuple[int, ...]
    words: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        """The time of all runs in sequence; None if it is not known."""
        seconds_per_run = self.filling.seconds
        return None if seconds_per_run is None else seconds_per_run * len(self.seeds)


@dataclass(frozen=True)
class Plan:
    """The runs to start, the shortest first.

    Attributes:
        rows: the rows with missing runs.
        left_out: reason why rows cannot be filled -> number of these rows.
    """

    rows: list[Planned]
    left_out: Counter[str]

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
    """Return the runs that tables lack, each once.

    Args:
        names: the tables.
        profile: "smoke", "here" or "paper".
        seeds: number of seeds per row. None: as many as the paper has.
        folder: folder of records.
        extra: overrides that are added to each run.
        as_published: leave out our variants. Default: False.
    """
    is_smoke = profile == "smoke"
    local = configured(["recipe=quickstart", *extra])  # for this machine's paths and device
    all_records = records.read_all(folder)
    done = {(run.experiment, run.seed) for run in all_records}
    device = "cuda" if "cuda" in local.device else "cpu"
    times = {} if is_smoke else read_times(all_records, device)
    rows: list[Planned] = []
    left_out: Counter[str] = Counter()
    planned: set[str] = set()
    problems: dict[tuple[str, str], str] = {}  # (recipe, data set) -> see `missing_data`
    for table in names:
        papers.require_recipes(table)
        for claim in claims_of(table, 1 if is_smoke else None, times):
            filling = claim.filling
            if filling.digest in planned or (as_published and filling.variant):
                continue
            planned.add(filling.digest)
            num_seeds = seeds or (1 if is_smoke else papers.seeds(table))
            missing_seeds = [
                seed
                for seed in range(1, num_seeds + 1)
                if is_smoke or (filling.digest, seed) not in done
            ]
            if not missing_seeds:
                continue
            key = filling.recipe, json.dumps(claim.config.resolved["dataset"], sort_keys=True)
            if key not in problems:
                config = dataclasses.replace(claim.config, paths=local.paths)
                try:
                    problems[key] = "" if is_smoke else missing_data(config, profile == "here")
                except UserError as error:
                    problems[key] = str(error)
            if problems[key]:
                left_out[problems[key]] += 1
                continue
            overrides = list(filling.overrides)
            if is_smoke:  # its data set has other options
                overrides = [word for word in overrides if not word.startswith("dataset.")]
            words = [f"recipe={filling.recipe}", *overrides, f"paths.results={folder}", *extra]
            if is_smoke:  # state the row, because its name may depend on the data set
                words += [*smoke_overrides(claim.config), f'claims.row="{filling.row}"']
            rows.append(Planned(table, filling, tuple(missing_seeds), tuple(words)))
    unknown = float("inf")
    rows.sort(key=lambda row: unknown if row.seconds is None else row.seconds)
    return Plan(rows, left_out)


def carry_out(
    plan: Plan, launcher: str = "local", settings: list[str] | None = None
) -> list[tuple[str, str]]:
    """Start the runs of a plan.

    Args:
        plan: the plan.
        launcher: one of Hydra's launchers. Default: "local".
        settings: overrides of the launcher. Default: none.

    Returns:
        (overrides, reason) of each run that failed.
    """
    if not plan.runs:
        return []
    with hydra_session() as driver:
        failed = launch(driver, plan.runs, launcher, settings or [], show="progress")
    return [(" ".join(words), reason) for words, reason in failed]


def missing_data(config: Run, only_here: bool = True) -> str:
    """Return a sentence about missing weights or data, or '' if nothing is missing.

    Args:
        config: the configuration of the run.
        only_here: also report weights and data sets that could be fetched. Default: True.
    """
    card = files.card(config.dataset.name)
    source = files.card(card.uses) if card.uses else card
    is_present = not files.missing(config.data_root, source)
    is_present = is_present and files.has_files(config.data_root, source)
    if is_present and source.holds and build_dataset(config).released(config.data_root):
        return (
            f"the data root has part of dataset '{card.name}', but not the files that this run "
            "needs."
        )
    if not only_here:
        return ""
    if sentence := missing_weights(str(config.model.options.get("weights", UNTRAINED))):
        return sentence
    return "" if is_present else f"the data root does not have dataset '{source.name}'."


def smoke_overrides(config: Run) -> list[str]:
    """Return the overrides that shorten a run to seconds, on the stand-in of its data set."""
    words = files.card(config.dataset.name).stand_in.split()
    rate = config.trainer.sample_rate
    size = "trainer.batch_size=8" if rate is None else f"trainer.sample_rate={max(rate, 0.25)}"
    words += ["trainer.epochs=1", size]
    if "weights" in config.model.options:
        words.append("model.weights=untrained")
    if config.init_from:
        words.append("model.init_from=null")
    if config.federated.nodes:  # the stand-in has few patients to split
        words.append("federated.nodes=3")
    if config.representation and "weights" in config.representation.options:
        words += ["representation.weights=untrained", "representation.resize=32"]
    if config.representation and config.representation.name == "joined":
        words += ["representation.axes=16", "representation.pictures=32"]
    hidden = config.model.options.get("hidden")
    if isinstance(hidden, int) and hidden > SMOKE_HIDDEN:  # VGG-11 needs 8.4 GiB with its 4096
        words.append(f"model.hidden={SMOKE_HIDDEN}")
    return [*words, "threads=1"]
