"""Read and write the files of an exported folder, and check the form of records and reports."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from zdp_bench import records
from zdp_bench.data.files import sha256
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import (
    Shape,
    exists,
    expect,
    is_file,
    misfits,
    read_json,
    read_text,
    reading,
)
from zdp_bench.privacy.ledger_files import list_set_aside
from zdp_bench.privacy.mechanism import MAX_COUNT
from zdp_bench.records import NUMBER, Document
from zdp_bench.training.spending import EXPORTED

WEIGHTS = "model.safetensors"
CARD = "README.md"
RECORD = "record.json"
REPORT = "report.json"
RECIPE = "recipe.yaml"
LEDGER = "ledger.jsonl"
SUMS = EXPORTED
MAX_LEDGER = 1 << 28  # bytes, enough for two million steps
MAX_CONFIG = 20_000  # characters
MAX_NUMBERS = 1 << 28  # in one example
# A run's record, or the report of your own loop: `private.report()` and a description of the model.
Source = Document
# The parts of records and reports that this package reads, as `foreign_files.misfits` takes them.
_SAMPLING: dict[str, Shape] = {
    "scheme": str,
    "records": int,
    **dict.fromkeys(("sample_rate", "expected_batch_size"), NUMBER),
}
_INTERVAL = dict.fromkeys(("epsilon_tight", "epsilon_tight_at_least"), NUMBER)
_PATIENT = dict.fromkeys(("epsilon_patient", "epsilon_patient_at_least"), NUMBER)
_SHARED: dict[str, Shape] = {
    "environment": {"commit": (str | None), "versions": {"zdp-bench": str}},
    "measured": {"weights": {"digest": str}},
    "metrics": {str: NUMBER},
    "privacy": {
        **dict.fromkeys(("epsilon_of", "adjacency", "randomness"), str),
        **dict.fromkeys(("delta", "noise_multiplier", "z"), NUMBER),
        **_INTERVAL,
        "epsilon_part": NUMBER | None,  # None if examples have no owners
        "steps": int,
        "sampling": _SAMPLING,
        "ledger": {"entries": int, "digest": str},
    },
}
_NODE: Shape = {
    **_INTERVAL,
    **_PATIENT,
    "epsilon_claimed": NUMBER,
    **dict.fromkeys(("node", "steps"), int),
    "examples_per_patient": int | None,  # None in version 0.1
    "sampling": _SAMPLING,
    "ledger": {"entries": int, "digest": str},
}
_RUN: Shape = {
    "config": {key: {"name": str} for key in ("task", "model", "algorithm")},
    "data": {
        **dict.fromkeys(("train", "validation", "test"), int),
        "example": {
            **{key: [int] for key in ("input_shape", "target_shape")},
            **dict.fromkeys(("input_dtype", "target_dtype"), str),
            "outputs": int,
        },
    },
    "model": {"parameters_real": int, "files": (NoneType, {str: str})},
    "privacy": {**_PATIENT, "epsilon_claimed": NUMBER, "nodes": (NoneType, [_NODE])},
    "representation": (
        NoneType,
        {"name": str, "digest": str, "input_shape": [int], "input_dtype": str},
    ),
    "start": (NoneType, {"recipe": str, "weights": str, "data": {"name": str}}),
    "federation": (NoneType, {"rounds": int, "asked": int}),
}
_START: Shape = {
    "weights": str,
    "trainings": (NoneType, [dict]),
    "epsilon_tight": NUMBER | None,
}
_LOOP: Shape = {
    **dict.fromkeys(("name", "algorithm", "inputs", "owners"), str),
    "data": {"name": str, "train": int | None},
    "parameters_real": int,
    "privacy": {
        "epsilon_rdp": NUMBER,
        "randomness_from": str,
        "steps_taken": int | None,
        "mechanism": dict,
        "fixed_state": [str],
        "examples_per_owner": int | None,
        "start": (NoneType, _START),
    },
}
# The metadata key of a JSON list: the names of tensors whose last dimension is (real, imaginary).
_PAIRS_KEY = "complex128_as_pairs"


def is_report(source: Source) -> bool:
    """Return whether a source is the report of your own loop, rather than a run's record."""
    return "config" not in source


