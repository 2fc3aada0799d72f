"""Run an exported model on inputs from a file: .npy, .npz or .pt, or files as it was trained on."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.folder import is_own, raw_example, read_record
from zdp_bench.extras.sharing.loading import config_of, load
from zdp_bench.records import Record, require_regular, write_bytes
from zdp_bench.training.evaluation import forward
from zdp_bench.training.setup import build_dataset

FORMATS = (".npy", ".npz", ".pt")


def predict_file(folder: Path, inputs: Path, out: Path) -> tuple[int, ...]:
    """Write the model's outputs [n, ...] for the inputs of a file; return their shape.

    Raises:
        UserError: a file has another format, or the inputs do not fit the model.
    """
    _require_format(out, "--out")
    require_regular(out)
    if is_own(folder):
        raise UserError(
            f"{folder}: holds a network of somebody's own code, which no command can build. Run it "
            f"in Python: zdp_bench.load({str(folder)!r}, model=...)(inputs)."
        )
    record = read_record(folder)
    shape, name = raw_example(record)
    dtype = getattr(torch, name)
    given = read_inputs(inputs) if inputs.suffix in FORMATS else prepare_file(record, inputs)
    if given.shape[1:] != shape or not len(given) or not torch.can_cast(given.dtype, dtype):
        raise UserError(
            f"{inputs}: holds {_described(given.dtype, given.shape)}, where the model takes "
            f"{_described(dtype, ('n', *shape))}, prepared as its training data was."
        )
    outputs = forward(load(folder), given.to(dtype))
    _write(out, outputs)
    return tuple(outputs.shape)


def prepare_file(record: Record, path: Path) -> Tensor:
    """Return a picture, scan or recording as the model's training data was prepared [n, ...].

    Raises:
        UserError: the model was not trained on such files, or the file is damaged.
    """
    data = build_dataset(config_of(record))
    prepare = getattr(data, "prepare", None)  # only dataset=folder has it
    if prepare is None:
        raise UserError(
            f"INPUTS {path}: must end with {', '.join(FORMATS[:-1])} or .pt, prepared as the "
            f"training data was; the model was trained on {record['data']['name']}, whose files "
            "are not read one by one."
        )
    if not path.is_file():
        raise UserError(f"{path}: there is no such file.")
    made: Tensor = prepare(path)
    return made


def read_inputs(path: Path) -> Tensor:
    """Return the tensor of a file; of several, the one that is called 'inputs'.

    Raises:
        UserError: the file is missing, damaged, or of another format.
    """
    try:
        if path.suffix == ".pt":
            found: Any = torch.load(path, weights_only=True, map_location="cpu")
        else:
            found = np.load(path, allow_pickle=False)
            found = dict(found) if path.suffix == ".npz" else found
        if isinstance(found, dict):
            found = next(iter(found.values())) if len(found) == 1 else found["inputs"]
        return torch.as_tensor(found)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file.") from None
    except KeyError:
        raise UserError(f"{path}: holds several arrays; call one of them 'inputs'.") from None
    except (
        OSError,
        EOFError,
        ValueError,
        TypeError,
        RuntimeError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ):
        raise UserError(f"{path}: holds no array that can be read; it may be damaged.") from None


def _write(path: Path, outputs: Tensor) -> None:
    whole = io.BytesIO()
    if path.suffix == ".pt":
        torch.save(outputs, whole)
    elif path.suffix == ".npz":
        np.savez_compressed(whole, outputs=outputs.numpy())
    else:
        np.save(whole, outputs.numpy())
    write_bytes(path, whole.getbuffer())


def _require_format(path: Path, name: str) -> None:
    if path.suffix not in FORMATS:
        raise UserError(f"{name} {path}: must end with {', '.join(FORMATS[:-1])} or .pt.")


def _described(dtype: torch.dtype, shape: tuple[Any, ...]) -> str:
    """'float32 [n, 1, 8, 8]'."""
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"
