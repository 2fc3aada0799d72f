"""The files of an exported folder: names, one schema, weights, ledger and digests."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from zdp_bench import records
from zdp_bench.data.files import sha256
from zdp_bench.errors import UserError, in_one_line
from zdp_bench.foreign_files import Shape, misfits, open_regular, read_json, read_text
from zdp_bench.library import starts
from zdp_bench.privacy.ledger import those_aside
from zdp_bench.privacy.mechanism import MOST
from zdp_bench.records import NUMBER, Document
from zdp_bench.training.spending import EXPORTED

WEIGHTS = "model.safetensors"
CARD = "README.md"
RECORD = "record.json"
REPORT = "report.json"
RECIPE = "recipe.yaml"
LEDGER = "ledger.jsonl"
SUMS = EXPORTED
MOST_LEDGER = 1 << 28  # bytes: two million steps
MOST_CONFIG = 20_000  # characters
MOST_NUMBERS = 1 << 28  # in one example
# A run's record; or, of a loop of one's own, `private.report()` with what the model is.
Source = Document
_SAMPLING: dict[str, Shape] = {
    "scheme": str,
    "records": int,
    **dict.fromkeys(("sample_rate", "expected_batch_size"), NUMBER),
}
_INTERVAL = dict.fromkeys(("epsilon_tight", "epsilon_tight_at_least"), NUMBER)
_PATIENT = dict.fromkeys(("epsilon_patient", "epsilon_patient_at_least"), NUMBER)
_BOTH: dict[str, Shape] = {
    "environment": {"commit": (str | None), "versions": {"zdp-bench": str}},
    "measured": {"weights": {"digest": str}},
    "metrics": {str: NUMBER},
    "privacy": {
        **dict.fromkeys(("epsilon_of", "adjacency", "randomness"), str),
        **dict.fromkeys(("delta", "noise_multiplier", "z"), NUMBER),
        **_INTERVAL,
        "epsilon_part": NUMBER | None,  # without an owner there is none
        "steps": int,
        "sampling": _SAMPLING,
        "ledger": {"entries": int, "digest": str},
    },
}
_OF_NODE: Shape = {
    **_INTERVAL,
    **_PATIENT,
    "epsilon_claimed": NUMBER,
    **dict.fromkeys(("node", "steps"), int),
    "sampling": _SAMPLING,
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
    "model": {"parameters_real": int},
    "privacy": {**_PATIENT, "epsilon_claimed": NUMBER, "nodes": (NoneType, [_OF_NODE])},
    "representation": (
        NoneType,
        {"name": str, "digest": str, "input_shape": [int], "input_dtype": str},
    ),
    "start": (NoneType, {"recipe": str, "weights": str, "data": {"name": str}}),
}
_START: Shape = {
    "weights": str,
    "trainings": (NoneType, [starts.SHAPE]),
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
_AS_PAIRS = "complex128_as_pairs"  # names of tensors whose last dimension is (real, imaginary)


def is_report(source: Source) -> bool:
    """True for your own loop's report."""
    return "config" not in source


def read(folder: Path) -> Source:
    """Return the record of an exported run, or the report of an exported loop."""
    path = folder / REPORT
    if not path.is_file():
        path = folder / RECORD
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(
            f"{folder}: is not an exported model, because it has no {path.name} or {WEIGHTS}."
        )
    source: Source = read_json(path, records.from_json)
    require_fit(source, path)
    return source


def require_fit(source: Source, path: Path) -> None:
    """Reject a record or report that lacks what an export needs, or has absurd values."""
    if is_report(source):
        wrong = _misfits_of_report(source)
    else:
        records.require_record(source, path)
        wrong = _misfits_of_record(source)
    if wrong:
        raise UserError(
            f"{path}: lacks {', '.join(wrong[:5])}, or contains something else there; it is "
            "damaged, or from another version of zdp-bench."
        )


def _misfits_of_report(report: Source) -> list[str]:
    wrong = [*misfits(report, _BOTH), *misfits(report, _LOOP)]
    if wrong:
        return wrong
    if report["owners"]:
        wrong = [*misfits(report, {"privacy": {"examples_per_owner": int}})]
    if not 0 < report["privacy"]["delta"] < 1:
        wrong.append("privacy.delta")
    return wrong


