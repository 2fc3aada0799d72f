"""Find a finished run by name, and the command that carries it out again."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from zdp_bench import records
from zdp_bench.config import configured
from zdp_bench.config.compose import recipe_body
from zdp_bench.config.schema import GROUPS
from zdp_bench.errors import UserError, suggestion
from zdp_bench.records import Record


def find_weights(results: Path, asked: str, key: str = "") -> Path:
    """Return the folder of the one finished run that still has its weights.

    Args:
        asked: RECIPE, RECIPE/RUN with the first letters of a run, or the path of a run's folder or
            record.
        key: what the user gave it to, such as "model.init_from=", for messages.

    Raises:
        UserError: no such run, several, or one whose record alone is there; says how to get it.
    """
    recipe, _, run = asked.partition("/")
    here = results / "runs" / recipe
    finished = [path.parent for path in sorted(here.glob("*/record.json"))]
    folders = [folder for folder in finished if folder.name.startswith(run)]
    place = Path(asked).parent if asked.endswith("record.json") else Path(asked)
    if not finished and (place / "record.json").is_file():
        folders, here = [place], place
    found = [folder for folder in folders if (folder / "checkpoint.pt").is_file()]
    if len(found) == 1:
        return found[0]
    if not folders:
        near = suggestion(recipe, [path.name for path in here.parent.glob("*")])
        raise UserError(
            f"{key}{asked}: no finished run with its weights is under {here}.{near} Carry it out "
            f"first: zdp-bench run recipe={recipe}."
        )
    if not found and (record := records.read(folders[0] / "record.json")):
        raise UserError(
            f"{key}{asked}: no finished run with its weights is under {here}, only its record, as "
            f"in a clone. This makes the weights again: {command_of(record)}."
        )
    names = ", ".join(f"{path.parent.name}/{path.name}" for path in found[:4])
    raise UserError(f"{key}{asked}: {len(found)} runs are meant. Name one of them: {names}.")


def command_of(record: Record) -> str:
    """Return the command that carries a record's run out again."""
    own = records.flatten(record["config"])
    words = [f"recipe={record['recipe']}"]
    if recipe_body(record["recipe"]) is None:  # a file of the user's, wherever it is
        words = [f"{words[0]}.yaml", f"seed={record['seed']}"]
        return shlex.join(["zdp-bench", "run", *words, "force=true"])
    recipe = records.flatten(configured(words).resolved)
    for group in GROUPS:
        name = own.get(f"{group}.name")
        if name != recipe.get(f"{group}.name"):
            words.append(f"{group}={name or 'none'}")
    default = records.flatten(configured(words).resolved)
    words += [
        f"{key}={_word(value)}"
        for key, value in sorted(own.items())
        if key in default and default[key] != value and not key.startswith("claims.")
    ]
    return shlex.join(["zdp-bench", "run", *words, "force=true"])


def _word(value: Any) -> str:
    """Return a value as Hydra reads it on a command line."""
    if isinstance(value, str) and re.fullmatch(r"[\w./:-]+", value):
        return value
    return json.dumps(value, separators=(",", ":"))
