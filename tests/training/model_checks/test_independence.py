"""What lets one example reach another's gradient, whatever it depends on, is right or refused.

Each model here passes any check that compares random batches: it mixes at some values only, in its
backward pass, after so many calls, or rarely.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.library.conftest import Make, make  # noqa: F401 - a fixture
from tests.library.small import CLASSES, loss
from zdp_bench.errors import UserError

Case = tuple[Callable[[], nn.Module], Callable[[Any], None]]
MANY, BOUND = 12, 0.8
PASSES = {"calls": 0}


def mixed(x: Tensor) -> Tensor:
    return x - x.mean(dim=0)


class Between(nn.Module):
    """Two linear layers, and a function of (self, x) between them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, CLASSES)
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))


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


STORE: dict[float, Tensor] = {}


def stored(row: Tensor) -> Tensor:
    return STORE.setdefault(round(float(row[0]) / 1e9), row.detach().clone())


def flagged(x: Tensor) -> Tensor:
    """A flag that the next example clears."""
    sign = float(os.environ.get("ZDP_TEST_SIGN", "1"))
    os.environ["ZDP_TEST_SIGN"] = "-1" if float(x.detach().abs().max()) > 1e4 else "1"
    return x * sign


class Looks(nn.Module):
    """Looks at its inputs beside torch, or at what the functions that it calls find beside them."""

    def __init__(self, function: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.function = nn.Linear(4, CLASSES), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(look(self.function, x))


class Inherits(Looks):
    pass


def largest_in_memory(x: Tensor) -> float:
    return float(np.abs(np.frombuffer(bytes(x.detach().untyped_storage()), np.float32)).max())


BESIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "a store": lambda x: torch.stack([stored(row) for row in x]),
    "a flag that is cleared": flagged,
    "its text": lambda x: -x if "e+0" in repr(x) else x,
    "its memory": lambda x: -x if largest_in_memory(x) > 1e4 else x,
}


def look(function: str, x: Tensor) -> Tensor:
    return BESIDE[function](x)


@torch.library.custom_op("zdp_test::turn", mutates_args=())
def turn(x: Tensor) -> Tensor:
    return -x if float(x.abs().max()) > 1e4 else x.clone()


turn.register_fake(torch.empty_like)
turn.register_autograd(lambda ctx, g: g)


class Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * (10 / g.norm()).clamp(max=1)


