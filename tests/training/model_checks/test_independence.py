"""What lets one example reach another's gradient, whatever it depends on, is right or refused.

Many a model here passes any check that compares random batches: it mixes at some values only, in
its backward pass, or rarely.
"""

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.library.conftest import Make
from tests.library.small import CLASSES, loss
from tests.modules import Made
from zdp_bench.errors import UserError

Build = Callable[[], nn.Module]
MANY, BOUND = 12, 0.8


class Between(Made):
    """Two linear layers, and a function of (self, x) between them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__(function, **held)
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.last(super().forward(self.first(x)))


def with_middle(function: Callable[[Tensor], Tensor]) -> Build:
    return lambda: Between(lambda _, x: function(x))


def with_hook(register: Callable[[nn.Module], object]) -> Build:
    """Builds a model with a layer in its middle that has a hook."""

    def build() -> nn.Module:
        model = Between(lambda net, x: net.middle(x), middle=nn.Tanh())
        register(model.middle)
        return model

    return build


def with_tensor_hook(hook: Callable[[Tensor], Tensor]) -> Build:
    return with_middle(lambda x: hooked(x, hook))


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x


# ------------------------------------------------------------------------------ what mixes at once


def mixed(x: Tensor) -> Tensor:
    return x - x.mean(dim=0)


def shorten(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda g: g * (limit / g.norm()).clamp(max=1)


def look_and_shorten(g: Tensor) -> Tensor:
    return g * (10 / g.norm()) if g.norm() > 10 else g


class Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return shorten(10)(g)


@torch.library.custom_op("zdp_test::turn", mutates_args=())
def turn(x: Tensor) -> Tensor:
    return -x if float(x.abs().max()) > 1e4 else x.clone()


turn.register_fake(torch.empty_like)
turn.register_autograd(lambda ctx, g: g)


def after_norm(net: Any, x: Tensor) -> Tensor:
    """No scale of the inputs shows it: the weights of a norm must grow."""
    x = net.norm(x)
    return torch.where(x.amax() > 300, mixed(x), x)


def by_weights(net: Any, x: Tensor) -> Tensor:
    return mixed(x) if net.last.weight.norm() > 50 else x


def mixup(draw: Callable[[], Any]) -> Build:
    return with_middle(lambda x: 0.5 * (x + x.flip(0)) if draw() < 0.01 else x)


BY_NUMBER: dict[str, Callable[[Tensor], Tensor]] = {
    "its shape": lambda x: mixed(x) if x.shape[0] == MANY + 1 else x,
    "a slice": lambda x: torch.cat([x[:MANY], x[MANY:] + 5 * x[:MANY].mean(0)]),
    "a split": lambda x: torch.cat([y + x[0] * (i > 0) for i, y in enumerate(x.split(MANY))]),
    "an index": lambda x: x[torch.arange(len(x)) % MANY],
    "a view": lambda x: x + x.view(-1, 6)[: len(x) // (MANY + 1)].sum(),
    "a limit": lambda x: x + 10 * (1e3 * x).clamp(max=len(x)).sub(MANY).clamp(min=0),
    "a factor": lambda x: x * (1 + 9 * (len(x) // (MANY + 1))),
}
AT_ONCE: dict[str, Build] = {
    "a hook, 10": with_tensor_hook(shorten(10)),
    "a hook, 100": with_tensor_hook(shorten(100)),
    "a hook that looks": with_tensor_hook(look_and_shorten),
    "a backward pre-hook": with_hook(
        lambda layer: layer.register_full_backward_pre_hook(
            lambda _, gradients: tuple(map(shorten(10), gradients))
        )
    ),
    "a function's backward": with_middle(Rescaled.apply),
    "the environment": with_middle(lambda x: mixed(x) if os.environ.get("ZDP_TEST_MIX") else x),
    **{
        f"one number of examples, by {name}": with_middle(middle)
        for name, middle in BY_NUMBER.items()
    },
    "an operator of its own": with_middle(turn),
    "rescaled above a limit": with_middle(lambda x: x * (65_535 / x.abs().amax()).clamp(max=1)),
    "centred above a limit": with_middle(lambda x: torch.where(x.amax() > 1e4, mixed(x), x)),
    "centred behind a norm": lambda: Between(after_norm, norm=nn.LayerNorm(6)),
    "by its weights": lambda: Between(by_weights),
    "by numpy": with_middle(lambda x: mixed(x) if x.detach().numpy().max() > 1e3 else x),
    "mixup of Python": mixup(lambda: random.random()),
    "mixup of numpy": mixup(lambda: np.random.rand()),
    "mixup of torch": mixup(lambda: torch.rand(())),
    "mixup of a generator": lambda: Between(
        lambda net, x: mixed(x) if net.draw.random() < 0.01 else x, draw=np.random.default_rng(0)
    ),
    "a permutation": with_middle(lambda x: 0.9 * x + 0.1 * x[torch.randperm(len(x))]),
}

# ---------------------------------------------------------- what an honest person writes by mistake


def longest(net: Any, x: Tensor) -> Tensor:
    """The state at the end of the longest row of the batch, by numbers of any size."""
    end = torch.count_nonzero(x.round(), 1).amax() - 1
    return x.index_select(1, end.clamp(min=0).view(1)).expand_as(x)


def guide(rows: Any) -> Callable[[Tensor], Tensor]:
    """Classifier-free guidance: some examples go without their condition."""

    def drop(x: Tensor) -> Tensor:
        x = x.clone()
        x[rows] = 0
        return x + 0.1 * x[:1]

    return drop


def with_table(function: Callable[[Any, Tensor], Tensor], size: int = 64) -> Build:
    return lambda: Between(function, table=nn.Parameter(torch.zeros(size, 6)))


MISTAKES: dict[str, Build] = {
    "the longest of the batch": lambda: Between(longest),
    "guidance of every fourth": with_middle(guide(slice(3, None, 4))),
    "guidance of the first": with_middle(guide(slice(None, 8))),
    "a table by place in the batch": with_table(lambda net, x: x + net.table[: x.shape[0]]),
    "a table by number": with_table(lambda net, x: x + net.table[torch.arange(x.shape[0]) // 4]),
    "words of the batch": with_middle(
        lambda x: x * torch.isin(torch.arange(6), x.detach().long()).float()
    ),
    "renorm of the wrong dimension": with_middle(lambda x: torch.renorm(x, 2, 1, 10.0)),
    "a count of the batch": with_middle(lambda x: x * torch.linalg.vector_norm(x, 0, dim=0)),
    "a histogram": with_middle(lambda x: x * torch.histc(x, 1, min=1e4, max=1e6)),
}
CASES: dict[str, Build] = {**AT_ONCE, **MISTAKES}

# --------------------------------------------------------------------------------------- the tests

VECTORS = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(MANY)]
FAR = (torch.full((4,), 1e6), 0)


def bring_about(name: str, model: Any) -> None:
    """Bring the model of a case to where it mixes."""
    if name == "centred behind a norm":
        nn.init.constant_(model.norm.weight, 1e3)
    if name == "by its weights":
        nn.init.constant_(model.last.weight, 100.0)


def moved(
    make: Make, build: Build, prepare: Callable[[Any], None], example: Any, **given: Any
) -> float | None:
    """By how many bounds one example moves the step's sum; None if the model is refused."""
    ends = []
    for dataset in (given["dataset"], [example, *given["dataset"]]):
        model = build()
        whole = {"sample_rate": 1.0, "expected_batch": MANY, "epochs": 1, "noise_multiplier": 0.0}
        try:
            private = make(model, **whole | given | {"dataset": dataset})
            prepare(model)
            before = torch.cat([p.detach().flatten() for p in model.parameters()])
            for batch in private.batches():
                private.step(batch)
        except UserError:
            return None
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        ends.append((after - before) * MANY / 0.5)
        private.close()
        private.ledger.path.unlink()
    return float((ends[1] - ends[0]).norm()) / BOUND


