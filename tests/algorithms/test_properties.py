"""What holds for every algorithm, on every kind of network it takes: one parametrised test a
property.

A new algorithm joins by being registered. It is tried as its defaults have it and with each of its
other choices in turn, on every network below that it does not refuse.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from zdp_bench import registry
from zdp_bench.algorithms import Algorithm, InSpectra, Problem, algorithm_type
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, Shares
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SeededNoise, add_noise
from zdp_bench.privacy.tally import BudgetExceeded
from zdp_bench.registry import lookup, names
from zdp_bench.tasks.classification import Classification
from zdp_bench.training.step import Training, descend, private_step
from zdp_bench.training.total import Total

POISSON = Sampling("poisson", 0.1, 8.0, 80)
GAUSSIAN = {"noise_multiplier": 1.3, "max_grad_norm": 0.7}
# kind of network -> the shape of its examples
NETWORKS: dict[str, tuple[int, ...]] = {
    "real": (5,),
    "convolutional": (2, 6, 7),
    "complex": (5,),
    "mixed": (5,),
    "linear": (5,),  # for algorithms that solve for one layer
}
# of two layers, the output's signal exceeds by 1/(γβ) what section 4.2 of DP-DFA takes it for
EXCESS = math.sqrt((1 + (0.25 * 0.9) ** -2) / 2)
# z / noise_multiplier where it is not 1: (algorithm, its choice, network)
Z = {
    ("zeta_dp_sgd", "circular", "complex"): 1 / math.sqrt(2),
    ("zeta_dp_sgd", "circular", "mixed"): 1 / math.sqrt(2),
    ("spectral_dp", "as_published", "convolutional"): 1 / math.sqrt(2),
    ("gredp", "complex", "convolutional"): 1 / math.sqrt(2),
    ("gredp", "real", "convolutional"): 0.0,
    ("gredp", "as_published", "convolutional"): 0.0,
    **{("dp_dfa", True, kind): 1 / EXCESS for kind in ("real", "complex", "mixed")},
}
Case = tuple[str, dict[str, Any], str]  # algorithm, options beside GAUSSIAN, kind of network


class Mixed(nn.Module):
    """A complex layer with a real one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6, dtype=torch.complex128)
        self.last = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).abs())


def network(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "mixed":
        return Mixed()
    if kind == "convolutional":
        conv = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 2, stride=2, bias=False)
        dense = CirculantLinear(4 * 3 * 3, 6, 4), nn.Linear(6, 3)
        return nn.Sequential(
            conv[0], nn.Tanh(), conv[1], nn.Flatten(), dense[0], nn.Tanh(), dense[1]
        ).double()
    own = {} if kind == "linear" else {"hidden": [6]}
    model = lookup("model", "real_linear" if own == {} else f"{kind}_mlp")((5,), 3, **own)
    model.dtype = torch.complex128 if kind == "complex" else torch.float64
    return model.to(model.dtype)