def read(folder: Path) -> Source:
    """Return the record of an exported run, or the report of an exported loop.

    Raises:
        UserError: the folder is not an exported model, or its record or report is damaged.
    """
    path = folder / REPORT
    if not is_file(path):
        path = folder / RECORD
    if not is_file(path) or not is_file(folder / WEIGHTS):
        raise UserError(
            f"{folder}: is not an exported model, because it has no {path.name} or {WEIGHTS}."
        )
    source: Source = read_json(path, records.from_json)
    if not isinstance(source, dict):
        raise UserError(f"{path}: is damaged; copy the folder again.")
    require_fit(source, path)
    return source


def require_fit(source: Source, path: Path) -> None:
    """Reject a record or report that lacks a required key, or has an implausible value.

    Raises:
        UserError: a key is missing, or its value has the wrong type or range.
    """
    if is_report(source):
        bad_keys = _report_misfits(source)
    else:
        records.require_record(source, path)
        bad_keys = _record_misfits(source)
    if bad_keys:
        raise UserError(
            f"{path}: lacks {', '.join(bad_keys[:5])}, or has an invalid value there; it is "
            "damaged, or from another version of zdp-bench."
        )


def _report_misfits(report: Source) -> list[str]:
    """Return the keys of a report that are missing or have an invalid value."""
    bad_keys = [*misfits(report, _SHARED), *misfits(report, _LOOP)]
    if bad_keys:
        return bad_keys
    if report["owners"]:
        bad_keys = [*misfits(report, {"privacy": {"examples_per_owner": int}})]
    if not 0 < report["privacy"]["delta"] < 1:
        bad_keys.append("privacy.delta")
    return bad_keys


def _record_misfits(record: Document) -> list[str]:
    """Return the keys of a record that are missing or have an invalid value."""
    bad_keys = [*misfits(record, _SHARED), *misfits(record, _RUN)]
    return bad_keys or list(_implausible_keys(record))


def _implausible_keys(record: Document) -> Iterator[str]:
    """Yield the keys of a record whose values are not possible for a model or data set.

    This limits the memory and time that a record of unknown origin can take.
    """
    if len(repr(record["config"])) > MAX_CONFIG:
        yield "config"
    shape, dtype = raw_example(record)
    if not _is_shape(shape) or dtype_of(dtype) is None:
        yield "representation"
    data = record["data"]
    for part in ("train", "validation", "test"):
        if not 0 <= data[part] <= MAX_COUNT:
            yield f"data.{part}"
    yield from _implausible_counts(record)
    example = data["example"]
    for side in ("input", "target"):
        if dtype_of(example[f"{side}_dtype"]) is None:
            yield f"data.example.{side}_dtype"
        if not _is_shape(example[f"{side}_shape"]):
            yield f"data.example.{side}_shape"


def _implausible_counts(record: Document) -> Iterator[str]:
    """Yield the keys of numbers of one patient's examples that exceed all examples there are."""
    privacy = record["privacy"]
    nodes = privacy.get("nodes") or []
    max_examples = max(1, record["data"]["train"])
    for node in nodes:
        # `records` counts patients, not examples, if a step draws whole patients.
        is_by_example = privacy["epsilon_of"] == "example"
        max_at_node = node["sampling"]["records"] if is_by_example else MAX_COUNT
        examples = node.get("examples_per_patient")
        if examples is not None and not 1 <= examples <= max_at_node:
            yield f"privacy.nodes[{node['node']}].examples_per_patient"
        # A site with its own data may have more examples than the server.
        max_examples = max(max_examples, max_at_node)
    if not 1 <= privacy["examples_per_patient"] <= max_examples:
        yield "privacy.examples_per_patient"


def _is_shape(sides: Sequence[int]) -> bool:
    return min(sides, default=1) > 0 and math.prod(sides) <= MAX_NUMBERS


