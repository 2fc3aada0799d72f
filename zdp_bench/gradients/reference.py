"""The reference engine: per-sample gradients by torch.func's vmap(grad), for any model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from zdp_bench.errors import UserError
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
from zdp_bench.gradients.losses import (
    Held,
    draw_seeds,
    held_by,
    kept_draws,
    per_example,
    set_seed,
)
from zdp_bench.gradients.shares import Shares, cut
from zdp_bench.gradients.watched import is_own

# Per-sample gradients of one chunk take at most this many bytes.
CHUNK_BYTES = 512 * 2**20

log = logging.getLogger(__name__)
_unmapped: WeakSet[nn.Module] = WeakSet()  # models whose branches follow the data, say
PUBLIC: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()  # inputs of a checked model


def per_sample_gradients(
    model: nn.Module, loss: Loss, batch: Batch, *, complex_scale: float = 1.0
) -> dict[str, Tensor]:
    """Return gᵢ of every example: parameter name -> [B, *shape].

    In PyTorch's `.grad` convention: 2∂L/∂θ̄ for complex θ, times `complex_scale`.
    """
    inputs, targets = batch
    alone, trained = per_example(loss), trainable(model)
    parameters = {name: parameter.detach() for name, parameter in trained.items()}
    names = {id(parameter): name for name, parameter in trained.items()}
    places = places_of(model)
    fixed = {place: held.detach() for place, held in places.items() if id(held) not in names}
    moved = {place: names[id(held)] for place, held in places.items() if id(held) in names}
    if len(inputs) == 0:
        return {name: value.new_zeros((0, *value.shape)) for name, value in parameters.items()}

    def loss_of_one(moving: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        given = {**fixed, **{place: moving[name] for place, name in moved.items()}}
        outputs = functional_call(model, given, (x.unsqueeze(0),), tie_weights=False)
        return alone.of_one(outputs, y.unsqueeze(0)).sum()

    each = grad(loss_of_one)
    gradients: dict[str, Tensor] = {}
    # A mapped pass of foreign code could read the whole batch (`repr(x)`, its memory).
    loops = alone.loops or model in _unmapped or not is_own(model)
    if not loops:
        try:
            with warnings.catch_warnings():  # of torch, that it maps an LSTM slowly
                warnings.filterwarnings("ignore", "There is a performance drop")
                mapped = vmap(each, in_dims=(None, 0, 0), randomness="different")
                gradients = mapped(parameters, inputs, targets)
        except RuntimeError as error:
            if "memory" in str(error):
                raise
            with torch.no_grad():
                alone(model(inputs[:1]), targets[:1])
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


def one_by_one(model: nn.Module, loss: Loss, batch: Batch) -> dict[str, Tensor]:
    """Return the gradients of every example from a pass of its own, [B, *shape] by name.

    Formal guarantee: no pass changes what the model holds or finds beside it, nor the random
    numbers of another; and neither the first example's gradient nor, of a checked model, the output
    for an example that is public is another after all passes.
    """
    device, public = next(model.parameters()).device, PUBLIC.get(model, batch[0][-1:])
    devices = [device] if device.type == "cuda" else []
    seeds = draw_seeds(len(batch[0]))
    with kept_draws(devices):
        answer, held = _answer(model, public), held_by(model)  # after a pass, which makes caches
        gradients = _pass_each(model, loss, batch, seeds, held)
        again = _pass_each(model, loss, (batch[0][:1], batch[1][:1]), seeds, held)
        pairs = [(_answer(model, public), answer)]
    for g, before in [*pairs, *((g, gradients[name][:1]) for name, g in again.items())]:
        g, before = g.nan_to_num(), before.nan_to_num()
        # A GPU's kernels may add in another order.
        if not torch.equal(g, before) and not (
            devices and torch.dist(g, before) <= 1e-3 * torch.linalg.vector_norm(g)
        ):
            raise _carries(
                model, "an example's gradient changed when it was computed again after others"
            )
    return gradients


@torch.no_grad()
def _answer(model: nn.Module, inputs: Tensor) -> Tensor:
    set_seed(0)
    output: Tensor = model(inputs[:1].clone())
    return output


def _carries(model: nn.Module, what: str) -> UserError:
    return UserError(
        f"the model ({type(model).__name__}) carries state from one example to the next: {what}. "
        "Clipping then bounds nothing and no ε would hold: compute each output from its own input "
        "only, or train with algorithm=sgd, which claims none."
    )


def _pass_each(
    model: nn.Module, loss: Loss, batch: Batch, seeds: Sequence[int], held: Held
) -> dict[str, Tensor]:
    """Return the gradients of every example; reject a pass that changes what is held."""
    parameters = trainable(model)
    each: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for x, target, seed in zip(batch[0].split(1), batch[1].split(1), seeds, strict=False):
        set_seed(seed)
        with torch.enable_grad():  # of a copy: the memory of a view is that of the whole batch
            one = per_example(loss).of_one(model(x.clone()), target.clone()).sum()
        found: Sequence[Tensor | None] = [None] * len(parameters)
        if one.requires_grad:
            found = torch.autograd.grad(one, [*parameters.values()], allow_unused=True)
        if changed := held.differs_from(held_by(model)):
            raise _carries(model, f"'{changed}' changed in a pass")
        for (name, parameter), g in zip(parameters.items(), found, strict=True):
            each[name].append(torch.zeros_like(parameter) if g is None else g)
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
