"""What a model overwrites: each example's gradient is that of the model, in every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

from tests.modules import Made
from zdp_bench.errors import UserError
from zdp_bench.gradients import clipped_sum
from zdp_bench.gradients.program import alone, state_of

Function = Callable[[Any, Tensor], Tensor]
X = torch.randn(4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = torch.zeros(4)
LARGE = 1e9


def loss(outputs: Tensor, _: Tensor) -> Tensor:
    outputs = outputs.flatten(1)
    weights = torch.linspace(0.5, 1.5, outputs.shape[1], dtype=torch.float64)
    return ((outputs + outputs**2) * weights).sum(1)


def model_of(function: Function) -> Any:
    """Return a model whose shift is so small that outputs hardly depend on it, as at its start."""
    torch.manual_seed(0)
    model = Made(
        function,
        layer=nn.Linear(3, 3).double(),
        shift=nn.Parameter(torch.full((3,), 1e-6, dtype=torch.float64)),
        weight=nn.Parameter(torch.randn(3, 3, dtype=torch.float64)),
    )
    return model.train()


def gradients_of(model: nn.Module, inputs: Tensor = X) -> dict[str, Tensor]:
    """Return the sum of each example's own gradients."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    totals = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for row in inputs.split(1):

        def compute_loss(weights: Any, row: Tensor = row) -> Tensor:
            return loss(functional_call(model, weights, (row.clone(),)), TARGETS[:1]).sum()

        for name, gradient in grad(compute_loss)(weights).items():
            totals[name] += gradient
    return totals


# ------------------------------------------------------------------- a result that is its argument


