"""Build the model of an exported folder, in a process that has neither its data nor its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import nn

from zdp_bench.config import compose, parse
from zdp_bench.config.schema import SECTIONS, Plugin, Run
from zdp_bench.data import DatasetInfo
from zdp_bench.errors import UserError, in_one_line
from zdp_bench.extras.sharing import folder as files
from zdp_bench.records import Record, is_of_unit
from zdp_bench.training.build import build_model


def load(folder: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Return an exported model with its weights, in eval mode.

    Args:
        model: your own network, which the weights go into, on its device. None for a run's: it is
            built from the record, on the CPU.

    Raises:
        UserError: the folder is no exported model, its weights do not fit the model, or it is of a
            loop of your own and `model` is missing.
    """
    folder = Path(folder)
    is_own, named = files.is_own(folder), "the model that was given"
    if model is None and is_own:
        name = files.read_report(folder)["name"]
        raise UserError(
            f"{folder}: holds the weights of '{name}', a network of somebody's own code. Build "
            f"it as for its training, and give it: zdp_bench.load({str(folder)!r}, model=...)."
        )
    if not is_own:
        record = files.read_record(folder)
    if model is None:
        named = f"the model of {files.RECORD}"
        model = build_model(without_download(config_of(record)), info_of(record))
    if not isinstance(model, nn.Module):
        raise UserError(f"model={model!r}: give the network itself, a torch module.")
    try:
        model.load_state_dict(files.read_weights(folder / files.WEIGHTS))
    except RuntimeError as error:
        raise UserError(
            f"{folder / files.WEIGHTS}: does not fit {named}: {in_one_line(error)}."
        ) from None
    return model.eval()


def config_of(record: Record) -> Run:
    """Return the configuration of a record, checked; keys that it lacks have their defaults.

    Raises:
        UserError: this version of zdp-bench does not know one of its keys or plug-ins.
    """
    default = OmegaConf.to_container(compose(["recipe=quickstart"]))
    assert isinstance(default, dict)
    own = {
        key: {**default[key], **value} if key in SECTIONS else value
        for key, value in record["config"].items()
    }
    return parse(OmegaConf.create({**default, **own}))


def without_download(config: Run) -> Run:
    """Let a model that would start from other weights do without them: it has its own."""
    if "weights" not in config.model.options:
        return config
    options = config.model.options | {"weights": "untrained"}
    return replace(config, model=Plugin(config.model.name, options))


def info_of(record: Record) -> DatasetInfo:
    """Return counts and shapes of a record's data; none of it is read."""
    data, privacy = record["data"], record["privacy"]
    example = data["example"]
    return DatasetInfo(
        train=data["train"],
        test=data["test"],
        validation=data["validation"],
        input_shape=tuple(example["input_shape"]),
        outputs=example["outputs"],
        dtype=getattr(torch, example["input_dtype"]),
        target_shape=tuple(example["target_shape"]),
        target_dtype=getattr(torch, example["target_dtype"]),
        examples_per_patient=privacy["records_per_patient"],
        unit=privacy["unit"],
        owners=privacy["sampling"]["records"] if is_of_unit(privacy) else None,
    )
