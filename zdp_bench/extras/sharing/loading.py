"""Load an exported model without its data or its run, and run it on a file."""

from __future__ import annotations

import io
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.config import check, compose, to_plain
from zdp_bench.config.plugins import plugin_keys
from zdp_bench.config.schema import PLUGINS, SECTIONS, Plugin, Run
from zdp_bench.config.words import check_values
from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.finite import find_finite_rows
from zdp_bench.disk import require_regular, write_bytes
from zdp_bench.errors import UserError, in_one_line, wrong_type
from zdp_bench.extras.sharing import folder as files
from zdp_bench.foreign_files import expect, reading
from zdp_bench.library import starts
from zdp_bench.nn.limits import limit_parameters
from zdp_bench.records import Document
from zdp_bench.registry import lookup
from zdp_bench.representations import NO_FILE, Representation, Represented, fit_weights
from zdp_bench.tasks import Task
from zdp_bench.training.build import build_model, leave_compiler
from zdp_bench.training.evaluation import forward
from zdp_bench.training.representation import build_representation
from zdp_bench.training.setup import ModelSetup, build_dataset

log = logging.getLogger(__name__)


def load(
    folder: str | Path,
    model: nn.Module | None = None,
    *,
    weights: str | Path | None = None,
) -> nn.Module:
    """Return an exported model with its weights, in eval mode.

    The model of a run takes raw examples: if it was trained on a representation, the returned model
    computes the representation first.

    Args:
        folder: the exported model.
        model: your own network, which receives the weights and stays on its device. Default: a
            run's model is built from its record, on the CPU.
        weights: your copy of the file with the public network's weights, needed if the run's
            `representation.weights` was a file. Paths in a record are never opened. Your own
            `model` takes none, because it is returned without the representation.

    Raises:
        UserError: the folder is not an exported model; its weights do not fit the model; `model` is
            missing for the export of your own loop; or `weights` are missing, not needed or differ
            from the run's.
    """
    folder = Path(folder)
    source = files.read(folder)
    representation = None
    if model is None:
        if files.is_report(source):
            raise UserError(
                f"{folder}: contains the weights of '{source['name']}', whose code is not in the "
                f"folder. Create the network: zdp_bench.load({str(folder)!r}, model=...)."
            )
        sketch = sketch_of(folder, source)
        model = build_model(sketch.config, info_of(source))
        representation = find_representation(folder, sketch.config, source, weights)
    elif weights is not None:
        raise UserError(
            "weights: with a model of your own, no representation is built, so they have no "
            "effect: leave weights out, or leave model out to build the run's own."
        )
    if not isinstance(model, nn.Module):
        instead = "create the network whose weights the folder has"
        raise wrong_type("model", model, "a torch.nn module", instead)
    weights_of_folder = files.read_weights(folder / files.WEIGHTS)
    _require_can_hold(folder, model, weights_of_folder)
    try:
        model.load_state_dict(weights_of_folder)
    except RuntimeError as error:
        raise UserError(
            f"{folder / files.WEIGHTS}: does not fit the model: {in_one_line(error)}."
        ) from None
    starts.note_export(model, source, folder / files.LEDGER)
    if representation:
        model = Represented(representation, model)
    return model.eval()


