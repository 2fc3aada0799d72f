"""The reference engine: per-sample gradients by torch.func's vmap(grad), for any model.

A model whose operations are not known to keep examples apart is run as it is, one example at a
time, each in a copy: nothing else is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from zdp_bench.errors import UserError
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
    kept_draws,
    per_example,
    set_seed,
)
from zdp_bench.gradients.mapping import map_rows
from zdp_bench.gradients.parts import map_leaves
from zdp_bench.gradients.program import Running, copy_apart, state_of
from zdp_bench.gradients.shares import Shares, cut

# Per-sample gradients of one chunk take at most this many bytes.
CHUNK_BYTES = 512 * 2**20

log = logging.getLogger(__name__)
_unmapped: WeakSet[nn.Module] = WeakSet()  # models whose random layers vmap cannot map, say


def per_sample_gradients(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    *,
    complex_scale: float = 1.0,
) -> dict[str, Tensor]:
    """Return gᵢ of every example: parameter name -> [B, *shape].

    In PyTorch's `.grad` convention: 2∂L/∂θ̄ for complex θ, times `complex_scale`.
    """
    inputs, _ = batch
    if len(inputs) == 0:
        return zero_rows(model, 0)
    gradients = _differentiate(model, per_example(loss), batch)
    if complex_scale != 1:
        for name, own in gradients.items():
            if own.is_complex():
                gradients[name] = complex_scale * own
    return gradients


def _differentiate(
    model: nn.Module,
    loss: PerExample,
    batch: Batch,
) -> dict[str, Tensor]:
    """Return the gradients of every example, mapped where model and loss can be."""
    inputs, _ = batch
    if loss.loops or model in _unmapped or state_of(model, inputs).alone:
        return one_by_one(model, loss, batch)
    try:
        return _mapped(model, loss, batch)
    except RuntimeError as error:
        if "memory" in str(error):
            raise
    with torch.no_grad():
        loss(*outputs_of_one(model, batch))
    if not loss.loops:  # it is the model that vmap cannot map
        log.info("torch.func cannot vectorise the model: computing gradients one by one")
        _unmapped.add(model)
    return one_by_one(model, loss, batch)


def outputs_of_one(model: nn.Module, batch: Batch) -> Batch:
    """Return the outputs for the first example, and its target."""
    inputs, targets = batch
    with torch.no_grad():
        return outputs_of(model, inputs[:1]), targets[:1]


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a model's outputs as a private step computes them."""
    parts = inputs.split(1) if state_of(model, inputs).alone else [inputs]
    outputs = []
    for part in parts:
        run = _forward(model, part)
        outputs.append(run(map_leaves(torch.clone, part)))
    return torch.cat(outputs)


def _forward(
    model: nn.Module,
    inputs: Tensor,
) -> Callable[[Tensor], Tensor]:
    """Return what gives a model's outputs: its program, itself, or a copy for these inputs."""
    state = state_of(model, inputs)
    if state.alone:
        return copy_apart(model, tuple(model.parameters()))
    return Running(model, state.program) if state.program is not None else model