def examples(count: int, kind: str, scale: float = 1.0, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(count, *NETWORKS[kind], 2, generator=generator, dtype=torch.float64) * scale
    inputs = torch.view_as_complex(parts) if kind in ("complex", "mixed") else parts[..., 0]
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def make(case: Case) -> tuple[Algorithm, nn.Module, str]:
    name, options, kind = case
    model = network(kind)
    sampling = replace(POISSON, cycle=algorithm_type(name).cycle(options))
    problem = Problem(model, Classification().loss, sampling, like=examples(0, kind)[0])
    builder = lookup("algorithm", name)
    asked = {k: v for k, v in GAUSSIAN.items() if k in inspect.signature(builder).parameters}
    return builder(problem, **(asked | options)), model, kind


def choices(name: str) -> list[dict[str, Any]]:
    """An algorithm's options: as they are, and each of its other choices alone."""
    builder = lookup("algorithm", name)
    hints, all_choices = get_type_hints(builder.__init__), [{}]
    for option in inspect.signature(builder).parameters.values():
        if (
            option.kind is not inspect.Parameter.KEYWORD_ONLY
            or option.default is inspect.Parameter.empty
        ):
            continue
        values = get_args(hints[option.name]) if get_origin(hints[option.name]) is Literal else ()
        values = (not option.default,) if isinstance(option.default, bool) else values
        own = {"clip_quantile": (0.4,), "gamma": (0.1,), "bands": (3,), "start_steps": (2,)}
        values = own.get(option.name, values)
        # auto is fast, checked
        all_choices += [
            {option.name: value} for value in values if value not in (option.default, "fast")
        ]
    return all_choices


def is_private(case: Case) -> bool:
    """Whether the algorithm takes the network, and releases something private."""
    try:
        return make(case)[0].mechanism().is_private
    except UserError:
        return False


PRIVATE = [
    name
    for name in names("algorithm")
    if "noise_multiplier" in inspect.signature(algorithm_type(name)).parameters
]
CASES: list[Case] = [
    c
    for name in names("algorithm")
    for o in choices(name)
    for kind in NETWORKS
    if (kind == "linear") == (algorithm_type(name).releases_once or "start_steps" in o)
    if name != "zeta_dp_sgd" or kind in ("complex", "mixed")  # of real networks it is dp_sgd
    if is_private(c := (name, o, kind))
]
IDS = ["-".join([name, *map(str, options.values()), kind]) for name, options, kind in CASES]


MADE: dict[int, tuple[Algorithm, nn.Module, str]] = {}


@pytest.fixture(params=CASES, ids=IDS)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def made(case: Case) -> tuple[Algorithm, nn.Module, str]:
    """What `make` makes of a case, once for all tests that change nothing of it."""
    number = CASES.index(case)
    if number not in MADE:
        MADE[number] = make(case)
    return MADE[number]


@pytest.fixture
def descending(case: Case) -> Case:
    """A case whose gradient is linear in what was released."""
    if make(case)[0].sets_weights:
        pytest.skip("sets the weights")
    return case


def test_what_is_not_an_algorithm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._builders["algorithm"], "loose", lambda problem: None)
    with pytest.raises(UserError, match=r"algorithm=loose: .* is not derived from zdp_bench"):
        algorithm_type("loose")


def test_every_algorithm_with_noise_and_no_other_is_private_on_some_network() -> None:
    assert {name for name, *_ in CASES} == set(PRIVATE)


def test_only_class_means_set_the_weights(case: Case) -> None:
    name, options, _ = case
    sets_weights = make(case)[0].sets_weights
    assert sets_weights == (name == "class_means" or "start_steps" in options)


def test_a_new_algorithm_claims_nothing_that_it_does_not_state() -> None:
    claims = ("takes_shares", "sums_gradients", "sums_in_float32", "releases_once")
    assert not any(getattr(Algorithm, claim) for claim in claims)


@pytest.mark.parametrize("name", names("algorithm"))
def test_an_algorithm_says_whether_it_takes_shares(name: str) -> None:
    algorithm = algorithm_type(name)
    takes_shares = "shares" in inspect.signature(algorithm.accumulate).parameters
    assert algorithm.takes_shares == takes_shares


@pytest.mark.parametrize(("name", "kind"), [("dp_sgd", "real"), ("zeta_dp_sgd", "complex")])
def test_by_default_a_long_gradient_is_shortened_as_a_whole(name: str, kind: str) -> None:
    algorithm, model, _ = make((name, {}, kind))
    inputs, targets = examples(1, kind, scale=100.0)
    loss = algorithm.problem.loss(model(inputs), targets).sum()
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    length = norm(dict(enumerate(gradients)))
    assert length > 0.7
    for value, gradient in zip(
        summed(algorithm, (inputs, targets)).values(), gradients, strict=True
    ):
        torch.testing.assert_close(value, gradient * (0.7 / length), rtol=1e-4, atol=0.0)


