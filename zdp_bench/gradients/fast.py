"""The fast engine: book-keeping (Bu et al. 2023, "Differentially private optimization on large model at small cost").

One forward and one backward pass that computes only the gradients of the layers' OUTPUTS (`tape.py`). A layer's per-sample
gradients follow from its input and that output gradient (`rules/`), in one of three ways, whichever counts cheapest:

    ghost    the norm without the gradient; then one weighted contraction of input and output gradient gives Σᵢ cᵢ·gᵢ
    kept     the gradients themselves, [B, *shape]; norm and weighted sum are one pass each, and input and output gradient go
    formed   the gradients, a few records at a time, for their norm only; then the weighted contraction

Which, is a matter of time and memory alone: no number depends on it but by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from zdp_bench.gradients.clipping import (
    Batch,
    ClippedSum,
    Loss,
    add_up,
    groups,
    guarded,
    no_records,
)
from zdp_bench.gradients.norms import all_finite, squared_norms, squared_norms_of
from zdp_bench.gradients.rules import NoRule, Rule, Share, Terms, contract, rule_of
from zdp_bench.gradients.rules.any_layer import any_layer
from zdp_bench.gradients.tape import Call, Layer, layers_of, record
from zdp_bench.gradients.weighing import Clipping, Term, clipping

# Per-sample gradients are kept where they take less than the activations they replace, and else up to this many bytes, up to half
# of what the layers' inputs take (by then backward has let go of as much), or up to what the parameters take, in all.
KEEP_BYTES = 64 * 2**20
# Gradients that are formed for their norm only take at most this many bytes at a time.
FORM_BYTES = 64 * 2**20
# Gradients of so few entries are measured all parameters' together, longer ones as they come, while they are in the cache.
SHORT = 2048


@dataclass(slots=True)
class _Parameter:
    """What is known of one parameter's per-sample gradients as backward goes on."""

    itself: nn.Parameter
    calls: int = 0  # that are still to come
    shares: list[Share] = field(default_factory=list)
    rows: Tensor | None = None  # the gradients themselves, [1, *shape], of one record on a CPU
    squared_norms: Tensor | None = None  # [B] float64
    product: tuple[
        Tensor, ...
    ] = ()  # or [B, *] each, whose norms are still to be taken, and multiplied
    weighted_sum: Callable[[Tensor], Tensor] | None = None

    def scale(self, complex_scale: float) -> float:
        return complex_scale if complex_scale != 1 and self.itself.is_complex() else 1.0

    def term(self, complex_scale: float) -> Term:
        """What it adds to the norms."""
        return Term(self.product, self.squared_norms, self.scale(complex_scale))

    def joins(self, total: Tensor | None, clipped: Clipping, complex_scale: float) -> bool:
        """Σ + c·g where g is one record's, kept: half the passes over memory of `total` and a sum. False of any other."""
        assert self.rows is not None
        if total is None or self.rows.dtype != total.dtype or self.rows.shape != (1, *total.shape):
            return False
        total.add_(self.rows[0], alpha=float(clipped.factors[0]) * self.scale(complex_scale))
        return True

    def total(self, clipped: Clipping, complex_scale: float) -> Tensor | None:
        """Σᵢ cᵢ gᵢ; None where no record moves the loss through it."""
        if self.weighted_sum is None:
            return None
        scale = self.scale(complex_scale)
        return self.weighted_sum(clipped.factors if scale == 1 else clipped.factors * scale)


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
    into: dict[str, Tensor] | None = None,
) -> ClippedSum:
    """Σᵢ clip(gᵢ); see `gradients.clipped_sum`.

    Args:
        rules: for some layers, a rule in place of their own. What it says of their weight need not be the gradient, nor have
            its shape: a spectrum. Such sums come as they are, and none where no record influences the loss.

    Raises:
        NoRule: a layer, or the way it is called, is beyond this engine.
    """
    inputs, _ = batch
    total = {} if into is None else into
    layers = layers_of(model)
    elsewhere = {
        id(p) for layer in rules for p in (getattr(layer, "weight", None),) if p is not None
    }
    if len(inputs) == 0:
        none, found = no_records(model, bound, per_layer, inputs.device), _parameters(layers)
        add_up(
            total,
            {
                name: value
                for name, value in none.sums.items()
                if id(found[name].itself) not in elsewhere
            },
        )
        return replace(none, sums=total)
    found = _differentiate(model, loss, batch, layers, rules)

    with torch.no_grad(), _full_precision(inputs.device):
        if len(inputs) == 1:
            _measure_what_is_left(found)
        clippings: list[tuple[list[str], Clipping]] = []
        for names, group_bound in (
            groups(model, bound, per_layer) if per_layer else [(list(found), bound)]
        ):
            terms = [
                found[name].term(complex_scale)
                for name in names
                if found[name].weighted_sum is not None
            ]
            clippings.append((names, clipping(terms or [_nothing(inputs)], group_bound)))
        norms = [clipped.norms for _, clipped in clippings]
        every_norm = torch.stack(norms, dim=1) if per_layer else norms[0]  # [B, groups], or [B]
        if all_finite(every_norm):
            for names, clipped in clippings:
                sums: dict[str, Tensor] = {}
                for name in names:
                    of = found.pop(name)
                    if of.rows is not None and of.joins(total.get(name), clipped, complex_scale):
                        continue
                    parameter, own = of.itself, of.total(clipped, complex_scale)
                    if id(parameter) in elsewhere:
                        sums |= {} if own is None else {name: own}
                    elif own is None:
                        sums[name] = torch.zeros_like(parameter, requires_grad=False)
                    else:
                        if own.dtype != parameter.dtype or own.shape != parameter.shape:
                            own = own.to(parameter.dtype).view_as(parameter)
                        sums[name] = own.resolve_conj() if resolved else own
                add_up(total, sums)
            return ClippedSum(total, every_norm)
    del found, clippings
    whole = torch.isfinite(every_norm.view(len(inputs), -1)).all(dim=1)  # [B]
    rest = (
        batch[0][whole],
        batch[1][whole],
    )  # without records that a factor of 0 does not take out: 0 · NaN is NaN
    sums = clipped_sum(
        model,
        loss,
        rest,
        bound,
        per_layer=per_layer,
        complex_scale=complex_scale,
        rules=rules,
        resolved=resolved,
        into=into,
    ).sums
    return ClippedSum(sums, every_norm)