def _mapped(
    model: nn.Module,
    loss: PerExample,
    batch: Batch,
) -> dict[str, Tensor]:
    """Return the gradients of every example, by one vmap over grad."""
    trained = trainable(model)
    parameters = {name: parameter.detach() for name, parameter in trained.items()}
    names = {id(parameter): name for name, parameter in trained.items()}
    running = _forward(model, batch[0])
    assert isinstance(running, nn.Module)
    fixed: dict[str, Tensor] = {}
    moved: dict[str, str] = {}  # place -> the name of its parameter
    for place, tensor in places_of(running).items():
        if id(tensor) in names:
            moved[place] = names[id(tensor)]
        else:
            fixed[place] = tensor.detach()

    def loss_of_one(
        moving: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        tensors = fixed | {place: moving[name] for place, name in moved.items()}
        outputs = functional_call(running, tensors, (x.unsqueeze(0),), tie_weights=False)
        return loss.of_one(outputs, y.unsqueeze(0)).sum()

    gradients: dict[str, Tensor] = map_rows(
        grad(loss_of_one), parameters, *batch, in_dims=(None, 0, 0), randomness="different"
    )
    return gradients


def one_by_one(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
) -> dict[str, Tensor]:
    """Return the gradients of every example from a pass of its own, [B, *shape] by name.

    Formal guarantee: an example's pass finds the model as every other does, and changes neither
    what the model holds nor the random numbers of another.

    Raises:
        UserError: model or loss gives the first example something else after the others.
    """
    inputs, _ = batch
    parameters = trainable(model)
    own_loss = per_example(loss)
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    losses: list[Tensor] = []
    first: tuple[Tensor, Tensor, int] | None = None
    device = next(model.parameters()).device
    seeds = draw_seeds(len(inputs))
    with kept_draws([device] if device.type == "cuda" else []):
        for (x, target), seed in zip(split_batch(batch), seeds, strict=True):
            run = _forward(model, x)
            set_seed(seed)
            with torch.enable_grad():  # of a copy: the memory of a view is that of the whole batch
                outputs = run(x.clone())
                if first is None:
                    first = outputs.detach().clone(), target, seed + 1
                example_loss = own_loss.of_seeded(outputs, target, seed + 1).sum()
            losses.append(example_loss.detach())
            for name, gradient in _gradients_of(example_loss, parameters).items():
                rows[name].append(gradient)
        if first is not None:
            set_seed(seeds[0])
            with torch.enable_grad():
                again = _forward(model, inputs[:1])(inputs[:1].clone())
            require_same_output(first[0], again)
            own_loss.require_nothing_kept(first, torch.stack(losses))
    return {name: torch.stack(gradients).detach() for name, gradients in rows.items()}


def require_same_output(before: Tensor, after: Tensor) -> None:
    """Reject a model whose outputs for the same examples, with the same draws, have changed."""
    if are_alike(before, after.detach(), before):
        return
    raise UserError(
        "the output for an example changes once others have passed, so the model keeps something "
        "of them (in a global, a class attribute, a random generator of its own?), which clipping "
        "cannot bound: compute the output from inputs and weights only, and draw random numbers "
        "by torch's functions."
    )


def _gradients_of(
    loss: Tensor,
    parameters: dict[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Return a loss's gradients by name; zeros where it does not depend on a parameter."""
    gradients: Sequence[Tensor | None] = [None] * len(parameters)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    by_name = {}
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        by_name[name] = torch.zeros_like(parameter) if gradient is None else gradient
    return by_name


def places_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer, one name per place, as `functional_call` needs them.

    Of two names (a module registered twice) it would save under the second what it put there
    itself, and restore that: the model would lose its tensor.
    """
    tensors = {}
    for module_name, module in model.named_modules():
        for own_name, tensor in (module._parameters | module._buffers).items():
            if tensor is not None:
                tensors[f"{module_name}.{own_name}" if module_name else own_name] = tensor
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
    """Return the mean gradient of each share: parameter name -> [S, *shape]."""
    if shares is None:
        return per_sample_gradients(model, loss, batch, complex_scale=complex_scale)
    means = zero_rows(model, len(shares))
    for number, share in enumerate(cut(shares)):
        inputs, targets = batch
        examples = inputs[share], targets[share]
        size = shares[number]
        for part in split_batch(examples, chunk or size):
            gradients = per_sample_gradients(model, loss, part, complex_scale=complex_scale)
            for name, own in gradients.items():
                means[name][number] += own.sum(dim=0) / size
    return means


def _in_chunks(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    shares: Shares | None,
    chunk: int,
    complex_scale: float,
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients of the batch's shares, at most `chunk` at once."""
    inputs, targets = batch
    positions = cut(shares or (1,) * len(inputs))
    for start in range(0, max(1, len(positions)), chunk):
        own_positions = positions[start : start + chunk]
        part = slice(0, 0)
        if own_positions:
            part = slice(own_positions[0].start, own_positions[-1].stop)
        own_shares = None if shares is None else shares[start : start + chunk]
        yield share_gradients(
            model,
            loss,
            (inputs[part], targets[part]),
            own_shares,
            complex_scale=complex_scale,
            chunk=chunk,
        )


def clip(
    gradients: dict[str, Tensor],
    clipped_together: list[tuple[list[str], float]],
    gamma: float | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return clip(gᵢ) of every example, name -> [B, *shape], and the norms before, [B, groups]."""
    clipped: dict[str, Tensor] = {}
    norms = []
    for names, bound in clipped_together:
        squares = [squared_norms(gradients[name]) for name in names]
        norm = reduce(torch.add, squares).sqrt()
        factors = clip_factors(norm, bound, gamma)
        for name in names:
            g = gradients[name]
            one_dims = [1] * (g.dim() - 1)
            own_factors = factors.to(g.real.dtype).view(-1, *one_dims)
            # 0 · NaN is NaN: a gradient that is not finite is replaced entry by entry.
            clipped[name] = torch.where(own_factors > 0, g * own_factors, torch.zeros_like(g))
        norms.append(norm)
    return clipped, torch.stack(norms, dim=1)


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
    """Return Σᵢ clip(gᵢ) as `gradients.clipped_sum`, in chunks so that memory stays bounded."""
    together = groups(model, bound, per_layer)
    parameters = trainable(model)
    bytes_per_example = sum(parameter.nbytes for parameter in parameters.values())
    chunk = max(1, CHUNK_BYTES // max(1, bytes_per_example))
    sums = {
        name: torch.zeros_like(parameter, requires_grad=False)
        for name, parameter in parameters.items()
    }
    norms = []
    for gradients in _in_chunks(model, loss, batch, shares, chunk, complex_scale):
        clipped, part_norms = clip(gradients, together, gamma)
        for name, value in clipped.items():
            sums[name] += value.sum(dim=0)
        norms.append(part_norms)
    every_norm = torch.cat(norms)  # [B, groups]
    total = {} if into is None else into
    add_up(total, sums)
    return ClippedSum(total, every_norm if per_layer else every_norm[:, 0])
