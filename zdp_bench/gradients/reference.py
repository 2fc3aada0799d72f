"""The reference engine: per-sample gradients by torch.func's vmap(grad), for any model.

A model whose operations are not known to keep examples apart is run as it is, one example at a
time, each in a copy: nothing else is there.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from zdp_bench.gradients.clipping import (
    Batch,
    ClippedSum,
    Loss,
    add_up,
    clip_factors,
    groups,
    squared_norms,
    trainable,
)
from zdp_bench.gradients.losses import draw_seeds, kept_draws, per_example, set_seed
from zdp_bench.gradients.parts import map_leaves
from zdp_bench.gradients.program import Running, copy_apart, state_of
from zdp_bench.gradients.shares import Shares, cut

# Per-sample gradients of one chunk take at most this many bytes.
CHUNK_BYTES = 512 * 2**20

log = logging.getLogger(__name__)
_unmapped: WeakSet[nn.Module] = WeakSet()  # models whose random layers vmap cannot map, say


def per_sample_gradients(
    model: nn.Module, loss: Loss, batch: Batch, *, complex_scale: float = 1.0
) -> dict[str, Tensor]:
    """Return gᵢ of every example: parameter name -> [B, *shape].

    In PyTorch's `.grad` convention: 2∂L/∂θ̄ for complex θ, times `complex_scale`.
    """
    inputs = batch[0]
    alone, trained = per_example(loss), trainable(model)
    if len(inputs) == 0:
        return {name: p.detach().new_zeros((0, *p.shape)) for name, p in trained.items()}
    gradients: dict[str, Tensor] = {}
    loops = alone.loops or model in _unmapped or bool(state_of(model, inputs).alone)
    if not loops:
        try:
            gradients = _mapped(model, loss, batch)
        except RuntimeError as error:
            if "memory" in str(error):
                raise
            with torch.no_grad():
                alone(*outputs_of_one(model, batch))
            loops = True
            if not alone.loops:  # it is the model that vmap cannot map
                log.info("torch.func cannot vectorise the model: computing gradients one by one")
                _unmapped.add(model)
    if loops:
        gradients = one_by_one(model, loss, batch)
    return {
        name: complex_scale * g if g.is_complex() and complex_scale != 1 else g
        for name, g in gradients.items()
    }


def outputs_of_one(model: nn.Module, batch: Batch) -> Batch:
    """Return the outputs for the first example, and its target."""
    with torch.no_grad():
        return outputs_of(model, batch[0][:1]), batch[1][:1]


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a model's outputs as a private step computes them."""
    parts = inputs.split(1) if state_of(model, inputs).alone else [inputs]
    return torch.cat([_forward(model, part)(map_leaves(torch.clone, part)) for part in parts])


def _forward(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what gives a model's outputs: its program, itself, or a copy for these inputs."""
    state = state_of(model, inputs)
    if state.alone:
        return copy_apart(model, tuple(model.parameters()))
    return Running(model, state.program) if state.program is not None else model


def _mapped(model: nn.Module, loss: Loss, batch: Batch) -> dict[str, Tensor]:
    alone, trained = per_example(loss), trainable(model)
    parameters = {name: parameter.detach() for name, parameter in trained.items()}
    names = {id(parameter): name for name, parameter in trained.items()}
    running = _forward(model, batch[0])
    assert isinstance(running, nn.Module)
    places = places_of(running)
    fixed = {place: held.detach() for place, held in places.items() if id(held) not in names}
    moved = {place: names[id(held)] for place, held in places.items() if id(held) in names}

    def loss_of_one(moving: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        given = {**fixed, **{place: moving[name] for place, name in moved.items()}}
        outputs = functional_call(running, given, (x.unsqueeze(0),), tie_weights=False)
        return alone.of_one(outputs, y.unsqueeze(0)).sum()

    with warnings.catch_warnings():  # of torch, that it maps an LSTM slowly
        warnings.filterwarnings("ignore", "There is a performance drop")
        mapped = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
        gradients: dict[str, Tensor] = mapped(parameters, *batch)
        return gradients


def one_by_one(model: nn.Module, loss: Loss, batch: Batch) -> dict[str, Tensor]:
    """Return the gradients of every example from a pass of its own, [B, *shape] by name.

    Formal guarantee: an example's pass finds the model as every other does, and changes neither
    what the model holds nor the random numbers of another.
    """
    device = next(model.parameters()).device
    parameters, alone = trainable(model), per_example(loss)
    each: dict[str, list[Tensor]] = {name: [] for name in parameters}
    seeds = draw_seeds(len(batch[0]))
    losses: list[Tensor] = []
    first: tuple[Tensor, Tensor, int] | None = None
    with kept_draws([device] if device.type == "cuda" else []):
        for x, target, seed in zip(batch[0].split(1), batch[1].split(1), seeds, strict=True):
            run = _forward(model, x)
            set_seed(seed)
            with torch.enable_grad():  # of a copy: the memory of a view is that of the whole batch
                outputs = run(x.clone())
                if first is None:
                    first = outputs.detach().clone(), target, seed + 1
                one = alone.of_seeded(outputs, target, seed + 1).sum()
            losses.append(one.detach())
            found: tuple[Tensor | None, ...] = (None,) * len(parameters)
            if one.requires_grad:
                found = torch.autograd.grad(one, [*parameters.values()], allow_unused=True)
            for (name, parameter), g in zip(parameters.items(), found, strict=True):
                each[name].append(torch.zeros_like(parameter) if g is None else g)
        if first is not None:
            alone.require_nothing_kept(first, torch.stack(losses))
    return {name: torch.stack(gradients).detach() for name, gradients in each.items()}


def places_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer, one name per place, as `functional_call` needs them.

    Of two names (a module registered twice) it would save under the second what it put there
    itself, and restore that: the model would lose its tensor.
    """
    return {
        f"{module_name}.{own}" if module_name else own: held
        for module_name, module in model.named_modules()
        for own, held in (*module._parameters.items(), *module._buffers.items())
        if held is not None
    }


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
    means = {name: p.new_zeros(len(shares), *p.shape) for name, p in trainable(model).items()}
    for number, of in enumerate(cut(shares)):
        many = of.stop - of.start
        for start in range(of.start, of.stop, chunk or many):
            part = slice(start, min(start + (chunk or many), of.stop))
            gradients = per_sample_gradients(
                model, loss, (batch[0][part], batch[1][part]), complex_scale=complex_scale
            )
            for name, g in gradients.items():
                means[name][number] += g.sum(dim=0) / many
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
    borders = cut(shares or (1,) * len(batch[0]))
    for start in range(0, max(1, len(borders)), chunk):
        few = borders[start : start + chunk]
        part = slice(few[0].start, few[-1].stop) if few else slice(0, 0)
        yield share_gradients(
            model,
            loss,
            (batch[0][part], batch[1][part]),
            None if shares is None else shares[start : start + chunk],
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
        norm = sum(squared_norms(gradients[name]) for name in names).sqrt()  # type: ignore[union-attr]
        factors = clip_factors(norm, bound, gamma)
        for name in names:
            g = gradients[name]
            of_each = factors.to(g.real.dtype).view(-1, *[1] * (g.dim() - 1))
            # 0 · NaN is NaN: a gradient that is not finite is replaced entry by entry.
            clipped[name] = torch.where(of_each > 0, g * of_each, torch.zeros_like(g))
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
