"""How weights start: the unit-variance start, on every model and with every activation."""

import math
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from tests.gradients.harness import Case
from tests.gradients.zoo import MODELS
from zdp_bench.config import configured
from zdp_bench.data import DatasetInfo
from zdp_bench.errors import UserError
from zdp_bench.nn.initialisation import Initialisation, initialise, scale_to_unit_variance
from zdp_bench.training.build import build_model


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("sizes", [(400, 900), (900, 400)], ids=["narrowing", "widening"])
@pytest.mark.parametrize("how", get_args(Initialisation))
def test_weights_have_the_second_moment_of_their_distribution(
    how: Initialisation, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """E|w|² in closed form; and E|w|⁴, which tells a Rayleigh modulus from a uniform one."""
    fan_out, fan_in = sizes
    layer = initialise(nn.Linear(fan_in, fan_out, dtype=dtype), how)
    parts = 2 if dtype.is_complex else 1
    moments = {
        "uniform_parts": parts / (3 * fan_in),
        "rayleigh_he": 2 / fan_in,
        "rayleigh_glorot": 2 / (fan_in + fan_out),
    }
    # (E w⁴ − (E w²)²) / (E w²)² of a real part: 4/5 of a uniform one, 2 of a normal one
    spread = (0.8 if how == "uniform_parts" else 2.0) / parts
    power = layer.weight.detach().abs().square()
    error = 5 * math.sqrt(spread / layer.weight.numel())
    assert power.mean().item() == pytest.approx(moments[how], rel=error)
    assert (power.var() / power.mean() ** 2).item() == pytest.approx(spread, rel=0.05)
    numbers = torch.view_as_real(layer.weight.detach()) if parts == 2 else layer.weight.detach()
    assert abs(numbers.mean().item()) < 5 * math.sqrt(moments[how] / layer.weight.numel())
    if parts == 2:  # a uniform phase: parts of one size, that are not correlated
        real, imaginary = numbers.unbind(-1)
        pseudo = ((real + 1j * imaginary) ** 2).mean().abs().item()
        assert pseudo < 5 * moments[how] / math.sqrt(layer.weight.numel())
    assert layer.bias.detach().abs().any() == (how == "uniform_parts")


def powers(model: nn.Module, inputs: Tensor) -> dict[str, float]:
    """E|z|² that comes out of each module, by name."""
    power_of_layer: dict[str, float] = {}

    def look(name: str, _: nn.Module, __: object, output: Tensor) -> None:
        power_of_layer[name] = output.abs().square().mean().item()

    handles = [
        module.register_forward_hook(partial(look, name)) for name, module in model.named_modules()
    ]
    with torch.no_grad():
        model.eval()(inputs)
    for handle in handles:
        handle.remove()
    return power_of_layer


def has_matrix(module: nn.Module) -> bool:
    return getattr(getattr(module, "weight", None), "ndim", 0) > 1


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_every_layer_of_every_model_has_unit_power_on_noise(case: Case) -> None:
    model = case.module(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers = {name: m for name, m in model.named_modules() if has_matrix(m)}
    noise = case.batch(16, torch.float32)[0]
    scale_to_unit_variance(model, noise)
    assert not any(module._forward_hooks for module in model.modules())
    power_of_layer = powers(model, noise)
    scaled = 0
    for name, layer in layers.items():
        if not layer.weight.requires_grad:
            assert torch.equal(layer.weight, before[f"{name}.weight"])
        elif not before[f"{name}.weight"].any():  # a block that starts from its input
            assert power_of_layer[name] == 0
        else:
            scaled += 1
            assert power_of_layer[name] == pytest.approx(1, rel=1e-3)
            assert getattr(layer, "bias", None) is None or not layer.bias.any()
    assert scaled or case.name.startswith(
        ("model complex_harmonic", "model real_linear", "model complex_linear")
    )
    for name, value in model.state_dict().items():
        if name.rpartition(".")[0] not in layers:  # norms, and biases of activations
            assert torch.equal(value, before[name])


def test_the_start_follows_from_the_seed_and_no_example_is_read() -> None:
    """`DatasetInfo` has shapes only."""

    def start(seed: int, *more: str) -> dict[str, Tensor]:
        config = configured(["recipe=quickstart", f"seed={seed}", *more])
        assert config.resolved["model"]["start"] == (unit if more else None)  # for the record
        info = DatasetInfo(train=9, test=3, input_shape=(8, 8), outputs=10, dtype=torch.complex64)
        return build_model(config, info).state_dict()

    unit = "unit_variance"
    word = f"model.start={unit}"
    first, same, other, plain = start(1, word), start(1, word), start(2, word), start(1)
    for name, value in first.items():
        assert torch.equal(value, same[name])
        if name.endswith("weight"):
            assert not torch.equal(value, other[name])
            ratio = value / plain[name]
            assert torch.allclose(ratio, ratio.flatten()[0])  # only their size differs


class Twice(nn.Module):
    """One layer that is used twice, behind a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(self.norm(x)).tanh())


def test_a_layer_used_twice_is_scaled_once_and_a_batchnorm_learns_nothing() -> None:
    model = Twice()
    scale_to_unit_variance(model, torch.randn(2048, 8))
    assert model.training
    assert not model.norm.running_mean.any()
    first = model.layer(torch.randn(2048, 8))
    assert first.square().mean().item() == pytest.approx(1, rel=0.1)


class Uncalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight.T


@pytest.mark.parametrize(
    ("model", "message"),
    [(Uncalled(), "layer 'layer' is not called"), (nn.Flatten(), "the model has no such layer")],
)
def test_a_model_whose_layers_are_out_of_reach_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=rf"model\.start=unit_variance .*: {message}\."):
        scale_to_unit_variance(model, torch.randn(3, 4))
    assert not any(module._forward_hooks for module in model.modules())


def test_each_module_stays_in_its_mode() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 4))
    model[1].eval()
    scale_to_unit_variance(model, torch.randn(64, 6))
    assert [module.training for module in model] == [True, False, True]


def test_a_weight_that_two_layers_share_is_scaled_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    noise = torch.randn(4096, 6)
    scale_to_unit_variance(model, noise)
    assert powers(model, noise)["0"] == pytest.approx(1.0, rel=1e-5)