def sums_whole_gradients(case: Case) -> bool:
    """Whether every block that an example adds is its gradient, up to a positive factor."""
    algorithm, model, kind = make(case)
    inputs, targets = examples(3, kind)
    contributions = algorithm.contributions((inputs, targets))
    parameters = dict(model.named_parameters())
    if contributions.keys() != parameters.keys():
        return False
    for i in range(len(inputs)):
        loss = algorithm.problem.loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, [*parameters.values()])
        for name, gradient in zip(parameters, gradients, strict=True):
            added = contributions[name][i]
            if added.shape != gradient.shape:
                return False
            product = float((added * gradient.conj()).real.sum())
            if product < (1 - 1e-9) * float(added.norm() * gradient.norm()):
                return False
    return True


@pytest.mark.parametrize("name", names("algorithm"))
def test_an_algorithm_says_whether_it_sums_whole_gradients(name: str) -> None:
    cases = [case for case in CASES if case[:2] == (name, {})] or [(name, {}, "real")]
    is_whole = [sums_whole_gradients(case) for case in cases]
    assert all(is_whole) == algorithm_type(name).sums_gradients


def summed(algorithm: Algorithm, *batches: Batch, **shares: Shares) -> dict[str, Tensor]:
    total = Total(algorithm.mechanism(), torch.device("cpu"))
    for batch in batches:
        algorithm.accumulate(total, batch, **shares)
    return total.all_blocks()


def norm(blocks: dict[Any, Tensor]) -> float:
    return math.sqrt(sum(float(value.abs().square().sum()) for value in blocks.values()))


def test_the_sum_is_that_of_the_contributions_however_the_batch_is_cut(
    made: tuple[Algorithm, nn.Module, str],
) -> None:
    algorithm, _, kind = made
    inputs, targets = examples(5, kind)
    whole = summed(algorithm, (inputs, targets))
    for cut in ([2, 3], [1] * 5, [5, 0]):
        parts = summed(algorithm, *zip(inputs.split(cut), targets.split(cut), strict=True))
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    contributions = algorithm.contributions((inputs, targets))
    for name, value in whole.items():
        torch.testing.assert_close(contributions[name].sum(dim=0), value, rtol=1e-9, atol=1e-11)


def test_no_examples_have_no_contributions(made: tuple[Algorithm, nn.Module, str]) -> None:
    algorithm, _, kind = made
    contributions = algorithm.contributions(examples(2, kind))
    for name, rows in algorithm.contributions(examples(0, kind)).items():
        assert (rows.shape, rows.dtype) == (
            contributions[name][:0].shape,
            contributions[name].dtype,
        )


