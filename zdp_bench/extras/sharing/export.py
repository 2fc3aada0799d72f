"""Write a run's trained model as a folder that can be handed on."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import yaml

from zdp_bench import records
from zdp_bench.config.schema import GROUPS
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.card import card
from zdp_bench.records import Record
from zdp_bench.training import checkpoint
from zdp_bench.training.run_folder import command_of, find_weights


def export(results: Path, asked: str, to: Path) -> Record:
    """Write the model of a finished run into an empty or new folder; return the run's record.

    Args:
        asked: the run, see `find_weights`.

    Raises:
        UserError: there is no such run, its weights are missing or not those of its record, or the
            folder holds something.
    """
    home = find_weights(results, asked)
    record = records.read(home / "record.json")
    assert record is not None
    files.require_empty(to, "--to ")
    if lacking := files.missing_keys(record):
        raise UserError(
            f"{home / 'record.json'}: is of an older version, for it lacks {', '.join(lacking)}. "
            f"This makes it again: {command_of(record)}."
        )
    known = record["measured"]["weights"]
    saved = checkpoint.load(home / known["file"], record["run"])
    if saved is None or checkpoint.state_digest(saved.model) != known["digest"]:
        raise UserError(
            f"{home / known['file']}: does not hold the weights that the record names. "
            f"This makes them again: {command_of(record)}."
        )
    files.begin(to)
    files.write_weights(to / files.WEIGHTS, saved.model)
    records.write(to / files.RECORD, record)
    files.copy_ledger(home / files.LEDGER, to)
    records.write_text(to / files.RECIPE, recipe_of(record))
    records.write_text(to / files.CARD, card(record))
    files.write_sums(to)
    return record


def recipe_of(record: Record) -> str:
    """Return a record's configuration as the YAML of a recipe."""
    whole = deepcopy(record["config"])
    config = {key: value for key, value in whole.items() if key not in ("recipe", "claims")}
    chosen = [
        {f"override /{group}": config[group].pop("name") or "none"}
        for group in GROUPS
        if "name" in config.get(group, {})
    ]
    head = f"# The run that made this model: recipe {record['recipe']}, run {record['run'][:16]}.\n"
    body = {"defaults": chosen} | {key: value for key, value in config.items() if value != {}}
    return head + yaml.safe_dump(body, sort_keys=False, allow_unicode=True)