def shift_of(make_alias: Callable[[Tensor], Tensor]) -> Function:
    """Add a parameter in place to what may be the same memory as another tensor."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.layer(x).sin()
        y = make_alias(h)
        y += net.shift
        return h + 2 * y

    return forward


def add_scaled(net: Any, x: Tensor) -> Tensor:
    h = net.layer(x)
    y = F.dropout(h, 0.0)
    y += net.shift * net.layer(x)
    return h + 2 * y


def add_to_other_type(net: Any, x: Tensor) -> Tensor:
    h = net.layer(x).float()
    h += net.shift
    return h.double() * 3


def only_for_one_example(net: Any, x: Tensor) -> Tensor:
    h = net.layer(x)
    y = h.transpose(0, 1).contiguous()  # the same memory if there is one example
    y += net.shift
    return h + 2 * y.transpose(0, 1)


ALIASES: dict[str, Function] = {
    "dropout without chance": shift_of(lambda h: F.dropout(h, 0.0)),
    "dropout in evaluation": shift_of(lambda h: F.dropout(h, 0.3, training=False)),
    "alpha dropout in evaluation": shift_of(lambda h: F.alpha_dropout(h, 0.3, training=False)),
    "a permuting einsum": shift_of(lambda h: torch.einsum("bij->bji", h)),
    "the diagonal by einsum": shift_of(lambda h: torch.einsum("bii->bi", h).unsqueeze(1)),
    "reshape": shift_of(lambda h: h.reshape(h.shape)),
    "contiguous": shift_of(lambda h: h.contiguous()),
    "the same type": shift_of(lambda h: h.to(torch.float64)),
    "detach": shift_of(lambda h: h.detach()),
    "a copy": shift_of(lambda h: h.clone()),
    "scaled": add_scaled,
    "another type": add_to_other_type,
    "only for one example": only_for_one_example,
}

# -------------------------------------------------------------------------- without gradients


def zero_column(net: Any, x: Tensor) -> Tensor:
    h = net.layer(x)
    with torch.no_grad():
        h[..., 0] = 0
    return h.tanh()


def triple(net: Any, x: Tensor) -> Tensor:
    h = net.layer(x) * 1
    with torch.no_grad():
        h.mul_(3)
    return h + net.layer(x)


def clamp(net: Any, x: Tensor) -> Tensor:
    y = net.layer(x)
    with torch.no_grad():
        y.clamp_(-0.1, 0.1)
    return y


def clamp_detached(net: Any, x: Tensor) -> Tensor:
    y = net.layer(x)
    y.detach().clamp_(-0.1, 0.1)
    return y


def mask(net: Any, x: Tensor) -> Tensor:
    h = net.layer(x)
    with torch.no_grad():
        kept = torch.zeros_like(h)
        kept[..., 0] = 1
        kept.add_(h.sign()).mul_(0.5)
    return h * kept


def fill(write: Callable[[Any, Tensor, Tensor], object]) -> Function:
    """Write to new memory in no_grad, and read it with gradients."""

    def forward(net: Any, x: Tensor) -> Tensor:
        kept = torch.zeros_like(x)
        with torch.no_grad():
            write(net, kept, x)
        return kept * net.layer(x)

    return forward


WITHOUT_GRADIENTS: dict[str, Function] = {
    "a slice of outputs": fill(
        lambda net, kept, x: kept[..., :2].copy_(net.layer(x)[..., :2]),
    ),
    "a sum of outputs": fill(lambda net, kept, x: kept.add_(net.layer(x).mT)),
    "a computed weight": fill(lambda net, kept, x: kept[..., 0].add_(net.shift.exp().sum())),
    "a column": zero_column,
    "a product": triple,
    "the output": clamp,
    "through a detached alias": clamp_detached,
    "a mask of its own": mask,
}

# ------------------------------------------------------------------------- computed weights


def overwrite(change: Callable[[Tensor], Any]) -> Function:
    """Overwrite a tensor that is computed from parameters, after its use."""

    def forward(net: Any, x: Tensor) -> Tensor:
        shift = net.shift + 1
        y = x + shift
        change(shift)
        return y * shift

    return forward


def zero_after_use(net: Any, x: Tensor) -> Tensor:
    weight = net.weight + 0
    y = x + weight
    weight.zero_()
    return y + weight


def clamp_before_use(net: Any, x: Tensor) -> Tensor:
    weight = net.weight * 2
    weight.clamp_(-1, 1)
    return F.linear(x, weight)


WEIGHTS: dict[str, Function] = {
    "a product": overwrite(lambda weight: weight.mul_(3)),
    "a sum of weights": overwrite(lambda weight: weight.add_(weight.exp())),
    "an entry": overwrite(lambda weight: weight[:1].mul_(3)),
    "an assignment": overwrite(lambda weight: weight.__setitem__(0, 0.5)),
    "zeros": zero_after_use,
    "before its use": clamp_before_use,
}


def with_gaps(copy: Callable[[Tensor], Tensor]) -> Function:
    """A product in place of a slice, of which `copy` is a copy, because the slice has gaps."""

    def forward(net: Any, x: Tensor) -> Tensor:
        part = net.layer(x)[..., :2]
        part *= 1 + net.shift[:2]
        copied = copy(part)
        copied.clamp_(-4, 4)  # no number of X, but some of 20 X
        return torch.cat((copied.flatten(1), part.flatten(1)), 1)

    return forward


GAPS = {
    "reshape": with_gaps(lambda part: part.reshape(len(part), -1)),
    "flatten": with_gaps(lambda part: part.flatten(1)),
    "contiguous": with_gaps(lambda part: part.contiguous()),
    "transposed": with_gaps(lambda part: part.mT.reshape(len(part), -1)),
}


def add_to_an_out_argument(net: Any, x: Tensor) -> Tensor:
    doubled = x * 2
    result = torch.empty_like(doubled)
    torch.add(doubled, 0, out=result)
    result += net.shift
    return doubled * 3 + result


def clamp_to_an_out_argument(net: Any, x: Tensor) -> Tensor:
    doubled = x * 2
    result = torch.empty_like(doubled)
    torch.clamp(doubled, 0, 1e9, out=result)
    result += net.shift
    return net.layer(doubled) + result


OUT_ARGUMENTS: dict[str, Function] = {
    "add": add_to_an_out_argument,
    "clamp": clamp_to_an_out_argument,
}

CASES = {
    **{f"out: {name}": function for name, function in OUT_ARGUMENTS.items()},
    **{f"alias: {name}": function for name, function in ALIASES.items()},
    **{f"no_grad: {name}": function for name, function in WITHOUT_GRADIENTS.items()},
    **{f"weight: {name}": function for name, function in WEIGHTS.items()},
}


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_each_example_has_the_gradient_of_the_model(name: str, engine: Any) -> None:
    model = model_of(CASES[name])
    expected = gradients_of(model)
    sums = clipped_sum(model, loss, (X, TARGETS), LARGE, engine=engine).sums
    torch.testing.assert_close(sums, expected)


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("name", GAPS)
def test_what_is_a_copy_in_the_model_is_one_in_its_program(name: str, engine: Any) -> None:
    """The product has no gaps, so that it was a view of what it was a copy of in the model."""
    model = model_of(GAPS[name])
    clipped_sum(model, loss, (X, TARGETS), LARGE, engine=engine)  # records and checks the program
    sums = clipped_sum(model, loss, (20 * X, TARGETS), LARGE, engine=engine).sums
    torch.testing.assert_close(sums, gradients_of(model, 20 * X))


def clamp_a_view(net: Any, x: Tensor) -> Tensor:
    net_input = x.flatten(1)  # a view, unless x is channels-last
    net_input.clamp_(-1, 1)
    return net.first(x) + net.second(2 * x)


def clamp_a_copy(net: Any, x: Tensor) -> Tensor:
    last = x.permute(0, 2, 3, 1).contiguous()  # a copy, unless x is channels-last
    last.clamp_(-1, 1)
    return net.first(x) + net.second(last.permute(0, 3, 1, 2))


def clamp_a_view_of_a_map(net: Any, x: Tensor) -> Tensor:
    maps = net.first(x)
    maps.flatten(1).clamp_(-1, 1)
    return maps + net.second(x)


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("function", [clamp_a_view, clamp_a_copy, clamp_a_view_of_a_map])
def test_views_are_those_of_the_recordings_memory_format(function: Function, engine: Any) -> None:
    """Maps of several convolutions are channels-last in a step, where views are other ones."""
    torch.manual_seed(0)
    layers = {name: nn.Conv2d(3, 2, 1).double() for name in ("first", "second")}
    model = Made(function, **layers)
    images = 3 * torch.randn(4, 3, 5, 4, dtype=torch.float64)
    sums = clipped_sum(model, loss, (images.clone(), TARGETS), LARGE, engine=engine).sums
    torch.testing.assert_close(sums, gradients_of(model, images))


def clamp_a_view_of_all(net: Any, x: Tensor) -> Tensor:
    x.transpose(0, 1).reshape(3, -1).clamp_(-1, 1)  # a view if x is channels-last, or has one row
    return net.first(x) + net.second(2 * x)


def clamp_a_view_of_all_maps(net: Any, x: Tensor) -> Tensor:
    maps = net.first(x)
    maps.transpose(0, 1).reshape(2, -1).clamp_(-1, 1)
    return maps + net.second(x)


def clamp_in_channels_last(net: Any, x: Tensor) -> Tensor:
    arranged = x.to(memory_format=torch.channels_last)  # itself, if x is channels-last
    arranged.clamp_(-1, 1)
    return net.first(x) + net.second(2 * arranged)


IN_FORMATS = [
    *(clamp_a_view, clamp_a_copy, clamp_a_view_of_a_map),
    *(clamp_a_view_of_all, clamp_a_view_of_all_maps, clamp_in_channels_last),
]


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("function", IN_FORMATS)
def test_views_are_those_of_the_inputs_own_memory_format(function: Function, engine: Any) -> None:
    """A program that was recorded for one memory format was run on inputs of another."""
    torch.manual_seed(0)
    layers = {name: nn.Conv2d(3, 2, 1).double() for name in ("first", "second")}
    model = Made(function, **layers)
    images = torch.randn(4, 3, 5, 4, dtype=torch.float64)
    for factor in (0.01, 3.0):  # nothing is clamped when the model is recorded
        for memory_format in (torch.contiguous_format, torch.channels_last):
            inputs = (factor * images).contiguous(memory_format=memory_format)
            sums = clipped_sum(model, loss, (inputs.clone(), TARGETS), LARGE, engine=engine).sums
            torch.testing.assert_close(sums, gradients_of(model, inputs))


def arrange_last(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


def loss_of_arranged(outputs: Tensor, targets: Tensor) -> Tensor:
    return loss(arrange_last(outputs), targets)


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_memory_format_that_vmap_does_not_support_is_no_lack_of_memory(engine: Any) -> None:
    """The word "memory" in torch's error was taken for it."""
    torch.manual_seed(0)
    model = Made(lambda net, x: net.layer(arrange_last(x)), layer=nn.Conv2d(3, 2, 1).double())
    images = torch.randn(4, 3, 5, 4, dtype=torch.float64)
    sums = clipped_sum(model, loss_of_arranged, (images, TARGETS), LARGE, engine=engine).sums
    torch.testing.assert_close(sums, gradients_of(model, images))


