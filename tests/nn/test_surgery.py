"""What is done to a built model: other norms, standardised weights, mapped complex records."""

import pickle

import pytest
import torch
from torch import Tensor, nn

from tests.training.model_checks.models import IMAGES, check, convolutional, mlp
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.gradients.rules import rule_of
from zdp_bench.nn import surgery
from zdp_bench.nn.convolution import ComplexConv1d, ComplexConv2d, ComplexConv3d
from zdp_bench.nn.surgery import (
    STANDARDISED,
    RealInput,
    real_shape,
    standardise,
    standardise_weights,
)
from zdp_bench.training.setup import Setup


@pytest.mark.parametrize("how", ["group", "instance", "frozen"])
def test_batchnorm_is_replaced_in_place_with_its_weights(how: surgery.Replacement) -> None:
    norm = nn.BatchNorm2d(8)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8.0) + 1)
        norm.bias.copy_(-torch.arange(8.0))
    model = surgery.replace_batchnorm(convolutional(nn.Identity(), norm), how)
    new = model.get_submodule("1.1")
    assert torch.equal(new.weight, torch.arange(8.0) + 1)
    assert torch.equal(new.bias, -torch.arange(8.0))
    kind = {"group": "GroupNorm", "instance": "InstanceNorm2d", "frozen": "FrozenBatchNorm"}[how]
    assert surgery.surgery(model) == [
        {"layer": "1.1", "was": "BatchNorm2d", "is": kind, "why": "batch statistics mix samples"}
    ]
    assert check(model, IMAGES) == (["1.1.mean", "1.1.variance"] if how == "frozen" else [])


def test_a_frozen_batchnorm_is_batchnorm_in_evaluation() -> None:
    norm = nn.BatchNorm2d(3)
    norm(torch.randn(20, 3, 4, 4) * 3 + 1)
    frozen, x = surgery.FrozenBatchNorm(norm), torch.randn(5, 3, 4, 4)
    torch.testing.assert_close(frozen(x), norm.eval()(x))


@pytest.mark.parametrize(("channels", "groups"), [(3, 1), (12, 3), (256, 32), (514, 2)])
def test_a_group_keeps_four_channels_where_it_can(channels: int, groups: int) -> None:
    model = surgery.replace_batchnorm(nn.Sequential(nn.BatchNorm1d(channels)), "group")
    assert model[0].num_groups == groups


def test_instance_norm_on_vectors_has_nothing_to_normalise_and_is_refused() -> None:
    for affine in (True, False):
        model = surgery.replace_batchnorm(mlp(nn.BatchNorm1d(8, affine=affine)), "instance")
        with pytest.raises(UserError, match=r"would normalise single numbers.*by group"):
            check(model)
        with pytest.raises(UserError, match="would normalise single numbers"):
            model(torch.randn(8, 5))  # as many examples as channels
    assert check(surgery.replace_batchnorm(mlp(nn.BatchNorm1d(8)), "group")) == []


def test_instance_norm_on_sequences_is_torchs() -> None:
    model = surgery.replace_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), "instance")
    x = torch.randn(4, 3, 7)
    torch.testing.assert_close(model(x), nn.InstanceNorm1d(3)(x))
    assert rule_of(model[0]) is rule_of(nn.InstanceNorm1d(3))


