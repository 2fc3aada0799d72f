"""The files of an exported folder: their names, digests, weights and record."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zdp_bench import records
from zdp_bench.data.files import sha256
from zdp_bench.errors import UserError
from zdp_bench.records import Record

WEIGHTS = "model.safetensors"
CARD = "README.md"
RECORD = "record.json"
REPORT = "report.json"
RECIPE = "recipe.yaml"
LEDGER = "ledger.jsonl"
SUMS = "SHA256SUMS"
# What a model card states of a record's section on privacy.
STATED = (
    *(
        "unit",
        "epsilon_of",
        "records_per_patient",
        "adjacency",
        "delta",
        "epsilon_claimed",
        "claimed_by",
    ),
    *("epsilon_tight", "epsilon_tight_at_least", "epsilon_patient", "epsilon_patient_at_least"),
    *("noise_multiplier", "z", "steps", "sampling", "randomness", "ledger"),
)
# What it states of the report of a loop of one's own.
STATED_OF_OWN = (
    *("epsilon_of", "adjacency", "delta", "epsilon_tight", "epsilon_tight_at_least"),
    *("epsilon_rdp", "noise_multiplier", "z", "steps", "sampling", "randomness"),
    *("randomness_from", "ledger"),
)
Report = dict[str, Any]  # `private.report()`, and what the model is
_AS_PAIRS = "complex128_as_pairs"  # names of tensors whose last dimension is (real, imaginary)


def read_record(folder: Path) -> Record:
    """Return the record of an exported model.

    Raises:
        UserError: the folder is no exported model.
    """
    record = records.read(folder / RECORD)
    if record is None or not (folder / WEIGHTS).is_file():
        raise UserError(
            f"{folder}: is no exported model, for it lacks {RECORD} or {WEIGHTS}. "
            f"`zdp-bench export RUN --to {folder}` writes one, and so does `private.export`."
        )
    if lacking := missing_keys(record):
        raise UserError(
            f"{folder / RECORD}: lacks {', '.join(lacking)}; it was edited, or is of an older "
            "version. Export the run again."
        )
    return record


def is_own(folder: Path) -> bool:
    """True if the folder holds the model of a loop of one's own, and not that of a run.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder.")
    return (folder / REPORT).is_file()


def read_report(folder: Path) -> Report:
    """Return the report of an exported model that `is_own`.

    Raises:
        UserError: it is damaged.
    """
    path = folder / REPORT
    try:
        found = records.from_json(path.read_text(encoding="utf-8"))
        of_owner = ("records_per_owner",) if found["owners"] else ()
        _ = [found["privacy"][k] for k in (*STATED_OF_OWN, "mechanism", "fixed_state", *of_owner)]
        _ = found["measured"]["weights"]["digest"], found["environment"]["versions"]["zdp-bench"]
        _ = [found[key] for key in ("name", "algorithm", "inputs", "data", "metrics")]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{path}: is damaged, or of an older version. Export the model again."
        ) from None
    return found


def require_empty(folder: Path, key: str = "") -> None:
    """Refuse a folder that holds something, or that is a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{key}{folder}: is there and not empty; name a new folder.")


def copy_ledger(ledger: Path, to: Path) -> None:
    """Copy a ledger, if there is one, and those that were set aside beside it, as `LEDGER`."""
    for path in [ledger, *sorted(ledger.parent.glob(f"{ledger.name}.*"))]:
        if path.is_file():
            shutil.copyfile(path, to / path.name.replace(ledger.name, LEDGER, 1))


def missing_keys(record: Record) -> list[str]:
    """Return what an exported model needs and a record lacks."""
    needed: dict[str, tuple[str, ...]] = {
        "data": ("example",),
        "measured": ("weights",),
        "environment": ("versions",),
        "privacy": STATED,
    }
    return [
        f"{section}.{key}"
        for section, keys in needed.items()
        for key in keys
        if key not in (record.get(section) or {})
    ]


def write_weights(path: Path, weights: dict[str, Any]) -> None:
    """Write a model's state; safetensors has no complex128, so that is written as pairs."""
    tensors = {name: t.detach().cpu() for name, t in weights.items() if isinstance(t, Tensor)}
    pairs = [name for name, t in tensors.items() if t.dtype == torch.complex128]
    plain = {
        # Cloned: safetensors refuses tensors that share memory.
        name: (torch.view_as_real(t.resolve_conj()) if name in pairs else t.resolve_conj())
        .contiguous()
        .clone()
        for name, t in tensors.items()
    }
    noted = {_AS_PAIRS: " ".join(pairs)} if pairs else {}
    save_file(plain, path, {"format": "pt", **noted})


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return what `write_weights` wrote, bit for bit.

    Raises:
        UserError: the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            pairs = (file.metadata() or {}).get(_AS_PAIRS, "").split()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: is damaged ({error}); copy it again.") from None
    return {n: torch.view_as_complex(t) if n in pairs else t for n, t in tensors.items()}


def write_sums(folder: Path) -> None:
    """Write the digests of all files of the folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    lines = [f"{sha256(path)}  {path.name}\n" for path in files]
    records.write_text(folder / SUMS, "".join(lines))


def read_sums(folder: Path) -> dict[str, str]:
    """Return digest by file name; empty without a file of them."""
    path = folder / SUMS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pairs = [line.split(maxsplit=1) for line in lines if len(line.split(maxsplit=1)) == 2]
    return {name.strip(): digest for digest, name in pairs}
