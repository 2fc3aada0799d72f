"""The fast engine: book-keeping (Bu et al. 2023, "Differentially private optimization on large model at small cost").

One forward and one backward pass that computes only the gradients of the layers' OUTPUTS (`tape.py`). A layer's per-sample
gradients follow from its input and that output gradient (`rules/`), in one of three ways, whichever counts cheapest:

    ghost    the norm without the gradient; then one weighted contraction of input and output gradient gives Σᵢ cᵢ·gᵢ
    kept     the gradients themselves, [B, *shape]; norm and weighted sum are one pass each, and input and output gradient go
    formed   the gradients, a few records at a time, for their norm only; then the weighted contraction

Which, is a matter of time and memory alone: no number depends on it but by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType

import torch
from torch import Tensor, nn

from zdp_bench.gradients.clipping import Batch, ClippedSum, Loss, clip_factors, groups, no_records
from zdp_bench.gradients.norms import all_finite, squared_norms, squared_norms_of
from zdp_bench.gradients.rules import NoRule, Rule, Share, contract, rule_of
from zdp_bench.gradients.rules.any_layer import any_layer
from zdp_bench.gradients.tape import Call, Layer, layers_of, record

# Per-sample gradients are kept where they take less than the activations they replace, and else up to this many bytes, up to half
# of what the layers' inputs take (by then backward has let go of as much), or up to what the parameters take, in all.
KEEP_BYTES = 64 * 2**20
# Gradients that are formed for their norm only take at most this many bytes at a time.
FORM_BYTES = 64 * 2**20
# Gradients of so few entries are measured all parameters' together, longer ones as they come, while they are in the cache.
SHORT = 2048


@dataclass
class _Parameter:
    """What is known of one parameter's per-sample gradients as backward goes on."""

    calls: int  # that are still to come
    shares: list[Share] = field(default_factory=list)
    squared_norms: Tensor | None = None  # [B] float64
    product: tuple[Tensor, ...] = ()  # or [B, *] each, whose norms are still to be taken, and multiplied
    weighted_sum: Callable[[Tensor], Tensor] | None = None


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    bound: float,
    *,
    per_layer: bool = False,
    complex_scale: float = 1.0,
    rules: Mapping[nn.Module, Rule] = MappingProxyType({}),
    resolved: bool = True,
) -> ClippedSum:
    """Σᵢ clip(gᵢ); see `gradients.clipped_sum`.

    Args:
        rules: for some layers, a rule in place of their own. What it says of their weight need not be the gradient, nor have
            its shape: a spectrum. Such sums come as they are, and none where no record influences the loss.

    Raises:
        NoRule: a layer, or the way it is called, is beyond this engine.
    """
    inputs, _ = batch
    layers = layers_of(model)
    parameters = _parameters(layers)
    elsewhere = {id(p) for layer in rules for p in (getattr(layer, "weight", None),) if p is not None}
    if len(inputs) == 0:
        none = no_records(model, bound, per_layer, inputs.device)
        return replace(none, sums={name: value for name, value in none.sums.items() if id(parameters[name]) not in elsewhere})
    found = _differentiate(model, loss, batch, layers, parameters, rules)

    with torch.no_grad(), _full_precision(inputs.device):
        _measure(found.values())
        scale = {name: complex_scale if p.is_complex() else 1.0 for name, p in parameters.items()}
        zero = torch.zeros(len(inputs), dtype=torch.float64, device=inputs.device)
        sums: dict[str, Tensor] = {}
        norms = []
        together = groups(model, bound, per_layer) if per_layer else [(list(parameters), bound)]
        for names, group_bound in together:
            own = ((found[name].squared_norms, scale[name] ** 2) for name in names)
            squares = [square if by == 1 else square * by for square, by in own if square is not None]
            norms.append(torch.stack(squares).sum(dim=0).sqrt_() if squares else zero)  # [B], float64
            factors = clip_factors(norms[-1], group_bound)
            for name in names:
                weighted_sum = found.pop(name).weighted_sum
                parameter = parameters[name]
                if id(parameter) in elsewhere:
                    sums |= {} if weighted_sum is None else {name: weighted_sum(factors)}
                elif weighted_sum is None:
                    sums[name] = torch.zeros_like(parameter, requires_grad=False)
                else:
                    total = weighted_sum(factors if scale[name] == 1 else factors * scale[name])
                    if total.dtype != parameter.dtype or total.shape != parameter.shape:
                        total = total.to(parameter.dtype).view_as(parameter)
                    sums[name] = total.resolve_conj() if resolved else total
        every_norm = torch.stack(norms, dim=1) if per_layer else norms[0]  # [B, groups], or [B]
    if not all_finite(every_norm):  # 0 · NaN is NaN: leave such records out and sum again
        whole = torch.isfinite(every_norm.view(len(inputs), -1)).all(dim=1)  # [B]
        rest = batch[0][whole], batch[1][whole]
        sums = clipped_sum(
            model, loss, rest, bound, per_layer=per_layer, complex_scale=complex_scale, rules=rules, resolved=resolved
        ).sums
    return ClippedSum(sums, every_norm)


def without_rule(model: nn.Module) -> list[str]:
    """Names of the layers that hold trainable parameters but have no rule of their own."""
    return [layer.name for layer in layers_of(model) if rule_of(layer.module) is None]


def _parameters(layers: list[Layer]) -> dict[str, nn.Parameter]:
    """What `clipping.trainable` finds, under the same names, from the layers that are at hand."""
    names: dict[nn.Parameter, str] = {}
    for layer in layers:
        for own, parameter in layer.own.items():
            names.setdefault(parameter, f"{layer.name}.{own}" if layer.name else own)
    return {name: parameter for parameter, name in names.items()}


