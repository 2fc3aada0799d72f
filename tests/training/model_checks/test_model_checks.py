"""Model checks: what keeps samples apart passes, what keeps something of them is found, and nothing
is left behind."""

import copy
from collections.abc import Callable
from dataclasses import replace
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
    LABELS,
    NOTHING_FOUND,
    VECTORS,
    Layer,
    algorithm_for,
    check,
    clean,
    convolutional,
    cross_entropy,
    mlp,
    run_probe,
)
from zdp_bench.errors import UserError
from zdp_bench.registry import lookup
from zdp_bench.training import model_checks

# ------------------------------------------------------------------------------------- what passes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_on_a_gpu_every_model_of_the_zoo_passes(case: Case) -> None:
    """An H200 refused U-Nets, VGG-11 and the DFA network: cuDNN rounds by the batch."""
    inputs, targets = (part[:0].to("cuda") for part in case.batch(1, torch.float32))
    check(case.module(torch.float32).to("cuda"), inputs, loss, targets)


def test_a_check_computes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's convolutions take TF32, and deep networks of them failed the check."""
    precisions, convolve = set(), F.conv2d

    def noting(*arguments: Any) -> Tensor:
        precisions.add(torch.backends.cudnn.conv.fp32_precision)
        return convolve(*arguments)

    monkeypatch.setattr(F, "conv2d", noting)
    check(convolutional(nn.ReLU()))
    assert precisions == {"ieee"}


@pytest.mark.parametrize("name", clean())
def test_a_model_that_keeps_samples_apart_passes_and_is_left_as_it_was(name: str) -> None:
    model, inputs = clean()[name]
    before = copy.deepcopy(model)
    torch.manual_seed(5)
    random = torch.get_rng_state()
    check(model, inputs)
    assert torch.equal(torch.get_rng_state(), random)
    states = model.state_dict(), before.state_dict()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    for ours, old_module in zip(model.modules(), before.modules(), strict=True):
        assert not ours._forward_hooks
        assert not ours._forward_pre_hooks
        assert ours.training == old_module.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.slow
def test_a_network_that_makes_much_of_the_last_bits_passes() -> None:
    """Instance norms of few pixels: gradients by torch.func and by our own loops differ by 3 %,
    each as near to the truth."""
    model = lookup("model", "complex_unet")((1, 32, 40), 1, width=16, normalisation="instance")

    def squares(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().flatten(1).mean(dim=1)

    images = torch.zeros(0, 1, 32, 40)
    assert check(model, images.to(torch.complex64), squares, images) == []


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


def test_a_parameter_without_numbers_needs_no_influence() -> None:
    """It was said to be trained on noise, or ended in a division by zero."""
    model = mlp()
    model[0].idle = nn.Parameter(torch.zeros(3, 0))
    assert check(model) == []
    used = Made(lambda net, x: x + net.empty.sum(), empty=nn.Parameter(torch.zeros(0)))
    assert check(mlp(used)) == []


def gate(net: Any, x: Tensor) -> Tensor:
    return x + net.gates(x).softmax(dim=0) * x


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda: mlp(Layer(lambda x: x - x.mean(dim=0))), "0.weight"),
        (lambda: mlp(Layer(lambda x: x - x.mean(dim=0).detach())), "2.weight"),
        (lambda: nn.Sequential(*mlp(), Layer(lambda y: y - y[:1])), "0.weight"),
        (lambda: nn.Sequential(*mlp(), Layer(lambda y: y.softmax(dim=0))), "0.weight"),
        (lambda: nn.Sequential(*mlp(), Layer(lambda y: F.normalize(y, dim=0))), "0.weight"),
        (lambda: mlp(Made(gate, gates=nn.Linear(8, 8))), "1.gates.weight"),
    ],
    ids=["mean", "detached mean", "difference", "softmax", "normalize", "gates"],
)
def test_a_parameter_without_influence_on_a_single_example_is_refused(
    make: Callable[[], nn.Module], parameter: str
) -> None:
    sentence = rf"^parameter '{parameter}' changes .* not the output for a single .*line \d+"
    with pytest.raises(UserError, match=sentence):
        check(make())


def test_a_model_that_differentiates_in_its_forward_pass_passes() -> None:
    def force(net: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net.energy(x).sum(), x, create_graph=True)[0]

    energy = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    assert check(Made(force, energy=energy)) == []


