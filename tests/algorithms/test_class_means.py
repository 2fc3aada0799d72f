"""Class means: what is released, what it costs, and a start for DP-SGD."""

from __future__ import annotations

from pathlib import Path

import dp_accounting
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.algorithms.test_properties import examples, make, summed
from tests.training.test_interrupts import stop_and_go_on
from tests.training.test_run import carry_out
from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.class_means import ClassMeans, _normalize
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.gradients.clipping import SAFETY
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup
from zdp_bench.tasks.classification import Classification

ONCE = Sampling("poisson", 1.0, 200.0, 200)
CASE = ("class_means", {}, "linear")
MODEL = ["dataset=phase_digits", "model=real_linear", "model.complex_as=channels"]
RUN = [*MODEL, "algorithm=class_means", "trainer.sample_rate=1", "trainer.epochs=1"]
START = [*MODEL, "algorithm=dp_sgd", "algorithm.start_steps=3"]


def test_a_share_has_norm_1_and_the_noise_is_sigma() -> None:
    algorithm, _, _ = make(CASE)
    (block,) = algorithm.mechanism().blocks
    assert (block.bound, block.std) == pytest.approx((1.0, algorithm.noise_multiplier), rel=2e-9)


def test_the_classifier_is_the_noisy_sum_of_centred_labels_times_features() -> None:
    algorithm, model, kind = make(CASE)
    inputs, targets = examples(7, kind)
    aims = torch.nn.functional.one_hot(targets, 3).double() - 1 / 3
    unit = torch.einsum("bk,bd->bkd", aims, inputs)
    unit = unit / unit.norm(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(algorithm.contributions((inputs, targets))["linear.weight"], unit)
    # an owner's examples count as one, in the direction of their sum
    own = (aims.T @ (inputs / inputs.norm(dim=1, keepdim=True))).unsqueeze(0)
    shared = algorithm.contributions((inputs, targets), (7,))["linear.weight"]
    torch.testing.assert_close(shared, own / own.norm())
    updates = algorithm.postprocess(summed(algorithm, (inputs, targets)), 7.0)
    along = unit.sum(dim=0) / unit.sum(dim=0).norm()
    torch.testing.assert_close(updates["linear.weight"], 3 * along)
    assert not updates["linear.bias"].any()
    assert updates.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_epsilon_is_that_of_one_gaussian_release(tmp_path: Path, optimizer: str) -> None:
    """The weights are what was released, whatever the optimizer."""
    words = [*RUN, "privacy.target_epsilon=2", f"optimizer={optimizer}"]
    record = carry_out(tmp_path, *words).record.document
    privacy = record["privacy"]
    exact = dp_accounting.get_epsilon_gaussian(privacy["noise_multiplier"], privacy["delta"])
    assert privacy["steps"] == 1
    assert privacy["epsilon_tight"] == pytest.approx(exact, rel=1e-6)
    assert 1.999 < privacy["epsilon_tight"] <= 2.0
    weights = torch.load(next(tmp_path.rglob("checkpoint.pt")))["model"]
    assert float(weights["1.linear.weight"].norm()) == pytest.approx(3.0)


def test_dp_sgd_starts_from_the_sum_of_its_first_releases() -> None:
    algorithm, model, kind = make(("dp_sgd", {"start_steps": 2}, "linear"))
    torch.nn.init.normal_(model.get_parameter("linear.weight"))  # which nothing may remember
    batches = [examples(6, kind, seed=seed) for seed in (0, 1)]
    expected = sum(algorithm.contributions(b)["linear.weight"].sum(dim=0) for b in batches)
    for batch in batches:
        assert algorithm.sets_weights
        total = summed(algorithm, batch)
        assert not total["linear.bias"].any()
        weights = algorithm.postprocess(total, 6.0)
        assert not any(value.requires_grad for value in weights.values())
        with torch.no_grad():
            for name, value in weights.items():
                model.get_parameter(name).copy_(value)
    assert not algorithm.sets_weights
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(model.get_parameter("linear.weight"), 3 * expected / expected.norm())
    plain = make(("dp_sgd", {}, "linear"))[0]
    plain.problem.model.load_state_dict(model.state_dict())
    batch = examples(5, kind, seed=2)
    for name, value in summed(plain, batch).items():
        torch.testing.assert_close(summed(algorithm, batch)[name], value)


def test_the_start_has_a_stated_part_of_epsilon(tmp_path: Path) -> None:
    words = [*START, "trainer.sample_rate=0.5", "trainer.epochs=4", "privacy.target_epsilon=2"]
    privacy = carry_out(tmp_path, *words).record.document["privacy"]
    assert privacy["steps"] == 8
    assert privacy["start"]["steps"] == 3
    assert 0.5 < privacy["start"]["epsilon_alone"] < privacy["epsilon_tight"] <= 2.0


@pytest.mark.parametrize("step", [2, 5])
def test_a_start_that_is_stopped_goes_on_as_if_it_had_not_been(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int
) -> None:
    stop_and_go_on(monkeypatch, tmp_path, step, *START)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([*RUN, "trainer.epochs=2"], "has one step"),
        ([*RUN, "trainer.sample_rate=0.5"], "has one step"),
        ([*START, "federated.nodes=2"], "start apart"),
        ([*START, "algorithm.start_steps=0"], "start_steps"),
    ],
)
def test_what_makes_no_such_release_is_refused(words: list[str], error: str) -> None:
    with pytest.raises(UserError, match=error):
        configured(["recipe=quickstart", *words])