def test_a_batchnorm_that_computes_more_is_refused_before_any_is_replaced() -> None:
    class Activated(nn.BatchNorm2d):
        """As timm's BatchNormAct2d."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    hooked, patched = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    hooked.register_forward_hook(lambda _, __, output: 10 * output)
    patched.forward = lambda x: nn.BatchNorm2d.forward(patched, x).relu()
    for norm in (Activated(4), hooked, patched):
        model = nn.Sequential(nn.BatchNorm2d(4), norm)
        with pytest.raises(UserError, match=r"^layer '1' \(\w+\) may compute more than torch's"):
            surgery.replace_batchnorm(model, "group")
        assert type(model[0]) is nn.BatchNorm2d


def test_a_batchnorm_that_is_only_initialised_in_another_way_is_replaced() -> None:
    class Zeroed(nn.BatchNorm2d):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            nn.init.zeros_(self.weight)

    model = surgery.replace_batchnorm(nn.Sequential(Zeroed(4)), "group")
    assert isinstance(model[0], nn.GroupNorm)
    assert not model[0].weight.any()


def test_an_unknown_replacement_is_refused() -> None:
    with pytest.raises(UserError, match=r"^how 'layer' is not known.*frozen, group, instance"):
        surgery.replace_batchnorm(nn.Sequential(nn.BatchNorm2d(4)), "layer")


def test_a_batchnorm_of_two_names_is_replaced_under_both() -> None:
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh(), norm)
    model.norm = norm
    surgery.replace_batchnorm(model, "group")
    assert isinstance(model.norm, nn.GroupNorm)
    assert model[1] is model[3] is model.norm
    assert not any(isinstance(layer, nn.BatchNorm1d) for layer in model.modules())


def test_a_layer_may_say_itself_what_takes_its_place() -> None:
    class ComplexBatchNorm(nn.Module):
        def per_sample_norm(self, how: str) -> nn.Module:
            return nn.Identity() if how == "group" else nn.Tanh()

    model = surgery.replace_batchnorm(mlp(ComplexBatchNorm()), "group")
    assert surgery.surgery(model)[0]["is"] == "Identity"


def test_a_layer_that_is_replaced_takes_the_batchnorm_in_it_along() -> None:
    class Activated(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    class Block(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def per_sample_norm(self, how: str) -> nn.Module:
            return nn.Tanh()

    for norm in (Activated(4), nn.BatchNorm2d(4)):
        model = surgery.replace_batchnorm(nn.Sequential(Block(norm), nn.BatchNorm2d(4)), "group")
        assert [type(layer) for layer in model] == [nn.Tanh, nn.GroupNorm]
        assert not [*model[0].children()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_filters_have_mean_0_and_norm_1(dtype: torch.dtype) -> None:
    weight = 3 * torch.randn(4, 2, 3, 3, dtype=dtype) + 1
    filters = standardise(weight).flatten(1)
    assert torch.allclose(filters.mean(dim=1), torch.zeros(4, dtype=dtype), atol=1e-12)
    assert torch.allclose(filters.abs().square().sum(dim=1), torch.ones(4).double(), atol=1e-5)
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


def test_a_model_with_standardised_weights_is_pickled_whole() -> None:
    complex_layers = ComplexConv1d(1, 1, 3), ComplexConv2d(1, 1, 3), ComplexConv3d(1, 1, 3)
    for layer in (nn.Conv1d(1, 1, 3), nn.Conv2d(1, 1, 3), nn.Conv3d(1, 1, 3), *complex_layers):
        (copy,) = pickle.loads(pickle.dumps(standardise_weights(nn.Sequential(layer))))
        assert type(copy) is type(layer) is STANDARDISED[type(layer).__mro__[2]]
        assert torch.equal(copy.weight, layer.weight)


def test_a_filter_of_one_number_and_a_transposed_convolution_stay() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ConvTranspose2d(2, 2, 2), nn.Conv2d(2, 2, 2))
    types = [type(layer) for layer in standardise_weights(model)]
    assert types[:2] == [nn.Conv2d, nn.ConvTranspose2d]
    assert types[2] is not nn.Conv2d


def test_a_model_without_batchnorm_stays() -> None:
    model = mlp(nn.ReLU())
    types = [type(layer) for layer in model]
    assert surgery.replace_batchnorm(model, "group") is model
    assert [type(layer) for layer in model] == types
    with pytest.raises(UserError, match=r"^the model is a single BatchNorm1d, .*nn\.Sequential"):
        surgery.replace_batchnorm(nn.BatchNorm1d(3), "group")


def test_a_configured_replacement_needs_a_batchnorm() -> None:
    with pytest.raises(UserError, match=r"^model\.replace_batchnorm=group: the model has no"):
        Setup.of(configured(["recipe=quickstart", "model.replace_batchnorm=group"]))


def test_a_model_without_a_convolution_is_refused() -> None:
    with pytest.raises(UserError, match="no convolution"):
        standardise_weights(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["algorithm=gredp", "model=real_mlp"], "sums whole gradients"),
        (["model.start=unit_variance"], "have no scale to set"),
    ],
)
def test_what_it_does_not_go_with_is_one_sentence(more: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        configured(["recipe=quickstart", "model.weight_standardisation=true", *more])


# An example's shape [1, 16, 16], and networks with real weights that take it.
COMPLEX = ["recipe=quickstart", "algorithm=dp_sgd", "dataset=synthetic_images"]
COMPLEX += ["dataset.complex_valued=true", "dataset.shape=[1,16,16]", "dataset.train=60"]


@pytest.mark.parametrize("model", ["real_mlp", "real_cnn", "lenet5"])
def test_no_real_network_drops_an_imaginary_part(model: str) -> None:
    for _ in range(2):  # torch warns once a process
        with pytest.raises(UserError, match="complex_as=channels"):
            Setup.of(configured([*COMPLEX, f"model={model}"]))
    for mapped, channels in (("magnitude", 1), ("channels", 2)):
        setup = Setup.of(configured([*COMPLEX, f"model={model}", f"model.complex_as={mapped}"]))
        inputs, _ = setup.data.train.batch(torch.arange(3))
        seen = setup.model[0](inputs)
        assert seen.shape == (3, channels, 16, 16)
        assert not seen.is_complex()
        setup.check_model()


def test_the_mapping_is_what_it_says() -> None:
    for shape in ((5,), (4, 6), (3, 4, 6), (2, 3, 4, 6)):
        z = torch.randn(2, *shape, dtype=torch.complex64)
        magnitude, channels = (RealInput(mapped)(z) for mapped in ("magnitude", "channels"))
        assert torch.equal(magnitude, z.abs())
        assert tuple(channels.shape[1:]) == real_shape(shape, "channels")
        assert torch.allclose(channels.norm(), z.norm())
        assert torch.equal(channels.flatten()[:4], z.real.flatten()[:4])
    with pytest.raises(TypeError, match="real already"):
        RealInput("magnitude")(torch.ones(1, 2))


@pytest.mark.parametrize("how", ["group", "instance", "frozen"])
def test_timms_batchnorm_keeps_its_activation(how: surgery.Replacement) -> None:
    timm_layers = pytest.importorskip("timm.layers")
    norm = timm_layers.BatchNormAct2d(8)
    plain = surgery.replace_batchnorm(nn.Sequential(nn.BatchNorm2d(8)), how)
    inputs = torch.randn(3, 8, 4, 4)
    outputs = surgery.replace_batchnorm(nn.Sequential(norm), how)(inputs)
    torch.testing.assert_close(outputs, plain(inputs).relu())
