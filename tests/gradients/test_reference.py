"""The reference where torch.func needs help: parameters under several names, recurrent layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.gradients.harness import loss
from tests.gradients.outside_state.holders import in_a_closure
from tests.modules import Made
from zdp_bench.errors import UserError
from zdp_bench.gradients import clipped_sum, reference

WIDTH = 4


class TwiceInAList(nn.Module):
    """One block, which holds a layer and a buffer, three times in a list."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Tanh())
        block.register_buffer("scale", torch.ones(()))
        self.blocks = nn.ModuleList([block, block, block])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * block.scale
        return x


class TiedHead(nn.Module):
    """As in a language model: the head is the embedding, or a complex layer in its place."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3, dtype=dtype)
        if dtype.is_complex:
            self.embedding = nn.Linear(WIDTH, 3, bias=False, dtype=dtype)
        outputs, width = self.embedding.weight.shape
        self.between = nn.Linear(3, width, dtype=dtype)
        self.head = nn.Linear(width, outputs, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.between(self.embedding(x))))


class OwnLayerTied(nn.Module):
    """A layer without a rule whose parameter has two names in it, and two more in another layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = self.same = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.own = _Scaled(self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.own(self.first(x)))


class _Scaled(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = self.shift = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale + self.shift)


def one_number(dtype: torch.dtype) -> nn.Module:
    """A layer, and a parameter without dimensions behind it."""
    number = nn.Parameter(torch.full((), 0.7, dtype=dtype))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), _Scaled(number))


SHARING: list[Callable[[torch.dtype], nn.Module]] = [
    *(TwiceInAList, TiedHead, OwnLayerTied, one_number)
]
every_model = pytest.mark.parametrize("build", SHARING, ids=lambda build: build.__name__)
real_and_complex = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128], ids=["real", "complex"]
)