def _misfits_of_record(record: Document) -> list[str]:
    wrong = [*misfits(record, _BOTH), *misfits(record, _RUN)]
    return wrong or list(_beyond_reason(record))


def _beyond_reason(record: Document) -> Iterator[str]:
    """Yield the keys of a record whose values no model or data set has."""
    if len(repr(record["config"])) > MOST_CONFIG:
        yield "config"
    shape, dtype = raw_example(record)
    if not _is_shape(shape) or dtype_of(dtype) is None:
        yield "representation"
    data = record["data"]
    for part in ("train", "validation", "test"):
        if not 0 <= data[part] <= MOST:
            yield f"data.{part}"
    example = data["example"]
    for side in ("input", "target"):
        if dtype_of(example[f"{side}_dtype"]) is None:
            yield f"data.example.{side}_dtype"
        if not _is_shape(example[f"{side}_shape"]):
            yield f"data.example.{side}_shape"


def _is_shape(sides: Sequence[int]) -> bool:
    return min(sides, default=1) > 0 and math.prod(sides) <= MOST_NUMBERS


def raw_example(record: Document) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of an example before its representation, if it has one."""
    example = record.get("representation") or record["data"]["example"]
    return tuple(example["input_shape"]), example["input_dtype"]


def dtype_of(name: str) -> torch.dtype | None:
    """Return torch's type of numbers of a name such as 'float32'; None for other words."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def copy_ledger(ledger: Path, to: Path) -> None:
    """Copy a ledger, if there is one, and those that were set aside beside it, as `LEDGER`."""
    for path in [ledger, *those_aside(ledger)]:
        if path.is_file():
            if path.stat().st_size > MOST_LEDGER:
                raise UserError(f"{path}: is larger than the {MOST_LEDGER:,} bytes of a ledger.")
            shutil.copyfile(path, to / path.name.replace(ledger.name, LEDGER, 1))


def write_weights(path: Path, weights: dict[str, Any]) -> None:
    """Write a model's state; safetensors has no complex128, so that is written as pairs."""
    tensors, pairs = {}, []
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            continue
        value = value.detach().cpu().resolve_conj()
        if value.dtype == torch.complex128:
            pairs.append(name)
            value = torch.view_as_real(value)
        tensors[name] = value.contiguous().clone()  # safetensors refuses tensors that share memory
    metadata = {"format": "pt"}
    if pairs:
        metadata[_AS_PAIRS] = " ".join(pairs)
    path.write_bytes(save(tensors, metadata))  # `save_file` lets nobody else read it


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return what `write_weights` wrote, bit for bit."""
    with _open_weights(path) as (file, pairs):
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name in pairs:
            weights[name] = torch.view_as_complex(weights[name])
        return weights


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of the weights in a file, of which only the head is read."""
    with _open_weights(path) as (file, pairs):
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        for name in pairs:
            shapes[name] = shapes[name][:-1]
        return shapes


@contextmanager
def _open_weights(path: Path) -> Iterator[tuple[Any, list[str]]]:
    """Open a file of weights; yields it and the names of tensors that are written as pairs."""
    try:
        open_regular(path).close()  # safetensors would wait for a FIFO without end
        with safe_open(path, "pt") as file:
            yield file, (file.metadata() or {}).get(_AS_PAIRS, "").split()
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(f"{path}: is damaged ({in_one_line(error)}); copy it again.") from None


def write_sums(folder: Path) -> None:
    """Write the digests of all files of the folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    lines = [f"{sha256(path)}  {path.name}\n" for path in files]
    records.write_text(folder / SUMS, "".join(lines))


def read_sums(folder: Path) -> dict[str, str]:
    """Return digest by file name; empty without a file of them."""
    path = folder / SUMS
    if not path.exists():
        return {}
    sums = {}
    for line in read_text(path).splitlines():
        words = line.split(maxsplit=1)
        if len(words) == 2:
            digest, name = words
            sums[Path(name.strip()).name] = digest
    return sums


def misses(path: Path, digest: str) -> str:
    """Return why a file does not match a digest: 'is missing', ...; '' if it does."""
    if not os.path.isfile(path):  # unlike `Path.is_file`, also of a name that is too long
        return "is missing"
    if path.name != WEIGHTS and path.stat().st_size > MOST_LEDGER:
        return f"is larger than the {MOST_LEDGER:,} bytes of any file but the weights"
    return "" if sha256(path) == digest else "is not the file exported"
