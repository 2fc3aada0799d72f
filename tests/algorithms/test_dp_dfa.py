"""DP-DFA against its paper: an example-by-example reference, the thresholds solved from C, and
bounds on hostile inputs.

The reference is Algorithm 1 of Lee & Kifer 2020 written out with plain autograd for one example; it
shares nothing with the package but the feedback matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.algorithms.test_properties import norm, summed
from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.dp_dfa import DPDFA, _seed
from zdp_bench.errors import UserError
from zdp_bench.gradients.clipping import SAFETY
from zdp_bench.nn.activations import SeparableSigmoid
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.memory_format import MapLinear
from zdp_bench.privacy.accountants import Claim, claimed_epsilon
from zdp_bench.privacy.accounting import pld_uniform, tight_epsilon
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup
from zdp_bench.tasks.classification import Classification

UNIFORM = Sampling("uniform", 128 / 60_000, 128, 60_000)


class Chain(nn.Module):
    """Two convolutions and three fully connected layers, real or complex, of few numbers."""

    def __init__(self, dtype: torch.dtype, slopes: type[nn.Module]) -> None:
        super().__init__()
        conv = ComplexConv2d if dtype.is_complex else nn.Conv2d
        act = SeparableSigmoid if dtype.is_complex else nn.Tanh
        front = conv(2, 3, 3, dtype=dtype), act(), conv(3, 4, 3, dtype=dtype), act()
        self.front = nn.Sequential(*front, nn.Flatten())
        first, second, last = (nn.Linear(*of, dtype=dtype) for of in ((24, 6), (6, 5), (5, 3)))
        self.connected = nn.Sequential(first, slopes(), second, slopes(), last)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.connected(self.front(x.to(self.dtype)))
        return y.abs() if y.is_complex() else y


def chain(kind: str) -> nn.Module:
    torch.manual_seed(2)
    dtype = torch.complex128 if kind == "complex" else torch.float64
    return Chain(dtype, SeparableSigmoid if kind == "complex" else nn.Sigmoid)


def dense(kind: str) -> nn.Module:
    torch.manual_seed(2)
    activation = "separable_sigmoid" if kind == "complex" else "sigmoid"
    model = lookup("model", f"{kind}_mlp")((2, 6, 7), 3, hidden=[6, 5], activation=activation)
    model.dtype = torch.complex128 if kind == "complex" else torch.float64
    return model.to(model.dtype)


def batch(count: int, kind: str = "real", scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    dtype = torch.complex128 if kind == "complex" else torch.float64
    inputs = scale * torch.randn(count, 2, 6, 7, dtype=dtype, generator=generator)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def dfa(model: nn.Module, seed: int = 4, **options: Any) -> DPDFA:
    options = {"noise_multiplier": 3.2, "max_grad_norm": 2.0} | options
    return DPDFA(Problem(model, Classification().loss, UNIFORM, seed=seed), **options)


# ------------------------------------------------------------------------- one example, written out


def clipped(v: Tensor, bound: float) -> Tensor:
    """min(‖v‖, c)·v/‖v‖; SAFETY is how much below c the package stays."""
    size = float(torch.linalg.vector_norm(v.detach()))
    return v * min(1.0, bound * SAFETY / size) if size else v


def share_of_one(algorithm: DPDFA, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Lines 6 to 16 of Algorithm 1 for one example, x [2, 6, 7]: its share by parameter name."""
    model = algorithm.problem.model
    kinds = nn.Linear | nn.Conv2d | ComplexConv2d
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    went_in: dict[str, Tensor] = {}
    came_out: dict[str, Tensor] = {}

    def keep(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        (name,) = (name for name, own in layers.items() if own is layer)
        went_in[name], came_out[name] = inputs[0], output

    handles = [layer.register_forward_hook(keep) for layer in layers.values()]
    loss = algorithm.problem.loss(model(x.unsqueeze(0)), y.unsqueeze(0)).sum()
    for handle in handles:
        handle.remove()
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    (error,) = torch.autograd.grad(loss, came_out[linear[-1]], retain_graph=True)
    error = clipped(error, algorithm.error_clip)
    share: dict[str, Tensor] = {}

    def fed_back(name: str, following: str) -> tuple[Tensor, Tensor]:
        """h as the next layer sees it, and B e."""
        h = went_in[following]
        return h, (algorithm._feedback[name].to(h.dtype) @ error[0].to(h.dtype)).view_as(h)

    delta = error
    for index in reversed(range(len(linear))):
        name = linear[index]
        if index < len(linear) - 1:
            h, way = fed_back(name, linear[index + 1])
            (delta,) = torch.autograd.grad(h, came_out[name], way, retain_graph=True)
        h = clipped(went_in[name][0], algorithm.activation_clips[index])
        share[f"{name}.weight"], share[f"{name}.bias"] = torch.outer(delta[0], h.conj()), delta[0]
    bound = algorithm.max_grad_norm / math.sqrt(len(layers))
    front = [name for name in layers if name not in linear]
    for name, following in zip(front, [*front, linear[0]][1:], strict=True):
        own = {f"{name}.{key}": p for key, p in layers[name].named_parameters()}
        h, way = came_out[linear[0]], delta
        if algorithm.convolutions == "dfa":
            h, way = fed_back(name, following)
        gradients = torch.autograd.grad(h, list(own.values()), way, retain_graph=True)
        jointly = clipped(torch.cat([g.flatten() for g in gradients]), bound)
        parts = jointly.split([g.numel() for g in gradients])
        share |= {key: part.view_as(own[key]) for key, part in zip(own, parts, strict=True)}
    return {key: value.detach() for key, value in share.items()}


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("network", ["dense", "hybrid", "dfa"])
@pytest.mark.parametrize("bound", [2.0, 0.35])
def test_the_sum_is_algorithm_1_example_by_example(network: str, kind: str, bound: float) -> None:
    model = dense(kind) if network == "dense" else chain(kind)
    convolutions = "dfa" if network == "dfa" else "hybrid"
    algorithm = dfa(model, max_grad_norm=bound, convolutions=convolutions)
    inputs, targets = batch(7, kind, scale=20.0)
    total = summed(algorithm, (inputs, targets))
    shares = [share_of_one(algorithm, x, y) for x, y in zip(inputs, targets, strict=True)]
    rows = {name: torch.stack([share[name] for share in shares]) for name in shares[0]}
    contributions = algorithm.contributions((inputs, targets))
    torch.testing.assert_close(contributions, rows, rtol=1e-9, atol=1e-12)
    sums = {name: value.sum(dim=0) for name, value in rows.items()}
    torch.testing.assert_close(total, sums, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("convolutions", ["hybrid", "dfa"])
def test_a_first_layer_on_maps_learns_as_one_behind_flatten(convolutions: str) -> None:
    flat = chain("complex")
    on_maps = deepcopy(flat)
    first = on_maps.connected[0]
    on_maps.front = on_maps.front[:-1]
    on_maps.connected[0] = MapLinear(24, 6, dtype=first.weight.dtype)
    on_maps.connected[0].load_state_dict(first.state_dict())
    expected, contributions = (
        summed(dfa(model, convolutions=convolutions), batch(7, "complex", scale=20.0))
        for model in (flat, on_maps)
    )
    torch.testing.assert_close(contributions, expected, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------ what follows from C


def test_the_activation_clip_is_solved_from_c() -> None:
    network = lookup("model", "real_mlp")((28, 28), 10, hidden=[128, 256], activation="sigmoid")
    algorithm = dfa(network)
    assert algorithm.activation_clips == pytest.approx([19.03] * 3, abs=5e-3)
    # put back into the sensitivity it was solved from
    pairs = zip(algorithm.signals, algorithm.activation_clips, strict=True)
    assert sum(s**2 * (1 + clip**2) for s, clip in pairs) == pytest.approx(4.0, rel=1e-12)


def test_the_published_activation_clip_lets_a_share_exceed_c_and_z_says_so() -> None:
    network = lookup("model", "real_mlp")((28, 28), 10, hidden=[128, 256], activation="sigmoid")
    algorithm = dfa(network, max_grad_norm=1.0, noise_multiplier=1.28, as_published=True)
    assert algorithm.activation_clips == pytest.approx([25.6] * 3, abs=0.05)
    # section 4.2: γβτ_e √((1 + τ_h²)L), of one example
    stated = 0.25 * 0.9 * 0.1 * math.sqrt(3 * (1 + algorithm.activation_clips[0] ** 2))
    assert stated == pytest.approx(1.0)
    assert algorithm.bound == pytest.approx(2.693, abs=1e-3)
    assert algorithm.mechanism().z == pytest.approx(1.28 / (2 * algorithm.bound))  # a replaced one
    with torch.no_grad():  # all 256 units in front of the output are 1
        algorithm.connected[list(algorithm.connected)[1]].bias.fill_(30.0)
    shares = algorithm.contributions((torch.ones(9, 28, 28), torch.arange(9)))
    norms = torch.stack([v.flatten(1).square().sum(dim=1) for v in shares.values()]).sum(0).sqrt()
    assert 1.0 < float(norms.max()) <= algorithm.bound
    with pytest.raises(UserError, match="this one has other layers"):
        dfa(chain("real"), as_published=True)


def test_in_the_hybrid_every_layer_has_its_share_of_c() -> None:
    with torch.device("meta"):
        model = lookup("model", "real_dfa_cnn")(
            (28, 28), 10, channels=[64, 64], hidden=[384, 384], fc_activation="sigmoid"
        )
    algorithm = dfa(model, max_grad_norm=3.0)
    assert algorithm.activation_clips == pytest.approx([59.6, 59.6, 13.4], abs=0.05)
    for signal, clip in zip(algorithm.signals, algorithm.activation_clips, strict=True):
        assert signal * math.sqrt(1 + clip**2) == pytest.approx(3 / math.sqrt(5))


@pytest.mark.parametrize("convolutions", ["hybrid", "dfa"])
@pytest.mark.parametrize("healthy", [0, 1])
def test_examples_that_break_in_front_contribute_nothing_whoever_stands_beside_them(
    convolutions: str, healthy: int
) -> None:
    """tanh makes an infinite pixel finite, but its convolution's gradient is 0·∞: δ alone would
    still be summed."""
    algorithm = dfa(chain("real"), convolutions=convolutions)
    inputs, targets = batch(20 + healthy)
    inputs[:20, 0, 3, 3] = math.inf
    sums = summed(algorithm, (inputs, targets))
    alone = summed(algorithm, (inputs[20:], targets[20:]))
    assert norm({name: sums[name] - alone[name] for name in sums}) < 1e-9
    assert bool(norm(sums)) is bool(healthy)


def test_a_slope_set_too_low_does_not_break_the_bound() -> None:
    model = dense("real")
    model.net[1], model.net[3] = nn.Tanh(), nn.Tanh()  # type: ignore[operator]  # γ is 1, not ¼
    algorithm = dfa(model, max_grad_norm=0.5)
    inputs, targets = batch(50, scale=3.0)
    for example in zip(inputs.split(1), targets.split(1), strict=True):
        assert norm(summed(algorithm, example)) <= 0.5


def test_feedback_is_gaussian_of_spectral_norm_beta_and_follows_the_seed() -> None:
    model = chain("real")
    inputs, targets = batch(2)
    algorithm = dfa(model, convolutions="dfa")
    random_state = torch.get_rng_state()
    summed(algorithm, (inputs, targets))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert set(algorithm._feedback) == {"front.0", "front.2", "connected.0", "connected.2"}
    for matrix in algorithm._feedback.values():
        assert float(torch.linalg.matrix_norm(matrix, 2)) == pytest.approx(0.9, rel=1e-12)
    again, other = (dfa(model, seed=seed) for seed in (4, 5))
    for each_dfa in (again, other):
        summed(each_dfa, (inputs, targets))
    assert torch.equal(again._feedback["connected.0"], algorithm._feedback["connected.0"])
    assert not torch.equal(other._feedback["connected.0"], algorithm._feedback["connected.0"])
    assert _seed(4, "connected.0") == 2601867877100963786  # from version to version


# ------------------------------------------------------------------------------------------------ ε


@pytest.mark.parametrize(
    ("sigma", "batch_size", "c", "epochs", "printed"),
    [(0.03, 512, 3.0, 50, 1.28), (0.05, 128, 2.0, 50, 1.03)],
)
def test_claimed_epsilon_is_the_papers_and_tight_epsilon_counts_the_replaced_example(
    sigma: float, batch_size: int, c: float, epochs: int, printed: float
) -> None:
    sampling = Sampling("uniform", batch_size / 60_000, batch_size, 60_000)
    network = lookup("model", "real_mlp")((28, 28), 10, hidden=[16])
    problem = Problem(network, Classification().loss, sampling)
    share = c / 2  # C is how far a replaced example moves the sum
    multiplier, steps = sigma * batch_size / share, epochs * (60_000 // batch_size)
    mechanism = DPDFA(problem, noise_multiplier=multiplier, max_grad_norm=share).mechanism()
    claim = Claim(multiplier, sampling.sample_rate, steps, 1e-5, 60_000, epochs)
    claimed = claimed_epsilon("dp_dfa_2020", claim)
    assert math.floor(100 * claimed) / 100 == printed
    assert mechanism.z == pytest.approx(multiplier / 2)
    tight = tight_epsilon(mechanism, steps, 1e-5)
    assert tight == pld_uniform(multiplier / 2, sampling.sample_rate, steps, 1e-5)
    # on the sum; σ on the mean
    assert [b.std for b in mechanism.blocks] == pytest.approx([sigma * batch_size] * 4)


# ----------------------------------------------------------------------------------------- refusals


def test_networks_that_are_no_such_chain_are_refused() -> None:
    normed = nn.Sequential(nn.Flatten(), nn.Linear(84, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    with pytest.raises(UserError, match=r"layer '2' \(LayerNorm\)"):
        dfa(normed)
    with pytest.raises(UserError, match="no fully connected layer"):
        dfa(nn.Sequential(nn.Conv2d(2, 3, (6, 7)), nn.Flatten()))

    unruled = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(UserError, match=r"dp_dfa.*: does not support layer '0'"):
        summed(dfa(unruled.double()), (torch.zeros(2, 2, dtype=torch.long), torch.zeros(2).long()))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.last = nn.Linear(84, 84), nn.Linear(84, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.sigmoid(self.inside(torch.sigmoid(self.inside(x.flatten(1))))))

    with pytest.raises(UserError, match="layer 'inside' is called twice"):
        summed(dfa(Twice().double()), batch(2))


class Longer(nn.Linear):
    """Computes something else than `nn.Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


def with_hook(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda _, __, output: 10 * output)
    return layer


def with_own_forward(layer: nn.Linear) -> nn.Linear:
    forward = layer.forward
    layer.forward = lambda x: 10 * forward(x)
    return layer


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (lambda: Longer(5, 3), r"layer '3' \(Longer\) may compute something else"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)),
            r"layer '3' \(ParametrizedLinear\) may compute something else",
        ),
        (lambda: with_hook(nn.Linear(5, 3)), r"layer '3' \(Linear\) may compute something else"),
        (
            lambda: with_own_forward(nn.Linear(5, 3)),
            r"layer '3' \(Linear\) may compute something else",
        ),
    ],
)
def test_a_layer_that_may_compute_something_else_is_refused(
    last: Callable[[], nn.Module], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        dfa(nn.Sequential(nn.Flatten(), nn.Linear(84, 5), nn.Sigmoid(), last()))


def test_a_layer_that_is_only_initialised_in_another_way_learns() -> None:
    class Zeroed(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)

    algorithm = dfa(nn.Sequential(nn.Flatten(), Zeroed(84, 3)).double())
    assert summed(algorithm, batch(3))["1.weight"].any()


class Called(nn.Module):
    """Two linear layers and a number, which `forward` calls and uses in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.ones(1))
        self.hidden, self.out = nn.Linear(84, 84), nn.Linear(84, 3)
        self.scale.requires_grad_("scale" in how)
        if how == "shared":
            self.middle = nn.Linear(84, 84)
            self.middle.weight = self.hidden.weight
        if how == "reversed":
            self.hidden, self.out = nn.Linear(84, 3), nn.Linear(84, 84)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        h = torch.sigmoid(self.hidden(x)) if self.how not in ("reversed", "parallel") else x
        match self.how:
            case "scale of the output":
                return self.scale * self.out(h)
            case "shared":
                return self.out(torch.sigmoid(self.middle(h)))
            case "reversed":
                return self.hidden(torch.sigmoid(self.out(h)))
            case "parallel":
                return self.hidden(x)[:, :3] + self.out(x)
            case "around":
                return self.out(h) + h[:, :3]
            case "by keyword":
                return self.out(input=h)
            case "function":
                return nn.functional.linear(h, self.out.weight, self.out.bias)
            case "weight too":
                return self.out(h) * self.out.weight.sum()
        return self.out(h)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("scale of the output", "parameter 'scale' is used outside the chain of layers"),
        ("shared", "layers 'hidden' and 'middle' share a parameter"),
        ("reversed", "calls layer 'out' before layer 'hidden', which it defines first"),
        ("parallel", "layer 'out' does not depend on the output of layer 'hidden' alone"),
        ("around", "the loss does not depend on the output of layer 'out' alone"),
        ("by keyword", r"layer 'out' is not called on one tensor, as layer\(x\)"),
        ("function", "the model does not call layer 'out'"),
        ("weight too", r"parameter 'out\.weight' is used outside the chain of layers"),
    ],
)
def test_what_feedback_does_not_reach_is_refused_in_one_sentence(how: str, says: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UserError, match=says) as refusal:
        summed(dfa(Called(how).double()), batch(2))
    assert "torch raises" not in str(refusal.value)


@pytest.mark.parametrize("convolutions", ["hybrid", "dfa"])
def test_a_layer_in_front_that_feedback_does_not_reach_is_refused(convolutions: str) -> None:
    class Beside(nn.Module):
        def __init__(self, goes_around: bool) -> None:
            super().__init__()
            self.goes_around = goes_around
            self.first, self.beside = nn.Conv2d(2, 1, 1), nn.Conv2d(2, 1, 1)
            self.out = nn.Linear(42, 3)

        def forward(self, x: Tensor) -> Tensor:
            first, beside = self.first(x), self.beside(x)
            outputs = self.out(first.flatten(1))
            return outputs + beside.flatten(1)[:, :3] if self.goes_around else outputs

    for goes_around, says in (
        (False, "feedback does not reach parameter 'beside.bias'"),
        (True, "parameter 'beside.bias' is used outside the chain of layers"),
    ):
        with pytest.raises(UserError, match=says):
            summed(dfa(Beside(goes_around).double(), convolutions=convolutions), batch(2))


@pytest.mark.parametrize("convolutions", ["hybrid", "dfa"])
def test_activations_may_overwrite_what_they_take(convolutions: str) -> None:
    sums = []
    for inplace in (False, True):
        torch.manual_seed(0)
        front = nn.Conv2d(2, 3, 3), nn.ReLU(inplace), nn.Conv2d(3, 4, 3), nn.ReLU(inplace)
        connected = nn.Linear(24, 6), nn.ReLU(inplace), nn.Linear(6, 3)
        model = nn.Sequential(*front, nn.Flatten(), *connected).double()
        sums.append(summed(dfa(model, convolutions=convolutions), batch(5)))
    torch.testing.assert_close(*sums, rtol=0, atol=0)


def test_a_model_that_is_one_linear_layer_learns() -> None:
    torch.manual_seed(0)
    model = nn.Linear(84, 3).double()
    inputs, targets = batch(4)
    sums = summed(dfa(model, max_grad_norm=1e6, error_clip=1e3), (inputs.flatten(1), targets))
    loss = torch.nn.functional.cross_entropy(model(inputs.flatten(1)), targets, reduction="sum")
    weight, bias = torch.autograd.grad(loss, [*model.parameters()])
    expected = {"weight": weight, "bias": bias}
    torch.testing.assert_close(sums, expected)


@pytest.mark.parametrize("build", [dense, chain])
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_its_hooks_do_nothing_outside_of_a_step(
    build: Callable[[str], nn.Module], kind: str
) -> None:
    """Another algorithm on the model, evaluation and ordinary training must not meet them."""
    model, plain = build(kind), build(kind)
    inputs, targets = batch(5, kind)
    expected = summed(dfa(build(kind)), (inputs, targets))
    first, second = dfa(model), dfa(model)
    assert torch.equal(model(inputs), plain(inputs))
    for algorithm in (first, second, first):
        sums = summed(algorithm, (inputs, targets))
        torch.testing.assert_close(sums, expected, rtol=0, atol=0)
    for network in (model, plain):
        torch.nn.functional.cross_entropy(network(inputs), targets).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_model_that_is_saved_whole_tells_nothing_of_the_run(tmp_path: Path) -> None:
    """Whoever has the seed can draw the noise again and subtract it."""
    model = dense("real")
    summed(dfa(model), batch(3))
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    torch.save(model, tmp_path / "model.pt")
    assert b"Problem" not in (tmp_path / "model.pt").read_bytes()


@pytest.mark.parametrize("has_autocast", [False, True])
def test_layers_of_another_precision_keep_their_bounds(has_autocast: bool) -> None:
    """A factor or signal rounded to half precision would lift a float32 layer's share."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(84, 6), nn.Linear(6, 3)
            if not has_autocast:
                self.last.bfloat16().requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.sigmoid(self.first(x.flatten(1)))
            return self.last(hidden.to(self.last.weight.dtype))

    torch.manual_seed(0)
    algorithm = dfa(Mixed())
    inputs, targets = batch(40, scale=100.0)
    for example in zip(inputs.float().split(1), targets.split(1), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_autocast):
            sums = algorithm._sums(example)
        limits = zip(
            algorithm.connected, algorithm.signals, algorithm.activation_clips, strict=True
        )
        for name, delta, of_input in limits:
            assert float(sums[f"{name}.weight"].double().norm()) <= delta * of_input
            assert float(sums[f"{name}.bias"].double().norm()) <= delta


def test_its_hooks_do_nothing_after_a_step_that_failed() -> None:
    model = dense("real")
    algorithm = dfa(model)
    inputs, targets = batch(3)
    with pytest.raises(RuntimeError):
        summed(algorithm, (inputs[:, :1], targets))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(inputs), dense("real")(inputs))


@pytest.mark.parametrize(
    ("key", "value"),
    [("error_clip", 0.0), ("feedback_norm", 0.0), ("slope", math.inf), ("max_grad_norm", 0.05)],
)
def test_values_that_mean_nothing_are_refused(key: str, value: float) -> None:
    """A max_grad_norm of 0.05 leaves nothing for activations."""
    with pytest.raises(UserError, match=f"algorithm.{key}={value:g}"):
        dfa(dense("real"), **{key: value})


def test_a_bound_that_the_bias_alone_takes_up_is_refused() -> None:
    one_layer = nn.Sequential(nn.Flatten(), nn.Linear(84, 3))
    with pytest.raises(UserError, match=r"algorithm\.max_grad_norm=0\.5: is too small"):
        dfa(one_layer, max_grad_norm=0.5, error_clip=0.5)
    assert dfa(one_layer, max_grad_norm=0.5, error_clip=0.3).activation_clips[0] > 0
    without_bias = nn.Sequential(nn.Flatten(), nn.Linear(84, 3, bias=False))
    assert dfa(without_bias, max_grad_norm=0.5, error_clip=0.5).activation_clips == [1.0]
