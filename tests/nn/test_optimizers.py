"""Optimisers: normalising by |g|², written out by hand; torch's own formulas on real numbers; what is refused."""

from __future__ import annotations

import cmath
import copy
from pathlib import Path

import pytest
import torch

from tests.training.test_run import carry_out
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.nn.optimizers import BY_MAGNITUDE
from zdp_bench.registry import lookup
from zdp_bench.training.build import build_optimizer

START, GRADIENTS = 0.3 - 0.2j, [1 + 2j, -0.5j, 0.25 - 3j]


def walk(
    optimizer: type[torch.optim.Optimizer],
    start: complex,
    gradients: list[complex],
    **options: object,
) -> complex:
    """Where a complex parameter ends after these gradients."""
    parameter = torch.nn.Parameter(torch.tensor([start], dtype=torch.complex128))
    taken = optimizer([parameter], **options)  # type: ignore[call-arg]
    for g in gradients:
        parameter.grad = torch.tensor([g], dtype=torch.complex128)
        taken.step()
    return complex(parameter.detach()[0])


def adam_by_hand() -> complex:
    z, m, v = START, 0j, 0.0
    for t, gradient in enumerate(GRADIENTS, start=1):
        g = gradient + 0.01 * z
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * abs(g) ** 2
        z -= 0.1 * m / (1 - 0.8**t) / ((v / (1 - 0.9**t)) ** 0.5 + 1e-3)
    return z


def nadam_by_hand() -> complex:
    z, m, v, product = START, 0j, 0.0, 1.0
    for t, g in enumerate(GRADIENTS, start=1):
        mu, then = (0.8 * (1 - 0.5 * 0.96 ** (0.004 * s)) for s in (t, t + 1))
        product *= mu
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * abs(g) ** 2
        z -= (
            0.1
            * ((1 - mu) * g / (1 - product) + then * m / (1 - product * then))
            / ((v / (1 - 0.9**t)) ** 0.5 + 1e-3)
        )
    return z


def rmsprop_by_hand() -> complex:
    z, v, velocity = START, 0.0, 0j
    for g in GRADIENTS:
        v = 0.9 * v + 0.1 * abs(g) ** 2
        velocity = 0.5 * velocity + g / (v**0.5 + 1e-3)
        z -= 0.1 * velocity
    return z


MOMENTS = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}
BY_HAND = {
    "adam": (adam_by_hand, {**MOMENTS, "weight_decay": 0.01}),
    "nadam": (nadam_by_hand, MOMENTS),
    "rmsprop": (rmsprop_by_hand, {"lr": 0.1, "alpha": 0.9, "eps": 1e-3, "momentum": 0.5}),
}
OPTIONS = {
    "adam": {"weight_decay": 0.1},
    "adamw": {"weight_decay": 0.1},
    "nadam": {"weight_decay": 0.1},
    "rmsprop": {"weight_decay": 0.1, "momentum": 0.3},
}
TORCHS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    by_hand, options = BY_HAND[name]
    assert abs(walk(BY_MAGNITUDE[name], START, GRADIENTS, **options) - by_hand()) < 1e-14


@pytest.mark.parametrize("name", BY_MAGNITUDE)
def test_a_turned_problem_takes_turned_steps(name: str) -> None:
    """What torch's own, part by part, do not."""
    turn = cmath.exp(0.7j)
    ended = walk(BY_MAGNITUDE[name], START, GRADIENTS, **OPTIONS[name])
    turned = walk(BY_MAGNITUDE[name], turn * START, [turn * g for g in GRADIENTS], **OPTIONS[name])
    assert abs(turned - turn * ended) < 1e-12
    torchs = [
        walk(TORCHS[name], t * START, [t * g for g in GRADIENTS], **OPTIONS[name])
        for t in (1, turn)
    ]
    assert abs(torchs[1] - turn * torchs[0]) > 1e-6


@pytest.mark.parametrize("name", BY_MAGNITUDE)
@pytest.mark.parametrize("plain", [True, False], ids=["defaults", "options"])
def test_real_parameters_move_as_torch_moves_them(name: str, plain: bool) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    ends = []
    for optimizer in (BY_MAGNITUDE[name], TORCHS[name]):
        parameter = torch.nn.Parameter(start.clone())
        taken = optimizer([parameter], **({} if plain else OPTIONS[name]))
        for g in gradients:
            parameter.grad = g.clone()
            taken.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(
        ends[0], ends[1], rtol=1e-9, atol=1e-10
    )  # torch keeps NAdam's product of μ in float32


@pytest.mark.parametrize("name", BY_MAGNITUDE)
def test_its_state_goes_through_a_file(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = [
        torch.nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        torch.nn.Parameter(torch.randn(2)),
    ]
    gradients = [[torch.randn_like(p) for p in first] for _ in range(4)]

    def take(
        parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: slice
    ) -> None:
        for step in gradients[steps]:
            for parameter, g in zip(parameters, step, strict=True):
                parameter.grad = g.clone()
            optimizer.step()

    one = BY_MAGNITUDE[name](first)
    take(first, one, slice(0, 2))
    torch.save(one.state_dict(), tmp_path / "state.pt")
    second = copy.deepcopy(first)
    two = BY_MAGNITUDE[name](second)
    two.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    take(first, one, slice(2, 4))
    take(second, two, slice(2, 4))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_the_record_says_which_and_the_digest_knows(tmp_path: Path) -> None:
    adam = ["optimizer=adam", "trainer.epochs=1"]
    torchs = carry_out(tmp_path, *adam).record
    ours = carry_out(tmp_path, *adam, "optimizer.complex_second_moment=magnitude").record
    assert torchs["optimizer"] == {"complex_second_moment": "per_component"}
    assert ours["optimizer"] == {"complex_second_moment": "magnitude"}
    assert ours["experiment"] != torchs["experiment"]
    spelt_out = parse(
        compose(
            ["recipe=quickstart", "optimizer=adam", "optimizer.complex_second_moment=per_component"]
        )
    )
    assert experiment_digest(spelt_out) == experiment_digest(
        parse(compose(["recipe=quickstart", "optimizer=adam"]))
    )


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["optimizer=adam", "optimizer.complex_second_moment=magnitud"],
            r"complex_second_moment.*magnitude",
        ),
        (
            ["optimizer=sgd", "+optimizer.complex_second_moment=magnitude"],
            r"is for adam, adamw, nadam, rmsprop, and not for sgd",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse(compose(["recipe=quickstart", *overrides]))


@pytest.mark.parametrize(
    "option", ["optimizer.lr=-1", "optimizer.betas=[0.9,1.5]", "+optimizer.amsgrad=true"]
)
def test_values_that_the_formula_has_not_are_refused(option: str) -> None:
    words = [
        "recipe=quickstart",
        "optimizer=adam",
        "optimizer.complex_second_moment=magnitude",
        option,
    ]
    model = lookup("model", "complex_mlp")((2,), 2, hidden=[3])
    with pytest.raises(UserError, match=r"optimizer=adam|optimizer\.(lr|betas)="):
        build_optimizer(parse(compose(words)), model)


def test_fused_optimisers_refuse_complex_parameters() -> None:
    config = parse(compose(["recipe=quickstart", "optimizer=adam", "+optimizer.fused=true"]))
    with pytest.raises(UserError, match=r"optimizer\.fused=true"):
        build_optimizer(config, lookup("model", "complex_mlp")((2,), 2, hidden=[3]))
