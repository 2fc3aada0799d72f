"""Which engine serves which model, and what fast must notice or leave as it was."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gradients.harness import OwnScale, loss
from tests.gradients.test_harness import norm
from tests.modules import Made
from zdp_bench.errors import UserError
from zdp_bench.gradients import Engine, clipped_sum, fast, layer_gradient, reference, rules, tape
from zdp_bench.gradients.program import uses
from zdp_bench.gradients.rules import NoRule, convolution
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.nn.convolution import ComplexConv2d

ENGINES: tuple[Engine, ...] = ("fast", "reference")
INPUTS, TARGETS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(4)


def test_a_layer_is_measured_before_backward_reaches_the_layer_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the activations of all layers would be held to the end."""
    order: list[str] = []
    apply_rule, measure = fast._apply_rule, layer_gradient.ParameterGradient.measure

    def apply_and_note(call: Any, *arguments: Any) -> Any:
        order.append(call.layer.name)
        return apply_rule(call, *arguments)

    def measure_and_note(gradient: Any, *arguments: Any) -> int:
        order.append("measure")
        return measure(gradient, *arguments)

    monkeypatch.setattr(fast, "_apply_rule", apply_and_note)
    monkeypatch.setattr(layer_gradient.ParameterGradient, "measure", measure_and_note)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    fast.clipped_sum(model, loss, (INPUTS, TARGETS), 1.0)
    assert order == ["2", "measure", "measure", "0", "measure", "measure"]