def raw_example(record: Document) -> tuple[tuple[int, ...], str]:
    """Return the shape and the dtype's name of an example, before a representation if any."""
    example = record.get("representation") or record["data"]["example"]
    return tuple(example["input_shape"]), example["input_dtype"]


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype with a name such as 'float32', or None if there is no such dtype."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def copy_ledger(ledger: Path, folder: Path) -> None:
    """Copy a ledger and those that were set aside to a folder; missing files are skipped.

    Args:
        ledger: the path of the ledger.
        folder: an existing folder; the copy is named `LEDGER`.

    Raises:
        UserError: a file is larger than `MAX_LEDGER`.
    """
    for path in [ledger, *list_set_aside(ledger)]:
        if path.is_file():
            if path.stat().st_size > MAX_LEDGER:
                raise UserError(
                    f"{path}: is larger than {MAX_LEDGER:,} bytes, too large for a ledger."
                )
            shutil.copyfile(path, folder / path.name.replace(ledger.name, LEDGER, 1))


def write_weights(path: Path, weights: dict[str, Any]) -> None:
    """Write a model's state to a safetensors file.

    The format has no complex128, so such tensors are written as pairs of real numbers.

    Raises:
        UserError: a part of the state is no tensor.
    """
    tensors, pairs = {}, []
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"model: its state '{name}' is of type {type(value).__name__}, but a file of "
                "weights holds tensors: let get_extra_state return a tensor, or nothing."
            )
        value = value.detach().cpu().resolve_conj()
        if value.dtype == torch.complex128:
            pairs.append(name)
            value = torch.view_as_real(value)
        tensors[name] = value.contiguous().clone()  # safetensors rejects tensors that share memory
    metadata = {"format": "pt"}
    if pairs:
        metadata[_PAIRS_KEY] = json.dumps(pairs)
    # Not `save_file`, whose files only the current user can read.
    path.write_bytes(save(tensors, metadata))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the state in a file of `write_weights`, bit for bit."""
    with _open_weights(path) as (file, pairs):
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name in pairs:
            weights[name] = torch.view_as_complex(weights[name])
        return weights


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of the weights in a file; only its header is read."""
    with _open_weights(path) as (file, pairs):
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        for name in pairs:
            shapes[name] = shapes[name][:-1]
        return shapes


@contextmanager
def _open_weights(path: Path) -> Iterator[tuple[Any, set[str]]]:
    """Yield the open safetensors file, and the names of tensors that are written as pairs."""
    with reading(path), safe_open(path, "pt") as file:
        pairs = _parse_names((file.metadata() or {}).get(_PAIRS_KEY, "[]"))
        for name in pairs:
            _require_pairs(file, name)
        yield file, pairs


def _parse_names(text: str) -> set[str]:
    """Return the names in a list in JSON or, as in older exports, separated by spaces."""
    names = None
    with suppress(ValueError, RecursionError):
        names = json.loads(text)
    if not isinstance(names, list):
        names = text.split()
    expect(not list(misfits(names, [str])), f"has no names of tensors in {_PAIRS_KEY}")
    return set(names)


def _require_pairs(file: Any, name: str) -> None:
    """Reject a name in the metadata of a file that has no such tensor of pairs of numbers."""
    expect(name in file.keys(), f"lacks the complex tensor {name[:200]}")  # noqa: SIM118
    entry = file.get_slice(name)
    is_of_pairs = entry.get_dtype() == "F64" and entry.get_shape()[-1:] == [2]
    expect(is_of_pairs, f"has no pairs of numbers in the complex tensor {name[:200]}")


def write_sums(folder: Path) -> None:
    """Write the digests of all files in the folder to `SHA256SUMS`."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    lines = [f"{sha256(path)}  {path.name}\n" for path in files]
    records.write_text(folder / SUMS, "".join(lines))


def read_sums(folder: Path) -> dict[str, str]:
    """Return the digests in `SHA256SUMS` by file name; empty if there is no such file."""
    path = folder / SUMS
    if not exists(path):
        return {}
    sums = {}
    for line in read_text(path).splitlines():
        words = line.split(maxsplit=1)
        if len(words) == 2:
            digest, name = words
            sums[Path(name.strip()).name] = digest
    return sums


def find_mismatch(path: Path, digest: str) -> str:
    """Return why a file does not match a digest, such as 'is missing', or '' if it matches."""
    if not os.path.isfile(path):  # `Path.is_file` would raise if the name is too long
        return "is missing"
    if path.name != WEIGHTS and path.stat().st_size > MAX_LEDGER:
        return f"is larger than {MAX_LEDGER:,} bytes, which only the weights may be"
    return "" if sha256(path) == digest else "is not the exported file"
