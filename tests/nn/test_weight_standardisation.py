"""`model.weight_standardisation`: what the filters are, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zdp_bench.config import configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.weight_standardisation import standardise, standardise_weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_filters_have_mean_0_and_norm_1(dtype: torch.dtype) -> None:
    weight = 3 * torch.randn(4, 2, 3, 3, dtype=dtype) + 1
    found = standardise(weight).flatten(1)
    assert torch.allclose(found.mean(dim=1), torch.zeros(4, dtype=dtype), atol=1e-12)
    assert torch.allclose(found.abs().square().sum(dim=1), torch.ones(4).double(), atol=1e-5)
    assert torch.allclose(standardise(5 * weight - 2), standardise(weight), atol=1e-5)


def test_the_layer_computes_with_them_and_keeps_its_parameters() -> None:
    for layer in (nn.Conv2d(2, 3, 3), ComplexConv2d(2, 3, 3)):
        weight, names = layer.weight.clone(), [*layer.state_dict()]
        x = torch.randn(2, 2, 5, 5, dtype=weight.dtype)
        expected = layer._conv_forward(x, standardise(weight), layer.bias)
        model = standardise_weights(nn.Sequential(layer))
        assert torch.equal(model(x), expected)
        assert torch.equal(layer.weight, weight)
        assert [*layer.state_dict()] == names


def test_a_filter_of_one_number_and_a_transposed_convolution_stay() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ConvTranspose2d(2, 2, 2), nn.Conv2d(2, 2, 2))
    types = [type(layer) for layer in standardise_weights(model)]
    assert types[:2] == [nn.Conv2d, nn.ConvTranspose2d]
    assert types[2] is not nn.Conv2d


def test_without_a_convolution_it_is_refused() -> None:
    with pytest.raises(UserError, match="no convolution"):
        standardise_weights(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["algorithm=gredp", "model=real_mlp"], "sums whole gradients: sgd, dp_sgd or zeta"),
        (["model.start=unit_variance"], "have no scale that a start could set"),
    ],
)
def test_what_it_does_not_go_with_is_one_sentence(more: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        configured(["recipe=quickstart", "model.weight_standardisation=true", *more])


def test_off_leaves_the_digest_as_it_was() -> None:
    plain = configured(["recipe=quickstart"])
    node = {k: v for k, v in plain.resolved["model"].items() if k != "weight_standardisation"}
    before = type(plain)(**{**vars(plain), "resolved": plain.resolved | {"model": node}})
    assert experiment_digest(before) == experiment_digest(plain)
