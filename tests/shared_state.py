"""What tests share, and what none may leave changed: else their order would decide results."""

import os
import random
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import FunctionType, ModuleType

import numpy as np
import torch
from torch import nn

FREE = ("PYTEST_", "COV_")  # environment variables that tools of tests change
DEPTH = 6  # of tables, of functions and of what they refer to


def seed_all() -> None:
    """Start every global generator anew, so that no test draws what another left over."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def process_settings() -> dict[str, object]:
    """Return the settings of this process that change what code computes or finds."""
    settings: dict[str, object] = {
        f"environment variable {name}": value
        for name, value in os.environ.items()
        if not name.startswith(FREE)
    }
    settings["working directory"] = os.getcwd()
    settings["default dtype"] = torch.get_default_dtype()
    settings["threads"] = torch.get_num_threads()
    settings["grad mode"] = torch.is_grad_enabled()
    settings["deterministic mode"] = torch.get_deterministic_debug_mode()
    settings["anomaly detection"] = torch.is_anomaly_enabled()
    return settings


def shared_values(module: ModuleType) -> dict[str, object]:
    """Return the content of every tensor, array and layer that a module's names lead to.

    They lead through tables, the tests' parameters, and what functions and closures refer to.
    """
    contents: dict[str, object] = {}
    seen: set[int] = set()
    for name, value in vars(module).items():
        if not name.startswith("__"):
            contents.update(_contents(value, name, DEPTH, seen))
    return contents


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Return the names of what is not as it was; packages may add variables of their own."""
    return [name for name in sorted(before) if name not in after or before[name] != after[name]]


def _contents(
    value: object, place: str, depth: int, seen: set[int]
) -> Iterator[tuple[str, object]]:
    if id(value) in seen or depth == 0:
        return
    if isinstance(value, torch.Tensor):
        seen.add(id(value))
        yield place, _tensor_content(value)
    elif isinstance(value, np.ndarray):
        seen.add(id(value))
        yield place, (value.dtype, value.shape, value.tobytes())
    elif isinstance(value, nn.Module):
        seen.add(id(value))
        yield place, value.training
        for name, tensor in value.state_dict(keep_vars=True).items():
            yield f"{place}.{name}", _tensor_content(tensor)
    else:
        for name, part in _parts(value):
            seen.add(id(value))
            yield from _contents(part, f"{place} {name}", depth - 1, seen)


def _tensor_content(tensor: torch.Tensor) -> object:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), content, tensor.grad is None


def _parts(value: object) -> Iterator[tuple[object, object]]:
    """Yield the name and the value of each thing that a value refers to."""
    if isinstance(value, dict) and "__name__" not in value:  # else the names of a module
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, FunctionType):
        yield from enumerate(value.__defaults__ or ())
        yield from vars(value).items()  # the marks of a test, with its parameters
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
    elif is_dataclass(value) and not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).items()
