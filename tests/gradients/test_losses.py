"""Nothing of another example reaches an example's loss, whatever loss it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules import Made
from zdp_bench import clipped_sum
from zdp_bench.errors import UserError
from zdp_bench.gradients import Engine, PerExample, per_example
from zdp_bench.gradients.losses import require_outputs_alone

BOUND, WORDS, LENGTH = 0.1, 20, 64
Loss = Callable[[Tensor, Tensor], Tensor]


def per_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """Divided by how many tokens the batch has."""
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none", ignore_index=-1)
    return losses.sum(dim=1) / (targets >= 0).sum()


def rare(outputs: Tensor, targets: Tensor) -> Tensor:
    """Ten times as much for positives, if they are the rarer class of the batch."""
    losses = F.binary_cross_entropy_with_logits(outputs[:, 0], targets, reduction="none")
    return losses * torch.where((targets == 1) & (targets.mean() < 0.5), 10.0, 1.0)


def by_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    return rare(outputs - outputs.mean(dim=0), targets)


def by_size(outputs: Tensor, targets: Tensor) -> Tensor:
    return rare(outputs, targets) * len(targets)


def beyond_vmap(outputs: Tensor, targets: Tensor) -> Tensor:
    return rare(outputs, targets) * (2.0 if float(targets.mean()) > 0.5 else 1.0)


class Frequencies(nn.Module):
    """Weighs an example by how many positives it has seen so far."""

    positives: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positives", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.positives = self.positives + targets.sum()
        return rare(outputs, targets) * self.positives


def documents() -> tuple[nn.Module, Tensor, Tensor]:
    """One document of 64 tokens, among documents of one."""
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
    targets = torch.randint(0, WORDS, (32, LENGTH))
    targets[1:, 1:] = -1
    return nn.Sequential(*layers), torch.randint(0, WORDS, (32, LENGTH)), targets


def positives() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.zeros(31)
    targets[:16] = 1.0  # a positive in front turns the balance
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(31, 5), targets


def move(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, engine: Engine) -> float:
    """How far the sum moves with the first example, in units of the bound."""

    def total(start: int) -> dict[str, Tensor]:
        batch = inputs[start:], targets[start:]
        return clipped_sum(model, loss, batch, BOUND, engine=engine).sums

    with_it, without = total(0), total(1)
    return float(sum((with_it[n] - without[n]).square().sum() for n in with_it) ** 0.5) / BOUND


@pytest.mark.parametrize("engine", ["auto", "fast", "reference"])
def test_a_loss_divided_by_the_tokens_of_the_batch(engine: Engine) -> None:
    model, inputs, targets = documents()
    assert move(model, per_token, inputs, targets, engine) <= 1 + 1e-4


@pytest.mark.parametrize("engine", ["auto", "fast", "reference"])
@pytest.mark.parametrize("loss", [rare, by_outputs, by_size, beyond_vmap])
def test_a_loss_that_looks_at_the_batch(loss: Loss, engine: Engine) -> None:
    assert move(*positives()[:1], loss, *positives()[1:], engine) <= 1 + 1e-4


@pytest.mark.parametrize("loss", [rare, by_outputs, by_size, beyond_vmap])
def test_it_is_the_loss_of_each_example_alone(loss: Loss) -> None:
    outputs, targets = torch.randn(9, 1), torch.rand(9).round()
    alone = [loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(9)]
    torch.testing.assert_close(per_example(loss)(outputs, targets), torch.cat(alone))


@pytest.mark.parametrize(
    "halves",
    [
        lambda outputs, targets: targets == 0,
        lambda outputs, targets: isinstance(targets, Tensor),
        lambda outputs, targets: copy.copy(outputs).shape == (1, 3),
        lambda outputs, targets: F.cross_entropy(outputs, targets) < 1,
    ],
)
def test_a_cross_entropy_is_that_of_each_example_alone(halves: Loss) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        weight = torch.full((3,), 0.5) if halves(outputs, targets) else None
        return F.cross_entropy(outputs, targets, weight, reduction="none")

    outputs, targets = torch.randn(3, 3), torch.tensor([0, 1, 2])
    alone = [loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(per_example(loss)(outputs, targets), torch.cat(alone))
    with pytest.raises(UserError, match="cannot take outputs"):  # weighed by other targets
        per_example(lambda o, t: F.cross_entropy(o, t, t, reduction="none"))(outputs, targets)


def needs_two(outputs: Tensor, targets: Tensor) -> Tensor:
    if len(outputs) < 2:
        raise ValueError("pairs are needed")
    return rare(outputs, targets)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (needs_two, r"outputs of shape \[1, 1\].*pairs are needed\. It is computed for each"),
        (lambda o, t: rare(o, t).mean(), r"gives shape \[\] for 1 example.*never a mean"),
        (lambda o, t: [rare(o, t)], "gives list for 1 example"),
    ],
)
def test_a_loss_that_one_example_is_not_enough_for(loss: Loss, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        per_example(loss)(torch.randn(3, 1), torch.ones(3))


def test_a_class_out_of_range_is_an_error_as_without_privacy() -> None:
    """Its row would be all zeros under vmap, and so its loss."""

    def by_one_hot(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(F.one_hot(targets, 3) * outputs.log_softmax(dim=1)).sum(dim=1)

    with pytest.raises(UserError, match="Class values must be smaller than num_classes"):
        per_example(by_one_hot)(torch.randn(3, 3), torch.tensor([0, 1, 9]))


def test_a_loss_module_begins_anew_with_every_call() -> None:
    module, three = Frequencies(), (torch.randn(3, 1), torch.ones(3))
    loss = per_example(module)
    first = loss(*three)
    assert torch.equal(loss(*three), first)
    assert not module.positives


MUTATORS: dict[str, Loss] = {
    "shifts": lambda o, t: rare(o, t.sub_(0.5)),
    "scales": lambda o, t: rare(o, t.div_(100)),
    "decides": lambda o, t: rare(o, t.sub_(0.5)) if float(o.detach().sum()) < 1e9 else rare(o, t),
    "scales outputs": lambda o, t: rare(o.mul_(0.5), t),
}


@pytest.mark.parametrize("engine", ["auto", "fast", "reference"])
@pytest.mark.parametrize("name", MUTATORS)
def test_a_loss_that_changes_its_targets_in_place_is_right_beside_a_broken_example(
    name: str, engine: Engine
) -> None:
    model, inputs, targets = positives()
    inputs[3] = torch.nan
    before = targets.clone()
    sums = clipped_sum(model, MUTATORS[name], (inputs, targets), BOUND, engine=engine).sums
    total = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
    for x, y in zip(inputs.split(1), before.split(1), strict=True):
        example_loss = MUTATORS[name](model(x) * 1.0, y.clone()).sum()
        gradients = torch.autograd.grad(example_loss, [*model.parameters()])
        norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
        if norm == norm:
            for value, g in zip(total.values(), gradients, strict=True):
                value.data += g * min(1.0, BOUND / norm)
    torch.testing.assert_close(targets, before)
    for key, value in total.items():
        torch.testing.assert_close(sums[key], value.detach(), rtol=1e-4, atol=1e-5)


class Average:
    """Divides by the mean of all losses so far."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = rare(outputs, targets)
        self.total, self.count = self.total + losses.sum().item(), self.count + len(losses)
        return losses * self.count / self.total


