"""The fast engine: book-keeping (Bu et al. 2023, "Differentially private optimization on large
model at small cost").

It runs one forward and one backward pass, which computes only the gradients of the layers' OUTPUTS
(`tape`). A layer's per-sample gradients follow from its input and its output gradient (`rules`).
They are only formed if that costs less than the alternatives (`ParameterGradient`). The choice
affects the result by rounding only.
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
    flush_subnormals,
    groups,
)
from zdp_bench.gradients.layer_gradient import GPU_SCALE, LayerGradient, ParameterGradient
from zdp_bench.gradients.parts import map_leaves
from zdp_bench.gradients.program import Program
from zdp_bench.gradients.program.uses import move_examples_first
from zdp_bench.gradients.rules import NoRule, Rule, any_layer, rule_of
from zdp_bench.gradients.shares import Shares, average_shares, select
from zdp_bench.gradients.tape import Call, Layer, layers_of, run_forward

# Memory for per-sample gradients that are kept although they take more than the activations they
# replace, in all. The limit rises to half the size of the layers' inputs (the backward pass has
# freed as much by then), or to the size of the parameters.
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
    """Return Σᵢ clip(gᵢ), as `gradients.clipped_sum` does. Other arguments are as there.

    Args:
        rules: for some layers, a rule that replaces their own. What it returns for the weight may
            be another quantity than the gradient, of another shape, such as a spectrum. The sums
            then have that shape, and one is missing if no example's loss depends on the weight.
        program: the program that runs instead of the model's own forward function.

    Raises:
        NoRule: this engine does not support a layer, or the way it is called.
    """
    inputs, targets = batch
    layers = layers_of(model)
    total = {} if into is None else into
    if len(inputs):
        gradients = _differentiate(model, loss, batch, layers, rules, shares, program)
    else:
        gradients = _collect(layers)
    count = len(inputs) if shares is None else len(shares)
    weights_with_rules = {id(layer.weight) for layer in rules}
    clip_groups = groups(model, bound, per_layer) if per_layer else [([*gradients], bound)]

    with torch.no_grad(), _full_precision(inputs.device):
        zeros = torch.zeros(count, dtype=torch.float64, device=inputs.device)
        norms = torch.stack(
            [_norms(zeros, gradients, names, complex_scale) for names, _ in clip_groups]
        )
        if all_finite(norms):
            for (names, group_bound), group_norms in zip(clip_groups, norms, strict=True):
                factors = clip_factors(group_norms, group_bound, gamma)
                for name in names:
                    gradient = gradients.pop(name)  # frees kept gradients once they are summed
                    like_parameter = id(gradient.parameter) not in weights_with_rules
                    gradient.add_to(total, name, factors, complex_scale, like_parameter)
            return ClippedSum(total, norms.T if per_layer else norms[0])
    del gradients
    # A factor of 0 does not remove an example whose gradient is not finite, because 0 · NaN is NaN.
    # The batch is therefore computed again without such examples.
    is_finite = torch.isfinite(norms).all(dim=0)
    if shares is not None:
        is_finite, shares = select(shares, is_finite)
    finite_examples = clipped_sum(
        model,
        loss,
        (inputs[is_finite], targets[is_finite]),
        bound,
        per_layer=per_layer,
        gamma=gamma,
        complex_scale=complex_scale,
        rules=rules,
        shares=shares,
        into=into,
        program=program,
    )
    return ClippedSum(finite_examples.sums, norms.T if per_layer else norms[0])


def _norms(
    zeros: Tensor,
    gradients: dict[str, ParameterGradient],
    names: list[str],
    complex_scale: float,
) -> Tensor:
    """Return the norm of each example over the named parameters, like `zeros` [B].

    The norms are 0 if no example's loss depends on these parameters.
    """
    group = [gradients[name] for name in names]
    squares = [
        gradient.scaled_squares(complex_scale)
        for gradient in group
        if gradient.weighted_sum is not None
    ]
    if not squares:
        return zeros
    return torch.stack(squares).sum(dim=0).sqrt_()


def without_rule(model: nn.Module) -> list[str]:
    """Return the names of the layers that hold trainable parameters but have no rule."""
    return [layer.name for layer in layers_of(model) if rule_of(layer.module) is None]


def _collect(layers: list[Layer]) -> dict[str, ParameterGradient]:
    """Return an empty `ParameterGradient` for each trainable parameter, by name."""
    gradients: dict[str, ParameterGradient] = {}
    seen: set[int] = set()
    for layer_name, _, parameters in layers:
        for parameter_name, parameter in parameters.items():
            if id(parameter) in seen:  # a tied parameter has its first name
                continue
            seen.add(id(parameter))
            name = f"{layer_name}.{parameter_name}" if layer_name else parameter_name
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
    """Run the forward and backward pass, and measure each parameter's per-sample gradients."""
    inputs, _ = batch
    tape = run_forward(model, layers, loss, batch, program, rules.keys())
    gradients = _collect(layers)
    gradient_by_id = {id(gradient.parameter): gradient for gradient in gradients.values()}
    for call in tape.calls:
        for parameter in call.layer.parameters.values():
            gradient_by_id[id(parameter)].pending_calls += 1
    parameters = [gradient.parameter for gradient in gradients.values()]
    input_bytes = sum(call.input.nbytes for call in tape.calls)
    parameter_bytes = sum(parameter.nbytes for parameter in parameters)
    keep_bytes = KEEP_BYTES * (GPU_SCALE if inputs.device.type == "cuda" else 1)
    budget = max(keep_bytes, input_bytes // 2, parameter_bytes)
    full_precision = _full_precision(inputs.device)
    count = len(inputs) if shares is None else len(shares)

    def consume(call: Call, g: Tensor) -> None:
        nonlocal budget
        with full_precision:  # no_grad is not needed: autograd records nothing in a backward pass
            layer = call.layer
            x, g = _examples_first(call, g, len(inputs))
            x, g = _promote(x, g, next(iter(layer.parameters.values())))
            layer_gradients = _apply_rule(call, x, g, rules, shares)
            for name, parameter in layer.parameters.items():
                if name not in layer_gradients:
                    raise NoRule(
                        f"layer '{layer.name}', whose rule does not support its parameter '{name}'"
                    )
                gradient = gradient_by_id[id(parameter)]
                gradient.calls.append(layer_gradients[name])
                gradient.pending_calls -= 1
                if gradient.pending_calls == 0:
                    freed_bytes = x.nbytes + g.nbytes
                    budget -= gradient.measure(count, freed_bytes, budget)
        del call.input

    tape.play_back(parameters, consume)
    with torch.no_grad(), full_precision:
        for gradient in gradients.values():
            if gradient.calls:  # the loss does not depend on this parameter's other calls
                gradient.measure(count, 0, budget)
    return gradients


def _examples_first(
    call: Call,
    g: Tensor,
    examples: int,
) -> tuple[Tensor, Tensor]:
    """Return the input and output gradient with the dimension of the examples first, [B, ...]."""
    if call.places is None:
        return call.input, g
    input_places, output_place = call.places
    places = iter(input_places)
    x = map_leaves(lambda leaf: move_examples_first(leaf, next(places), examples), call.input)
    return x, move_examples_first(g, output_place, examples)


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
        g = flush_subnormals(g.resolve_conj())  # `average_shares` requires it
        return average_shares(
            lambda share: rule(layer.module, x[share], g[share]), shares, g.device
        )
    except NoRule as error:
        raise NoRule(f"layer '{layer.name}': {error}") from None


def _full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast is disabled, and a null context if it already is.

    Entering torch's context takes as long as computing a small norm.
    """
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _promote(
    x: Tensor,
    g: Tensor,
    parameter: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return x and g in the parameter's precision, or float32 if that is higher.

    With autocast, both have half precision.
    """
    real = torch.promote_types(parameter.dtype.to_real(), torch.float32)

    def promote(numbers: Tensor) -> Tensor:
        if not (numbers.is_floating_point() or numbers.is_complex()):
            return numbers  # indices
        is_complex = numbers.is_complex() or parameter.is_complex()
        return numbers.to(real.to_complex() if is_complex else real)

    return map_leaves(promote, x), promote(g)