def test_a_model_that_fails_for_one_example_is_refused_in_one_sentence() -> None:
    def squeeze(net: Any, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).squeeze()
        return x + torch.diff(x, dim=1, prepend=x[:, :1])

    with pytest.raises(UserError, match=r"cannot take .*shape \[1, 5\].* as after squeeze\(\)"):
        check(mlp(Made(squeeze)))


def test_a_layer_that_random_draws_skip_is_no_reason_to_refuse() -> None:
    def skip(net: Any, x: Tensor) -> Tensor:
        """Return x plus the layer's output, which is left out for nine examples of ten."""
        is_kept = float(torch.rand(())) < 0.1
        return x + net.layer(x) if is_kept or len(x) > 1 else x

    check(mlp(Made(skip, layer=nn.Linear(8, 8))))


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


def test_a_sum_that_is_not_that_of_its_contributions_is_found() -> None:
    model, kind = mlp(), type("Mine", (ZetaDPSGD,), {"__module__": "mine"})
    algorithm: Any = algorithm_for(model, kind=kind)
    right = algorithm.accumulate

    def wrong(total: dict[str, Tensor], batch: Any) -> None:
        right(total, batch)
        total["1.bias"] *= 0.9

    algorithm.accumulate = wrong
    with pytest.raises(UserError, match=r"^Mine\.accumulate .*no noise"):
        model_checks.check(model, algorithm, cross_entropy, (VECTORS, LABELS))


def test_contributions_beyond_the_bound_are_found() -> None:
    model = mlp()
    algorithm: Any = algorithm_for(model, bound=1e-3)
    mechanism = algorithm.mechanism()
    halved = [replace(block, bound=block.bound / 2) for block in mechanism.blocks]
    too_small = replace(mechanism, blocks=tuple(halved))
    algorithm.mechanism = lambda: too_small
    with pytest.raises(UserError, match=r"exceeds its bound 0\.0005"):
        model_checks.check(model, algorithm, cross_entropy, (VECTORS, LABELS))


def test_a_loss_that_others_would_change_is_said_to_be_computed_alone(caplog: Any) -> None:
    check(mlp(), loss=lambda outputs, targets: cross_entropy(outputs, targets) / len(targets))
    assert "computed for each example separately" in caplog.text
    caplog.clear()
    check(mlp())
    assert "computed for each example separately" not in caplog.text


@pytest.mark.parametrize(
    ("factor", "is_flat"), [(0.0, True), (1e-9, False), (torch.arange(CLASSES), False)]
)
def test_a_loss_whose_gradient_is_zero_is_named(caplog: Any, factor: Any, is_flat: bool) -> None:
    """It has a gradient, so that it was trained on noise alone in silence."""
    check(mlp(), loss=lambda outputs, _: (outputs * factor).sum(1))
    assert ("the gradient of the loss is exactly 0" in caplog.text) == is_flat


def test_a_model_that_does_not_fit_the_inputs_is_told_where() -> None:
    message = r"cannot take float32 inputs of shape \[3, 5\]: layer '0' \(Linear\) raises: mat1"
    with pytest.raises(UserError, match=message):
        check(nn.Sequential(nn.Linear(7, CLASSES)))
    with pytest.raises(UserError, match=r"returns shape \[4\] for 3 examples"):
        check(nn.Sequential(mlp(), Layer(lambda x: x.sum(dim=0))))
    with pytest.raises(UserError, match=r"returns shape \[3, 0\], which holds no numbers"):
        check(nn.Sequential(mlp(), Layer(lambda x: x[:, :0])))


# --------------------------------------------------------------------------------- from end to end


def with_batchnorm(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    pixels = Layer(lambda z: z.abs().flatten(1))
    return nn.Sequential(pixels, nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))


def test_non_private_training_takes_batchnorm_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run_probe(monkeypatch, with_batchnorm, tmp_path, "algorithm=sgd")
    assert record["model"]["surgery"] == record["model"]["fixed_state"] == []


def test_the_record_says_what_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run_probe(monkeypatch, with_batchnorm, tmp_path, "model.replace_batchnorm=frozen")
    (layer,) = record["model"]["surgery"]
    assert (layer["layer"], layer["was"]) == ("2", "BatchNorm1d")
    assert record["config"]["model"]["replace_batchnorm"] == "frozen"
    assert record["model"]["fixed_state"] == ["2.mean", "2.variance"]


def test_the_check_reads_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(model_checks, "check", lambda *given: asked.append(given) or NOTHING_FOUND)
    run_probe(monkeypatch, with_batchnorm, tmp_path, "model.replace_batchnorm=group")
    ((_, _, _, like, _),) = asked
    assert [part.shape for part in like] == [(0, 8, 8), (0,)]
