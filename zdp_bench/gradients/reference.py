"""The reference engine: per-sample gradients by torch.func's vmap(grad), for any model.

If it is unknown whether a model's operations keep examples apart, the model runs on one example at
a time, each in its own copy, so that no example can affect another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from zdp_bench.errors import UserError, is_out_of_memory
from zdp_bench.gradients.clipping import (
    Batch,
    ClippedSum,
    Loss,
    add_up,
    clip_factors,
    groups,
    split_batch,
    squared_norms,
    trainable,
    zero_rows,
)
from zdp_bench.gradients.losses import (
    PerExample,
    are_alike,
    draw_seeds,
    per_example,
    preserve_random_state,
    set_seed,
)
from zdp_bench.gradients.mapping import map_rows
from zdp_bench.gradients.outside_state import are_equal, preserve_outside_state
from zdp_bench.gradients.parts import map_leaves
from zdp_bench.gradients.program import Running, copy_apart, state_of
from zdp_bench.gradients.shares import Shares, cut

# Memory for the per-sample gradients of one chunk.
CHUNK_BYTES = 512 * 2**20

log = logging.getLogger(__name__)
_without_vmap: WeakSet[nn.Module] = WeakSet()  # models for which vmap has failed


def per_sample_gradients(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    *,
    complex_scale: float = 1.0,
) -> dict[str, Tensor]:
    """Return each example's gradient gᵢ: parameter name -> [B, *shape].

    The convention is that of PyTorch's `.grad`: 2∂L/∂θ̄ for complex θ, here times `complex_scale`.
    """
    inputs, _ = batch
    if len(inputs) == 0:
        return zero_rows(model, 0)
    gradients = _differentiate(model, per_example(loss), batch)
    if complex_scale != 1:
        for name, gradient in gradients.items():
            if gradient.is_complex():
                gradients[name] = complex_scale * gradient
    return gradients


def _differentiate(
    model: nn.Module,
    loss: PerExample,
    batch: Batch,
) -> dict[str, Tensor]:
    """Return each example's gradients, by vmap if it supports model and loss, else in a loop."""
    inputs, _ = batch
    if loss.loops or model in _without_vmap or state_of(model, inputs).alone:
        return differentiate_in_loop(model, loss, batch)
    try:
        with preserve_outside_state(loss.loss) as restore:
            gradients = _differentiate_by_vmap(model, loss, batch)
            loss.loops = restore()
        if not loss.loops:
            return gradients
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
    with torch.no_grad():
        loss(*compute_first_output(model, batch))  # sets `loops` if vmap does not support the loss
    if not loss.loops:  # vmap does not support the model
        log.info("torch.func cannot vectorise the model: computing gradients one by one")
        _without_vmap.add(model)
    return differentiate_in_loop(model, loss, batch)


def compute_first_output(model: nn.Module, batch: Batch) -> Batch:
    """Return the output for the first example, [1, ...], and its target."""
    inputs, targets = batch
    return compute_outputs(model, inputs[:1]).detach(), targets[:1]


def compute_outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a model's outputs as a private step computes them."""
    if state_of(model, inputs).alone:
        return run_apart(model, inputs, lambda copy, example: copy(example))
    return _forward_of(model, inputs)(map_leaves(torch.clone, inputs))


def run_apart(
    model: nn.Module,
    inputs: Tensor,
    run: Callable[[nn.Module, Tensor], Tensor],
) -> Tensor:
    """Return the rows [B, ...] that a function of the model and one example [1, ...] returns.

    Formal guarantee: each call gets its own copy of the model, its own random numbers, and the
        state that is there at the beginning. Parameters are shared, so gradients reach them. The
        function may differentiate in any context, but the rows have a graph only if gradients are
        enabled.
    """
    parameters = tuple(model.parameters())
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    seeds = draw_seeds(len(inputs))
    rows = []
    with (
        preserve_random_state(devices),
        preserve_outside_state(model, weights=parameters) as restore,
    ):
        for example, seed in zip(inputs.split(1), seeds, strict=True):
            restore()
            set_seed(seed)
            own_example = map_leaves(torch.clone, example)  # not a view of the batch
            with torch.enable_grad():
                row = run(copy_apart(model, parameters), own_example)
            rows.append(row if torch.is_grad_enabled() else row.detach())
    return torch.cat(rows)


def _forward_of(
    model: nn.Module,
    inputs: Tensor,
) -> Callable[[Tensor], Tensor]:
    """Return the module that computes the outputs for these inputs.

    It is the model's program, a new copy of a model that runs on one example at a time, or the
    model itself.
    """
    state = state_of(model, inputs)
    if state.alone:
        return copy_apart(model, tuple(model.parameters()))
    return Running(model, state.program) if state.program is not None else model


def _outputs_of(
    model: nn.Module,
    inputs: Tensor,
    seed: int,
) -> Tensor:
    """Return the outputs for these inputs, with the random numbers of a seed."""
    forward = _forward_of(model, inputs)
    set_seed(seed)
    return forward(inputs.clone())  # not a view, through which the batch can be reached


