"""Show a search: a line for each trial, and a sheet of all trials with notes on ε and commands."""

from __future__ import annotations

import shlex
from typing import Any

from zdp_bench.config.words import parse_words, split_word
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Document
from zdp_bench.report.number_format import name_one
from zdp_bench.report.sheet import Sheet

MAX_SHOWN = 10  # number of trials in the printed table; CSV and JSON have all of them


def describe_trial(trial: Document, num_trials: int, metric: str) -> str:
    """Return a finished trial as one line for the terminal."""
    values = " ".join(f"{key}={_short(value)}" for key, value in trial["values"].items())
    if trial["state"] == "failed":
        result = trial.get("reason", "diverged")  # earlier versions saved no reason
    elif trial["state"] == "deleted" and trial["score"] is None:
        result = "its run was deleted before it ended"
    elif trial["score"] is None:
        result = f"validation {metric} is not finite"
    else:
        result = f"validation {metric} {trial['score']:.4f}"
        if trial["state"] == "deleted":
            result += ", its run was deleted"
    return f"trial {trial['trial']} of {num_trials}: {values}: {result}"


def sheet(record: Document) -> Sheet:
    """Return a search's record as a sheet: trials from best to worst, and notes on ε."""
    metric = record["metric"]
    sort_sign = 1 if record["direction"] == "minimize" else -1  # the best score comes first

    def rank(trial: Document) -> tuple[bool, float, int]:
        """Return the sort key of a trial; trials without a score come last."""
        if trial["score"] is None:
            return True, 0.0, trial["trial"]
        return False, sort_sign * trial["score"], trial["trial"]

    rows = []
    for trial in sorted(record["trials"], key=rank):
        rows.append(
            {
                "trial": trial["trial"],
                **trial["values"],
                "state": trial["state"],
                f"validation_{metric}": trial["score"],
                f"test_{metric}": trial.get("test"),
                "epsilon_tight": trial.get("epsilon_tight"),
                "run": trial.get("run"),
            }
        )
    printed_rows = []
    for row in rows[:MAX_SHOWN]:
        cells = {key: _short(value)[:16] for key, value in row.items()}
        cells["epsilon_tight"] = show_epsilon(row["epsilon_tight"])
        printed_rows.append(list(cells.values()))
    notes = _notes(record)
    if len(rows) > MAX_SHOWN:
        notes.insert(0, f"{len(rows) - MAX_SHOWN} more trials: --format csv.")
    title = f"Search of {record['recipe']}: {len(rows)} trials by {record['sampler']}"
    keys = list(rows[0]) if rows else []
    important_keys = ("trial", f"validation_{metric}", "run", "epsilon_tight", *record["searched"])
    return Sheet(
        title,
        [_heading(key) for key in keys],
        printed_rows,
        notes,
        numbers=rows,
        important=[_heading(key) for key in important_keys],
    )


def _heading(key: str) -> str:
    return key.replace("_", " ")


def _notes(record: Document) -> list[str]:
    """Return sentences on the total ε, the validation examples and the best trial."""
    privacy = record["privacy"]
    if privacy["epsilon_all"] is None:
        total = "unknown: its runs differ in sampling, unit or owners"
    else:
        total = f"{show_epsilon(privacy['epsilon_all'])} for {name_one(privacy['epsilon_of'])}"
    if privacy["epsilon_all_unit"] is not None:
        total += f", {show_epsilon(privacy['epsilon_all_unit'])} for {name_one(privacy['unit'])}"
    notes = [record["ended_by"]] if record["ended_by"] else []
    deleted = [trial["trial"] for trial in record["trials"] if trial["state"] == "deleted"]
    if deleted:
        notes.append(
            f"Deleted runs: those of trials {', '.join(map(str, deleted))}. Their scores are those "
            "that the search recorded, and what they spent still counts."
        )
    return [
        *notes,
        f"ε of the whole search: {total} (δ {privacy['delta']:g}; tight, composed over "
        f"the {privacy['runs']} runs of {record['recipe']} on these data in the results folder). "
        "It covers every choice made by looking at the training examples. The ε of one trial "
        "covers less.",
        f"Chosen on {record['data']['validation']:,} validation examples, which no ε protects.",
        *_commands(record),
    ]


def _commands(record: Document) -> list[str]:
    """Return the best trial, and the commands that export it and repeat it with other seeds."""
    if record["best"] is None:
        return []
    best = next(trial for trial in record["trials"] if trial["trial"] == record["best"])
    name = f"{record['recipe']}/{best['run'][:8]}"
    metric = record["metric"].replace("_", " ")
    export = ["zdp-bench", "export", name, "--to", f"{record['recipe']}_best"]
    shared_words = [record["recipe_as_typed"]]  # what all trials share, without the seed
    for word in record["fixed"]:
        key, _ = split_word(word)
        if key == "paths.results":
            (override,) = parse_words([word])
            export += ["--results", str(override.value())]
        if key not in ("seed", "recipe"):
            shared_words.append(word)
    values = [f"{key}={value}" for key, value in best["values"].items()]
    repeat = ["zdp-bench", "run", "-m", *shared_words, *values, *best["noise"], "seed=1,2,3"]
    exporting = [] if best["state"] == "deleted" else [f"Export it: {shlex.join(export)}"]
    return [
        f"Best: trial {best['trial']}, run {name}, validation {metric} {best['score']:.4f}.",
        *exporting,
        f"Run it with other seeds, which spend ε beyond the search's: {shlex.join(repeat)}",
    ]


def _short(value: Any) -> str:
    """Return a value as a short text for a table's cell."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
