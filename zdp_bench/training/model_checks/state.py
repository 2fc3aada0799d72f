"""Check what a forward pass stores in a model, and that only steps change weights.

Weights are released with noise. All else in a model is released as it is, so a forward pass must
not store anything of an example there. The passes of a private step cannot, because they run a
program or a copy. A model that relies on it would not train as intended, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients.losses import set_seed
from zdp_bench.gradients.parts import map_leaves
from zdp_bench.gradients.program import copy_apart
from zdp_bench.gradients.reference import require_same_output
from zdp_bench.training.model_checks.layers import advice_on, describe_layer, describe_owner

NUMBERS = (bool, int, float, str)


class WrittenError(UserError):
    """A weight was changed in a way that no noise covers."""


@dataclass(frozen=True, eq=False)
class Mark:
    """The identity, version and memory of a weight at some time.

    The memory is kept alive, so that no later tensor can get the same address.
    """

    parameter: nn.Parameter
    version: int
    memory: Tensor

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Mark)
            and self.parameter is other.parameter
            and self.version == other.version
            and self.memory.data_ptr() == other.memory.data_ptr()
        )


Marks = dict[str, Mark]


def mark_weights(parameters: Mapping[str, nn.Parameter]) -> Marks:
    """Return marks of the weights that require gradients, for `require_unwritten`.

    No number is read. An in-place change through `.data` is not detected.
    """
    return {
        name: Mark(p, p._version, p.detach()) for name, p in parameters.items() if p.requires_grad
    }


def require_unwritten(parameters: Mapping[str, nn.Parameter], marks: Marks) -> None:
    """Reject weights that were changed since they were marked.

    Raises:
        WrittenError: the model or the loss changed a weight.
    """
    now = mark_weights(parameters)
    for name, mark in marks.items():
        if now.get(name) != mark:
            raise WrittenError(
                f"parameter '{name}' was changed by the model or the loss while its gradient was "
                "computed, and no noise covers that: make sure neither writes weights, and start "
                "again or resume from an earlier save."
            )


def require_nothing_kept(model: nn.Module, inputs: Tensor) -> None:
    """Reject a model whose forward pass writes weights, stores what depends on the examples, or
    gives another output when it runs again.

    It may store what its first pass creates once, such as a mask.

    Args:
        model: the model. Copies of it run, so it is not changed.
        inputs: at least two examples.

    Raises:
        UserError: the model does so. The message names the layer.
    """
    twin, other = copy_apart(model), copy_apart(model)
    marks = mark_weights(dict(twin.named_parameters()))
    fewer = map_leaves(lambda leaf: leaf.flip(0)[1:], inputs)
    after_fewer, _ = _after(other, fewer)
    after_first, output = _after(twin, inputs)
    after_second, output_again = _after(twin, inputs)
    now = mark_weights(dict(twin.named_parameters()))
    names = {name for name, _ in model.named_parameters()}
    new = [name for name in now if name not in marks and name not in names]
    if new:
        raise UserError(
            f"parameter '{new[0]}' is made in the first pass, so no optimizer has it: call the "
            "model once on a batch of the right shape, made up, and make the optimizer after that."
        )
    for name, mark in marks.items():
        if now.get(name) != mark:
            raise UserError(
                f"{describe_owner(model, name)} changes its '{name.rpartition('.')[2]}' in the "
                "forward pass (max_norm, flatten_parameters?), and no noise covers that: leave "
                "it out there."
            )
    kept = _difference(after_fewer, after_first)
    if kept:
        raise _kept(model, *kept)
    changed = _difference(after_first, after_second)
    if changed:
        name, key = changed
        raise UserError(
            f"{describe_layer(model, name)} changes '{key}' in each pass. No noise covers that, "
            "and how many passes a step takes tells how many examples there were: change it in "
            "your loop."
        )
    require_same_output(output, output_again)


def require_loss_keeps_nothing(
    loss: nn.Module,
    outputs: Tensor,
    targets: Any,
) -> None:
    """Reject a loss whose state changes at each call. Its first call may create state once."""
    twin = copy_apart(loss, tuple(loss.parameters()))
    states = []
    for _ in range(2):
        with torch.no_grad(), suppress(RuntimeError):  # it may need torch.func's types
            twin(outputs, targets)
        states.append(_held_by(twin))
    changed = _difference(*states)
    if changed:
        raise UserError(
            f"the loss changes '{'.'.join(filter(None, changed))}' when it is called, so one "
            "example would affect the next, which clipping cannot bound: compute it from outputs "
            "and targets only."
        )


def _kept(
    model: nn.Module,
    name: str,
    key: str,
) -> UserError:
    layer = describe_layer(model, name)
    advice = "return what is kept, or leave it out."
    if "Norm" in type(model.get_submodule(name)).__name__:
        advice = (
            f"{advice_on(model.get_submodule(name))}, or switch it off "
            "(track_running_stats=False for torch's norms)."
        )
    return UserError(
        f"{layer} stores training examples in '{key}', which no noise covers: {advice}"
    )


Place = tuple[str, str]  # name of a module, and of a value that it holds


@torch.no_grad()
def _after(model: nn.Module, inputs: Tensor) -> tuple[dict[Place, Any], Tensor]:
    """Return a model's state after a forward pass with fixed draws, and the pass's output."""
    set_seed(0)
    output = model(map_leaves(torch.clone, inputs))
    return _held_by(model), output.clone()


def _held_by(model: nn.Module) -> dict[Place, Any]:
    """Return the numbers and tensors that modules hold, except for parameters, by place."""
    return {place: _copy(value) for place, value in _places_of(model)}


def _difference(one: dict[Place, Any], other: dict[Place, Any]) -> Place | None:
    """Return a place where two states differ, or None."""
    for place, value in one.items():
        if place in other and not _same(value, other[place]):
            return place
    return None


def _places_of(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    for name, module in model.named_modules():
        own = vars(module)
        for key, buffer in own["_buffers"].items():
            yield (name, key), buffer
        for key, value in own.items():
            if not key.startswith("_") or isinstance(value, Tensor):
                for path, leaf in _leaves(key, value):
                    yield (name, path), leaf


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for inner, part in value.items():
            yield from _leaves(f"{key}[{inner!r}]", part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _leaves(f"{key}[{number}]", part)
    elif isinstance(value, (Tensor, *NUMBERS)):
        yield key, value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and one == other