def build_with_batch(
    build: Callable[[torch.dtype], nn.Module], dtype: torch.dtype
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = build(dtype)
    if build is TiedHead and not dtype.is_complex:
        return model, (torch.randint(0, 7, (3, 5)), torch.randn(3, dtype=torch.float64))
    return model, (torch.randn(3, WIDTH, dtype=dtype), torch.randn(3, dtype=torch.float64))


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under each of its names."""
    every = {"remove_duplicate": False}
    return dict(model.named_parameters(**every)) | dict(model.named_buffers(**every))


def assert_unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = everything(model)
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] is not before[name]] == []


def gradients_one_by_one(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """[B, *shape] by parameter, by plain autograd, one example at a time."""
    parameters = dict(model.named_parameters())
    losses = [loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum() for i in range(len(inputs))]
    rows = [torch.autograd.grad(example_loss, [*parameters.values()]) for example_loss in losses]
    stacked = map(torch.stack, zip(*rows, strict=True))
    return dict(zip(parameters, stacked, strict=True))


@every_model
@real_and_complex
def test_both_engines_have_pytorchs_own_gradients_and_leave_every_tensor_in_its_place(
    build: Callable[[torch.dtype], nn.Module], dtype: torch.dtype
) -> None:
    model, (inputs, targets) = build_with_batch(build, dtype)
    before = everything(model)
    right = gradients_one_by_one(model, inputs, targets)
    for _ in range(2):  # the second would meet what the first leaves behind
        ours = reference.per_sample_gradients(model, loss, (inputs, targets))
        torch.testing.assert_close(ours, right)
        assert_unchanged(model, before)
    clipped, norms = reference.clip(right, [([*right], 0.5)])
    sums = {name: value.sum(dim=0) for name, value in clipped.items()}
    for engine in ("auto", "fast", "reference"):  # auto also runs the check
        clipped_sums = clipped_sum(model, loss, (inputs, targets), 0.5, engine=engine)  # type: ignore[arg-type]
        torch.testing.assert_close(clipped_sums.sums, sums)
        torch.testing.assert_close(clipped_sums.norms, norms[:, 0])
        assert_unchanged(model, before)


class Recurrent(nn.Module):
    """A recurrent layer over the positions, or a cell that is called position by position."""

    def __init__(self, layer: nn.Module, given: bool = False) -> None:
        super().__init__()
        self.layer, self.last, self.given = layer, nn.LazyLinear(2, dtype=torch.float64), given

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 2]
        if isinstance(self.layer, nn.RNNCellBase):
            state = None
            for t in range(x.shape[1]):
                state = self.layer(x[:, t], state)
            return self.last(state[0] if isinstance(state, tuple) else state)
        ordered = x if self.layer.batch_first else x.transpose(0, 1)
        if self.given:
            return self.last(self.layer(ordered, hx=x.new_ones(1, len(x), 3))[0].mean(dim=1))
        return self.last(self.layer(ordered)[0].mean(dim=1 if self.layer.batch_first else 0))


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "GRU with a first state": lambda: Recurrent(
        nn.GRU(2, 3, batch_first=True, dtype=torch.float64), given=True
    ),
    "LSTM with a projection": lambda: Recurrent(nn.LSTM(2, 4, proj_size=3, dtype=torch.float64)),
    "RNNCell": lambda: Recurrent(nn.RNNCell(2, 3, dtype=torch.float64)),
    "GRUCell": lambda: Recurrent(nn.GRUCell(2, 3, dtype=torch.float64)),
    "LSTMCell": lambda: Recurrent(nn.LSTMCell(2, 3, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_have_pytorchs_own_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = RECURRENT[name]()
    inputs, targets = torch.randn(3, 5, 2).double(), torch.zeros(3).double()
    model(inputs)  # gives the last layer its size
    right = gradients_one_by_one(model, inputs, targets)
    ours = reference.per_sample_gradients(model, loss, (inputs, targets))
    torch.testing.assert_close(ours, right)
    whole = clipped_sum(model, loss, (inputs, targets), float("inf"))
    torch.testing.assert_close(whole.sums, {name: rows.sum(dim=0) for name, rows in right.items()})
    assert not any(module._forward_pre_hooks for module in model.modules())


class Carries(nn.Module):
    """Multiplies with what the pass before left behind; Python decides, so it runs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(WIDTH, WIDTH), 0
        self.held = [torch.ones(1, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        h = torch.tanh(self.layer(x)) * self.held[0] * self.passes
        if float(h.detach().sum()) < 1e9:
            self.held[0] = h.detach().clone()
        return h


def test_every_example_finds_the_model_as_the_first_does() -> None:
    torch.manual_seed(0)
    model, inputs = Carries(), torch.randn(5, WIDTH)
    gradients = reference.per_sample_gradients(model, loss, (inputs, torch.zeros(5)))
    for i in range(5):
        torch.manual_seed(0)
        alone = reference.per_sample_gradients(model, loss, (inputs[i : i + 1], torch.zeros(1)))
        torch.testing.assert_close({name: g[i : i + 1] for name, g in gradients.items()}, alone)
    outputs = reference.compute_outputs(model, inputs)
    each = [reference.compute_outputs(model, example) for example in inputs.split(1)]
    torch.testing.assert_close(outputs, torch.cat(each))
    assert model.passes == 0
    assert torch.equal(model.held[0], torch.ones(1, WIDTH))


def test_an_output_does_not_depend_on_the_examples_before_it() -> None:
    """State outside of the model is restored for each: here, of the largest number so far."""
    torch.manual_seed(0)
    remember = in_a_closure()
    scaled = lambda net, x: net.layer(x) / remember(float(x.abs().max()))  # noqa: E731
    model, inputs = Made(scaled, layer=nn.Linear(WIDTH, 2)), torch.rand(3, WIDTH)
    inputs[0] *= 1e3
    outputs = reference.compute_outputs(model, inputs)
    each = [reference.compute_outputs(model, example) for example in inputs.split(1)]
    torch.testing.assert_close(outputs, torch.cat(each))


def test_what_vmap_cannot_map_is_passed_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.RReLU(0.25, 0.25))
    inputs, targets = torch.randn(3, WIDTH), torch.zeros(3)
    right = gradients_one_by_one(model, inputs, targets)
    with caplog.at_level("INFO"):
        for _ in range(2):
            ours = reference.per_sample_gradients(model, loss, (inputs, targets))
            torch.testing.assert_close(ours, right)
        plain = nn.Linear(WIDTH, 3)
        reference.per_sample_gradients(plain, loss, (inputs, targets))
    assert caplog.text.count("cannot vectorise the model") == 1
    assert (model in reference._without_vmap, plain in reference._without_vmap) == (True, False)


def test_a_pass_that_writes_into_its_example_changes_no_batch() -> None:
    def write(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets.mul_(2))

    layer, batch = nn.Linear(WIDTH, WIDTH), (torch.ones(3, WIDTH), torch.ones(3))
    for factor in (lambda x: 2, lambda x: 1 + float(x.max())):  # by a program, and one by one
        model = Made(lambda net, x, factor=factor: net.layer(x.mul_(factor(x))), layer=layer)
        reference.differentiate_in_loop(model, write, batch)
        reference.compute_outputs(model, batch[0])
        assert all((part == 1).all() for part in batch)


def test_a_parameter_that_no_loss_depends_on_has_gradients_of_zero() -> None:
    model = Made(lambda net, x: net.used(x), used=nn.Linear(WIDTH, 2), unused=nn.Linear(3, 2))
    batch = torch.ones(2, WIDTH), torch.ones(2)
    gradients = reference.differentiate_in_loop(model, loss, batch)
    assert torch.equal(gradients["unused.weight"], torch.zeros(2, 2, 3))
    assert (gradients["used.weight"] != 0).any()


def test_gradients_record_no_graph_whatever_a_hook_returns() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.weight.register_hook(lambda gradient: model.weight)
    batch = torch.ones(2, WIDTH), torch.ones(2)
    gradients = reference.differentiate_in_loop(model, loss, batch)
    assert not any(gradient.requires_grad for gradient in gradients.values())


class Decides(nn.Module):
    """Acts if an example has a large number."""

    def __init__(self, act: Callable[[], object], of: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.act, self.of = nn.Linear(WIDTH, WIDTH), act, of

    def forward(self, x: Tensor) -> Tensor:
        if float(x.max()) > 1e3:
            self.act()
        return self.layer(x.clamp(max=1)) * self.of()


@pytest.mark.parametrize(
    "draw", [lambda: float(torch.randn(())), random.random, lambda: float(np.random.rand())]
)
def test_an_example_that_seeds_changes_no_random_numbers_of_others(draw: Any) -> None:
    def seed() -> None:
        torch.manual_seed(3), random.seed(3), np.random.seed(3)  # type: ignore[func-returns-value]

    model, batch = Decides(seed, draw), torch.rand(4, WIDTH)
    others = []
    for first in (0.5, 1e6):
        batch[0] = first
        torch.manual_seed(0)
        gradients = reference.differentiate_in_loop(model, loss, (batch, torch.zeros(4)))
        others.append([g[1:] for g in gradients.values()] + [torch.rand(1)])
    torch.testing.assert_close(*others, rtol=0, atol=0)
    assert len({float(g[0]) for g in others[0][1]}) == 3  # each its own


def remember_largest(held: list[Tensor], values: Tensor) -> Tensor:
    """Return the largest magnitude so far, of these values and all earlier ones."""
    held[0] = torch.maximum(held[0], values.detach().abs().max())
    return held[0]


def scaled_by_a_hook() -> Callable[[Any, Tensor], Tensor]:
    held = [torch.full((), 1e-6)]

    def answer(net: Any, x: Tensor) -> Tensor:
        outputs = net.layer(x)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient / remember_largest(held, gradient))
        return outputs

    return answer


def scaled_by_a_function() -> Callable[[Any, Tensor], Tensor]:
    held = [torch.full((), 1e-6)]

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] / remember_largest(held, gradients[0])

    return lambda net, x: Scale.apply(net.layer(x))


def clamp_weights() -> Callable[[Any, Tensor], Tensor]:
    def answer(net: Any, x: Tensor) -> Tensor:
        net.layer.weight.data.clamp_(max=1 / float(x.abs().max()))
        return net.layer(x)

    return answer


def nudge_weights() -> Callable[[Any, Tensor], Tensor]:
    def answer(net: Any, x: Tensor) -> Tensor:
        net.layer.weight.data.mul_(1 + 1e-6)
        return net.layer(x)

    return answer


def clamp_frozen_weights() -> Callable[[Any, Tensor], Tensor]:
    def answer(net: Any, x: Tensor) -> Tensor:
        net.layer.bias.data.clamp_(max=1 / float(x.abs().max()))
        return net.layer(x)

    return answer


@pytest.mark.parametrize(
    ("make_answer", "words"),
    [
        (clamp_frozen_weights, "'layer.bias' was changed .* not even through .data"),
        (scaled_by_a_hook, "gradient of parameter 'layer.weight' .* changes once others"),
        (scaled_by_a_function, "gradient of parameter 'layer.weight' .* changes once others"),
        (clamp_weights, "'layer.weight' was changed .* not even through .data"),
        (nudge_weights, "'layer.weight' was changed .* not even through .data"),
    ],
)
def test_what_a_pass_leaves_for_the_next_is_refused(
    make_answer: Callable[[], Callable[[Any, Tensor], Tensor]],
    words: str,
) -> None:
    torch.manual_seed(0)
    model = Made(make_answer(), layer=nn.Linear(WIDTH, WIDTH))
    model.layer.bias.requires_grad_(make_answer is not clamp_frozen_weights)
    weights = model.layer.weight.detach().clone()
    examples = torch.randn(4, WIDTH)
    examples[2] *= 1e4
    with pytest.raises(UserError, match=words):
        reference.differentiate_in_loop(model, loss, (examples, torch.randn(4)))
    assert torch.equal(model.layer.weight, weights)


def test_a_weight_that_is_no_number_counts_as_unchanged() -> None:
    layer = nn.Linear(WIDTH, 2)
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    batch = torch.randn(3, WIDTH), torch.zeros(3)
    gradients = reference.differentiate_in_loop(layer, loss, batch)
    assert gradients["weight"].shape == (3, 2, WIDTH)


class WithDropout(nn.Module):
    """A model whose examples each draw random numbers, with a loss that draws some as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.5)


def random_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.dropout(outputs, 0.5).square().sum(dim=1)


@pytest.mark.parametrize(("count", "passes"), [(1, 1), (2, 3), (6, 7)])
def test_only_the_first_of_several_examples_is_passed_again_with_its_random_numbers(
    monkeypatch: pytest.MonkeyPatch, count: int, passes: int
) -> None:
    torch.manual_seed(0)
    seeds: list[int] = []
    outputs_of = reference._outputs_of

    def spy(model: nn.Module, inputs: Tensor, seed: int) -> Tensor:
        seeds.append(seed)
        return outputs_of(model, inputs, seed)

    monkeypatch.setattr(reference, "_outputs_of", spy)
    batch = torch.randn(count, WIDTH), torch.zeros(count)
    gradients = reference.differentiate_in_loop(WithDropout(), random_loss, batch)
    assert gradients["layer.weight"].shape == (count, 3, WIDTH)
    assert (len(seeds), len({*seeds})) == (passes, count)


def test_what_torch_func_computes_with_another_shape_is_passed_one_by_one() -> None:
    """`linalg.solve` of a matrix without examples returns as many rows as there are examples."""
    torch.manual_seed(0)
    model = Made(
        lambda net, x: torch.linalg.solve(net.weight + 4 * torch.eye(3), x),
        weight=nn.Parameter(torch.randn(3, 3)),
    )
    inputs, targets = torch.randn(5, 3, 3), torch.randn(5)
    gradients = reference.per_sample_gradients(model, loss, (inputs, targets))["weight"]
    for example, target, gradient in zip(inputs, targets, gradients, strict=True):
        example_loss = loss(model(example[None]), target[None]).sum()
        (expected,) = torch.autograd.grad(example_loss, model.weight)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("is_enabled", [False, True])
def test_rows_of_a_model_that_differentiates_have_a_graph_if_gradients_are_enabled(
    is_enabled: bool,
) -> None:
    def force(net: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net.layer(x).tanh().sum(), x, create_graph=True)[0]

    model = Made(force, layer=nn.Linear(4, 2))
    with torch.set_grad_enabled(is_enabled):
        outputs = reference.compute_outputs(model, torch.randn(3, 4))
    assert outputs.requires_grad == is_enabled


def test_a_first_output_is_that_of_one_example() -> None:
    batch = torch.randn(3, WIDTH), torch.arange(3)
    output, target = reference.compute_first_output(nn.Linear(WIDTH, 2), batch)
    assert (output.shape, target.tolist()) == ((1, 2), [0])


@pytest.mark.parametrize(("per_layer", "shape"), [(False, (0,)), (True, (0, 1))])
def test_an_empty_batch_has_no_norms(per_layer: bool, shape: tuple[int, ...]) -> None:
    batch = torch.zeros(0, WIDTH), torch.zeros(0)
    clipped = reference.clipped_sum(nn.Linear(WIDTH, 2), loss, batch, 1.0, per_layer=per_layer)
    assert clipped.norms.shape == shape
    assert not any(value.any() or value.requires_grad for value in clipped.sums.values())
    assert len(reference.per_sample_gradients(nn.Linear(WIDTH, 2), loss, batch)["weight"]) == 0
