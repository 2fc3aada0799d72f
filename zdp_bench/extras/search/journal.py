"""The journal of a search: `search.json`, which lists each trial before the trial starts.

It also states the search's options, the best trial so far and the total ε. A search that continues
reads its trials from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zdp_bench import records
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.extras.search.space import SearchOptions
from zdp_bench.foreign_files import Shape, is_file, misfits, read_json
from zdp_bench.records import Document
from zdp_bench.report.budget import joint_epsilon
from zdp_bench.tasks.metric import Metric
from zdp_bench.training.run import epsilon_of
from zdp_bench.training.spending import read_spendings_of_recipe

_TRIAL: Shape = {
    "trial": int,
    "values": dict,
    "noise": [str],
    "run": str,
    "state": str,
    "score": (float, int, type(None)),
}


@dataclass
class Journal:
    """The record of a search, which lists each trial before it starts.

    Attributes:
        path: file of the record.
        options: the search.
        config: the configuration of one possible trial. Only what all trials share is read from it.
        data: the data set.
        metric: the metric by which the best trial is chosen.
        saved_trials: the trials in the record that an earlier process wrote, by number.
        trials: the trials that this process has come to, in order.
        ended_by: why no further trial starts; "" as long as one may.
    """

    path: Path
    options: SearchOptions
    config: Run
    data: Splits
    metric: Metric
    saved_trials: Mapping[int, Document]
    trials: list[Document] = field(default_factory=list)
    ended_by: str = ""

    def list_all_trials(self) -> list[Document]:
        """Return the trials so far, and the saved ones that this process has not come to yet.

        The saved ones stay listed, so that their runs still belong to the search if this process is
        killed before it comes to them, or is asked for fewer trials.
        """
        numbers = sorted(number for number in self.saved_trials if number > len(self.trials))
        not_reached = [self.saved_trials[number] for number in numbers]
        return [*self.trials, *not_reached]

    def list_folders_except(self, number: int) -> set[Path]:
        """Return the folders of the listed trials' runs, without the trial of this number.

        Of a deleted run, they are those that hold what it spent.
        """
        homes = {
            self.home_of(trial) for trial in self.list_all_trials() if trial["trial"] != number
        }
        return homes.union(*map(records.list_deleted, homes))

    def home_of(self, trial: Document) -> Path:
        """Return the folder of a trial's run."""
        return records.folder(self.config.results, self.config.recipe, trial["run"])

    def write(self) -> Document:
        """Write the record, with the total ε so far, and return it."""
        record = make_record(self)
        records.write(self.path, record)
        return record


def read_trials(path: Path, data_digest: str) -> dict[int, Document]:
    """Return the trials in a search's record by number, empty for a new search.

    Raises:
        UserError: the record is damaged, or of a search on other data.
    """
    if not is_file(path):
        return {}
    advice = "Delete it, and search again: the runs of its trials are kept, and still count."
    try:
        record = read_json(path)
    except UserError as error:
        raise UserError(f"{error} {advice}") from None
    keys = [*misfits(record, {"trials": [_TRIAL], "data": {"digest": str}})]
    if keys:
        raise UserError(f"{path}: is damaged at {keys[0]}. {advice}")
    if record["data"]["digest"] != data_digest:
        raise UserError(
            f"{path}: is of a search on other data, which have changed since. Search on these in "
            "another results folder: paths.results=FOLDER."
        )
    return {trial["trial"]: trial for trial in record["trials"]}


def make_record(journal: Journal) -> Document:
    """Return a search's record: its options, all trials, the best trial and the total ε.

    The total ε is composed anew, from all runs in the results folder.
    """
    options, config, data = journal.options, journal.config, journal.data
    trials = journal.list_all_trials()
    trials_to_run = [trial for trial in trials if trial["trial"] <= options.trials]
    finished = [trial for trial in trials_to_run if trial["state"] != "open"]
    best = _find_best(trials, journal.metric)
    runs = read_spendings_of_recipe(config, data)
    delta = config.privacy.delta
    # of what the search protects: an example or, with `privacy.unit=patient`, an owner
    epsilon = joint_epsilon(runs, for_owner=config.privacy.by_owner, delta=delta)
    epsilon_of_owner = None
    has_units = any(run.by_owner or run.shares_per_owner > 1 for run in runs)
    if has_units and not config.privacy.by_owner:
        epsilon_of_owner = joint_epsilon(runs, for_owner=True, delta=delta)
    return {
        "recipe": config.recipe,
        "fixed": list(options.fixed),
        "recipe_as_typed": options.recipe,
        "searched": {key: str(values) for key, values in options.searched.items()},
        "sampler": options.sampler,
        "asked": options.trials,
        "finished": len(finished) == options.trials,
        "metric": journal.metric.name,
        "direction": direction(journal.metric),
        "data": {
            "name": config.dataset.name,
            "digest": data.digest,
            "validation": len(data.validation or ()),
        },
        "trials": trials,
        "best": None if best is None else best["trial"],
        "privacy": {
            "delta": delta,
            "epsilon_asked": options.epsilon,
            "runs": len(runs),
            "epsilon_of": epsilon_of(config, data.unit),
            "epsilon_all": epsilon,
            "epsilon_all_unit": epsilon_of_owner,
            "unit": data.unit,
        },
        "ended_by": journal.ended_by,
    }


def direction(metric: Metric) -> Literal["minimize", "maximize"]:
    """Return the direction of a metric in Optuna's terms."""
    return "minimize" if metric.less_is_better else "maximize"


def _find_best(trials: Sequence[Document], metric: Metric) -> Document | None:
    """Return the trial with the best score, the first if there are several; None without scores."""
    best = None
    for trial in trials:
        if trial["score"] is None:
            continue
        if best is None or metric.gain(trial["score"], best["score"]) > 0:
            best = trial
    return best
