"""Model checks: what keeps samples apart passes, what keeps something of them is found, and nothing
is left behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gradients.harness import Case, loss
from tests.gradients.zoo import MODELS
from tests.modules import Made
from tests.training.model_checks.models import (
    CLASSES,
    IMAGES,
    LABELS,
    NOTHING_FOUND,
    VECTORS,
    Layer,
    check,
    clean,
    convolutional,
    cross_entropy,
    mlp,
)
from zdp_bench import registry
from zdp_bench.algorithms import Problem
from zdp_bench.config import compose, parse
from zdp_bench.errors import UserError
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup, names
from zdp_bench.training import model_checks
from zdp_bench.training.model_checks.influence import check_apart
from zdp_bench.training.progress import Watcher
from zdp_bench.training.run import run

# ------------------------------------------------------------------------------------- what passes


def check_on(device: str, case: Case) -> None:
    model = case.module(torch.float32).to(device)
    inputs, targets = (part[:0].to(device) for part in case.batch(1, torch.float32))
    problem = Problem(model, loss, Sampling("poisson", 0.1, 10, 100))
    algorithm = lookup("algorithm", "zeta_dp_sgd")(problem, noise_multiplier=1.0, max_grad_norm=1.0)
    model_checks.check(model, algorithm, loss, (inputs, targets), 8)


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_every_model_of_the_zoo_keeps_samples_apart_in_a_batch(case: Case) -> None:
    assert check_apart(case.module(torch.float32), case.batch(3, torch.float32)[0]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_on_a_gpu_every_model_of_the_zoo_passes(case: Case) -> None:
    """An H200 refused U-Nets, VGG-11 and the DFA network: cuDNN rounds by the batch."""
    check_on("cuda", case)


def test_a_check_computes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's convolutions take TF32, and deep networks of them failed the check."""
    found, convolve = set(), F.conv2d

    def noting(*arguments: Any) -> Tensor:
        found.add(torch.backends.cudnn.conv.fp32_precision)
        return convolve(*arguments)

    monkeypatch.setattr(F, "conv2d", noting)
    check(convolutional(nn.ReLU()), IMAGES)
    assert found == {"ieee"}


@pytest.mark.parametrize("name", clean())
def test_a_model_that_keeps_samples_apart_passes_and_is_left_as_it_was(name: str) -> None:
    model, inputs = clean()[name]
    before = copy.deepcopy(model)
    torch.manual_seed(5)
    random = torch.get_rng_state()
    check(model, inputs)
    assert torch.equal(torch.get_rng_state(), random)
    for (key, value), old in zip(
        model.state_dict().items(), before.state_dict().values(), strict=True
    ):
        assert torch.equal(value, old), key
    for ours, old_module in zip(model.modules(), before.modules(), strict=True):
        assert not ours._forward_hooks
        assert not ours._forward_pre_hooks
        assert ours.training == old_module.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.slow
def test_a_network_that_makes_much_of_the_last_bits_passes() -> None:
    """Instance norms of few pixels: gradients by torch.func and by our own loops differ by 3 %,
    each as near to the truth."""
    torch.manual_seed(0)
    model = lookup("model", "complex_unet")((1, 32, 40), 1, width=16, normalisation="instance")
    loss = lambda outputs, targets: (outputs - targets).square().flatten(1).mean(dim=1)  # noqa: E731
    problem = Problem(model, loss, Sampling("poisson", 0.1, 2, 20))
    algorithm = lookup("algorithm", "zeta_dp_sgd")(problem, noise_multiplier=1.0, max_grad_norm=1.0)
    like = torch.zeros(0, 1, 32, 40, dtype=torch.complex64), torch.zeros(0, 1, 32, 40)
    assert model_checks.check(model, algorithm, loss, like, 12).fixed_state == []


# ------------------------------------------------------------------------------------ what is kept


def test_running_statistics_are_found() -> None:
    with pytest.raises(
        UserError,
        match=r"layer '1\.0' \(InstanceNorm2d\) stores.*'running_mean'.*track_running_stats=False",
    ):
        check(convolutional(nn.InstanceNorm2d(8, track_running_stats=True)), IMAGES)


# ------------------------------------------------------------------- fixed state, parameters, loss


def test_fixed_state_that_is_used_is_reported() -> None:
    held = {"scale": torch.ones(8), "unused": torch.ones(8), "whole": torch.arange(8)}
    model = mlp(Made(lambda net, x: x * net.scale, **held), nn.Linear(8, 8))
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    assert check(model) == ["1.scale", "2.bias", "2.weight"]
    assert not model[2].weight.requires_grad
    assert torch.equal(model[1].scale, torch.ones(8))


def test_a_parameter_without_influence_is_named() -> None:
    model = mlp()
    model[0].idle = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match=r"parameter '0\.idle' has no influence"):
        check(model)
    model[0].idle.requires_grad_(False)
    assert check(model) == []


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_is_refused_in_one_sentence(use_reentrant: bool) -> None:
    sentence = (
        r"^layer '1(\.middle)?' \(\w+\): torch\.utils\.checkpoint .*micro_batch to save memory\.$"
    )
    function = lambda net, x: checkpoint(net.middle, x.tanh(), use_reentrant=use_reentrant)  # noqa: E731
    with pytest.raises(UserError, match=sentence):
        check(mlp(Made(function, middle=nn.Linear(8, 8))))