@pytest.mark.parametrize("name", ["weight: a product", "weight: zeros", "alias: a copy"])
def test_what_nothing_else_reads_has_rules(name: str) -> None:
    program = state_of(model_of(CASES[name]), X).program
    assert program is not None
    assert not program.reason


REASONS = {
    "no_grad: a product": "mul_ overwrites a tensor without recording gradients",
    "alias: only for one example": "add_ overwrites other tensors if there is one example",
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_for_one_example_at_a_time_is_stated(name: str) -> None:
    model = model_of(CASES[name])
    state_of(model, X)
    assert REASONS[name] in alone(model)


def partly_without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        h = net.layer(x)
    with torch.no_grad():
        u = net.layer(x).exp()
        with torch.enable_grad():
            v = net.layer(x) ** 2
    return (h + u + v + net.shift) @ net.weight


@pytest.mark.parametrize("engine", ["auto", "fast", "reference"])
@pytest.mark.parametrize("function", [partly_without_gradients, lambda net, x: net.layer(x)])
def test_a_caller_without_gradients_gets_the_same_sums(function: Function, engine: Any) -> None:
    model = model_of(function)
    expected = gradients_of(model)
    with torch.no_grad():
        sums = clipped_sum(model, loss, (X, TARGETS), LARGE, engine=engine).sums
    torch.testing.assert_close(sums, expected)
    sums = clipped_sum(model, loss, (X, TARGETS), LARGE, engine=engine).sums
    torch.testing.assert_close(sums, expected)


# ----------------------------------------------------------------------------- stored tensors


def clamp_weight(net: Any, x: Tensor) -> Tensor:
    net.layer.weight.detach().clamp_(-0.1, 0.1)
    return net.layer(x)


def clamp_view(net: Any, x: Tensor) -> Tensor:
    net.layer.weight.detach().view(-1).clamp_(-0.1, 0.1)
    return net.layer(x)


@pytest.mark.parametrize("function", [clamp_weight, clamp_view])
def test_a_model_that_overwrites_a_weight_is_refused(function: Function) -> None:
    model = model_of(function)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with pytest.raises(UserError, match=r"parameter 'layer\.weight' was changed by the model"):
        clipped_sum(model, loss, (X, TARGETS), LARGE)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights[name])


def test_a_buffer_that_is_overwritten_through_a_view_stays_as_it_was() -> None:
    model = model_of(lambda net, x: net.layer(x) + net.counts[0].add_(1))
    model.register_buffer("counts", torch.zeros(2, dtype=torch.float64))
    clipped_sum(model, loss, (X, TARGETS), LARGE)
    assert "the model changes its parameters or buffers" in alone(model)
    assert not model.counts.any()