def hook(limit: float, look: bool = False) -> Callable[[Any, Tensor], Tensor]:
    def rescale(g: Tensor) -> Tensor:
        if look:
            return g * (limit / g.norm()) if g.norm() > limit else g
        return g * (limit / g.norm()).clamp(max=1)

    def function(net: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(rescale)
        return x

    return function


def pre_hooked() -> nn.Module:
    def rescale(module: nn.Module, gradients: Any) -> Any:
        return tuple(g * (10 / g.norm()).clamp(max=1) for g in gradients)

    model = Between(lambda net, x: net.middle(x), middle=nn.Tanh())
    model.middle.register_full_backward_pre_hook(rescale)
    return model


def count_in(net: Any, kind: str) -> int:
    if kind == "an attribute":
        net.calls += 1
        return net.calls
    if kind == "a buffer":
        net.steps = net.steps + 1
        return int(net.steps)
    if kind == "a dictionary":
        net.notes["calls"] += 1
        return net.notes["calls"]
    if kind == "its class":
        type(net).calls_of_all = getattr(type(net), "calls_of_all", 0) + 1
        return type(net).calls_of_all
    if kind == "a generator":
        return next(net.numbers)
    PASSES["calls"] += 1
    return PASSES["calls"]


def counting(kind: str) -> Callable[[], nn.Module]:
    def function(net: Any, x: Tensor) -> Tensor:
        return mixed(x) if count_in(net, kind) > 400 else x

    held: dict[str, Any] = {"an attribute": {"calls": 0}, "a dictionary": {"notes": {"calls": 0}}}
    held["a generator"] = {"numbers": count()}

    def build() -> nn.Module:
        PASSES["calls"] = 0
        Between.calls_of_all = 0  # type: ignore[attr-defined]
        model = Between(function, **held.get(kind, {}))
        model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        return model

    return build


def advance(model: Any) -> None:
    for _ in range(500):
        model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()


# Numbers that no check of what a model holds can reach.
HIDDEN = threading.local()


def passes() -> int:
    HIDDEN.calls = getattr(HIDDEN, "calls", 0) + 1
    return HIDDEN.calls


def in_environment(net: Any, x: Tensor) -> Tensor:
    return mixed(x) if os.environ.get("ZDP_TEST_MIX") else x


def late(mix: Callable[[Tensor], Tensor], else_: Callable[[Tensor], Tensor]) -> Case:
    """What mixes from the 400th pass on, and counts where nothing sees it."""

    def build() -> nn.Module:
        HIDDEN.calls = 0
        return Between(lambda net, x: mix(x) if passes() > 400 else else_(x))

    return build, advance


class Passes(torch.autograd.Function):
    """Mixes in its backward pass from the 400th on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return mixed(g) if passes() > 400 else g


def hooked(kind: str) -> Case:
    def build() -> nn.Module:
        HIDDEN.calls = 0
        model = Between(lambda net, x: net.middle(x), middle=nn.Tanh())
        if kind == "forward":
            change = lambda module, args, x: mixed(x) if passes() > 400 else x  # noqa: E731
            model.middle.register_forward_hook(change)
        elif kind == "backward":
            turn = lambda module, g, _: (mixed(g[0]),) if passes() > 400 else g  # noqa: E731
            model.middle.register_full_backward_hook(turn)
        else:
            model.function = lambda net, x: (x.requires_grad and x.register_hook(of_tensor), x)[1]
        return model

    def of_tensor(g: Tensor) -> Tensor:
        return mixed(g) if passes() > 400 else g

    return build, advance


def hook_late(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(mixed)
    return x


def node_late(x: Tensor) -> Tensor:
    if x.grad_fn:
        x.grad_fn.register_prehook(lambda g: (mixed(g[0]),))
    return x


def mixup(draw: Callable[[], Any]) -> Callable[[Any, Tensor], Tensor]:
    return lambda net, x: 0.5 * (x + x.flip(0)) if draw() < 0.01 else x


def rescaled(net: Any, x: Tensor) -> Tensor:
    return x * (65_535 / x.abs().amax()).clamp(max=1)


def rescaled_after_norm(net: Any, x: Tensor) -> Tensor:
    """No scale of the inputs shows it: the weights of a norm must grow."""
    x = net.norm(x)
    return torch.where(x.amax() > 300, mixed(x), x)


def grow_norm(model: Any) -> None:
    nn.init.constant_(model.norm.weight, 1e3)


def by_weights(net: Any, x: Tensor) -> Tensor:
    return mixed(x) if net.last.weight.norm() > 50 else x


def by_numpy(net: Any, x: Tensor) -> Tensor:
    return mixed(x) if x.detach().numpy().max() > 1e3 else x


def grow_last(model: Any) -> None:
    nn.init.constant_(model.last.weight, 100.0)


VECTORS = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(MANY)]
FAR = (torch.full((4,), 1e6), 0)


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.0)
    monkeypatch.setattr(np.random, "rand", lambda: 0.0)
    monkeypatch.setenv("ZDP_TEST_MIX", "1")


def nothing(model: Any) -> None:
    pass


CASES: dict[str, Case] = {
    "a hook, 10": (lambda: Between(hook(10)), nothing),
    "a hook, 100": (lambda: Between(hook(100)), nothing),
    "a hook that looks": (lambda: Between(hook(10, True)), nothing),
    "a backward pre-hook": (pre_hooked, nothing),
    "a function's backward": (lambda: Between(lambda _, x: Rescaled.apply(x)), nothing),
    **{
        f"a counter in {kind}": (counting(kind), advance)
        for kind in ("an attribute", "a buffer", "a dictionary", "its class", "a generator", "none")
    },
    "a counter that none sees": late(mixed, lambda x: x),
    "a late function": late(Passes.apply, torch.clone),
    "a late hook": late(hook_late, lambda x: x),
    "a late hook of a node": late(node_late, lambda x: x),
    "a function that counts its backward passes": (
        lambda: Between(lambda _, x: Passes.apply(x)),
        advance,
    ),
    "a forward hook that counts": hooked("forward"),
    "a backward hook that counts": hooked("backward"),
    "a tensor's hook that counts": hooked("tensor"),
    "the environment": (lambda: Between(in_environment), nothing),
    **{
        f"one number of examples, by {name}": (lambda of=of: Between(lambda _, x: of(x)), nothing)
        for name, of in {
            "its shape": lambda x: mixed(x) if x.shape[0] == MANY + 1 else x,
            "a slice": lambda x: torch.cat([x[:MANY], x[MANY:] + 5 * x[:MANY].mean(0)]),
            "a split": lambda x: torch.cat(
                [y + x[0] * (i > 0) for i, y in enumerate(x.split(MANY))]
            ),
            "an index": lambda x: x[torch.arange(len(x)) % MANY],
            "a view": lambda x: x + x.view(-1, 6)[: len(x) // (MANY + 1)].sum(),
            "a limit": lambda x: x + 10 * (1e3 * x).clamp(max=len(x)).sub(MANY).clamp(min=0),
            "a factor": lambda x: x * (1 + 9 * (len(x) // (MANY + 1))),
        }.items()
    },
    "a store of a parent's forward": (lambda: Inherits("a store"), lambda _: STORE.clear()),
    **{name: (lambda name=name: Looks(name), lambda _: STORE.clear()) for name in BESIDE},
    "an operator of its own": (lambda: Between(lambda _, x: turn(x)), nothing),
    "rescaled above a limit": (lambda: Between(rescaled), nothing),
    "centred above a limit": (
        lambda: Between(lambda _, x: torch.where(x.amax() > 1e4, mixed(x), x)),
        nothing,
    ),
    "centred behind a norm": (
        lambda: Between(rescaled_after_norm, norm=nn.LayerNorm(6)),
        grow_norm,
    ),
    "by its weights": (lambda: Between(by_weights), grow_last),
    "by numpy": (lambda: Between(by_numpy), nothing),
    "mixup of Python": (lambda: Between(mixup(lambda: random.random())), nothing),
    "mixup of numpy": (lambda: Between(mixup(lambda: np.random.rand())), nothing),
    "mixup of torch": (lambda: Between(mixup(lambda: torch.rand(()))), nothing),
    "mixup without a look": (
        lambda: Between(lambda _, x: torch.where(torch.rand(()) < 0.01, x + x.flip(0), x)),
        nothing,
    ),
    "mixup of a generator": (
        lambda: Between(
            lambda net, x: mixed(x) if net.draw.random() < 0.01 else x,
            draw=np.random.default_rng(0),
        ),
        nothing,
    ),
    "a permutation": (
        lambda: Between(lambda _, x: 0.9 * x + 0.1 * x[torch.randperm(len(x))]),
        nothing,
    ),
}


def moved(
    make: Make,  # noqa: F811
    build: Callable[[], nn.Module],
    prepare: Callable[[Any], None],
    one: Any,
    **given: Any,
) -> float | None:
    """By how many bounds one example moves the step's sum; None if the model is refused."""
    ends = []
    for dataset in (given["dataset"], [one, *given["dataset"]]):
        model = build()
        whole = {"sample_rate": 1.0, "expected_batch": MANY, "epochs": 1, "noise_multiplier": 0.0}
        try:
            private = make(model, **whole | given | {"dataset": dataset})
            prepare(model)
            private.guard.require_unchanged()
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
    make: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    build, prepare = CASES[name]

    def act(model: Any) -> None:
        prepare(model)
        always(monkeypatch)

    found = moved(make, build, act, FAR, dataset=VECTORS)
    assert found is None or found <= 1 + 1e-4


@pytest.mark.parametrize("cut", ["slice", "mask"])
@pytest.mark.parametrize("pool", ["mean", "lstm"])
@pytest.mark.parametrize("pad", [0, 2, 50_256])
def test_a_text_does_not_tell_how_long_the_others_are(
    make: Make,  # noqa: F811
    pad: int,
    pool: str,
    cut: str,
) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, pad + 5, (MANY + 1, 12), generator=generator)
    texts[:-1, 3:] = pad
    dataset = [(text, index % 3) for index, text in enumerate(texts)]
    found = moved(
        make, lambda: Texts(pad, pool, cut), nothing, dataset[-1], dataset=dataset[:-1], loss=loss
    )
    assert found is None or found <= 1 + 1e-4
    assert cut == "mask" or found is not None, "each text alone is right"


def regression(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


@pytest.mark.parametrize("name", [name for name in CASES if "hook" in name or "back" in name])
def test_one_far_target_moves_a_step_by_its_bound_at_most(
    make: Make,  # noqa: F811
    name: str,
) -> None:
    build, prepare = CASES[name]
    dataset = [(x, torch.tensor(1.0)) for x, _ in VECTORS]
    far = (VECTORS[0][0], torch.tensor(1e6))
    found = moved(make, build, prepare, far, dataset=dataset, loss=regression)
    assert found is None or found <= 1 + 1e-4