def _measure_what_is_left(found: dict[str, _Parameter]) -> None:
    """The norms of one record's gradients, all parameters' at once: asked for one by one, each would cost what Python does."""
    left = [
        (of, of.rows)
        for of in found.values()
        if of.rows is not None and of.squared_norms is None and not of.product
    ]
    if left:
        for (of, _), squares in zip(
            left, squared_norms_of([rows for _, rows in left]), strict=True
        ):
            of.squared_norms = squares


def _nothing(inputs: Tensor) -> Term:
    """What parameters add to the norms that no record influences the loss through."""
    return Term((), torch.zeros(len(inputs), dtype=torch.float64, device=inputs.device))


def without_rule(model: nn.Module) -> list[str]:
    """Names of the layers that hold trainable parameters but have no rule of their own."""
    return [layer.name for layer in layers_of(model) if rule_of(layer.module) is None]


def _parameters(layers: list[Layer]) -> dict[str, _Parameter]:
    """What `clipping.trainable` finds, under the same names, from the layers that are at hand."""
    seen: set[int] = set()
    found = {}
    for name, _, own in layers:
        for own_name, parameter in own.items():
            if id(parameter) not in seen:  # else it is shared, and has its first name
                seen.add(id(parameter))
                found[f"{name}.{own_name}" if name else own_name] = _Parameter(parameter)
    return found