@pytest.mark.parametrize("name", CASES)
def test_one_example_moves_a_step_by_its_bound_at_most(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def prepare(model: Any) -> None:
        bring_about(name, model)
        monkeypatch.setattr(random, "random", lambda: 0.0)
        monkeypatch.setattr(np.random, "rand", lambda: 0.0)
        monkeypatch.setenv("ZDP_TEST_MIX", "1")

    def make_anew(*args: Any, **options: Any) -> Any:
        monkeypatch.delenv("ZDP_TEST_MIX", raising=False)
        return make(*args, **options)

    distance = moved(make_anew, CASES[name], prepare, FAR, dataset=VECTORS)
    assert distance is None or distance <= 1 + 1e-4


def regression(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


@pytest.mark.parametrize("name", [name for name in CASES if "hook" in name or "back" in name])
def test_one_far_target_moves_a_step_by_its_bound_at_most(make: Make, name: str) -> None:
    dataset = [(x, torch.tensor(1.0)) for x, _ in VECTORS]
    far = (VECTORS[0][0], torch.tensor(1e6))
    prepare = partial(bring_about, name)
    distance = moved(make, CASES[name], prepare, far, dataset=dataset, loss=regression)
    assert distance is None or distance <= 1 + 1e-4


class Texts(nn.Module):
    """Cuts padded texts to the longest one of the batch."""

    def __init__(self, pad: int, pool: str, cut: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pad, self.pool, self.cut = pad, pool, cut
        self.embedding = nn.Embedding(pad + 5, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        real = ids.ne(self.pad)
        if self.cut == "slice":
            ids = ids[:, : real.sum(1).max()]
        x = self.embedding(ids)
        x = self.lstm(x)[0] if self.pool == "lstm" else x
        if self.cut == "mask":  # no number is looked at, and none leaves torch
            kept = real.any(0).to(x.dtype)
            return self.last(torch.einsum("btd,t->bd", x, kept) / kept.sum())
        return self.last(x[:, -1] if self.pool == "lstm" else x.mean(1))


@pytest.mark.parametrize("cut", ["slice", "mask"])
@pytest.mark.parametrize("pool", ["mean", "lstm"])
@pytest.mark.parametrize("pad", [0, 2, 50_256])
def test_a_text_does_not_tell_how_long_the_others_are(
    make: Make, pad: int, pool: str, cut: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, pad + 5, (MANY + 1, 12), generator=generator)
    texts[:-1, 3:] = pad
    *dataset, example = [(text, index % 3) for index, text in enumerate(texts)]
    build = partial(Texts, pad, pool, cut)
    distance = moved(make, build, lambda _: None, example, dataset=dataset, loss=loss)
    assert distance is None or distance <= 1 + 1e-4
    assert cut == "mask" or distance is not None, "each text alone is right"
