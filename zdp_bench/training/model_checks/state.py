"""Check what a forward pass stores in a model, and that only steps change weights.

Weights are released with noise. Everything else in a model is released without it, so a forward
pass must not store anything that depends on an example there. The passes of a private step cannot,
because they run a program or a copy. A model that relies on such state would not train as intended,
so it is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients.clipping import trainable
from zdp_bench.gradients.losses import set_seed
from zdp_bench.gradients.outside_state import are_equal
from zdp_bench.gradients.parts import map_leaves
from zdp_bench.gradients.program import copy_apart
from zdp_bench.gradients.reference import require_same_output
from zdp_bench.training.model_checks.layers import advice_on, describe_layer, describe_owner

SIMPLE_TYPES = (bool, int, float, str)


class WeightsChangedError(UserError):
    """A weight was changed in a way that no noise covers."""


@dataclass(frozen=True, eq=False)
class WeightVersion:
    """The identity, version and memory of a weight at one time.

    Attributes:
        parameter: the weight.
        version: autograd's counter of its in-place changes.
        memory: the weight's values at that time, or later ones in the same memory. It is kept
            alive, so that no later tensor can get the same address.
    """

    parameter: nn.Parameter
    version: int
    memory: Tensor

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, WeightVersion)
            and self.parameter is other.parameter
            and self.version == other.version
            and self.memory.data_ptr() == other.memory.data_ptr()
        )


WeightVersions = dict[str, WeightVersion]


def record_versions(parameters: Mapping[str, nn.Parameter]) -> WeightVersions:
    """Return the versions of weights, for `require_unchanged`.

    The values are not read, so this is fast. An in-place change through `.data` is not detected.
    """
    return {
        name: WeightVersion(parameter, parameter._version, parameter.detach())
        for name, parameter in parameters.items()
    }


def require_unchanged(parameters: Mapping[str, nn.Parameter], versions: WeightVersions) -> None:
    """Reject weights that were changed since their versions were recorded.

    Raises:
        WeightsChangedError: the model or the loss changed a weight.
    """
    now = record_versions(parameters)
    for name, version in versions.items():
        if now.get(name) != version:
            raise WeightsChangedError(
                f"parameter '{name}' was changed by the model or the loss while its gradient was "
                "computed, and no noise covers this change: make sure that neither writes weights, "
                "and start again or resume from an earlier save."
            )


def require_nothing_kept(model: nn.Module, inputs: Tensor) -> None:
    """Reject a model whose forward pass writes weights or keeps state that depends on examples.

    It may store what its first pass creates once and for all, such as a mask.

    Args:
        model: the model. Copies of it run, so it is not changed.
        inputs: at least two examples.

    Raises:
        UserError: the forward pass creates or writes a parameter, stores something that depends on
            the examples or on the number of passes, or returns another output when it runs again.
            The message names the layer.
    """
    # Two copies: one sees all examples, twice. The other sees fewer, in reverse order.
    twin, other_twin = copy_apart(model), copy_apart(model)
    versions = record_versions(trainable(twin))
    fewer_inputs = map_leaves(lambda leaf: leaf.flip(0)[1:], inputs)
    state_of_fewer, _ = _run(other_twin, fewer_inputs)
    first_state, first_output = _run(twin, inputs)
    second_state, second_output = _run(twin, inputs)
    new_versions = record_versions(trainable(twin))
    old_names = versions.keys() | {name for name, _ in model.named_parameters()}
    for name in new_versions:
        if name not in old_names:
            raise UserError(
                f"parameter '{name}' is created in the first forward pass, so no optimizer has it: "
                "call the model once on made-up inputs of the right shape, and then create the "
                "optimizer."
            )
    for name, version in versions.items():
        if new_versions.get(name) != version:
            raise UserError(
                f"{describe_owner(model, name)} changes its '{name.rpartition('.')[2]}' in the "
                "forward pass, as max_norm and flatten_parameters do, and no noise covers this "
                "change: remove it from the forward pass."
            )
    if difference := _find_difference(state_of_fewer, first_state):
        raise _stored_error(model, *difference)
    if difference := _find_difference(first_state, second_state):
        name, key = difference
        raise UserError(
            f"{describe_layer(model, name)} changes '{key}' in each pass. No noise covers this, "
            "and the number of passes in a step reveals the number of examples: change it in your "
            "loop instead."
        )
    require_same_output(first_output, second_output)
    kept_state, _ = _run(twin, inputs, seed=1)
    drawn_state, _ = _run(copy_apart(model), inputs, seed=1)
    if difference := _find_difference(kept_state, drawn_state):
        name, key = difference
        raise UserError(
            f"{describe_layer(model, name)} draws '{key}' at random in its first forward pass and "
            "keeps it, but private steps undo what a pass stores: draw it in __init__, or call the "
            "model once on made-up inputs."
        )


def require_loss_keeps_nothing(
    loss: nn.Module,
    outputs: Tensor,
    targets: Any,
) -> None:
    """Reject a loss whose state changes at each call. Its first call may create state once.

    Args:
        loss: the loss. A copy of it runs, so it is not changed.
        outputs: outputs of the model [1, ...].
        targets: their targets, as the loss takes them.
    """
    twin = copy_apart(loss, tuple(loss.parameters()))
    states = []
    for _ in range(2):
        with torch.enable_grad(), suppress(RuntimeError):  # it may need torch.func's types
            twin(outputs, targets)
        states.append(_state_of(twin))
    if difference := _find_difference(*states):
        name = ".".join(filter(None, difference))
        raise UserError(
            f"the loss changes '{name}' when it is called, so one example would affect the next, "
            "which clipping cannot bound: compute the loss from outputs and targets only."
        )


def _stored_error(
    model: nn.Module,
    name: str,
    key: str,
) -> UserError:
    """Return the error for a layer that stores something that depends on the examples."""
    layer = describe_layer(model, name)
    advice = "return it instead, or remove it."
    if "Norm" in type(model.get_submodule(name)).__name__:
        advice = (
            f"{advice_on(model.get_submodule(name))}, or switch this off "
            "(track_running_stats=False for torch's norms)."
        )
    return UserError(
        f"{layer} stores training examples in '{key}', which no noise covers: {advice}"
    )


Attribute = tuple[str, str]  # name of a module, and name of one of its values


def _run(model: nn.Module, inputs: Tensor, seed: int = 0) -> tuple[dict[Attribute, Any], Tensor]:
    """Return a model's state after a forward pass with fixed random draws, and the output."""
    set_seed(seed)
    with torch.enable_grad():  # as in a step; the model may differentiate in its forward pass
        output = model(map_leaves(torch.clone, inputs))
    return _state_of(model), output.detach().clone()


