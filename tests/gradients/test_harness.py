"""Every layer, activation and model of the zoo, through every check of the fast engine."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.gradients.harness import CASES, Case, loss
from tests.gradients.zoo import MODELS, ZOO
from zdp_bench.gradients import ClippedSum, fast, reference, rules, tape
from zdp_bench.gradients.clipping import groups
from zdp_bench.gradients.layer_gradient import LayerGradient
from zdp_bench.gradients.rules.recurrent import Direction
from zdp_bench.registry import names


def of_cases(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


every_case = of_cases([*CASES, *MODELS])
every_layer = of_cases(CASES)  # what holds of each layer holds of the models made of them
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def norm(sums: dict[str, Tensor]) -> float:
    """‖S‖₂ over all parameters, in float64."""
    parts = [torch.view_as_real(s) if s.is_complex() else s for s in sums.values()]
    return float(sum(part.double().square().sum() for part in parts) ** 0.5)


def assert_same(ours: ClippedSum, theirs: ClippedSum, tolerance: float) -> None:
    """Equal sums, relative to the whole gradient; equal norms, relative to the largest."""
    assert ours.sums.keys() == theirs.sums.keys()
    scale = norm(theirs.sums)
    for name, value in theirs.sums.items():
        assert (ours.sums[name].shape, ours.sums[name].dtype) == (value.shape, value.dtype)
        assert not ours.sums[name].requires_grad
        assert float((ours.sums[name] - value).abs().max()) <= tolerance * scale + 1e-300, name
    assert ours.norms.shape == theirs.norms.shape
    if len(theirs.norms):
        difference = float((ours.norms - theirs.norms).abs().max())
        assert difference <= tolerance * float(theirs.norms.max())


@pytest.mark.parametrize(
    ("case", "dtype"),
    [  # models in one precision: their layers are tried in both
        pytest.param(case, dtype, id=f"{case.name}-{str(dtype).removeprefix('torch.')}")
        for case in (*CASES, *MODELS)
        for dtype in ((torch.float64,) if case in MODELS else TOLERANCE)
    ],
)
def test_fast_is_the_reference(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 2 if case in MODELS else 4
    module, (inputs, targets) = case.module(dtype), case.batch(most, dtype)
    by_torch = reference.per_sample_gradients(module, loss, (inputs, targets), complex_scale=0.5)
    unclipped = reference.clip(by_torch, groups(module, math.inf, per_layer=False))[1]
    bound = float(unclipped.median())  # some examples are clipped, some are not
    others = [(1, False)] if dtype == torch.float32 else [(most, True), (0, True)]
    for count, per_layer in [(most, False), *others]:
        first = {name: g[:count] for name, g in by_torch.items()}
        clipped, norms = reference.clip(first, groups(module, bound, per_layer))
        sums = {name: value.sum(dim=0) for name, value in clipped.items()}
        theirs = ClippedSum(sums, norms if per_layer else norms[:, 0])
        batch, how = (inputs[:count], targets[:count]), {"per_layer": per_layer}
        # Output gradients are consumed during the backward pass, and all at once after it.
        limits = [tape.MAX_DEFERRED_BYTES]
        if count == most and not per_layer:
            limits = [0, 2**30]
        for limit in limits:
            monkeypatch.setattr(tape, "MAX_DEFERRED_BYTES", limit)
            ours = fast.clipped_sum(module, loss, batch, bound, complex_scale=0.5, **how)
            assert_same(ours, theirs, TOLERANCE[dtype])


@of_cases([case for case in (*CASES, *MODELS) if case in MODELS or case.kind == "index"])
def test_hostile_scales_stay_within_the_bound(case: Case) -> None:
    module = case.module(torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= 1000
    inputs, targets = case.batch(4, torch.float32)
    if case.kind != "index":
        scales = torch.tensor([1e-2, 1.0, 30.0, 1e3])
        inputs = inputs * scales.view(-1, *[1] * (inputs.dim() - 1))
    for example in zip(inputs.split(1), targets.split(1), strict=True):
        assert norm(fast.clipped_sum(module, loss, example, 0.5).sums) <= 0.5
    whole = fast.clipped_sum(module, loss, (inputs, targets), 0.5)
    assert norm(whole.sums) <= 0.5 * 4


@every_layer
# torch on its own RMSNorm
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_changes_precision_and_nothing_else(case: Case) -> None:
    module = case.module(torch.float32)
    inputs, targets = case.batch(2, torch.float32)
    plain = fast.clipped_sum(module, loss, (inputs, targets), 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = fast.clipped_sum(module, loss, (inputs, targets), 0.5)
        sums_of_first = fast.clipped_sum(module, loss, (inputs[:1], targets[:1]), 0.5).sums
    assert mixed.norms.dtype == torch.float64
    assert norm(sums_of_first) <= 0.5
    assert all(value.dtype == plain.sums[name].dtype for name, value in mixed.sums.items())
    assert norm({n: mixed.sums[n] - plain.sums[n] for n in plain.sums}) <= 0.25 * 0.5 * 2


@of_cases([case for case in CASES if len(case.shape) == 3])
def test_channels_last(case: Case) -> None:
    module = case.module(torch.float64)
    inputs, targets = case.batch(3, torch.float64)
    plain = fast.clipped_sum(module, loss, (inputs, targets), 0.5)
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    assert_same(fast.clipped_sum(module, loss, (inputs, targets), 0.5), plain, 1e-12)


@of_cases([case for case in CASES if case.kind != "index"])
def test_a_broken_example_contributes_nothing(case: Case) -> None:
    module = case.module(torch.float64)
    inputs, targets = case.batch(3, torch.float64)
    healthy = fast.clipped_sum(module, loss, (inputs[1:], targets[1:]), 0.5)
    inputs[0] = torch.nan
    broken = fast.clipped_sum(module, loss, (inputs, targets), 0.5)
    assert not torch.isfinite(broken.norms[0])
    assert_same(ClippedSum(broken.sums, broken.norms[1:]), healthy, 1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_case
def test_gpu(case: Case) -> None:
    module = case.module(torch.float64).cuda()
    inputs, targets = (part.cuda() for part in case.batch(4, torch.float64))
    ours = fast.clipped_sum(module, loss, (inputs, targets), 0.5)
    assert_same(ours, reference.clipped_sum(module, loss, (inputs, targets), 0.5), 1e-10)


def test_every_model_of_the_zoo_has_an_entry() -> None:
    assert set(ZOO) == set(names("model"))


@of_cases(
    [
        case
        for case in (*CASES, *MODELS)
        if case.kind == "complex" and "large" not in case.name and "ghost" not in case.name
    ]
)
def test_backward_is_the_finite_difference(case: Case) -> None:
    """Of complex modules, in whose backward a conjugate is easily missed; random directions."""
    module: nn.Module = case.module(torch.float64)
    inputs, _ = case.batch(2, torch.float64)
    parameters = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}

    def outputs(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x,))

    arguments = (inputs.requires_grad_(), *parameters.values())
    assert torch.autograd.gradcheck(outputs, arguments, fast_mode=True)


def test_every_layer_with_a_rule_is_a_case() -> None:
    cased = {type(layer) for case in CASES for layer in case.module(torch.float64).modules()}
    assert set(rules._all_rules()) - {Direction} <= cased  # one direction of an LSTM, GRU or RNN


def test_a_rule_gives_norms_or_what_it_adds_up() -> None:
    """Without either, rounding errors of the sum would not be covered by the norms."""
    with pytest.raises(TypeError, match="squared_norms or summands"):
        LayerGradient(lambda start, stop: torch.ones(stop - start), lambda factors: factors)