def _differentiate_by_vmap(
    model: nn.Module,
    loss: PerExample,
    batch: Batch,
) -> dict[str, Tensor]:
    """Return each example's gradients, by vmap over grad."""
    trained = trainable(model)
    parameters = {name: parameter.detach() for name, parameter in trained.items()}
    names = {id(parameter): name for name, parameter in trained.items()}
    module = _forward_of(model, batch[0])
    assert isinstance(module, nn.Module)
    fixed: dict[str, Tensor] = {}
    trained_names: dict[str, str] = {}  # path in `module` -> name of the trainable parameter there
    for path, tensor in tensors_by_path(module).items():
        if id(tensor) in names:
            trained_names[path] = names[id(tensor)]
        else:
            fixed[path] = tensor.detach()

    def compute_loss(
        values: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        tensors = fixed | {path: values[name] for path, name in trained_names.items()}
        outputs = functional_call(module, tensors, (x.unsqueeze(0),), tie_weights=False)
        if len(outputs) != 1:  # as torch 2.11 does for `linalg.solve(weight, x)`
            raise RuntimeError("torch.func returns several rows for one example")
        return loss.compute_one(outputs, y.unsqueeze(0)).sum()

    gradients: dict[str, Tensor] = map_rows(
        grad(compute_loss), parameters, *batch, in_dims=(None, 0, 0), randomness="different"
    )
    return gradients


def differentiate_in_loop(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
) -> dict[str, Tensor]:
    """Return each example's gradients, [B, *shape] by name, each from its own forward pass.

    Formal guarantee: model and loss are in the same state for each example's pass. A pass changes
    neither this state (see `outside_state`) nor the random numbers of another pass.

    Raises:
        UserError: model, loss or backward pass returns something else for the first of several
            examples after all others, or changes a weight.
    """
    inputs, _ = batch
    parameters = trainable(model)
    example_loss = per_example(loss)
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    losses: list[Tensor] = []
    first: tuple[Tensor, Tensor, int] | None = None
    device = next(model.parameters()).device
    seeds = draw_seeds(len(inputs))
    devices = [device] if device.type == "cuda" else []
    weights = dict(model.named_parameters())
    with (
        preserve_random_state(devices),
        _unchanged_weights(weights),
        preserve_outside_state(model, example_loss.loss, weights=weights.values()) as restore,
    ):
        for (x, target), seed in zip(split_batch(batch), seeds, strict=True):
            restore()
            with torch.enable_grad():
                outputs = _outputs_of(model, x, seed)
                if first is None:
                    first = outputs.detach().clone(), target, seed + 1
                loss_value = example_loss.compute_seeded(outputs, target, seed + 1).sum()
            losses.append(loss_value.detach())
            for name, gradient in _gradients_of(loss_value, parameters).items():
                rows[name].append(gradient)
        # State is not restored first: if what the last example left behind affects another one,
        # model or loss would not train as intended, so they are rejected.
        if first is not None and len(inputs) > 1:
            with torch.enable_grad():
                output_again = _outputs_of(model, inputs[:1], seeds[0])
                loss_again = example_loss.compute_seeded(output_again, *first[1:])
            require_same_output(first[0], output_again)
            example_loss.require_stateless(first, torch.stack(losses))
            gradients_again = _gradients_of(loss_again, parameters)
            _require_same_gradients({name: rows[name][0] for name in rows}, gradients_again)
    return {name: torch.stack(gradients).detach() for name, gradients in rows.items()}


@contextmanager
def _unchanged_weights(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Restore weights that change inside the context, in whatever way, and reject the change."""
    weights = {name: parameter.clone() for name, parameter in parameters.items()}
    try:
        yield
    finally:
        _require_unchanged(parameters, weights)


def _require_unchanged(
    parameters: dict[str, nn.Parameter],
    weights: dict[str, Tensor],
) -> None:
    """Reject and restore parameters that differ from their earlier weights."""
    changed = [
        name for name, parameter in parameters.items() if not are_equal(parameter, weights[name])
    ]
    if not changed:
        return
    with torch.no_grad():
        for name in changed:
            parameters[name].copy_(weights[name])
    raise UserError(
        f"parameter '{changed[0]}' was changed by the model or the loss while its gradient was "
        "computed, and no noise covers that: make sure that neither writes weights, not even "
        "through .data."
    )


def require_same_output(before: Tensor, after: Tensor) -> None:
    """Reject a model whose outputs for the same examples and seed have changed."""
    if are_alike(before, after, before):
        return
    raise UserError(
        "the output for an example changes once others have been processed, so the model keeps "
        "state that depends on them (in a global, a class attribute, or a random generator of its "
        "own), which clipping cannot bound: compute the output from inputs and weights only, and "
        "draw random numbers with torch's functions."
    )


def _require_same_gradients(
    before: dict[str, Tensor],
    after: dict[str, Tensor],
) -> None:
    """Reject a backward pass whose gradients for the same example have changed."""
    for name, gradient in before.items():
        if not are_alike(gradient, after[name], gradient):
            raise UserError(
                f"the gradient of parameter '{name}' for an example changes once others have been "
                "processed, so a hook or a backward function keeps state that depends on them, "
                "which clipping cannot bound: compute gradients from the example and the weights "
                "only."
            )


def _gradients_of(
    loss: Tensor,
    parameters: dict[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Return the gradients of a loss by name; zeros for a parameter that it does not depend on."""
    gradients: Sequence[Tensor | None] = [None] * len(parameters)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    by_name = {}
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        by_name[name] = torch.zeros_like(parameter) if gradient is None else gradient
    return by_name


def tensors_by_path(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers for `functional_call`, with one path per module attribute.

    A module that is registered twice has one path only. With two, `functional_call` would save its
    own replacement as the original under the second path and restore that, so the model would
    lose its tensor. A tied parameter has a path for each module that has it.
    """
    tensors = {}
    for module_name, module in model.named_modules():
        for attribute, tensor in (module._parameters | module._buffers).items():
            if tensor is not None:
                tensors[f"{module_name}.{attribute}" if module_name else attribute] = tensor
    return tensors


def share_gradients(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    shares: Shares | None,
    *,
    complex_scale: float,
    chunk: int | None = None,
) -> dict[str, Tensor]:
    """Return the mean gradient of each share: parameter name -> [S, *shape].

    Args:
        model, loss, batch, shares, complex_scale: as in `gradients.clipped_sum`.
        chunk: largest number of examples that are differentiated at once. Default: a whole share.
    """
    if shares is None:
        return per_sample_gradients(model, loss, batch, complex_scale=complex_scale)
    means = zero_rows(model, len(shares))
    inputs, targets = batch
    for index, share in enumerate(cut(shares)):
        examples = inputs[share], targets[share]
        size = shares[index]
        for part in split_batch(examples, chunk or size):
            gradients = per_sample_gradients(model, loss, part, complex_scale=complex_scale)
            for name, gradient in gradients.items():
                means[name][index] += gradient.sum(dim=0) / size
    return means


def _in_chunks(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    shares: Shares | None,
    chunk: int,
    complex_scale: float,
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients of the batch's shares, at most `chunk` shares at a time.

    An empty batch yields empty gradients once.
    """
    inputs, targets = batch
    slices = cut(shares or (1,) * len(inputs))
    for start in range(0, max(1, len(slices)), chunk):
        chunk_slices = slices[start : start + chunk]
        examples = slice(start, start)
        if chunk_slices:
            examples = slice(chunk_slices[0].start, chunk_slices[-1].stop)
        chunk_shares = None if shares is None else shares[start : start + chunk]
        yield share_gradients(
            model,
            loss,
            (inputs[examples], targets[examples]),
            chunk_shares,
            complex_scale=complex_scale,
            chunk=chunk,
        )


def clip(
    gradients: dict[str, Tensor],
    clip_groups: list[tuple[list[str], float]],
    gamma: float | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Clip each example's gradients.

    Args:
        gradients: name -> [B, *shape].
        clip_groups: names that are clipped together and their bound, as `clipping.groups` returns.
        gamma: as in `clipping.clip_factors`.

    Returns:
        clip(gᵢ), name -> [B, *shape], and the norms before clipping, [B, groups].
    """
    group_norms = []
    for names, _ in clip_groups:
        squares = [squared_norms(gradients[name]) for name in names]
        group_norms.append(reduce(torch.add, squares).sqrt())
    norms = torch.stack(group_norms, dim=1)  # [B, groups]
    is_finite = norms.isfinite().all(dim=1)
    clipped: dict[str, Tensor] = {}
    for (names, bound), norm in zip(clip_groups, group_norms, strict=True):
        factors = clip_factors(norm, bound, gamma) * is_finite
        for name in names:
            g = gradients[name]
            ones = [1] * (g.dim() - 1)
            row_factors = factors.to(g.real.dtype).view(-1, *ones)
            # A factor of 0 would not remove a gradient that is not finite, because 0 · NaN is NaN.
            clipped[name] = torch.where(row_factors > 0, g * row_factors, torch.zeros_like(g))
    return clipped, norms


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    bound: float,
    *,
    per_layer: bool = False,
    gamma: float | None = None,
    complex_scale: float = 1.0,
    shares: Shares | None = None,
    into: dict[str, Tensor] | None = None,
) -> ClippedSum:
    """Return Σᵢ clip(gᵢ), as `gradients.clipped_sum` does, in chunks of limited memory."""
    clip_groups = groups(model, bound, per_layer)
    parameters = trainable(model)
    bytes_per_example = sum(parameter.nbytes for parameter in parameters.values())
    chunk = max(1, CHUNK_BYTES // max(1, bytes_per_example))
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    norms = []
    for gradients in _in_chunks(model, loss, batch, shares, chunk, complex_scale):
        clipped, chunk_norms = clip(gradients, clip_groups, gamma)
        for name, value in clipped.items():
            sums[name] += value.sum(dim=0)
        norms.append(chunk_norms)
    all_norms = torch.cat(norms)  # [B, groups]
    total = {} if into is None else into
    add_up(total, sums)
    return ClippedSum(total, all_norms if per_layer else all_norms[:, 0])