@pytest.fixture(params=[0, 2**30], ids=["as they come", "at once"])
def output_gradients(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which the tape hands them on: as backward meets them, and all at its end."""
    monkeypatch.setattr(tape, "MAX_DEFERRED_BYTES", request.param)


def elsewhere() -> nn.Module:
    """Uses its layer's weight once more, outside of the layer."""
    return Made(lambda net, x: F.linear(net.layer(x), net.layer.weight), layer=nn.Linear(3, 3))


def folds_positions() -> nn.Module:
    """Its layer sees positions as if they were examples."""
    return Made(lambda net, x: net.layer(x.reshape(-1, 1)).view(len(x), -1), layer=nn.Linear(1, 2))


def changes_an_input() -> nn.Module:
    """Changes in place what its layer has read."""

    def function(net: Any, x: Tensor) -> Tensor:
        between = net.first(x) * 1.0
        y = net.second(between)
        between.mul_(2)
        return y

    return Made(function, first=nn.Linear(3, 3), second=nn.Linear(3, 3))


def pairs_products() -> nn.Module:
    """A weight that is multiplied in place."""

    def function(net: Any, x: Tensor) -> Tensor:
        return net.layer(x).mul_(net.scale)

    return Made(function, layer=nn.Linear(3, 3), scale=nn.Parameter(torch.full((3,), 1.5)))


@pytest.mark.usefixtures("output_gradients")
def test_what_fast_cannot_serve_goes_to_the_reference_and_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = pairs_products()
    monkeypatch.setattr(uses, "MAX_BYTES", 0)  # of the per-example gradients of its product
    with pytest.raises(UserError, match=r"algorithm\.gradients=fast"):
        clipped_sum(module, loss, (INPUTS, TARGETS), 1.0, engine="fast")
    with caplog.at_level(logging.INFO):
        ours = clipped_sum(module, loss, (INPUTS, TARGETS), 1.0)
        clipped_sum(module, loss, (INPUTS, TARGETS), 1.0)
    assert len([record for record in caplog.records if "zdp_bench" in record.name]) == 1
    theirs = reference.clipped_sum(module, loss, (INPUTS, TARGETS), 1.0)
    torch.testing.assert_close(ours.sums, theirs.sums)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_memory_that_ran_out_does_not_mean_that_no_rule_supports_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference engine served the model from then on, although smaller batches fit."""

    def raise_no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(rules, "map_rows", raise_no_room)
    monkeypatch.setattr(uses, "map_rows", raise_no_room)
    with pytest.raises(torch.OutOfMemoryError):
        fast.clipped_sum(nn.Sequential(OwnScale()), loss, (INPUTS, TARGETS), 1.0)
    fill = nn.Parameter(torch.zeros(()))
    model = Made(lambda net, x: x.masked_fill(x > 0, net.fill), fill=fill)
    with pytest.raises(torch.OutOfMemoryError):
        clipped_sum(model, loss, (INPUTS, TARGETS), 1.0)


@pytest.mark.usefixtures("output_gradients")
@pytest.mark.parametrize("model", [elsewhere, folds_positions], ids=lambda m: m.__name__)
def test_layers_by_themselves_are_too_little_for_a_model_and_its_program_is_not(
    model: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    module = model()
    with pytest.raises(NoRule):
        fast.clipped_sum(module, loss, (INPUTS, TARGETS), 1.0)
    ours = clipped_sum(module, loss, (INPUTS, TARGETS), 1.0, engine="fast")
    theirs = reference.clipped_sum(module, loss, (INPUTS, TARGETS), 1.0)
    torch.testing.assert_close(ours.sums, theirs.sums)


def test_time_first_with_as_many_steps_as_examples_is_right() -> None:
    """Its first dimension is time, [B, T, 2]."""
    torch.manual_seed(0)
    turned = lambda net, x: net.layer(x.transpose(0, 1)).transpose(0, 1)  # noqa: E731
    model, batch = Made(turned, layer=nn.Linear(2, 2)), (torch.randn(4, 4, 2), torch.zeros(4))
    theirs = reference.clipped_sum(model, loss, batch, 0.1)
    by_layers = fast.clipped_sum(model, loss, batch, 0.1)
    assert not torch.allclose(by_layers.norms, theirs.norms, rtol=0.05)  # the trap is real
    ours = clipped_sum(model, loss, batch, 0.1, engine="fast")
    torch.testing.assert_close(ours.norms, theirs.norms, rtol=1e-5, atol=0.0)


def test_a_model_with_dropout_is_served_and_its_random_numbers_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    torch.manual_seed(5)
    fast_alone = fast.clipped_sum(model, loss, (INPUTS, TARGETS), 0.1)
    torch.manual_seed(5)
    checked = clipped_sum(model, loss, (INPUTS, TARGETS), 0.1)
    assert torch.equal(checked.norms, fast_alone.norms)


@pytest.mark.usefixtures("output_gradients")
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Made(lambda net, x: net.both(x, x), both=nn.Bilinear(3, 3, 2)), "not called on one"),
        (changes_an_input(), "changed in place"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "batch norm"),
    ],
)
def test_fast_refuses(model: nn.Module, reason: str) -> None:
    with pytest.raises(NoRule, match=reason):
        fast.clipped_sum(model, loss, (INPUTS, TARGETS), 1.0)


def test_gradients_formed_for_their_norm_only_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 40, 3), nn.Tanh(), nn.Conv2d(40, 60, 3))
    batch = torch.randn(3, 2, 6, 6), torch.zeros(3)
    kept = fast.clipped_sum(model, loss, batch, 0.01)
    monkeypatch.setattr(fast, "KEEP_BYTES", 0)
    monkeypatch.setattr(layer_gradient, "FORM_BYTES", 0)
    formed = fast.clipped_sum(model, loss, batch, 0.01)
    torch.testing.assert_close(formed.norms, kept.norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(formed.sums, kept.sums, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize(
    ("freed", "budget", "is_kept", "is_spent"),  # bytes beyond those of the gradients
    [(0, -9, True, False), (9, -9, True, False), (-1, 0, True, True), (-1, -1, False, False)],
)
def test_gradients_are_kept_where_they_fit_and_spend_what_nothing_else_frees(
    num_calls: int, freed: int, budget: int, is_kept: bool, is_spent: bool
) -> None:
    gradients = torch.ones(5, 2, 3)
    call = layer_gradient.LayerGradient(
        lambda start, stop: gradients[start:stop],
        lambda factors: layer_gradient.contract(gradients, factors),
        summands=lambda: layer_gradient.Summands(torch.ones(5, dtype=torch.float64), 1),
    )
    parameter = nn.Parameter(torch.zeros(2, 3))
    gradient = layer_gradient.ParameterGradient(parameter, calls=[call] * num_calls)
    num_bytes = gradients.nbytes * num_calls
    spent = gradient.measure(5, num_bytes + freed, num_bytes + budget)
    assert (gradient.kept is not None) == is_kept
    assert spent == (num_bytes if is_spent else 0)
    assert gradient.squared_norms is not None
    squares = torch.full((5,), 6.0 * num_calls**2, dtype=torch.float64)
    torch.testing.assert_close(gradient.squared_norms, squares, rtol=1e-3, atol=0)


@pytest.mark.usefixtures("output_gradients")
@pytest.mark.parametrize("features", [3, 4], ids=["in its second layer", "in its third"])
def test_a_model_that_fails_is_left_as_it_was(features: int) -> None:
    model = nn.Sequential(nn.Linear(3, features), nn.Linear(4, 4), nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fast.clipped_sum(model, loss, (INPUTS, TARGETS), 1.0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("forward" in vars(layer) for layer in model)


@pytest.mark.usefixtures("output_gradients")
@pytest.mark.parametrize("broken", [False, True])
def test_a_step_leaves_nothing_in_memory(broken: bool) -> None:
    """The garbage collector finds no cycle of autograd's graph and hooks: none may be left."""
    seen: SimpleQueue[weakref.ref[Tensor]] = SimpleQueue()

    def watched(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = loss(outputs, targets)
        for tensor in (outputs, losses):
            seen.put(weakref.ref(tensor))
        return losses

    whole = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    gc.freeze()  # what others left need not be looked through
    with pytest.raises(NoRule) if broken else nullcontext():
        model = changes_an_input() if broken else whole
        fast.clipped_sum(model, watched, (INPUTS, TARGETS), 1.0)
    gc.collect()
    gc.unfreeze()
    assert seen.qsize() == 2
    assert seen.get()() is None
    assert seen.get()() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_columns_and_patches_are_built_for_a_few_examples_at_a_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "COLUMN_BYTES", 1)
    monkeypatch.setattr(convolution, "PATCH_BYTES", 1)
    monkeypatch.setattr(fast, "KEEP_BYTES", 0)
    torch.manual_seed(0)
    layer: type[nn.Module] = ComplexConv2d if dtype.is_complex else nn.Conv2d

    def power(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.abs().square().flatten(1).sum(dim=1)

    for inputs, outputs, groups in ((2, 40, 1), (2, 40, 2), (16, 2, 1)):
        model = layer(inputs, outputs, 3, groups=groups, dtype=dtype)
        x = torch.randn(3, inputs, 12, 12, dtype=dtype).to(memory_format=torch.channels_last)
        ours, theirs = (
            clipped_sum(model, power, (x, torch.zeros(3)), 1.0, engine=engine)
            for engine in ("fast", "reference")
        )
        torch.testing.assert_close(ours.norms, theirs.norms)
        torch.testing.assert_close(ours.sums, theirs.sums)


def test_a_layer_keeps_a_forward_function_of_its_own() -> None:
    """As another library may have put it there."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    own = lambda x: nn.functional.linear(x, model[0].weight, model[0].bias)  # noqa: E731
    model[0].forward = own  # type: ignore[method-assign]
    ours, theirs = (
        engine.clipped_sum(model, loss, (INPUTS, TARGETS), 1.0).sums for engine in (fast, reference)
    )
    torch.testing.assert_close(ours, theirs)
    assert vars(model[0])["forward"] is own
    assert "forward" not in vars(model[1])


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("per_layer", [False, True], ids=["flat", "per layer"])
@pytest.mark.parametrize("broken", [False, True], ids=["finite", "one example is not"])
def test_examples_added_a_few_at_a_time_are_the_sum_of_them_all(
    engine: Engine, per_layer: bool, broken: bool
) -> None:
    """Each is added in place; one that is not finite adds nothing."""
    torch.manual_seed(0)
    layers = ((3, 16, 3, 1, 1), (16, 16, 3, 1, 1), (16, 2, 2))
    model = nn.Sequential(*(ComplexConv2d(*of) for of in layers))
    inputs, targets = torch.randn(4, 3, 9, 10, dtype=torch.complex64), torch.zeros(4)
    if broken:
        inputs[2, 0, 0, 0] = torch.nan
    how: dict[str, Any] = {"per_layer": per_layer, "complex_scale": 0.5, "engine": engine}
    whole = clipped_sum(model, loss, (inputs, targets), 0.5, **how)
    total: dict[str, Tensor] = {}
    norms = []
    sizes = [1, 1, 2]  # a single one is added without a pass over memory of its own
    for few in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        held = {name: value.data_ptr() for name, value in total.items()}
        clipped = clipped_sum(model, loss, few, 0.5, **how, into=total)
        assert clipped.sums is total
        assert not norms or {name: value.data_ptr() for name, value in total.items()} == held
        norms.append(clipped.norms)
    assert torch.allclose(torch.cat(norms), whole.norms, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(total, whole.sums, rtol=1e-5, atol=1e-6)
    assert norm(total) > 0.5  # some were clipped, none cancel


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_scale_of_complex_gradients_is_one_of_their_norms(engine: Engine) -> None:
    torch.manual_seed(0)
    model = ComplexConv2d(3, 4, 3)
    batch = torch.randn(4, 3, 9, 10, dtype=torch.complex64), torch.zeros(4)
    whole, scaled = (
        clipped_sum(model, loss, batch, 1e6, complex_scale=scale, engine=engine)
        for scale in (1.0, 0.3)
    )
    torch.testing.assert_close(scaled.norms, 0.3 * whole.norms)
    expected = {name: 0.3 * value for name, value in whole.sums.items()}
    torch.testing.assert_close(scaled.sums, expected)


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_parameter_that_does_not_move_the_loss_has_a_plain_zero(engine: Engine) -> None:
    """Plain, so that other sums can be added in place."""
    idles = lambda net, x: net.used(x) + 0 * net.idle(x.detach()).detach()  # noqa: E731
    model = Made(idles, used=nn.Linear(3, 2), idle=nn.Linear(3, 2))
    for count in (4, 1, 0):
        batch = INPUTS[:count], TARGETS[:count]
        sums = clipped_sum(model, loss, batch, 1.0, engine=engine).sums
        assert not any(value.requires_grad for value in sums.values())
        assert norm({name: sums[name] for name in ("idle.weight", "idle.bias")}) == 0


def test_a_layer_counts_by_those_of_its_calls_that_move_the_loss() -> None:
    calls = lambda net, x: net.layer(x) + 0 * net.layer(2 * x).detach()  # noqa: E731
    model = Made(calls, layer=nn.Linear(3, 2))
    clipped, expected = (
        clipped_sum(model, loss, (INPUTS, TARGETS), 0.1, engine=engine) for engine in ENGINES
    )
    torch.testing.assert_close(clipped.sums, expected.sums)
    assert norm(clipped.sums) > 0.1


def test_an_example_has_the_same_random_numbers_in_each_of_its_passes() -> None:
    """Else a model with dropout would be taken for one that remembers other examples."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))
    gradients = reference.differentiate_in_loop(model, loss, (INPUTS, TARGETS))
    assert gradients["1.weight"].shape == (4, 2, 3)


@pytest.mark.parametrize(("slope", "value"), [(1e20, 1.34e25), (1e3, 1e30)])
@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_an_example_stays_bounded_where_float32_cannot_hold_its_factor(
    engine: Engine, slope: float, value: float
) -> None:
    """Norms are float64: C/‖g‖ may be 1e-45, of which float32 holds whole multiples only."""

    def steep(outputs: Tensor, _: Tensor) -> Tensor:
        return slope * outputs.squeeze(1)

    batch = torch.full((1, 1), value), torch.zeros(1)
    clipped = clipped_sum(nn.Linear(1, 1, bias=False), steep, batch, 1.0, engine=engine)
    assert norm(clipped.sums) <= 1.0


@pytest.mark.parametrize("bound", [1.0, 1e-2, 2.3e-4])
def test_an_example_at_the_edge_of_float32_keeps_its_bound(bound: float) -> None:
    """Its scaled gradient is denormal and could be rounded upwards, then multiplied by 10³⁸."""

    def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).sum(dim=1)

    model = nn.Linear(1000, 1000)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    batch = torch.full((1, 1000), 3e38), torch.full((1, 1000), 1e-9)
    for engine in ("fast", "reference"):
        assert norm(clipped_sum(model, weighted, batch, bound, engine=engine).sums) <= bound


@pytest.mark.parametrize("value", [2.64e-23, 5.7e-22])
@pytest.mark.parametrize("block", [1, 8])
def test_a_circulant_layer_stays_bounded_where_squares_of_its_spectrum_underflow(
    value: float, block: int
) -> None:
    def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.squeeze(1) - targets) ** 2 / 2

    layer = CirculantLinear(10_000, 1, block, bias=False)
    torch.nn.init.zeros_(layer.weight)
    inputs = torch.zeros(1, 10_000)
    inputs[:, ::block] = value
    batch = inputs, torch.full((1,), 1.8e19)
    for bound in (1e-3, 1e-2):
        assert norm(clipped_sum(layer, half_square, batch, bound, engine="fast").sums) <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_whose_sums_would_be_rounded_past_the_bound_are_refused(
    dtype: torch.dtype,
) -> None:
    model = nn.Linear(3, 2).to(dtype)
    with pytest.raises(UserError, match="'weight' is of torch"):
        clipped_sum(model, loss, (torch.zeros(2, 3, dtype=dtype), torch.zeros(2)), 1.0)