def in_a_tensor() -> Loss:
    average = torch.ones(1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = rare(outputs, targets)
        average.mul_(0.9).add_(losses.detach().cpu().numpy().mean() * 0.1)
        return losses / average

    return loss


KEEPING: dict[str, Callable[[], Loss]] = {
    "in an object": Average,
    "in a method's object": lambda: Average().__call__,
    "in a tensor": in_a_tensor,
}


@pytest.mark.parametrize("engine", ["auto", "fast", "reference"])
@pytest.mark.parametrize("name", KEEPING)
def test_a_loss_that_keeps_numbers_of_other_examples_is_refused(name: str, engine: Engine) -> None:
    model, inputs, targets = positives()
    with pytest.raises(UserError, match="changes once others are computed"):
        clipped_sum(model, KEEPING[name](), (inputs, targets), BOUND, engine=engine)


def test_a_loss_that_keeps_numbers_is_refused_where_examples_run_alone() -> None:
    model, inputs, targets = positives()
    model.append(Made(lambda net, x: x * 2 if float(x.detach().sum()) > 0 else x))
    with pytest.raises(UserError, match="changes once others are computed"):
        clipped_sum(model, Average(), (inputs, targets), BOUND)


def test_a_loss_may_decide_by_numbers_log_them_and_draw_at_random() -> None:
    logged: list[float] = []  # emptied after each example

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = rare(outputs, targets)
        logged.append(losses.item())
        return losses * torch.rand(1) * (2.0 if logged[-1] > 0.5 else 1.0)

    model, inputs, targets = positives()
    assert clipped_sum(model, loss, (inputs, targets), BOUND).norms.isfinite().all()
    assert not logged


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.squeeze(1) - targets).square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return 2 * g.unsqueeze(1), None


