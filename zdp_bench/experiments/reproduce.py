"""Find the runs that tables lack, and start them with one of Hydra's launchers.

There are three profiles:

    smoke   one short run of the first job of each recipe, on generated or bundled data, in a
            separate folder, to show that every recipe runs
    here    all settings of the paper, for recipes whose data and weights are in the data root
    paper   all settings of the paper; missing data and weights are downloaded where possible

A run that has a record, under any recipe, is not planned. A run that was stopped continues from its
checkpoint. The command can therefore be stopped and run again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zdp_bench import records
from zdp_bench.config import configured
from zdp_bench.config.compose import hydra_session
from zdp_bench.config.schema import Run
from zdp_bench.config.words import write_word
from zdp_bench.data import files
from zdp_bench.errors import UserError
from zdp_bench.experiments.claims import claims_of
from zdp_bench.experiments.sweep import launch
from zdp_bench.experiments.times import read_times
from zdp_bench.models.resnet import UNTRAINED, missing_weights
from zdp_bench.records import Record
from zdp_bench.report import papers
from zdp_bench.report.cells import Filling, keep_counted
from zdp_bench.report.number_format import duration
from zdp_bench.report.sheet import Sheet
from zdp_bench.training.machine import pick_device
from zdp_bench.training.setup import build_dataset

SMOKE_FOLDER = "smoke"  # in the results folder
MAX_SMOKE_HIDDEN = 256  # width of the fully connected layers of a smoke run


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
        rows: rows with missing runs.
        left_out: number of rows that cannot be filled, by reason.
    """

    rows: list[Planned]
    left_out: Counter[str]

    @property
    def runs(self) -> list[list[str]]:
        """The overrides of each run."""
        return [[*row.words, f"seed={seed}"] for row in self.rows for seed in row.seeds]

    def sheet(self, launcher: str = "local", settings: Sequence[str] = ()) -> Sheet:
        """Return the plan as a table; a note states a launcher other than "local".

        Args:
            launcher, settings: see `carry_out`.
        """
        left_out = []
        for reason, count in self.left_out.most_common():
            left_out.append(f"{count} rows left out: {reason}")
        if not self.rows:
            title = "Nothing to run." if left_out else "Nothing to run: every row has its runs."
            return Sheet(title, (), (), left_out)
        notes = [f"{len(self.runs)} runs."]
        seconds = [row.seconds for row in self.rows if row.seconds is not None]
        if seconds:
            notes.append(f"In sequence, the timed runs take {duration(sum(seconds))}.")
        if launcher != "local":
            words = " ".join([f"launcher={launcher}", *settings])
            notes.append(f"Without --plan, they are submitted with {words}.")
        columns = ["table", "row", "run", "seeds", "time"]
        cells = [_cells(row) for row in self.rows]
        return Sheet("Runs to do, shortest first", columns, cells, [*notes, *left_out])


def _cells(row: Planned) -> list[str]:
    """Return the cells of a row of the plan."""
    return [
        row.table,
        row.filling.row,
        " ".join([f"recipe={row.filling.recipe}", *row.filling.overrides]),
        " ".join(map(str, row.seeds)),
        "not timed" if row.seconds is None else duration(row.seconds),
    ]


def make_plan(
    names: list[str],
    profile: str,
    seeds: int | None,
    folder: Path,
    extra: list[str],
    as_published: bool = False,
) -> Plan:
    """Return the runs that tables lack. A run that two tables need is planned once.

    Args:
        names: names of the tables.
        profile: "smoke", "here" or "paper".
        seeds: number of seeds per row. None: as many as in the paper.
        folder: results folder.
        extra: overrides that are added to each run.
        as_published: whether to leave out our variants. Default: False.

    Raises:
        UserError: no recipe fills one of the tables.
    """
    is_smoke = profile == "smoke"
    local = configured(["recipe=quickstart", *extra])  # has this machine's paths and device
    all_records = records.read_all(folder)
    # Experiment digest and seed of each run that is not planned, or not again
    done = set[tuple[str, int]]() if is_smoke else _list_done(all_records)
    device = pick_device("auto").type if local.device == "auto" else local.device
    times = {} if is_smoke else read_times(all_records, device.partition(":")[0])
    rows: list[Planned] = []
    left_out: Counter[str] = Counter()
    problems: dict[tuple[str, str], str] = {}  # by recipe and data set; empty if nothing is missing
    for table in names:
        papers.require_recipes(table)
        for claim in claims_of(table, 1 if is_smoke else None, times):
            filling = claim.filling
            if as_published and filling.variant:
                continue
            num_seeds = seeds or (1 if is_smoke else papers.seeds(table))
            missing_seeds = [
                seed for seed in range(1, num_seeds + 1) if (filling.digest, seed) not in done
            ]
            if not missing_seeds:
                continue
            done.update((filling.digest, seed) for seed in missing_seeds)
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
            if is_smoke:  # the stand-in of a data set does not have its options
                overrides = [word for word in overrides if not word.startswith("dataset.")]
            words = [f"recipe={filling.recipe}", *overrides]
            words += [write_word("paths.results", folder), *extra]
            if is_smoke:  # the row is stated, because its name may depend on the data set
                words += [*smoke_overrides(claim.config), write_word("claims.row", filling.row)]
            rows.append(Planned(table, filling, tuple(missing_seeds), tuple(words)))
    rows.sort(key=lambda row: math.inf if row.seconds is None else row.seconds)
    return Plan(rows, left_out)


def _list_done(all_records: Sequence[Record]) -> set[tuple[str, int]]:
    """Return experiment digest and seed of each run that counts in tables."""
    runs_of: dict[str, list[Record]] = defaultdict(list)
    for run in all_records:
        runs_of[run.experiment].append(run)
    done = set[tuple[str, int]]()
    for experiment, runs in runs_of.items():
        done |= {(experiment, run.seed) for run in keep_counted(runs)}
    return done


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
    """Return a sentence that states which weights or data are missing; empty if none are.

    Args:
        config: configuration of the run.
        only_here: whether weights and data sets that could be fetched count as missing. If False,
            only a data root with a part of a data set is reported. Default: True.
    """
    card = files.card(config.dataset.name)
    source = files.card(card.uses) if card.uses else card
    has_all_files = not files.missing(config.data_root, source)
    is_present = has_all_files and files.has_files(config.data_root, source)
    if is_present and source.holds and build_dataset(config).published_info(config.data_root):
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
    """Return the overrides that shorten a run to seconds, on the stand-in for its data set."""
    words = files.card(config.dataset.name).stand_in.split()
    words.append("trainer.epochs=1")
    sample_rate = config.trainer.sample_rate
    if sample_rate is None:
        words.append("trainer.batch_size=8")
    else:
        words.append(f"trainer.sample_rate={max(sample_rate, 0.25)}")
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
    if isinstance(hidden, int) and hidden > MAX_SMOKE_HIDDEN:  # VGG-11 with 4096 takes 8.4 GiB
        words.append(f"model.hidden={MAX_SMOKE_HIDDEN}")
    return [*words, "threads=1"]
