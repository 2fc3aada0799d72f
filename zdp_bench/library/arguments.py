"""What each argument of `make_private` and `Private.export` must be by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.gradients.parts import leaves_of, pack
from zdp_bench.privacy.mechanism import MOST

Kinds = Mapping[str, tuple[Callable[[Any], bool], str]]  # name -> what holds, and the words for it


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: Any, least: int, most: int = MOST) -> bool:
    return _is_number(value) and isinstance(value, Integral) and least <= int(value) <= most


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path) and "\0" not in str(value)


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule)


def _is_pair(value: Any) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(isinstance(leaf, Tensor) for part in value for leaf in leaves_of(pack(part)))


NUMBER = (_is_number, "must be a number")  # whose range is checked elsewhere
COUNT = (lambda x: _is_whole(x, 1), "must be a whole number, 1 or more")
FLAG = (lambda x: isinstance(x, bool), "must be True or False")
TEXT = (lambda x: isinstance(x, str), "must be a text")
OF_TRAINING: Kinds = {
    "model": (_is_module, "a torch.nn module is required, not one of torch.jit"),
    "epochs": (lambda x: _is_number(x) and 1 <= x <= MOST, f"must be a number from 1 to {MOST:,}"),
    "batch_size": (lambda x: _is_number(x) and x >= 1, "must be a number, 1 or more"),
    "sample_rate": (lambda x: _is_number(x) and 0 < x <= 1, "must be a number in (0, 1]"),
    "expected_batch": (
        lambda x: _is_number(x) and 0 < x <= MOST,
        "must be a number above 0, and a size",
    ),
    **dict.fromkeys(("delta", "max_grad_norm", "noise_multiplier", "target_epsilon"), NUMBER),
    "micro_batch": COUNT,
    "max_examples": COUNT,
    "seed": (lambda x: _is_whole(x, 0, 2**64 - 1), "must be a whole number from 0 to 2⁶⁴ - 1"),
    "secure": FLAG,
    "count_earlier": FLAG,
    "algorithm": TEXT,
    "precision": TEXT,
    "ledger": (
        lambda x: _is_path(x) and Path(x).suffix == ".jsonl",
        "give a file name that ends in .jsonl",
    ),
    "regulariser": (callable, "pass a function of the model"),
    "probe": (_is_pair, "give (inputs, targets), each a batch of examples"),
}
OF_EXPORT: Kinds = {
    "folder": (_is_path, "name a folder"),
    "name": TEXT,
    "data": TEXT,
    "metrics": (
        lambda x: isinstance(x, Mapping) and all(isinstance(name, str) for name in x),
        "give a dictionary of numbers by name",
    ),
}


def require_kinds(kinds: Kinds, given: Mapping[str, Any], optional: Mapping[str, Any]) -> None:
    """Refuse an argument that is not what it must be.

    Args:
        optional: the arguments' defaults; None is taken where it is one.

    Raises:
        UserError: names the argument.
    """
    for name, (holds, rule) in kinds.items():
        value = given[name]
        left_out = value is None and optional.get(name, ...) is None
        require(left_out or holds(value), name, f"{value!r:.80}", rule)
