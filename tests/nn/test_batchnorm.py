"""BatchNorm, replaced by what keeps samples apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.training.model_checks.models import IMAGES, check, convolutional, mlp
from zdp_bench.errors import UserError
from zdp_bench.nn import batchnorm


@pytest.mark.parametrize("how", ["group", "instance", "frozen"])
def test_batchnorm_is_replaced_in_place_with_its_weights(how: batchnorm.Replacement) -> None:
    norm = nn.BatchNorm2d(8)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8.0) + 1)
        norm.bias.copy_(-torch.arange(8.0))
    model = batchnorm.replace_batchnorm(convolutional(nn.Identity(), norm), how)
    new = model.get_submodule("1.1")
    assert torch.equal(new.weight, torch.arange(8.0) + 1)
    assert torch.equal(new.bias, -torch.arange(8.0))
    kind = {"group": "GroupNorm", "instance": "InstanceNorm2d", "frozen": "FrozenBatchNorm"}[how]
    assert batchnorm.surgery(model) == [
        {"layer": "1.1", "was": "BatchNorm2d", "is": kind, "why": "batch statistics mix samples"},
    ]
    assert check(model, IMAGES) == (["1.1.mean", "1.1.variance"] if how == "frozen" else [])


def test_a_frozen_batchnorm_is_batchnorm_in_evaluation() -> None:
    norm = nn.BatchNorm2d(3)
    norm(torch.randn(20, 3, 4, 4) * 3 + 1)
    frozen, x = batchnorm.FrozenBatchNorm(norm), torch.randn(5, 3, 4, 4)
    torch.testing.assert_close(frozen(x), norm.eval()(x))


@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (3, 1), (8, 2), (12, 3), (64, 16), (256, 32), (514, 2)]
)
def test_a_group_keeps_four_channels_where_it_can(channels: int, groups: int) -> None:
    model = batchnorm.replace_batchnorm(nn.Sequential(nn.BatchNorm1d(channels)), "group")
    assert model[0].num_groups == groups


def test_instance_norm_on_vectors_has_nothing_to_normalise_and_is_refused() -> None:
    with pytest.raises(UserError):
        check(batchnorm.replace_batchnorm(mlp(nn.BatchNorm1d(8)), "instance"))
    assert check(batchnorm.replace_batchnorm(mlp(nn.BatchNorm1d(8)), "group")) == []


def test_a_layer_may_say_itself_what_takes_its_place() -> None:
    class ComplexBatchNorm(nn.Module):
        def per_sample_norm(self, how: str) -> nn.Module:
            return nn.Identity() if how == "group" else nn.Tanh()

    model = batchnorm.replace_batchnorm(mlp(ComplexBatchNorm()), "group")
    assert batchnorm.surgery(model)[0]["is"] == "Identity"


def test_a_replacement_without_a_batchnorm_is_refused() -> None:
    with pytest.raises(UserError, match="has no BatchNorm"):
        batchnorm.replace_batchnorm(mlp(), "group")