def _differentiate(
    model: nn.Module, loss: Loss, batch: Batch, layers: list[Layer], rules: Mapping[nn.Module, Rule]
) -> dict[str, _Parameter]:
    """Forward and backward; every parameter's squared norms, or what they follow from, and how to sum its gradients weighted."""
    tape = record(model, layers, loss, batch)
    found = _parameters(layers)
    of_parameter = {id(of.itself): of for of in found.values()}
    of_inputs = 0
    for call in tape.calls:
        of_inputs += call.input.nbytes
        for parameter in call.layer.own.values():
            of_parameter[id(parameter)].calls += 1
    parameters = [of.itself for of in found.values()]
    allowance = max(KEEP_BYTES, of_inputs // 2, sum(parameter.nbytes for parameter in parameters))
    exact = _full_precision(batch[0].device)

    def consume(call: Call, g: Tensor) -> None:
        nonlocal allowance
        with exact:  # backward records no graph of its own
            own = call.layer.own
            x, g = _promoted(call, g, next(iter(own.values())))
            shares = _shares(call.layer, x, g, rules)
            for own_name, parameter in own.items():
                if own_name not in shares:
                    raise NoRule(
                        f"layer '{call.layer.name}', whose parameter '{own_name}' its rule does not know"
                    )
                of = of_parameter[id(parameter)]
                of.shares.append(shares[own_name])
                of.calls -= 1
                if of.calls == 0:
                    allowance -= _settle(of, len(g), (x, g), allowance)
        del call.input

    tape.play_back(parameters, consume)
    with torch.no_grad(), exact:
        for of in found.values():
            if of.shares:  # some other call of this parameter had no influence on the loss
                _settle(of, len(batch[0]), (), allowance)
    return found


def _settle(of: _Parameter, records: int, replaced: tuple[Tensor, ...], allowance: int) -> int:
    """All calls of a parameter are in: take its norms, and say how it will be summed. Returns what of the allowance is spent.

    Args:
        replaced: what need not be kept where the gradients themselves are.
    """
    shares, of.shares = of.shares, []
    if len(shares) == 1 and shares[0].product is not None:
        of.product = shares[0].product()
        of.weighted_sum = shares[0].weighted_sum
        return 0
    if len(shares) == 1 and shares[0].ghost is not None:
        of.squared_norms = _guarded(shares[0].ghost(), shares, of.itself.dtype)
        of.weighted_sum = shares[0].weighted_sum
        return 0
    size = of.itself.nbytes  # of one record's gradient
    total, free = size * records * len(shares), sum(tensor.nbytes for tensor in replaced)
    if total <= max(free, allowance):
        if len(shares) == 1 and shares[0].measured is not None:
            rows, of.squared_norms = shares[0].measured(0, records)
        else:
            rows = _rows(shares)(0, records)
            if of.itself.numel() <= SHORT:
                of.product = (rows,)
            elif (
                records > 1 or not rows.is_cpu
            ):  # one record's are measured together: Python takes longer than they do
                of.squared_norms = squared_norms(rows)
        if records == 1 and rows.is_cpu:
            of.rows = rows
        of.weighted_sum = lambda factors: contract(rows, factors)
        return 0 if total <= free else total
    of.squared_norms = _guarded(
        _formed_norms(shares, records, FORM_BYTES // size), shares, of.itself.dtype
    )
    of.weighted_sum = _sum_of(shares)
    return 0


def _guarded(squares: Tensor, shares: list[Share], dtype: torch.dtype) -> Tensor:
    """Squared norms to clip by where the sum is not made of the rows that were measured; see `clipping.guarded`."""
    terms = [share.terms() for share in shares if share.terms is not None]
    if len(terms) < len(shares):  # a call whose rows are there: what it adds is what they measure
        terms += [
            Terms(squared_norms(s.rows(0, len(squares))).sqrt(), 1)
            for s in shares
            if s.terms is None
        ]
    mass = (
        terms[0].mass if len(terms) == 1 else torch.stack([each.mass for each in terms]).sum(dim=0)
    )
    return guarded(
        squares,
        mass,
        sum(each.number for each in terms),
        dtype.to_real() if dtype.is_complex else dtype,
    )


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
    if len(shares) == 1 and (measured := shares[0].measured) is not None:
        return torch.cat(
            [measured(start, min(start + few, records))[1] for start in range(0, records, few)]
        )
    rows = _rows(shares)
    return torch.cat(
        [squared_norms(rows(start, min(start + few, records))) for start in range(0, records, few)]
    )


def _sum_of(shares: list[Share]) -> Callable[[Tensor], Tensor]:
    def weighted_sum(factors: Tensor) -> Tensor:
        total = shares[0].weighted_sum(factors)
        for share in shares[1:]:
            total = total + share.weighted_sum(factors)
        return total

    return weighted_sum


def _shares(
    layer: Layer, x: Tensor, g: Tensor, rules: Mapping[nn.Module, Rule]
) -> dict[str, Share]:
    rule: Rule = rules.get(layer.module) or rule_of(layer.module) or any_layer
    try:
        return rule(layer.module, x, g)
    except NoRule as error:
        raise NoRule(f"layer '{layer.name}': {error}") from None


_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off. Entering and leaving its context takes as long as a small network's norm."""
    return (
        torch.autocast(device.type, enabled=False)
        if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        else _AS_IT_IS
    )


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