def _require_can_hold(folder: Path, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Reject a model that cannot hold the weights: torch would load it without an error.

    It would drop the weights of a model without memory, and imaginary parts in a real one.
    """
    for name, own in model.state_dict().items():
        if not isinstance(own, Tensor):
            continue
        if own.is_meta:
            raise UserError(
                f"model: '{name}' is on the meta device and has no memory: create the network "
                "outside `torch.device('meta')`."
            )
        if name in weights and weights[name].is_complex() and not own.is_complex():
            raise UserError(
                f"{folder / files.WEIGHTS}: does not fit the model: '{name}' is complex, but real "
                "in the model."
            )


def find_representation(
    folder: Path,
    config: Run,
    record: Document,
    weights: str | Path | None = None,
) -> Representation | None:
    """Return the representation that a record's model was trained on, or None.

    Some representations compute their weights, which may take minutes. So this is done last, once
    the digest and the shape of the representation are those of the record.

    Args:
        folder: the exported model, for error messages.
        config: the record's configuration.
        record: the record.
        weights: the file to use in place of the path in the record; see `load`.

    Raises:
        UserError: `weights` is missing or not needed, or the representation differs from the run's.
    """
    chosen = config.representation
    needs_file = chosen and chosen.options.get("weights", NO_FILE[0]) not in NO_FILE
    if weights is not None and not needs_file:
        raise UserError(
            f"{folder / files.RECORD}: its model was not trained on the outputs of a network with "
            f"weights from a file: leave {weights} out."
        )
    if chosen is None:
        return None
    recorded = record.get("representation") or {}
    if needs_file:
        if weights is None:
            raise UserError(
                f"{folder / files.RECORD}: its model was trained on the outputs of a public "
                f"network with weights from a file (SHA-256 {str(recorded.get('sha256'))[:16]}). "
                "Paths in a record are never opened: pass your copy as "
                "zdp_bench.load(FOLDER, weights=FILE) or --weights FILE."
            )
        options = chosen.options | {"weights": str(weights)}
        config = replace(config, representation=Plugin(chosen.name, options))
    shape, dtype_name = files.raw_example(record)
    dtype = files.dtype_of(dtype_name) or torch.float32
    representation = build_representation(config, shape, dtype, fit=False)
    if representation.digest != recorded.get("digest"):
        raise UserError(
            f"{folder / files.RECORD}: its model was trained on a representation with digest "
            f"{str(recorded.get('digest'))[:16]}, but representation={representation.name} now has "
            f"{representation.digest[:16]}: the weights or the version of zdp-bench differ."
        )
    input_shape = list(record["data"]["example"]["input_shape"])
    if list(representation.gives) != input_shape:
        raise UserError(
            f"{folder / files.RECORD}: its model takes examples of {input_shape}, but "
            f"representation={representation.name} gives {list(representation.gives)}; copy the "
            "folder again."
        )
    fit_weights(representation.module)
    return representation


def sketch_of(folder: Path, record: Document) -> ModelSetup:
    """Return the setup of a record's run, with its model on PyTorch's meta device.

    A model on this device has no storage, so the memory used is bounded by the size of the weights
    in the folder, whatever the record states.

    Raises:
        UserError: the weights in the folder do not fit the model.
    """
    # The export has its own weights, so neither a start nor pretrained weights are loaded.
    config = replace(config_of(record), start=None)
    info = info_of(record)
    if "weights" in config.model.options:
        options = config.model.options | {"weights": "untrained"}
        config = replace(config, model=Plugin(config.model.name, options))
    path = folder / files.WEIGHTS
    shapes = files.read_shapes(path)
    leave_compiler()
    unfit = UserError(f"{path}: does not fit the model of {files.RECORD}; copy the folder again.")
    with torch.device("meta"), limit_parameters(unfit, tensors=4 * len(shapes) + 64):
        task: Task = lookup("task", config.task.name)(**config.task.options)
        model = build_model(config, info)
        optimizer = torch.optim.SGD(model.parameters())
    if {name: list(t.shape) for name, t in model.state_dict().items()} != shapes:
        raise unfit
    cpu = torch.device("cpu")
    return ModelSetup(config, cast(Splits, info), cpu, task, model, optimizer, None, {})


def config_of(record: Document) -> Run:
    """Return the checked configuration of a record; missing keys have their defaults."""
    try:
        check_values(record["config"], max_references=0)
    except UserError as error:
        raise UserError(f"{files.RECORD}: config: {error}") from None
    default = to_plain(compose(["recipe=quickstart"]))
    config = dict(default)
    for key, value in record["config"].items():
        if key == "execution":  # does not affect the model, and may have keys that were removed
            continue
        if key in SECTIONS and isinstance(value, dict):
            value = {**default[key], **_drop_removed(value, default[key])}
        elif key in PLUGINS and isinstance(value, dict) and isinstance(value.get("name"), str):
            value = _drop_removed(value, ["name", *plugin_keys(key, value["name"])])
        config[key] = value
    return check(config)


def _drop_removed(options: dict[str, Any], allowed: Collection[str]) -> dict[str, Any]:
    """Return the options without unknown ones that are null or false.

    An earlier version had these, and they were off. Other unknown options are kept, so that the
    check of the configuration rejects them.
    """
    return {
        key: value
        for key, value in options.items()
        if key in allowed or not (value is None or value is False)
    }


def info_of(record: Document) -> DatasetInfo:
    """Return the counts and shapes of a record's data, without reading the data."""
    data, privacy = record["data"], record["privacy"]
    example, by_owner = data["example"], privacy["epsilon_of"] != "example"
    return DatasetInfo(
        train=data["train"],
        test=data["test"],
        validation=data["validation"],
        input_shape=tuple(example["input_shape"]),
        outputs=example["outputs"],
        dtype=files.dtype_of(example["input_dtype"]) or torch.float32,
        target_shape=tuple(example["target_shape"]),
        target_dtype=files.dtype_of(example["target_dtype"]) or torch.int64,
        examples_per_patient=privacy["examples_per_patient"],
        unit=privacy["unit"],
        owners=privacy["sampling"]["records"] if by_owner else None,
    )


def predict_file(
    folder: Path,
    inputs: Path,
    out: Path,
    weights: Path | None = None,
) -> tuple[int, ...]:
    """Write the model's outputs, [n, ...], for the inputs in a file, and return their shape.

    Args:
        folder: the exported model.
        inputs: a .npy file with examples [n, ...]. For a model trained with `dataset=folder`, also
            a file of the kind that it was trained on, such as a .npy recording [channels, samples].
        out: the .npy file to write.
        weights: the file with the public network's weights; see `load`.

    Raises:
        UserError: the export is of your own loop, whose architecture it does not contain; or the
            model does not take such inputs.
    """
    if out.suffix != ".npy":
        raise UserError(f"--out {out}: must end with .npy.")
    require_regular(out)
    if out.exists() and inputs.exists() and out.samefile(inputs):
        raise UserError(f"--out {out}: is the file with the inputs; choose another one.")
    record = files.read(folder)
    if files.is_report(record):
        raise UserError(
            f"{folder}: does not contain the network's code; use zdp_bench.load(FOLDER, model=...)."
        )
    shape, dtype_name = files.raw_example(record)
    dtype = getattr(torch, dtype_name)
    examples = read_inputs(record, inputs)
    has_shape = examples.dim() > 0 and len(examples) > 0 and examples.shape[1:] == shape
    if not has_shape or not torch.can_cast(examples.dtype, dtype):
        raise UserError(
            f"{inputs}: contains {_describe(examples.dtype, examples.shape)}, but the model takes "
            f"{_describe(dtype, ('n', *shape))}, prepared as its training data was."
        )
    bad = torch.nonzero(~find_finite_rows(examples)).flatten()
    if len(bad):
        log.warning(
            "%s: %d of %d examples contain NaN or infinite values (the first is example %d), and "
            "their outputs have no meaning",
            inputs,
            len(bad),
            len(examples),
            int(bad[0]),
        )
    outputs = forward(load(folder, weights=weights), examples.to(dtype))
    buffer = io.BytesIO()
    np.save(buffer, outputs.numpy())
    write_bytes(out, buffer)
    return tuple(outputs.shape)


def read_inputs(record: Document, path: Path) -> Tensor:
    """Return the array in a .npy file, or another file prepared like the model's training data.

    A .npy file with one or two dimensions is a recording if the model takes recordings: prepared
    examples [n, channels, ...] have more.

    Raises:
        UserError: the file is not a .npy file, and the model was not trained with `dataset=folder`.
    """
    if path.suffix == ".npy":
        array = _read_array(path)
        if array.dim() not in (1, 2) or not _takes_recordings(record):
            return array
    prepare = getattr(build_dataset(config_of(record)), "prepare", None)
    if prepare is None:  # the data set is not dataset=folder, which alone has this method
        raise UserError(
            f"INPUTS {path}: must end with .npy and be prepared as the training data was; the "
            f"model was trained on {record['data']['name']}, whose files are not read one by one."
        )
    example: Tensor = prepare(path)
    return example


def _read_array(path: Path) -> Tensor:
    with reading(path):
        array = np.load(path, allow_pickle=False)
        expect(array.dtype.kind in "biufc", f"contains {array.dtype}, not numbers")
        expect(
            array.dtype.char not in "gG",
            f"contains {array.dtype}; save it as float64 or complex128",
        )
        # The bytes of the other order, such as those of an instrument, are not a PyTorch tensor.
        return torch.as_tensor(array.astype(array.dtype.newbyteorder("="), copy=False))


def _takes_recordings(record: Document) -> bool:
    """Return True if a record's model was trained on recordings with `dataset=folder`."""
    dataset = config_of(record).dataset
    return dataset.name == "folder" and dataset.options.get("length") is not None


def _describe(dtype: torch.dtype, shape: tuple[Any, ...]) -> str:
    """Return a dtype and shape as text, such as 'float32 [n, 1, 8, 8]'."""
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"