def _state_of(model: nn.Module) -> dict[Attribute, Any]:
    """Return copies of the numbers and tensors in a model's modules, except for parameters."""
    return {attribute: _copy(value) for attribute, value in _values_of(model)}


def _find_difference(
    state: dict[Attribute, Any], other_state: dict[Attribute, Any]
) -> Attribute | None:
    """Return an attribute that both states have, with different values, or None."""
    for attribute, value in state.items():
        if attribute in other_state and not _is_same(value, other_state[attribute]):
            return attribute
    return None


def _values_of(model: nn.Module) -> Iterator[tuple[Attribute, Any]]:
    """Yield buffers, public attributes and private tensors of all modules."""
    for name, module in model.named_modules():
        attributes = vars(module)
        for key, buffer in attributes["_buffers"].items():
            yield (name, key), buffer
        for key, value in attributes.items():
            if not key.startswith("_") or isinstance(value, Tensor):
                for path, leaf in _leaves(key, value):
                    yield (name, path), leaf


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors in a nested value, with names such as "cache[0]['x']"."""
    if isinstance(value, dict):
        for inner_key, inner_value in value.items():
            yield from _leaves(f"{key}[{inner_key!r}]", inner_value)
    elif isinstance(value, list | tuple):
        for index, inner_value in enumerate(value):
            yield from _leaves(f"{key}[{index}]", inner_value)
    elif isinstance(value, (Tensor, *SIMPLE_TYPES)):
        yield key, value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_same(value: Any, other: Any) -> bool:
    """Return True if two values are equal. NaN equals NaN."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return are_equal(value, other)
    return type(value) is type(other) and value == other
