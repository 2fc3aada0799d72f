"""Write a trained model, of a run or of your own loop, as a folder to share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from torch import Tensor, nn

from zdp_bench import records
from zdp_bench.config.schema import GROUPS
from zdp_bench.disk import make_folder, rename
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.card import card
from zdp_bench.extras.sharing.folder import Source
from zdp_bench.foreign_files import read_json
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.ledger_lines import end_of
from zdp_bench.records import Document, Record
from zdp_bench.report.results import read_frame, tell_differences
from zdp_bench.training import checkpoint
from zdp_bench.training.build import count_real
from zdp_bench.training.machine import environment
from zdp_bench.training.run_folder import command_of, find_weights


def export(
    results: Path,
    run: str,
    to: Path,
) -> Document:
    """Write the model of a finished run into an empty or new folder.

    A folder that holds this very export is left as it is.

    Args:
        run: RECIPE, RECIPE/RUN, RUN, or the run's folder.

    Returns:
        the run's record.

    Raises:
        UserError: there is no such run, or several; its weights are missing or not the record's;
            or the folder is not empty.
    """
    home = find_weights(results, run, tell=lambda runs: tell_differences(*read_frame(runs)))
    record = records.read_document(home / files.RECORD)
    assert record is not None
    files.require_fit(record, home / files.RECORD)
    weights = record["measured"]["weights"]
    path = home / weights["file"]
    saved = checkpoint.load(path, record["run"])
    if saved is None or checkpoint.state_digest(saved.model) != weights["digest"]:
        raise UserError(
            f"{path}: does not contain the record's weights. To make them again: "
            f"{command_of(Record.of(record))}."
        )
    _write(to, record, saved.model, home / files.LEDGER)
    return record


def recipe_of(record: Document) -> str:
    """Return a record's configuration as the YAML of a recipe."""
    config = deepcopy(record["config"])
    defaults = []
    for group in GROUPS:
        if "name" in config.get(group, {}):
            defaults.append({f"override /{group}": config[group].pop("name") or "none"})
    recipe = {"defaults": defaults}
    for key, value in config.items():
        if key not in ("recipe", "claims") and value != {}:
            recipe[key] = value
    head = f"# The run that made this model: recipe {record['recipe']}, run {record['run'][:16]}.\n"
    return head + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def write_own(
    to: Path,
    model: nn.Module,
    ledger: Path,
    about: dict[str, Any],
    privacy: dict[str, Any],
    metrics: Mapping[str, float],
) -> None:
    """Write weights, ledger, report and card into an empty or new folder.

    A folder that holds this very export is left as it is, so that a script can run twice.

    Args:
        about: name, algorithm, inputs, data and owners.
        privacy: what `Private.report` returned.
        metrics: the numbers that the card states.
    """
    state = model.state_dict()
    weights = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    report = {
        "format": 1,
        **about,
        "parameters_real": count_real(trainable(model).values()),
        "privacy": privacy,
        "metrics": {name: _number(name, value) for name, value in metrics.items()},
        "environment": environment(next(model.parameters()).device),
        "measured": {"weights": {"digest": checkpoint.state_digest(weights)}},
    }
    _write(to, report, weights, ledger)


def _write(
    to: Path,
    source: Source,
    weights: dict[str, Tensor],
    ledger: Path,
) -> None:
    """Write an export beside its place, and move it there: a kill leaves none half written."""
    name = files.REPORT if files.is_report(source) else files.RECORD
    if _holds(to, name, source):
        return
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UserError(f"{to}: is not empty; choose a new folder.")
    make_folder(to.absolute().parent)
    with TemporaryDirectory(prefix=f".{to.name}.", dir=to.absolute().parent) as place:
        whole = Path(place) / "model"
        make_folder(whole)
        files.write_weights(whole / files.WEIGHTS, weights)
        records.write(whole / name, source)
        files.copy_ledger(ledger, whole)
        if not source["privacy"].get("nodes"):  # a federation's are at its nodes
            _require_end(whole / files.LEDGER, source, ledger)
        written = records.from_json((whole / name).read_text(encoding="utf-8"))  # its order of keys
        for file, text in texts_of(written).items():
            records.write_text(whole / file, text)
        files.write_sums(whole)
        rename(whole, to)


def _require_end(
    copied: Path,
    source: Source,
    ledger: Path,
) -> None:
    """Reject a ledger, copied, that does not end where the record, or report, says."""
    end = end_of(copied) if copied.is_file() else None
    if end != source["privacy"]["ledger"]["digest"]:
        raise UserError(f"{ledger}: is damaged or cut, and its ε cannot be trusted.")


def texts_of(source: Source) -> dict[str, str]:
    """Return the texts that follow from a record, or report, by file name."""
    texts = {files.CARD: card(source)}
    if not files.is_report(source):
        texts[files.RECIPE] = recipe_of(source)
    return texts


def _holds(
    folder: Path,
    name: str,
    source: Source,
) -> bool:
    """True if the folder is the whole export of this record, or report, with no file changed."""
    sums = files.read_sums(folder)
    if name not in sums or any(files.misses(folder / file, sums[file]) for file in sums):
        return False
    exported = read_json(folder / name)
    ours = records.to_json(source)
    return all(exported.get(key) == ours[key] for key in ours if key != "environment")


def _number(name: str, value: Any) -> float:
    """Return a metric as a float, for a card."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"metrics: '{name}' is {value!r}; give one finite number for each name.")
    return number