def test_the_gradient_of_an_addition_is_scaled_by_the_conjugate() -> None:
    """Its sign was reversed for an imaginary scale, so that training went uphill."""
    weight = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    model = Made(lambda net, x: torch.add(x, net.w, alpha=1j), w=nn.Parameter(weight))
    batch = INPUTS.to(torch.complex64), TARGETS

    def modulus(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.abs().sum(dim=1) - targets) ** 2

    clipped = {engine: clipped_sum(model, modulus, batch, 1.0, engine=engine) for engine in ENGINES}
    torch.testing.assert_close(clipped["fast"].sums, clipped["reference"].sums)


def test_a_prelu_of_one_number_per_example_has_a_rule() -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0), nn.PReLU())
    batch = INPUTS, TARGETS

    def square(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) ** 2

    clipped = {engine: clipped_sum(model, square, batch, 1.0, engine=engine) for engine in ENGINES}
    torch.testing.assert_close(clipped["fast"].sums, clipped["reference"].sums)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_example_of_which_one_layer_is_not_finite_contributes_nothing(
    engine: Engine, per_layer: bool
) -> None:
    def logistic(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.squeeze(1).sigmoid()

    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(parameter.dim() == 2))
    batch = torch.tensor([[-math.inf]]), torch.ones(1)
    clipped = clipped_sum(model, logistic, batch, 1.0, engine=engine, per_layer=per_layer)
    assert norm(clipped.sums) == 0


def test_a_device_without_autocast_is_not_asked_for_it() -> None:
    """torch raises an error if it is."""
    assert isinstance(fast._full_precision(torch.device("meta")), nullcontext)