def test_a_loss_with_a_backward_pass_of_its_own_is_served() -> None:
    losses = per_example(lambda o, t: Straight.apply(o, t))
    outputs = torch.randn(4, 1, requires_grad=True)
    for _ in range(3):
        losses(outputs, torch.ones(4)).sum().backward()
    torch.testing.assert_close(outputs.grad, torch.full((4, 1), 6.0))


def test_what_is_made_at_the_first_call_may_stay() -> None:
    class Cached(nn.Module):
        weight: Tensor | None = None

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            if self.weight is None:
                self.weight = torch.full((1,), 3.0)
            return rare(outputs, targets) * self.weight

    loss, outputs = PerExample(Cached()), torch.randn(3, 1)
    first = loss(outputs, torch.ones(3))
    assert torch.equal(loss(outputs, torch.ones(3)), first)


def test_a_loss_that_seeds_changes_no_random_numbers_of_others() -> None:
    def draws(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.max() > 1:
            torch.manual_seed(3)
        return outputs.squeeze(1) * torch.rand(1)

    loss, outputs, targets, drawn = PerExample(draws), torch.ones(5, 1), torch.zeros(5), []
    for targets[0] in (0.0, 9.0):
        torch.manual_seed(0)
        drawn.append(loss(outputs, targets)[1:])
    assert torch.equal(*drawn)
    assert len(set(drawn[0].tolist())) == 4


def with_jitter(outputs: Tensor, targets: Tensor) -> Tensor:
    """Add a ridge to a matrix that has no Cholesky factor."""
    matrix = torch.eye(2) * outputs[:, :1, None]
    try:
        factor = torch.linalg.cholesky(matrix)
    except torch.linalg.LinAlgError:
        factor = torch.linalg.cholesky(matrix + 100 * torch.eye(2))
    return factor.square().sum(dim=(1, 2)) + 0 * targets


def of_a_distribution(outputs: Tensor, targets: Tensor) -> Tensor:
    try:
        return -torch.distributions.Normal(targets, outputs[:, 0]).log_prob(targets)
    except ValueError:
        return outputs[:, 0].square()


@pytest.mark.parametrize("loss", [with_jitter, of_a_distribution])
def test_a_loss_that_handles_an_error_handles_it_for_one_example(loss: Loss) -> None:
    """Under vmap, an operation fails for all examples if it fails for one."""
    targets = torch.zeros(3)
    rows = []
    for outlier in (1.0, -1.0):
        outputs = torch.tensor([[outlier], [2.0], [3.0]])
        rows.append(per_example(loss)(outputs, targets)[1:])
    torch.testing.assert_close(*rows)


class WithItsOwnVmap(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values / values.detach().abs().max()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.largest = inputs[0].detach().abs().max()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / ctx.largest

    @staticmethod
    def vmap(info: Any, in_dims: Any, values: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return WithItsOwnVmap.apply(values), in_dims[0]


@torch.library.custom_op("tests::divide_by_largest", mutates_args=())
def divide_by_largest(values: Tensor) -> Tensor:
    return values / values.abs().max()


@torch.library.register_vmap("tests::divide_by_largest")  # type: ignore[untyped-decorator]
def _(info: Any, in_dims: Any, values: Tensor) -> tuple[Tensor, int]:
    return divide_by_largest(values), in_dims[0]


def by_its_own_vmap(outputs: Tensor, targets: Tensor) -> Tensor:
    scaled: Tensor = WithItsOwnVmap.apply(outputs)
    return (outputs * scaled).sum(dim=1) - targets


def by_its_own_operator(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * divide_by_largest(outputs.detach())).sum(dim=1) - targets


def with_compressed_tensors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Save tensors for the backward pass in 8 bits."""

    def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
        scale = tensor.abs().max() / 127
        return (tensor / scale).round().to(torch.int8), scale

    def unpack(packed: tuple[Tensor, Tensor]) -> Tensor:
        numbers, scale = packed
        return numbers * scale

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return outputs.square().sum(dim=1) - targets


def by_a_scratch_buffer() -> Loss:
    """Return a loss whose factors NumPy writes, which autograd does not notice."""
    buffer = np.zeros(4, dtype=np.float32)

    def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
        np.square(outputs.detach().numpy()[0], out=buffer)
        return (outputs * torch.from_numpy(buffer)).sum(dim=1) - targets

    return weighted


def by_a_scratch_tensor() -> Loss:
    buffer = torch.zeros(4)

    def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
        torch.square(outputs.detach()[0], out=buffer)
        return (outputs * buffer).sum(dim=1) - targets

    return weighted


@pytest.mark.parametrize(
    "make",
    [
        lambda: by_its_own_vmap,
        lambda: by_its_own_operator,
        lambda: with_compressed_tensors,
        by_a_scratch_buffer,
        by_a_scratch_tensor,
    ],
    ids=["vmap", "operator", "hooks", "buffer", "tensor"],
)
def test_gradients_are_those_of_each_example_alone(make: Callable[[], Loss]) -> None:
    loss = make()
    outputs = torch.randn(3, 4)
    outputs[0] *= 100
    outputs.requires_grad_()
    targets, weights = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    expected = []
    for output, weight in zip(outputs.detach().split(1), weights, strict=True):
        (weight * loss(output.requires_grad_(), targets[:1]).sum()).backward()
        expected.append(output.grad)
    (per_example(loss)(outputs, targets) * weights).sum().backward()
    torch.testing.assert_close(outputs.grad, torch.cat(expected))


def test_a_complex_output_is_differentiated_in_a_loop() -> None:
    def energy(outputs: Tensor, targets: Tensor) -> Tensor:
        float(outputs.detach().abs().sum())  # vmap cannot map this
        return (outputs * outputs.conj()).real.sum(dim=1) - targets

    outputs = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    per_example(energy)(outputs, torch.zeros(3)).sum().backward()
    torch.testing.assert_close(outputs.grad, 2 * outputs.detach())


def with_a_gradient_penalty(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    (slopes,) = torch.autograd.grad(losses.sum(), outputs, create_graph=True)
    return losses + slopes.square().sum(dim=1)


def with_a_gradient_penalty_of_its_own(outputs: Tensor, targets: Tensor) -> Tensor:
    return with_a_gradient_penalty(outputs.requires_grad_(), targets)


def after_an_inner_step(outputs: Tensor, targets: Tensor) -> Tensor:
    """Adapt a shift of the outputs first, as in meta-learning."""
    shift = torch.zeros(3, requires_grad=True)
    inner = F.cross_entropy(outputs + shift, targets)
    (slope,) = torch.autograd.grad(inner, shift, create_graph=True)
    return F.cross_entropy(outputs - 0.5 * slope, targets, reduction="none")


@pytest.mark.parametrize("engine", ["auto", "fast", "reference"])
@pytest.mark.parametrize(
    "loss", [with_a_gradient_penalty, with_a_gradient_penalty_of_its_own, after_an_inner_step]
)
def test_a_loss_may_differentiate(loss: Loss, engine: Engine) -> None:
    """It was refused, as one that has parameters of its own or cannot be differentiated."""
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(4, 3), torch.randn(3, 4), torch.tensor([0, 1, 2])
    expected = torch.zeros(3, 4)
    for output, x, target in zip(model(inputs).split(1), inputs, targets.split(1), strict=True):
        leaf = output.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf, target).sum(), leaf)
        expected += gradient.T * x
    sums = clipped_sum(model, loss, (inputs, targets), 1e3, engine=engine).sums
    torch.testing.assert_close(sums["weight"], expected)
    per_loss = per_example(loss)
    assert require_outputs_alone(model, per_loss, model(inputs).detach(), targets).shape == (3,)


def test_a_tensor_that_a_loss_would_train_is_refused() -> None:
    scale = torch.ones(3, requires_grad=True)
    losses = per_example(lambda o, t: with_a_gradient_penalty(o * scale, t))
    with pytest.raises(UserError, match="the loss has parameters of its own"):
        require_outputs_alone(nn.Linear(4, 3), losses, torch.randn(2, 3), torch.tensor([0, 1]))
