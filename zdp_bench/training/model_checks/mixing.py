"""Check that no example reaches another's output or gradient, and name the layer in which one does.

`influence` follows what depends on what. How many examples there are is no number that it could
follow, so some examples are also compared with themselves alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients.watched import Departs, Pass, Program, parts_of
from zdp_bench.training.batches import is_out_of_memory
from zdp_bench.training.model_checks.influence import Influence, follow
from zdp_bench.training.model_checks.probes import (
    ROUNDED,
    Innermost,
    advice_on,
    describe_layer,
    differs,
    forward,
)
from zdp_bench.training.model_checks.state import copy_apart

# Alone, an example is rounded otherwise than in a batch: instance norms of few pixels by 7e-6.
ALONE = 1e-3

GRADIENT = " in its gradient"


def check_apart(model: nn.Module, inputs: Tensor, more: Tensor | None = None) -> Program | None:
    """Refuse a model in which an example's output or gradient depends on others.

    Args:
        model: a copy is followed.
        more: another number of examples.

    Returns:
        What each pass must call from now on; None if the model runs no foreign code.

    Raises:
        UserError: names the layer in which examples meet.
        Departs: says why the examples must be run one at a time.
    """
    passes = [_follow(copy_apart(model)[0], inputs)]
    if parts_of(model).get("") or more is None:
        return None
    passes.append(_follow(copy_apart(model)[0], more))
    try:
        return Program.of(*passes)
    except Departs as error:
        raise Departs(f"the model ({type(model).__name__}) {error}") from None


def _follow(model: nn.Module, inputs: Tensor) -> Pass:
    try:
        found = follow(model, inputs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        found = Influence(looks=f"the model cannot be traced by torch ({first_line(error)})")
    if found.layer is not None:
        raise mixing_error(model, found.layer, GRADIENT if found.backward else "")
    if found.made is None:
        raise Departs(found.looks)
    return found.made


def compare_alone(model: nn.Module, inputs: Tensor) -> None:
    """Refuse a model whose answer for an example depends on how many others there are.

    Args:
        model: a copy, which may change.
    """
    for at in range(len(inputs)):
        together, alone = _trace(model, inputs, at), _trace(model, inputs[at : at + 1], 0)
        if differs(together[-1][1], alone[-1][1], ALONE):
            pairs = zip(together, alone, strict=False)
            first = next((name for (name, a), (_, b) in pairs if differs(a, b, ROUNDED)), "")
            raise mixing_error(model, first)


def mixing_error(model: nn.Module, name: str, where: str = "") -> UserError:
    """Return the error for the layer of this name."""
    return UserError(
        f"{describe_layer(model, name)} lets one example see another{where}, so clipping bounds "
        f"nothing and no ε would hold: {advice_on(model.get_submodule(name))}, "
        "or train with algorithm=sgd, which claims none."
    )


def _trace(model: nn.Module, inputs: Tensor, at: int) -> list[tuple[str, Tensor]]:
    """Return the sample's part of each tensor that enters or leaves a module, in order.

    With it comes the module to blame if it is wrong: what enters wrong, the caller has made.
    """
    seen: list[tuple[str, Tensor]] = []

    def note(name: str, leaves: bool, passed: Any) -> None:
        for value in passed if isinstance(passed, tuple | list) else (passed,):
            if isinstance(value, Tensor) and value.dim() and len(value) % len(inputs) == 0:
                # Other dimensions may be folded into the first.
                own = value.detach().unflatten(0, (len(inputs), -1))[at].clone()
                seen.append((name if leaves else name.rpartition(".")[0], own))

    with torch.no_grad(), Innermost(model, note):
        forward(model, inputs)
    return seen
