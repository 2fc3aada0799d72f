"""Export the trained model of a run, or of your own loop, to a folder."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from torch import nn

from zdp_bench import records
from zdp_bench.config.schema import GROUPS
from zdp_bench.disk import make_folder, rename
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.card import card
from zdp_bench.extras.sharing.folder import Source
from zdp_bench.foreign_files import exists, is_file, read_json
from zdp_bench.gradients.clipping import trainable
from zdp_bench.nn.state import state_digest
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
    folder: Path,
) -> Document:
    """Write the model of a finished run to a new or empty folder.

    A folder that already contains this export is not changed.

    Args:
        results: the results folder.
        run: RECIPE, RECIPE/RUN, RUN, or the run's folder.
        folder: the folder to write.

    Returns:
        the run's record.

    Raises:
        UserError: no run matches, or several do; the weights are missing or do not match the
            record; or the folder is not empty.
    """
    home = find_weights(
        results, run, tell_differences=lambda runs: tell_differences(*read_frame(runs))
    )
    record = records.read_document(home / files.RECORD)
    assert record is not None
    files.require_fit(record, home / files.RECORD)
    path = home / "checkpoint.pt"
    saved = checkpoint.load(path, record["run"])
    weights_digest = record["measured"]["weights"]["digest"]
    if saved is None or state_digest(saved.model) != weights_digest:
        raise UserError(
            f"{path}: does not contain the record's weights. To recreate them, run: "
            f"{command_of(Record.of(record))}."
        )
    _write(folder, record, saved.model, home / files.LEDGER)
    return record


def recipe_of(record: Document) -> str:
    """Return a record's configuration as a recipe in YAML."""
    config = deepcopy(record["config"])
    defaults = []
    for group in GROUPS:
        if "name" in (config.get(group) or {}):
            defaults.append({f"override /{group}": config[group].pop("name") or "none"})
    recipe = {"defaults": defaults}
    for key, value in config.items():
        if key not in ("recipe", "claims") and value != {}:
            recipe[key] = value
    head = f"# The run that made this model: recipe {record['recipe']}, run {record['run'][:16]}.\n"
    return head + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def write_own(
    folder: Path,
    model: nn.Module,
    ledger: Path,
    about: dict[str, Any],
    privacy: dict[str, Any],
    metrics: Mapping[str, float],
) -> None:
    """Write the weights, ledger, report and card of your own loop to a new or empty folder.

    A folder that already contains this export is not changed, so that a script can run twice.

    Args:
        folder: the folder to write.
        model: the trained model, whose state consists of tensors.
        ledger: the path of the loop's ledger.
        about: the report's `name`, `algorithm`, `inputs`, `data` and `owners`.
        privacy: the result of `Private.report`.
        metrics: the test results to state in the card.
    """
    weights = model.state_dict()
    report = {
        "format": 1,
        **about,
        "parameters_real": count_real(trainable(model).values()),
        "privacy": privacy,
        "metrics": {name: _number(name, value) for name, value in metrics.items()},
        "environment": environment(next(model.parameters()).device),
        "measured": {"weights": {"digest": state_digest(weights)}},
    }
    _write(folder, report, weights, ledger)


def _write(
    folder: Path,
    source: Source,
    weights: dict[str, Any],
    ledger: Path,
) -> None:
    """Write an export.

    It is written to a temporary folder beside `folder` and then renamed, so that a killed process
    leaves no partial export.
    """
    name = files.REPORT if files.is_report(source) else files.RECORD
    if _contains_export(folder, name, source):
        return
    if exists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder}: is not empty; choose a new folder.")
    # A link stays one: the folder that it names is written.
    target = Path(os.path.realpath(folder))
    if target == Path.cwd() or target.is_mount():
        raise UserError(
            f"{folder}: is the current folder or a mount point, which an export cannot replace; "
            f"export to a new folder in it, such as {folder / 'model'}."
        )
    make_folder(target.parent)
    with TemporaryDirectory(prefix=".export.", dir=target.parent) as temporary:
        draft = Path(temporary) / "model"
        make_folder(draft)
        files.write_weights(draft / files.WEIGHTS, weights)
        records.write(draft / name, source)
        files.copy_ledger(ledger, draft)
        if not source["privacy"].get("nodes"):  # the nodes of a federation keep their ledgers
            _require_end(draft / files.LEDGER, source, ledger)
        # Read the source back, so that the texts have the order of keys that `verify` will read.
        written = records.from_json((draft / name).read_text(encoding="utf-8"))
        for file, text in texts_of(written).items():
            records.write_text(draft / file, text)
        files.write_sums(draft)
        rename(draft, target)


def _require_end(
    copied: Path,
    source: Source,
    ledger: Path,
) -> None:
    """Reject a ledger whose last entry does not have the digest that the source states.

    Args:
        copied: the copy of the ledger in the export, which is checked.
        source: the record or report.
        ledger: the original, which the error message names.
    """
    end = end_of(copied) if is_file(copied) else None
    if end != source["privacy"]["ledger"]["digest"]:
        raise UserError(f"{ledger}: is damaged or truncated, so its ε cannot be trusted.")


def texts_of(source: Source) -> dict[str, str]:
    """Return the texts that are determined by a record or report, by file name."""
    texts = {files.CARD: card(source)}
    if not files.is_report(source):
        texts[files.RECIPE] = recipe_of(source)
    return texts


def _contains_export(
    folder: Path,
    name: str,
    source: Source,
) -> bool:
    """Return whether the folder is an unchanged export of this record or report."""
    sums = files.read_sums(folder)
    if name not in sums or any(files.find_mismatch(folder / file, sums[file]) for file in sums):
        return False
    exported = read_json(folder / name)
    if not isinstance(exported, dict):  # a stranger's folder
        return False
    expected = records.to_json(source)
    return all(exported.get(key) == expected[key] for key in expected if key != "environment")


def _number(name: str, value: Any) -> float:
    """Return a metric's value as a finite float.

    Raises:
        UserError: the value is not a finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"metrics: '{name}' is {value!r}; give one finite number for each name.")
    return number
