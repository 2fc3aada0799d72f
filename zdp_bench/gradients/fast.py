"""The fast engine: book-keeping (Bu et al. 2023, "Differentially private optimization on large model at small cost").

One forward and one backward pass that computes only the gradients of the layers' OUTPUTS. A layer's per-sample norm follows
from its cached input and that output gradient; then one weighted contraction gives Σᵢ cᵢ·gᵢ. No per-sample gradient of a
linear layer is ever formed: ‖gᵢ xᵢᴴ‖² = ‖gᵢ‖²‖xᵢ‖².

A layer joins by a rule: a function that turns (module, input, output gradient) into a `LayerRule`. A model with a layer that
has parameters and no rule is not supported here, and `clipped_sum` takes the reference instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zdp_bench.gradients.clipping import Batch, ClippedSum, Loss, clip_factors, groups, squared_norms, trainable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerGradients:
    """What one call of a layer says of its parameters' per-sample gradients."""

    squared_norms: dict[str, Tensor]  # own parameter name -> [B]
    weighted_sum: Callable[[str, Tensor], Tensor]  # (own parameter name, factors [B]) -> Σᵢ cᵢ gᵢ


Rule = Callable[[nn.Module, Tensor, Tensor], LayerGradients]
_rules: dict[type[nn.Module], Rule] = {}


def rule(*types: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Enter the decorated function as the rule of these layer types (exact types: a subclass may compute something else)."""

    def enter(function: Rule) -> Rule:
        for layer in types:
            _rules[layer] = function
        return function

    return enter


@rule(nn.Linear)
def linear(module: nn.Module, x: Tensor, g: Tensor) -> LayerGradients:
    """y = x Wᵀ + b on [B, n]: W.grad of one record is gᵢ xᵢᴴ (conjugated x: PyTorch's convention), b.grad is gᵢ."""
    g_norms = squared_norms(g)  # [B]

    def weighted_sum(name: str, factors: Tensor) -> Tensor:
        weighted = g * factors.to(g.real.dtype).unsqueeze(1)  # [B, out]
        if name == "bias":
            return weighted.sum(dim=0)
        return (weighted.conj().T @ x).conj() if x.is_complex() else weighted.T @ x  # [out, in]

    return LayerGradients({"weight": g_norms * squared_norms(x), "bias": g_norms}, weighted_sum)


def unsupported(model: nn.Module) -> list[str]:
    """Names of the layers that hold trainable parameters but have no rule; also every layer of a shared parameter."""
    missing = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if own and (type(module) not in _rules or any(id(p) in seen for p in own)):
            missing.append(name)
        seen.update(id(p) for p in own)
    return missing


def clipped_sum(
    model: nn.Module, loss: Loss, batch: Batch, bound: float, *, per_layer: bool = False, complex_scale: float = 1.0
) -> ClippedSum:
    """Σᵢ clip(gᵢ); see `gradients.clipped_sum`.

    Raises:
        ValueError: a layer has no rule here, or is called more than once or on an input this engine does not know.
    """
    inputs, targets = batch
    parameters = trainable(model)
    together = groups(model, bound, per_layer)
    if len(inputs) == 0:
        empty = torch.zeros((0, len(together)), dtype=torch.float64, device=inputs.device)
        return ClippedSum(
            {n: torch.zeros_like(p, requires_grad=False) for n, p in parameters.items()}, empty if per_layer else empty[:, 0]
        )
    if missing := unsupported(model):
        raise ValueError(f"no book-keeping rule for layer '{missing[0]}'; use the reference engine")

    calls = _forward(model, inputs)
    with torch.enable_grad():
        losses = loss(calls.outputs, targets)  # [B]
    output_gradients = torch.autograd.grad(losses.sum(), [call.output for call in calls.layers])

    with torch.no_grad():
        layer_gradients: dict[str, LayerGradients] = {}
        for call, g in zip(calls.layers, output_gradients, strict=True):
            layer_gradients[call.name] = _rules[type(call.module)](call.module, call.input, g)
        scale = {name: complex_scale if p.is_complex() else 1.0 for name, p in parameters.items()}
        sums: dict[str, Tensor] = {}
        norms = []
        for names, group_bound in together:
            owners = {name: _owner(name) for name in names}
            squares = [layer_gradients[layer].squared_norms[own] * scale[name] ** 2 for name, (layer, own) in owners.items()]
            norm = torch.stack(squares).sum(dim=0).sqrt()  # [B], float64
            factors = clip_factors(norm, group_bound)
            for name, (layer, own) in owners.items():
                sums[name] = layer_gradients[layer].weighted_sum(own, factors * scale[name])
            norms.append(norm)
        every_norm = torch.stack(norms, dim=1)  # [B, groups]
    if not torch.isfinite(every_norm).all():  # 0 · NaN is NaN: leave such records out and sum again
        return _without_broken_records(model, loss, batch, bound, every_norm, per_layer, complex_scale)
    return ClippedSum(sums, every_norm if per_layer else every_norm[:, 0])


@dataclass(frozen=True)
class _Call:
    """One call of one layer: what went in, what came out."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class _Forward:
    outputs: Tensor
    layers: list[_Call]


def _owner(name: str) -> tuple[str, str]:
    """'net.0.weight' -> ('net.0', 'weight')."""
    layer, _, own = name.rpartition(".")
    return layer, own


def _forward(model: nn.Module, inputs: Tensor) -> _Forward:
    """Run the model once and keep, for every layer with parameters, its input and its output."""
    calls: list[_Call] = []
    handles = []

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if args[0].dim() != 2:
                raise ValueError(f"layer '{name}': book-keeping knows linear layers on [B, n] only")
            calls.append(_Call(name, module, args[0].detach(), output))

        return hook

    for name, module in model.named_modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            handles.append(module.register_forward_hook(keep(name)))
    try:
        with torch.enable_grad():
            outputs = model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if len({call.name for call in calls}) != len(calls):
        raise ValueError("a layer is called more than once; use the reference engine")
    return _Forward(outputs, calls)


def _without_broken_records(
    model: nn.Module, loss: Loss, batch: Batch, bound: float, norms: Tensor, per_layer: bool, complex_scale: float
) -> ClippedSum:
    """The sum over the records whose every norm is finite; the others contribute zero, their norms stay as they are."""
    whole = torch.isfinite(norms).all(dim=1)  # [B]
    log.warning("%d records with a gradient that is not finite contribute nothing", int((~whole).sum()))
    inputs, targets = batch
    rest = clipped_sum(model, loss, (inputs[whole], targets[whole]), bound, per_layer=per_layer, complex_scale=complex_scale)
    return ClippedSum(rest.sums, norms if per_layer else norms[:, 0])
