"""The fast engine: book-keeping (Bu et al. 2023, "Differentially private optimization on large
model at small cost").

One forward and one backward pass that computes only the gradients of the layers' OUTPUTS (`tape`).
From a layer's input and output gradient follow its per-sample gradients (`rules`), which are never
all formed where that costs more than a way around (`ParameterGradient`). Which way is taken
changes a number by rounding only.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor, nn

from zdp_bench.gradients.clipping import (
    Batch,
    ClippedSum,
    Loss,
    all_finite,
    clip_factors,
    flushed,
    groups,
)
from zdp_bench.gradients.layer_gradient import GPU_TIMES, LayerGradient, ParameterGradient
from zdp_bench.gradients.parts import leaves_of, map_leaves
from zdp_bench.gradients.program import Program
from zdp_bench.gradients.program.uses import rows
from zdp_bench.gradients.rules import NoRule, Rule, any_layer, rule_of
from zdp_bench.gradients.shares import Shares, average_shares, select
from zdp_bench.gradients.tape import Call, Layer, layers_of, run_forward

# Per-sample gradients are kept where they take less than the activations they replace; else up to
# this many bytes in all, or half of what the layers' inputs take (by then backward has freed as
# much), or what the parameters take.
KEEP_BYTES = 64 * 2**20


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    bound: float,
    *,
    per_layer: bool = False,
    gamma: float | None = None,
    complex_scale: float = 1.0,
    rules: Mapping[nn.Module, Rule] = MappingProxyType({}),
    shares: Shares | None = None,
    into: dict[str, Tensor] | None = None,
    program: Program | None = None,
) -> ClippedSum:
    """Return Σᵢ clip(gᵢ) as `gradients.clipped_sum`.

    Args:
        program: what is run in place of the model's own forward function.
        rules: for some layers, a rule in place of their own. What it returns for their weight need
            not be the gradient, nor have its shape: a spectrum. Such sums come as they are, and
            none where no example moves the loss.

    Raises:
        NoRule: a layer, or the way it is called, is beyond this engine.
    """
    inputs, targets = batch
    layers = layers_of(model)
    total = {} if into is None else into
    if len(inputs):
        gradients = _differentiate(model, loss, batch, layers, rules, shares, program)
    else:
        gradients = _collect(layers)
    count = len(inputs) if shares is None else len(shares)
    of_other_shape = {id(layer.weight) for layer in rules}
    together = groups(model, bound, per_layer) if per_layer else [([*gradients], bound)]

    with torch.no_grad(), _full_precision(inputs.device):
        zeros = torch.zeros(count, dtype=torch.float64, device=inputs.device)
        norms = torch.stack(
            [_norms(zeros, gradients, names, complex_scale) for names, _ in together]
        )
        if all_finite(norms):
            for (names, group_bound), own_norms in zip(together, norms, strict=True):
                factors = clip_factors(own_norms, group_bound, gamma)
                for name in names:
                    gradient = gradients.pop(name)  # what it keeps is freed once it is summed
                    shaped = id(gradient.parameter) not in of_other_shape
                    gradient.add_to(total, name, factors, complex_scale, shaped)
            return ClippedSum(total, norms.T if per_layer else norms[0])
    del gradients
    # A factor of 0 does not take an example out whose gradient is not finite: 0 · NaN is NaN.
    whole = torch.isfinite(norms).all(dim=0)
    if shares is not None:
        whole, shares = select(shares, whole)
    rest = clipped_sum(
        model,
        loss,
        (inputs[whole], targets[whole]),
        bound,
        per_layer=per_layer,
        gamma=gamma,
        complex_scale=complex_scale,
        rules=rules,
        shares=shares,
        into=into,
        program=program,
    )
    return ClippedSum(rest.sums, norms.T if per_layer else norms[0])


def _norms(
    zeros: Tensor,
    gradients: dict[str, ParameterGradient],
    names: list[str],
    complex_scale: float,
) -> Tensor:
    """Return the norms over these parameters, as `zeros` [B]; 0 where no example moves the loss."""
    own = [gradients[name] for name in names]
    squares = [
        gradient.scaled_squares(complex_scale)
        for gradient in own
        if gradient.weighted_sum is not None
    ]
    if not squares:
        return zeros
    return torch.stack(squares).sum(dim=0).sqrt_()


def without_rule(model: nn.Module) -> list[str]:
    """Return the names of the layers that hold trainable parameters but have no rule."""
    return [layer.name for layer in layers_of(model) if rule_of(layer.module) is None]


def _collect(layers: list[Layer]) -> dict[str, ParameterGradient]:
    """Return what `clipping.trainable` finds, under the same names."""
    gradients: dict[str, ParameterGradient] = {}
    seen: set[int] = set()
    for layer_name, _, own in layers:
        for own_name, parameter in own.items():
            if id(parameter) in seen:  # a shared one has its first name
                continue
            seen.add(id(parameter))
            name = f"{layer_name}.{own_name}" if layer_name else own_name
            gradients[name] = ParameterGradient(parameter)
    return gradients


def _differentiate(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    layers: list[Layer],
    rules: Mapping[nn.Module, Rule],
    shares: Shares | None,
    program: Program | None,
) -> dict[str, ParameterGradient]:
    """Run forward and backward, and measure every parameter's per-sample gradients."""
    inputs, _ = batch
    tape = run_forward(model, layers, loss, batch, program, rules.keys())
    gradients = _collect(layers)
    of_parameter = {id(gradient.parameter): gradient for gradient in gradients.values()}
    for call in tape.calls:
        for parameter in call.layer.parameters.values():
            of_parameter[id(parameter)].pending_calls += 1
    parameters = [gradient.parameter for gradient in gradients.values()]
    input_bytes = sum(call.input.nbytes for call in tape.calls)
    parameter_bytes = sum(parameter.nbytes for parameter in parameters)
    keep_bytes = KEEP_BYTES * (GPU_TIMES if inputs.device.type == "cuda" else 1)
    budget = max(keep_bytes, input_bytes // 2, parameter_bytes)
    full_precision = _full_precision(inputs.device)
    count = len(inputs) if shares is None else len(shares)

    def consume(call: Call, g: Tensor) -> None:
        nonlocal budget
        with full_precision:  # backward records no graph of its own
            layer = call.layer
            x, g = _examples_first(call, g, len(inputs))
            x, g = _promote(x, g, next(iter(layer.parameters.values())))
            of_layer = _apply_rule(call, x, g, rules, shares)
            for name, parameter in layer.parameters.items():
                if name not in of_layer:
                    raise NoRule(
                        f"layer '{layer.name}', whose parameter '{name}' its rule does not know"
                    )
                gradient = of_parameter[id(parameter)]
                gradient.calls.append(of_layer[name])
                gradient.pending_calls -= 1
                if gradient.pending_calls == 0:
                    budget -= gradient.measure(count, x.nbytes + g.nbytes, budget)
        del call.input

    tape.play_back(parameters, consume)
    with torch.no_grad(), full_precision:
        for gradient in gradients.values():
            if gradient.calls:  # other calls of this parameter did not move the loss
                gradient.measure(count, 0, budget)
    return gradients


def _examples_first(
    call: Call,
    g: Tensor,
    examples: int,
) -> tuple[Tensor, Tensor]:
    """Return input and output gradient [B, ...], wherever an operation has its examples."""
    if call.places is None:
        return call.input, g
    input_places, output_place = call.places
    places = iter(input_places)
    x = map_leaves(lambda leaf: rows(leaf, next(places), examples), call.input)
    return x, rows(g, output_place, examples)


def _apply_rule(
    call: Call,
    x: Tensor,
    g: Tensor,
    rules: Mapping[nn.Module, Rule],
    shares: Shares | None,
) -> dict[str, LayerGradient]:
    layer = call.layer
    rule = rules.get(layer.module) or call.rule or rule_of(layer.module) or any_layer
    try:
        if shares is None:
            return rule(layer.module, x, g)
        g = flushed(g.resolve_conj())  # as `average_shares` needs it
        return average_shares(lambda share: rule(layer.module, x[share], g[share]), shares)
    except NoRule as error:
        raise NoRule(f"layer '{layer.name}': {error}") from None


def _full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast; entering torch's own takes as long as a small norm."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


_FULL = {torch.float32, torch.float64, torch.complex64, torch.complex128}


def _promote(
    x: Tensor,
    g: Tensor,
    parameter: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return both in the parameter's precision, float32 at least: autocast makes both half."""
    dtypes = {g.dtype, *(leaf.dtype for leaf in leaves_of(x))}
    if dtypes == {parameter.dtype} <= _FULL:
        return x, g
    real = torch.promote_types(parameter.dtype.to_real(), torch.float32)

    def promote(numbers: Tensor) -> Tensor:
        if not (numbers.is_floating_point() or numbers.is_complex()):
            return numbers  # an index
        is_complex = numbers.is_complex() or parameter.is_complex()
        return numbers.to(real.to_complex() if is_complex else real)

    return map_leaves(promote, x), promote(g)