ZetaDPSGD = lookup("algorithm", "zeta_dp_sgd")
OURS = r"layer '1' \(Linear\): its rule.*algorithm\.gradients=reference"


@pytest.mark.parametrize(
    ("of", "sentence"),
    [
        (ZetaDPSGD, OURS),
        (type("Mine", (ZetaDPSGD,), {"__module__": "mine"}), r"^Mine\.accumulate .*no noise"),
    ],
)
def test_a_sum_that_is_not_that_of_its_contributions_is_found(of: Any, sentence: str) -> None:
    model = mlp()
    problem = Problem(model, cross_entropy, Sampling("poisson", 0.1, 8.0, 80))
    algorithm = of(problem, noise_multiplier=1.0, max_grad_norm=1.0)
    right = algorithm.accumulate

    def wrong(total: dict[str, Tensor], batch: Any) -> None:
        right(total, batch)
        total["1.bias"] *= 0.9

    algorithm.accumulate = wrong
    with pytest.raises(UserError, match=sentence):
        model_checks.check(model, algorithm, cross_entropy, (VECTORS, LABELS))


def test_contributions_beyond_the_bound_are_found() -> None:
    model = mlp()
    problem = Problem(model, cross_entropy, Sampling("poisson", 0.1, 8.0, 80))
    algorithm = lookup("algorithm", "zeta_dp_sgd")(
        problem, noise_multiplier=1.0, max_grad_norm=1e-3
    )
    too_small = _halved(algorithm.mechanism())
    algorithm.mechanism = lambda: too_small
    with pytest.raises(UserError, match=r"exceeds its bound 0\.0005"):
        model_checks.check(model, algorithm, cross_entropy, (VECTORS, LABELS))


def _halved(mechanism: Any) -> Any:
    import dataclasses

    blocks = tuple(dataclasses.replace(block, bound=block.bound / 2) for block in mechanism.blocks)
    return dataclasses.replace(mechanism, blocks=blocks)


def test_a_mean_loss_is_refused() -> None:
    with pytest.raises(UserError, match="one real number per example, never a mean"):
        check(mlp(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets))


def test_a_loss_that_others_would_change_is_said_to_be_computed_alone(caplog: Any) -> None:
    check(mlp(), loss=lambda outputs, targets: cross_entropy(outputs, targets) / len(targets))
    assert "computed for each example separately" in caplog.text
    caplog.clear()
    check(mlp())
    assert not caplog.text


def test_a_model_that_does_not_fit_the_inputs_is_told_where() -> None:
    with pytest.raises(
        UserError,
        match=r"cannot take float32 inputs of shape \[3, 5\]: layer '0' \(Linear\) says: mat1",
    ):
        check(nn.Sequential(nn.Linear(7, CLASSES)))
    with pytest.raises(UserError, match=r"answers 3 examples with \[4\]"):
        check(nn.Sequential(mlp(), Layer(lambda x: x.sum(dim=0))))


# --------------------------------------------------------------------------------- from end to end


def batchnorm_probe(input_shape: tuple[int, ...], outputs: int, *, hidden: int = 8) -> nn.Module:
    pixels = Layer(lambda z: z.abs().flatten(1))
    return nn.Sequential(
        pixels, nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, outputs)
    )


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe among the models, for one test."""
    names("model")  # loads the real ones first
    monkeypatch.setitem(registry._builders["model"], "batchnorm_probe", batchnorm_probe)


def probe(results: Path, *overrides: str) -> Any:
    tiny = [
        "recipe=quickstart",
        "trainer.epochs=1",
        "trainer.sample_rate=0.5",
        f"paths.results={results}",
        "threads=1",
    ]
    mine = [
        "model.name=batchnorm_probe",
        "model.hidden=8",
        "~model.activation",
        "~model.init",
        "accountant=gdp_clt",
    ]
    return run(parse(compose([*tiny, *mine, *overrides])), Watcher())


@pytest.mark.usefixtures("probed")
def test_non_private_training_takes_batchnorm_as_it_is(tmp_path: Path) -> None:
    record = probe(tmp_path, "algorithm=sgd").record
    assert record["model"]["surgery"] == record["model"]["fixed_state"] == []


@pytest.mark.usefixtures("probed")
def test_the_record_says_what_was_replaced(tmp_path: Path) -> None:
    record = probe(tmp_path, "model.replace_batchnorm=frozen").record
    (layer,) = record["model"]["surgery"]
    assert (layer["layer"], layer["was"]) == ("2", "BatchNorm1d")
    assert record["config"]["model"]["replace_batchnorm"] == "frozen"
    assert record["model"]["fixed_state"] == ["2.mean", "2.variance"]


@pytest.mark.usefixtures("probed")
def test_the_check_reads_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(model_checks, "check", lambda *given: asked.append(given) or NOTHING_FOUND)
    probe(tmp_path, "model.replace_batchnorm=group")
    ((_, _, _, like, _),) = asked
    assert [part.shape for part in like] == [(0, 8, 8), (0,)]