def test_no_example_moves_the_sum_by_more_than_the_bound(case: Case) -> None:
    algorithm, model, kind = make(case)
    bound = algorithm.mechanism().blocks[0].bound
    for weight_scale, input_scale in ((1.0, 0.0), (1.0, 1.0), (1.0, 1e5), (1e3, 1e3)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(weight_scale)
        inputs, targets = examples(3, kind, input_scale, seed=1)
        rest = summed(algorithm, (inputs[1:], targets[1:]))
        with_it = summed(algorithm, (inputs, targets))
        moved = norm({name: with_it[name] - rest[name] for name in rest})
        assert moved <= bound * (1 + 1e-9)
        for example in zip(inputs.split(1), targets.split(1), strict=True):
            assert norm(summed(algorithm, example)) <= bound


def test_a_broken_example_contributes_nothing_and_spoils_nothing(
    made: tuple[Algorithm, nn.Module, str],
) -> None:
    algorithm, _, kind = made
    bound = algorithm.mechanism().blocks[0].bound
    inputs, targets = examples(4, kind)
    clean = summed(algorithm, (inputs[1:], targets[1:]))
    for poison in (math.nan, math.inf):
        inputs[0] = poison
        total = summed(algorithm, (inputs, targets))
        torch.testing.assert_close(total, clean, rtol=1e-9, atol=1e-11)  # which is finite
    inputs[0] = 1e308  # a network that saturates makes an ordinary, bounded gradient of it
    total = summed(algorithm, (inputs, targets))
    assert norm({name: total[name] - clean[name] for name in total}) <= bound * (1 + 1e-9)


def test_z_is_what_the_conventions_say_and_proportional_to_the_multiplier(case: Case) -> None:
    name, options, kind = case
    expected = [Z[key] for key in ((name, choice, kind) for choice in options.values()) if key in Z]
    for sigma in (1.3, 2.6):
        z = make((name, options | {"noise_multiplier": sigma}, kind))[0].mechanism().z
        assert z == pytest.approx((expected or [1.0])[0] * sigma, rel=1e-12)


def test_postprocessing_is_linear_and_divides_by_the_expected_batch_size(descending: Case) -> None:
    algorithm, model, kind = make(descending)
    first, second = (summed(algorithm, examples(3, kind, seed=seed)) for seed in (0, 1))

    def post(noisy: dict[str, Tensor], expected: float) -> dict[str, Tensor]:
        carried = dict(algorithm.carried)
        copied = {name: value.clone() for name, value in noisy.items()}
        postprocessed = algorithm.postprocess(copied, expected)
        algorithm.carried.update(carried)
        return postprocessed

    both = post({name: first[name] + second[name] for name in first}, 8.0)
    parameters = dict(model.named_parameters())
    assert both.keys() == parameters.keys()
    for name, value in both.items():
        assert (value.shape, value.dtype) == (parameters[name].shape, parameters[name].dtype)
        torch.testing.assert_close(
            value, post(first, 8.0)[name] + post(second, 8.0)[name], rtol=1e-9, atol=1e-12
        )
        torch.testing.assert_close(
            value, post({n: first[n] + second[n] for n in first}, 4.0)[name] / 2
        )


def test_an_algorithm_averages_if_it_only_divides_by_the_expected_batch_size(case: Case) -> None:
    algorithm, _, kind = make(case)
    averages = algorithm.averages
    noisy = summed(algorithm, examples(3, kind))
    means = {name: value / 4 for name, value in noisy.items()}
    postprocessed = algorithm.postprocess(noisy, 4.0)
    is_mean = postprocessed.keys() == means.keys() and all(
        (postprocessed[name].shape, postprocessed[name].dtype) == (mean.shape, mean.dtype)
        and torch.allclose(postprocessed[name], mean)
        for name, mean in means.items()
    )
    assert averages == (is_mean and not isinstance(algorithm, InSpectra))


# ------------------------------------------------------------------- shares, and steps before


SHARED = [c for c in CASES if algorithm_type(c[0]).takes_shares]
SHARES = (3, 1, 2)


@pytest.mark.parametrize("shared", SHARED, ids=lambda c: "-".join(map(str, (c[0], c[2], c[1]))))
def test_a_share_counts_as_one_example(shared: Case) -> None:
    """Each share moves the sum by its examples' mean gradient, clipped as one example's is."""
    algorithm, _, kind = make(shared)
    inputs, targets = examples(sum(SHARES), kind)
    each = algorithm.contributions((inputs, targets), SHARES)
    bound = algorithm.mechanism().blocks[0].bound
    parts = []
    for number, own in enumerate(zip(inputs.split(SHARES), targets.split(SHARES), strict=True)):
        parts.append(summed(algorithm, own, shares=SHARES[number : number + 1]))
        assert norm(parts[-1]) <= bound * (1 + 1e-9)
        for name, value in parts[-1].items():
            torch.testing.assert_close(value, each[name][number], rtol=1e-9, atol=1e-11)
    for name, value in summed(algorithm, (inputs, targets), shares=SHARES).items():
        torch.testing.assert_close(value, sum(part[name] for part in parts))
    # an example three times over is a share like the example itself
    thrice = summed(algorithm, (inputs[[0, 0, 0]], targets[[0, 0, 0]]), shares=(3,))
    once = summed(algorithm, (inputs[:1], targets[:1]))
    torch.testing.assert_close(thrice, once, rtol=1e-6, atol=1e-9)


def test_no_batch_before_changes_a_step(case: Case) -> None:
    """After another batch, a step is that of an instance which saw none but is told what the first
    carries from its release."""
    (used, _, kind), (fresh, _, _) = make(case), make(case)
    used.postprocess(summed(used, examples(3, kind, 3.0, seed=5)), 8.0)
    fresh.carried.update(used.carried)
    batch = examples(4, kind)
    assert used.mechanism() == fresh.mechanism()
    after, first = summed(used, batch), summed(fresh, batch)
    torch.testing.assert_close(after, first, rtol=1e-12, atol=1e-14)
    rows = used.contributions(batch), fresh.contributions(batch)
    torch.testing.assert_close(*rows, rtol=1e-12, atol=1e-14)
    gradients = used.postprocess(after, 8.0), fresh.postprocess(first, 8.0)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------- through the engine


@contextmanager
def training(
    case: Case, folder: Path, limit: int | None = None
) -> Iterator[tuple[Training, nn.Module, str]]:
    algorithm, model, kind = make(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ledger = Ledger(folder / "ledger.jsonl", algorithm.mechanism(), repeatable=True)
    yield Training(algorithm, model, optimizer, SeededNoise(5), ledger, limit), model, kind
    ledger.close()


def test_an_empty_batch_is_a_step_of_pure_noise(descending: Case, tmp_path: Path) -> None:
    with training(descending, tmp_path) as (run, model, _):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        private_step(run, 0, iter(()), expected_batch_size=8.0)
        assert run.ledger.releases == 1
        moved = norm({name: before[name] - p.detach() for name, p in model.named_parameters()})
        mechanism = run.algorithm.mechanism()
        another = add_noise(summed(run.algorithm), mechanism, SeededNoise(6), 0)
        expected = norm(run.algorithm.postprocess(another, 8.0))
        assert 0.6 * expected < moved < 1.7 * expected


def test_a_step_is_in_the_ledger_before_its_noise_is_drawn_and_a_spent_budget_changes_nothing(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untouched() -> Iterator[Batch]:
        raise AssertionError("a record was read")
        yield

    with training(case, tmp_path, limit=1) as (run, model, kind):
        seen = []
        real = SeededNoise.add_white

        def spy(self: SeededNoise, *arguments: Any) -> None:
            seen.append(run.ledger.releases)
            real(self, *arguments)

        monkeypatch.setattr(SeededNoise, "add_white", spy)
        private_step(run, 0, iter([examples(4, kind)]), expected_batch_size=8.0)
        assert set(seen) == {1}
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(BudgetExceeded):
            private_step(run, 1, untouched(), expected_batch_size=8.0)
        assert run.ledger.releases == 1
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# ---------------------------------------------------------------------------- conventions, refusals


def test_wirtinger_is_half_of_autograd_at_half_the_bound() -> None:
    problem = Problem(network("complex"), Classification().loss, POISSON)
    make_one = lookup("algorithm", "zeta_dp_sgd")
    wirtinger = make_one(problem, noise_multiplier=1.0, max_grad_norm=1.0, gradient="wirtinger")
    autograd = make_one(problem, noise_multiplier=1.0, max_grad_norm=2.0, gradient="autograd")
    half, full = (summed(algorithm, examples(6, "complex")) for algorithm in (wirtinger, autograd))
    for name, value in full.items():
        torch.testing.assert_close(half[name], value / 2, rtol=1e-9, atol=1e-12, msg=name)


def test_dp_sgd_refuses_a_complex_network() -> None:
    problem = Problem(network("complex"), Classification().loss, POISSON)
    with pytest.raises(UserError, match=r"net\.0\.weight.*use algorithm=zeta_dp_sgd"):
        lookup("algorithm", "dp_sgd")(problem, **GAUSSIAN)


def test_non_private_training_is_plain_gradient_descent() -> None:
    model = network("complex")
    twin = network("complex")
    batch = examples(7, "complex")
    algorithm = lookup("algorithm", "sgd")(
        Problem(model, Classification().loss, Sampling("shuffled", 0.1, 7, 70))
    )
    assert algorithm.mechanism().z == algorithm.noise_multiplier == 0
    descend(
        dict(model.named_parameters()),
        torch.optim.SGD(model.parameters(), lr=0.3),
        algorithm.postprocess(summed(algorithm, batch), 7),
    )
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3)
    torch.nn.functional.cross_entropy(twin(batch[0]), batch[1]).backward()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