def _differentiate(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    layers: list[Layer],
    parameters: dict[str, nn.Parameter],
    rules: Mapping[nn.Module, Rule],
) -> dict[str, _Parameter]:
    """Forward and backward; every parameter's squared norms, or what they follow from, and how to sum its gradients weighted."""
    tape = record(model, layers, loss, batch)
    name_of = {parameter: name for name, parameter in parameters.items()}
    found = {name: _Parameter(0) for name in parameters}
    for call in tape.calls:
        for parameter in call.layer.own.values():
            found[name_of[parameter]].calls += 1
    of_inputs, of_parameters = sum(_bytes(call.input) for call in tape.calls), sum(map(_bytes, parameters.values()))
    allowance = max(KEEP_BYTES, of_inputs // 2, of_parameters)

    def consume(call: Call, g: Tensor) -> None:
        nonlocal allowance
        with _full_precision(g.device):  # backward records no graph of its own
            own = call.layer.own
            x, g = _promoted(call, g, next(iter(own.values())))
            replaced = _bytes(x) + _bytes(g)
            shares = _shares(call.layer, x, g, rules)
            for own_name, parameter in own.items():
                if own_name not in shares:
                    raise NoRule(f"layer '{call.layer.name}', whose parameter '{own_name}' its rule does not know")
                of = found[name_of[parameter]]
                of.shares.append(shares[own_name])
                of.calls -= 1
                if of.calls == 0:
                    allowance -= _settle(of, parameter, len(g), replaced, allowance)
        del call.input

    tape.play_back(list(parameters.values()), consume)
    with torch.no_grad(), _full_precision(batch[0].device):
        for name, of in found.items():
            if of.shares:  # some other call of this parameter had no influence on the loss
                _settle(of, parameters[name], len(batch[0]), 0, allowance)
    return found


def _settle(of: _Parameter, parameter: nn.Parameter, records: int, replaced: int, allowance: int) -> int:
    """All calls of a parameter are in: take its norms, and say how it will be summed. Returns what of the allowance is spent."""
    shares, of.shares = of.shares, []
    if len(shares) == 1 and shares[0].product is not None:
        of.product = shares[0].product()
        of.weighted_sum = shares[0].weighted_sum
        return 0
    if len(shares) == 1 and shares[0].ghost is not None:
        of.squared_norms = shares[0].ghost()
        of.weighted_sum = shares[0].weighted_sum
        return 0
    size = parameter.numel() * parameter.element_size()  # of one record's gradient
    total = size * records * len(shares)
    if total <= max(replaced, allowance):
        rows = _rows(shares)(0, records)
        if parameter.numel() <= SHORT:
            of.product = (rows,)
        else:
            of.squared_norms = squared_norms(rows)
        of.weighted_sum = lambda factors: contract(rows, factors)
        return 0 if total <= replaced else total
    of.squared_norms = _formed_norms(shares, records, FORM_BYTES // size)
    of.weighted_sum = _sum_of(shares)
    return 0


def _measure(found: Iterable[_Parameter]) -> None:
    """Norms of products, those of all parameters together: a small network's are sooner taken than asked for one by one."""
    waiting = [of for of in found if of.product]
    if waiting:
        parts = {id(part): part for of in waiting for part in of.product}
        squares = dict(zip(parts, squared_norms_of([*parts.values()]), strict=True))
        for of in waiting:
            of.squared_norms = reduce(torch.mul, (squares[id(part)] for part in of.product))


def _rows(shares: list[Share]) -> Callable[[int, int], Tensor]:
    """Per-sample gradients over all calls of a parameter."""

    def rows(start: int, stop: int) -> Tensor:
        total = shares[0].rows(start, stop)
        for share in shares[1:]:
            total = total + share.rows(start, stop)
        return total

    return rows


def _formed_norms(shares: list[Share], records: int, few: int) -> Tensor:
    """[B]: squared norms of gradients that are formed a `few` records at a time and let go."""
    few = max(1, few)
    rows = _rows(shares)
    return torch.cat([squared_norms(rows(start, min(start + few, records))) for start in range(0, records, few)])


def _sum_of(shares: list[Share]) -> Callable[[Tensor], Tensor]:
    def weighted_sum(factors: Tensor) -> Tensor:
        total = shares[0].weighted_sum(factors)
        for share in shares[1:]:
            total = total + share.weighted_sum(factors)
        return total

    return weighted_sum


def _shares(layer: Layer, x: Tensor, g: Tensor, rules: Mapping[nn.Module, Rule]) -> dict[str, Share]:
    rule: Rule = rules.get(layer.module) or rule_of(layer.module) or any_layer
    try:
        return rule(layer.module, x, g)
    except NoRule as error:
        raise NoRule(f"layer '{layer.name}': {error}") from None


_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off. Entering and leaving its context takes as long as a small network's norm."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else _AS_IT_IS


_AS_IT_IS = nullcontext()


def _promoted(call: Call, g: Tensor, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output gradient in the parameter's precision, float32 at least: under autocast both may be half."""
    if call.input.dtype == g.dtype == parameter.dtype and g.dtype in _WIDE:
        return call.input, g
    wide = torch.promote_types(parameter.dtype.to_real(), torch.float32)

    def promoted(t: Tensor) -> Tensor:
        return t.to(wide.to_complex() if t.is_complex() or parameter.is_complex() else wide)

    numbers = call.input.is_floating_point() or call.input.is_complex()  # and no indices
    return promoted(call.input) if numbers else call.input, promoted(g)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