class Centred(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        centred: Tensor = self.layer(x - x.mean(0))
        return centred


class Noisy(Centred):
    def forward(self, x: Tensor) -> Tensor:
        noisy: Tensor = self.layer(x + torch.rand_like(x))
        return noisy


class SinceTheFirst(Centred):
    first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x[:1]
        changed: Tensor = self.layer(2 * x - self.first)
        return changed


seen: list[Tensor] = []


class SinceTheFirstOfAll(Centred):
    def forward(self, x: Tensor) -> Tensor:
        seen.append(x)
        changed: Tensor = self.layer(2 * x - seen[0])
        return changed


@pytest.mark.parametrize(
    ("model", "others"),
    [
        (Centred, slice(0, 5)),
        (Noisy, slice(0, 5)),
        (SinceTheFirst, slice(1, 6)),
        (SinceTheFirstOfAll, slice(1, 6)),
    ],
)
def test_a_third_party_model_sees_one_example_at_a_time(
    model: type[nn.Module], others: slice
) -> None:
    problem = Problem(model(), Classification().loss, ONCE)
    algorithm = ClassMeans(problem, noise_multiplier=1.0)
    inputs, targets = 1000 * torch.randn(6, 5), torch.randint(3, (6,))
    inputs[others] /= 1000
    sums = []
    for kept in (others, slice(0, 6)):
        torch.manual_seed(0)
        sums.append(summed(algorithm, (inputs[kept], targets[kept]))["layer.weight"])
    assert (sums[1] - sums[0]).norm() <= 1 + 1e-9
    nobody = algorithm.contributions((inputs[:0], targets[:0]))["layer.weight"]
    assert nobody.shape == (0, 3, 5)


def test_a_share_of_tiny_features_has_norm_1() -> None:
    """Their squares underflow in float64, which made the norm 67."""
    model = nn.Sequential(nn.Linear(10_000, 2, dtype=torch.float64))
    algorithm = ClassMeans(Problem(model, Classification().loss, ONCE), noise_multiplier=1.0)
    for tiny in (1.5e-162, 5e-324):
        inputs = torch.full((2, 10_000), tiny, dtype=torch.float64)
        inputs[0] = 0
        batch = inputs, torch.tensor([0, 1])
        norms = algorithm.contributions(batch)["0.weight"].norm(dim=(1, 2))
        torch.testing.assert_close(norms, torch.tensor([0.0, 1.0], dtype=torch.float64))
        total = summed(algorithm, batch)["0.weight"]
        assert float(total.norm()) == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_classes_may_be_integers_of_any_type(dtype: torch.dtype) -> None:
    algorithm, _, kind = make(CASE)
    inputs, targets = examples(7, kind)
    expected = algorithm.contributions((inputs, targets))["linear.weight"]
    contributions = algorithm.contributions((inputs, targets.to(dtype)))["linear.weight"]
    assert torch.equal(contributions, expected)


@pytest.mark.parametrize("target", [-100, -1, 3, 2**40])
def test_an_example_whose_target_is_no_class_has_no_share(target: int) -> None:
    """Losses ignore -100. An error would come after the step is counted."""
    algorithm, _, kind = make(CASE)
    inputs, targets = examples(7, kind)
    expected = algorithm.contributions((inputs, targets))["linear.weight"]
    targets[2] = target
    contributions = algorithm.contributions((inputs, targets))["linear.weight"]
    assert not contributions[2].any()
    expected[2] = 0
    assert torch.equal(contributions, expected)
    total = summed(algorithm, (inputs, targets))["linear.weight"]
    torch.testing.assert_close(total, expected.sum(dim=0))
    shared = algorithm.contributions((inputs, targets), (3, 4))["linear.weight"]
    assert shared.isfinite().all()


def test_a_linear_layer_on_several_rows_of_an_example_is_refused() -> None:
    problem = Problem(nn.Sequential(nn.Linear(5, 3)), Classification().loss, ONCE)
    algorithm = ClassMeans(problem, noise_multiplier=1.0)
    with pytest.raises(UserError, match="calls its linear layer on several: remove the key"):
        algorithm.contributions((torch.randn(2, 4, 5), torch.tensor([0, 1])))


class Scaled(nn.Linear):
    """Has a trained factor, which a start would set to 0."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


class Zeroed(nn.Linear):
    """Is initialised in another way, and computes what `nn.Linear` does."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def test_a_linear_layer_that_is_only_initialised_in_another_way_has_class_means() -> None:
    sums = []
    for layer in (nn.Linear(5, 3), Zeroed(5, 3)):
        problem = Problem(nn.Sequential(layer).double(), Classification().loss, ONCE)
        algorithm = ClassMeans(problem, noise_multiplier=1.0)
        sums.append(summed(algorithm, examples(4, "real"))["0.weight"])
    assert torch.equal(*sums)


def test_what_is_no_linear_layer_or_class_is_refused() -> None:
    for model, own in (("real_mlp", {"hidden": [4]}), ("complex_linear", {})):
        problem = Problem(lookup("model", model)((5,), 3, **own), Classification().loss, ONCE)
        with pytest.raises(UserError, match="a linear model, such as real_linear"):
            ClassMeans(problem, noise_multiplier=1.0)
    behind_a_norm = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
    with pytest.raises(UserError, match="a linear model, such as real_linear"):
        ClassMeans(Problem(behind_a_norm, Classification().loss, ONCE), noise_multiplier=1.0)
    frozen, scaled, pruned, extended = nn.Linear(5, 3), Scaled(5, 3), nn.Linear(5, 3), Zeroed(5, 3)
    frozen.weight.requires_grad_(False)
    prune.l1_unstructured(pruned, "weight", 0.2)
    extended.factor = nn.Parameter(torch.ones(1))
    for layer in (frozen, scaled, pruned, extended):
        with pytest.raises(UserError, match="one real linear layer, which must be trained"):
            ClassMeans(Problem(layer, Classification().loss, ONCE), noise_multiplier=1.0)
    two_classes = Problem(nn.Sequential(nn.Linear(5, 2)), Classification().loss, ONCE)
    algorithm = ClassMeans(two_classes, noise_multiplier=1.0)
    for targets in (torch.rand(4), torch.zeros(4, 2).long()):
        with pytest.raises(UserError, match="takes a class for each example"):
            algorithm.contributions((torch.randn(4, 5), targets))
    with pytest.raises(UserError, match="none is left unclipped"):
        make(("dp_sgd", {"clip_quantile": 0.5, "start_steps": 2}, "linear"))


def test_the_shares_of_a_start_are_class_means_of_norm_c() -> None:
    start, _, kind = make(("dp_sgd", {"start_steps": 2}, "linear"))
    means = make(CASE)[0].contributions(examples(4, kind))["linear.weight"]
    contributions = start.contributions(examples(4, kind))["linear.weight"]
    torch.testing.assert_close(contributions, 0.7 * SAFETY * means, rtol=1e-12, atol=0)


def test_a_start_sums_in_float64_whatever_the_weights_are() -> None:
    start, model, _ = make(("dp_sgd", {"start_steps": 2}, "linear"))
    model.float()
    noisy = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    length = float(noisy["linear.weight"].double().norm())
    start.postprocess(noisy, 4.0)
    assert start.carried["length"] == pytest.approx(length, rel=1e-12)


def test_a_broken_example_and_an_empty_sum_are_zero() -> None:
    algorithm, _, kind = make(CASE)
    assert isinstance(algorithm, ClassMeans)
    inputs, targets = examples(3, kind)
    inputs[1] = torch.nan
    norms = algorithm.contributions((inputs, targets))["linear.weight"].norm(dim=(1, 2))
    assert not algorithm.sums.layer._forward_pre_hooks
    assert norms.tolist() == pytest.approx([1.0, 0.0, 1.0])
    for length, norm in ((0.0, 0.0), (1e-3, 2.0), (1e3, 2.0)):
        direction = torch.zeros(3, 5, dtype=torch.float64)
        direction[0, 0] = length
        weights = algorithm.sums.weights_along(direction, 2.0)["linear.weight"]
        assert float(weights[0, 0]) == float(weights.norm()) == pytest.approx(norm)


@pytest.mark.parametrize("shares", [None, (1,) * 6])
def test_one_logit_takes_probabilities(shares: tuple[int, ...] | None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 1)).double()
    problem = Problem(model, Classification().loss, ONCE)
    algorithm = ClassMeans(problem, noise_multiplier=1.0)
    inputs = torch.randn(6, 5, dtype=torch.float64)
    targets = torch.tensor([-2.0, 0.4, 0.6, 1.0, 7.0, torch.nan])
    signs = torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    expected = signs[:, None] * inputs / inputs.norm(dim=1, keepdim=True)
    contributions = algorithm.contributions((inputs, targets), shares)["0.weight"]
    torch.testing.assert_close(contributions[:, 0], expected)
    total = summed(algorithm, (inputs, targets), shares=shares)["0.weight"]
    torch.testing.assert_close(total[0], expected.sum(dim=0))
    # within an owner's share, an example counts by how far its probability is from a half
    weighted = torch.tensor([-1.0, -0.2, 0.2, 1.0, 1.0, -1.0], dtype=torch.float64)
    own = (weighted.abs()[:, None] * expected).sum(dim=0)
    contributions = algorithm.contributions((inputs, targets), (6,))["0.weight"]
    torch.testing.assert_close(contributions[0, 0], own / own.norm())


def test_a_direction_of_numbers_of_all_sizes_is_kept() -> None:
    """Only a row of which every number is tiny is enlarged before its norm is taken."""
    rows = torch.tensor([[1.0, 1e-200], [3e-200, -4e-200], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 1e-200], [0.6, -0.8], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(_normalize(rows), expected, rtol=1e-12, atol=0.0)
