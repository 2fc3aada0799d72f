"""The harness: every layer, activation and model of the zoo, through every check of the fast engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.gradients.harness import CASES, ZOO, Case, loss
from zdp_bench.gradients import ClippedSum, fast, reference, tape
from zdp_bench.registry import names

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def size(sums: dict[str, Tensor]) -> float:
    """‖S‖₂ over all parameters, in float64."""
    return (
        sum(
            torch.view_as_real(s).double().square().sum()
            if s.is_complex()
            else s.double().square().sum()
            for s in sums.values()
        )
        ** 0.5
    )  # type: ignore[operator]


def assert_same(ours: ClippedSum, theirs: ClippedSum, tolerance: float) -> None:
    """Equal sums, relative to the whole gradient; equal norms, relative to the largest."""
    assert ours.sums.keys() == theirs.sums.keys()
    scale = float(size(theirs.sums))
    for name, value in theirs.sums.items():
        assert ours.sums[name].shape == value.shape
        assert ours.sums[name].dtype == value.dtype
        assert not ours.sums[name].requires_grad
        assert float((ours.sums[name] - value).abs().max()) <= tolerance * scale + 1e-300, name
    assert ours.norms.shape == theirs.norms.shape
    if len(theirs.norms):
        assert float((ours.norms - theirs.norms).abs().max()) <= tolerance * float(
            theirs.norms.max()
        )


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_fast_is_the_reference(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = case.module(dtype)
    records = case.batch(4, dtype)
    bound = float(
        reference.clipped_sum(module, loss, records, 1.0).norms.median()
    )  # so that some records are clipped, some not
    for per_layer in (False, True):
        for count in (4, 1, 0):
            batch = records[0][:count], records[1][:count]
            theirs = reference.clipped_sum(
                module, loss, batch, bound, per_layer=per_layer, complex_scale=0.5
            )
            for together in (0, 2**30):  # output gradients as they come, and all at once
                monkeypatch.setattr(tape, "TOGETHER", together)
                ours = fast.clipped_sum(
                    module, loss, batch, bound, per_layer=per_layer, complex_scale=0.5
                )
                assert_same(ours, theirs, TOLERANCE[dtype])


@every_case
def test_hostile_scales_stay_within_the_bound(case: Case) -> None:
    module = case.module(torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= 1000
    inputs, targets = case.batch(5, torch.float32)
    if case.kind != "index":
        inputs = inputs * torch.logspace(-2, 3, 5).view(-1, *[1] * (inputs.dim() - 1))
    for i in range(5):
        one = inputs[i : i + 1], targets[i : i + 1]
        contribution = fast.clipped_sum(module, loss, one, 0.5).sums
        assert float(size(contribution)) <= 0.5
    whole = fast.clipped_sum(module, loss, (inputs, targets), 0.5)
    assert float(size(whole.sums)) <= 0.5 * 5


@every_case
def test_no_record_sees_another(case: Case) -> None:
    module = case.module(torch.float64)
    inputs, targets = case.batch(4, torch.float64)
    others, _ = case.batch(4, torch.float64, seed=1)
    others[2] = inputs[2]
    before = fast.clipped_sum(module, loss, (inputs, targets), 0.5).norms[2]
    after = fast.clipped_sum(module, loss, (others, targets), 0.5).norms[2]
    torch.testing.assert_close(after, before, rtol=1e-12, atol=0)


@every_case
def test_unclipped_it_is_pytorchs_own_gradient(case: Case) -> None:
    module = case.module(torch.float64)
    inputs, targets = case.batch(3, torch.float64)
    ours = fast.clipped_sum(module, loss, (inputs, targets), 1e30).sums
    loss(module(inputs), targets).sum().backward()
    largest = max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad == (name in ours)
        if parameter.requires_grad:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-10, atol=1e-12 * largest)


@every_case
def test_micro_batches_add_up(case: Case) -> None:
    module = case.module(torch.float64)
    inputs, targets = case.batch(5, torch.float64)
    whole = fast.clipped_sum(module, loss, (inputs, targets), 0.3)
    parts = [
        fast.clipped_sum(module, loss, (inputs[cut], targets[cut]), 0.3)
        for cut in (slice(0, 2), slice(2, 3), slice(3, 5))
    ]
    summed = {name: sum(part.sums[name] for part in parts) for name in whole.sums}
    assert_same(ClippedSum(summed, torch.cat([part.norms for part in parts])), whole, 1e-12)  # type: ignore[arg-type]


@every_case
def test_twice_a_record_is_twice_its_share(case: Case) -> None:
    module = case.module(torch.float64)
    inputs, targets = case.batch(1, torch.float64)
    one = fast.clipped_sum(module, loss, (inputs, targets), 0.3).sums
    two = fast.clipped_sum(
        module, loss, (torch.cat([inputs] * 2), torch.cat([targets] * 2)), 0.3
    ).sums
    for name, value in one.items():
        torch.testing.assert_close(two[name], 2 * value, rtol=1e-12, atol=1e-12)


@every_case
@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight"
)  # torch on its own RMSNorm
def test_autocast_changes_precision_and_nothing_else(case: Case) -> None:
    module = case.module(torch.float32)
    inputs, targets = case.batch(3, torch.float32)
    plain = fast.clipped_sum(module, loss, (inputs, targets), 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = fast.clipped_sum(module, loss, (inputs, targets), 0.5)
        single = [
            fast.clipped_sum(module, loss, (inputs[i : i + 1], targets[i : i + 1]), 0.5).sums
            for i in range(3)
        ]
    assert mixed.norms.dtype == torch.float64
    assert all(float(size(share)) <= 0.5 for share in single)
    assert all(value.dtype == plain.sums[name].dtype for name, value in mixed.sums.items())
    assert float(size({n: mixed.sums[n] - plain.sums[n] for n in plain.sums})) <= 0.25 * 0.5 * 3


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if len(c.shape) == 3],
    ids=[c.name for c in CASES if len(c.shape) == 3],
)
def test_channels_last(case: Case) -> None:
    module = case.module(torch.float64)
    inputs, targets = case.batch(3, torch.float64)
    plain = fast.clipped_sum(module, loss, (inputs, targets), 0.5)
    last = fast.clipped_sum(
        module, loss, (inputs.contiguous(memory_format=torch.channels_last), targets), 0.5
    )
    assert_same(last, plain, 1e-12)


@every_case
def test_a_broken_record_contributes_nothing(case: Case) -> None:
    if case.kind == "index":
        pytest.skip("an index is never broken")
    module = case.module(torch.float64)
    inputs, targets = case.batch(4, torch.float64)
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


def _differentiable() -> list[Case]:
    return [
        case
        for case in CASES
        if case.kind == "complex" and "large" not in case.name and "ghost" not in case.name
    ]


@pytest.mark.parametrize("case", _differentiable(), ids=[c.name for c in _differentiable()])
def test_backward_is_the_finite_difference(case: Case) -> None:
    """Of complex modules, whose backward is the likeliest to miss a conjugate; along random directions (fast mode)."""
    module: nn.Module = case.module(torch.float64)
    inputs, _ = case.batch(2, torch.float64)
    parameters = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}

    def outputs(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(
        outputs, (inputs.requires_grad_(), *parameters.values()), fast_mode=True
    )
