"""Nothing of another example reaches an example's loss, whatever loss it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench import clipped_sum
from zdp_bench.errors import UserError
from zdp_bench.gradients import Engine, PerExample, per_example
from zdp_bench.gradients.cross_check import same_draws

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


def documents(dropout: float) -> tuple[nn.Module, Tensor, Tensor]:
    """One document of 64 tokens, among documents of one."""
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, 8), nn.Dropout(dropout), nn.Linear(8, WORDS)
    targets = torch.randint(0, WORDS, (32, LENGTH))
    targets[1:, 1:] = -1
    return nn.Sequential(*layers), torch.randint(0, WORDS, (32, LENGTH)), targets


def positives() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.zeros(31)
    targets[:16] = 1.0  # a positive in front turns the balance
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(31, 5), targets


def move(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, engine: Engine) -> float:
    """How far the sum moves with the first example, in units of the bound; masks are the same."""

    def total(start: int) -> dict[str, Tensor]:
        with same_draws():
            batch = inputs[start:], targets[start:]
            return clipped_sum(model, loss, batch, BOUND, engine=engine).sums

    with_it, without = total(0), total(1)
    return float(sum((with_it[n] - without[n]).square().sum() for n in with_it) ** 0.5) / BOUND


@pytest.mark.parametrize("engine", ["auto", "fast", "reference"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_loss_divided_by_the_tokens_of_the_batch(dropout: float, engine: Engine) -> None:
    model, inputs, targets = documents(dropout)
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


def test_an_option_of_a_cross_entropy_sees_one_example_at_most() -> None:
    seen: set[int] = set()

    class Curious(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is F.cross_entropy:
                seen.update(len(each) for each in args if type(each) is Tensor)
            return super().__torch_function__(func, types, args, kwargs)

    weight = torch.ones(3).as_subclass(Curious)
    loss = PerExample(lambda o, t: F.cross_entropy(o, t, weight, reduction="none"))
    with suppress(UserError):
        loss(torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1]))
    assert seen <= {1, 3}  # a batch of one, and the weights themselves


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


def test_a_loss_that_remembers_is_refused() -> None:
    seen: list[float] = []

    def keeps(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(float(targets.mean()))
        return rare(outputs, targets)

    three, counts = (torch.randn(3, 1), torch.ones(3)), per_example(Frequencies())
    counts(*three)
    with pytest.raises(UserError, match=r"the loss changes 'positives.*' when it is called"):
        counts(*three)
    # vmap cannot map the other, which sees one example after another in its first call
    with pytest.raises(UserError, match=r"the loss changes 'seen.*' when it is called"):
        per_example(keeps)(*three)


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

    loss, outputs, targets, found = PerExample(draws), torch.ones(5, 1), torch.zeros(5), []
    for targets[0] in (0.0, 9.0):
        torch.manual_seed(0)
        found.append(loss(outputs, targets)[1:])
    assert torch.equal(*found)
    assert len(set(found[0].tolist())) == 4


class Memory:
    """Where a loss could keep a number."""

    of_class = 0.0
    __slots__ = ("seen",)


KEPT_AT = 0.0
KEPT_BY = Memory()
LONG = [0.0] * 20_000


def keepers(path: Path) -> dict[str, Callable[[float], float]]:
    """Functions that add a number to what they keep somewhere, and return the sum."""

    def in_a_global(large: float) -> float:
        global KEPT_AT
        KEPT_AT += large
        return KEPT_AT

    def in_an_object(large: float) -> float:
        KEPT_BY.seen += large
        return KEPT_BY.seen

    def in_a_class(large: float) -> float:
        Memory.of_class += large
        return Memory.of_class

    def in_a_long_list(large: float) -> float:
        LONG[0] += large
        return LONG[0]

    def in_a_file(large: float) -> float:
        path.write_text("x" * int(large) + (path.read_text() if path.exists() else ""))
        return float(len(path.read_text()))

    def generate() -> Iterator[float]:
        total = 0.0
        while True:
            total += yield total

    generator = generate()
    next(generator)
    places = {"global": in_a_global, "object": in_an_object, "class": in_a_class}
    return places | {"list": in_a_long_list, "file": in_a_file, "generator": generator.send}


@pytest.mark.parametrize("by", ["outputs", "targets"])
@pytest.mark.parametrize("where", ["global", "object", "class", "list", "generator", "file"])
def test_a_loss_that_remembers_in_any_place_is_refused(where: str, by: str, tmp_path: Path) -> None:
    """What the first example leaves behind shows at the first ever, a check's."""
    global KEPT_AT
    KEPT_AT = KEPT_BY.seen = Memory.of_class = LONG[0] = 0.0
    keep = keepers(tmp_path / "kept")[where]

    def remembering(outputs: Tensor, targets: Tensor) -> Tensor:
        large = outputs.detach().abs().max() > 3 if by == "outputs" else targets.max() == 2
        flipped = keep(float(large)) >= 1
        return F.cross_entropy(-outputs if flipped else outputs, targets, reduction="none")

    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    inputs = torch.cat([torch.full((1, 6), 100.0), 0.3 * torch.randn(20, 6)])
    loss, targets = per_example(remembering), torch.arange(21) % 2
    if by == "targets":
        clipped_sum(model, loss, (inputs[1:], targets[1:]), 1.0)
        targets[0] = 2
    with pytest.raises(UserError, match="which clipping cannot bound"):
        clipped_sum(model, loss, (inputs, targets), 1.0)
