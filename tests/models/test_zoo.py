"""Every architecture: shapes, parameter counts its paper states, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from tests.gradients.zoo import ZOO, model_case
from zdp_bench import assets
from zdp_bench.config.plugins import check_options
from zdp_bench.errors import UserError
from zdp_bench.models.harmonic import cosines, responses
from zdp_bench.nn.batchnorm import replace_batchnorm, surgery
from zdp_bench.registry import lookup, names


def parameters(name: str, shape: tuple[int, ...], outputs: int, **options: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in lookup("model", name)(shape, outputs, **options).parameters())


def test_every_model_has_a_configuration_that_builds_it() -> None:
    assert set(assets.group(assets.CONF / "model")) == set(names("model"))
    for name in names("model"):
        options = dict(assets.read_yaml(assets.CONF / "model" / f"{name}.yaml"))
        assert options.pop("name") == name
        assert set(check_options("model", lookup("model", name), options)) == set(options)


def test_table_7s_linear_layer_has_28800_inputs() -> None:
    assert parameters("complex_conv_linear", (3, 32, 32), 1) == 32 * 27 + 32 + 28800 + 1


def test_vgg11_has_as_many_parameters_as_the_paper_says() -> None:
    assert parameters("vgg11", (3, 224, 224), 1000) == 132_863_336


def test_the_original_unet_has_its_size() -> None:
    # 31 million, as everywhere quoted
    assert 30.9e6 < parameters("transposed_unet", (1, 256, 256), 2) < 31.1e6


@pytest.mark.parametrize("name", ["vgg11", "vgg11_unet"])
def test_batchnorm_as_deepee_ran_it_is_an_instance_norm(name: str) -> None:
    """deepee runs one copy of the network per example: BatchNorm over one example, with its running
    statistics switched off.
    """
    torch.manual_seed(0)
    options = {"hidden": 8} if name == "vgg11" else {}
    model = lookup("model", name)((1, 64, 64), 2, norm="batch", width=8, **options)
    records = torch.randn(3, 1, 64, 64)
    with torch.no_grad():
        one_by_one = torch.cat([model(record.unsqueeze(0)) for record in records])
        together = model(records)
        replaced = replace_batchnorm(model, "instance")(records)
    assert not torch.allclose(one_by_one, together, atol=1e-3)
    torch.testing.assert_close(replaced, one_by_one, rtol=1e-4, atol=1e-4)
    report = surgery(model)
    assert {(line["was"], line["is"]) for line in report} == {("BatchNorm2d", "InstanceNorm2d")}
    assert len(report) == (8 if name == "vgg11" else 20)


@pytest.mark.parametrize("images", [32, 96, 128])
def test_vgg11_takes_small_films(images: int) -> None:
    model = lookup("model", "vgg11")(
        (1, images, images), 1, norm="group", groups=4, width=4, pool=2, hidden=4
    )
    assert model(torch.randn(2, 1, images, images)).shape == (2, 1)


def test_unet_has_fastmris_size() -> None:
    assert 7.7e6 < parameters("complex_unet", (1, 320, 320), 1) < 7.8e6


@pytest.mark.parametrize("name", ["complex_unet", "real_unet", "transposed_unet"])
def test_unet_answers_with_a_map(name: str) -> None:
    model = lookup("model", name)((1, 16, 24), 3, width=4, depth=2)
    answer = model(torch.randn(2, 1, 16, 24))
    assert answer.shape == (2, 3, 16, 24)
    assert not answer.is_complex()


def test_the_vgg_unet_answers_with_a_map() -> None:
    model = lookup("model", "vgg11_unet")((3, 32, 64), 2, width=4)
    assert model(torch.randn(2, 3, 32, 64)).shape == (2, 2, 32, 64)


@pytest.mark.parametrize("name", ["complex_unet", "real_unet"])
@pytest.mark.parametrize("how", ["group", "instance"])
def test_unet_takes_a_norm_behind_every_convolution(name: str, how: str) -> None:
    shape, width, depth = (1, 16, 24), 8, 2
    plain = parameters(name, shape, 1, width=width, depth=depth)
    # two convolutions a block
    scale_and_shift = 2 * 2 * (width + 2 * width + 4 * width + 2 * width + width)
    assert (
        parameters(name, shape, 1, width=width, depth=depth, normalisation=how)
        == plain + scale_and_shift
    )


def test_sequence_cnns_are_twins() -> None:
    """As the 2024 paper describes it; the real one has twice the inputs, and real numbers in the
    place of complex ones.
    """
    rest = 9 * (32 * 64 + 64 * 128) + (32 + 64 + 128) * 3 + 128 * 4 + 4
    assert parameters("complex_sequence_cnn", (1, 32, 32), 4) == 9 * 32 + rest
    assert parameters("real_sequence_cnn", (1, 32, 32), 4) == 9 * 2 * 32 + rest
    x = torch.randn(3, 1, 32, 32, dtype=torch.complex64)
    for name in ("complex_sequence_cnn", "real_sequence_cnn"):
        torch.manual_seed(0)
        model = lookup("model", name)((1, 32, 32), 4)
        answer = model(x)
        assert answer.shape == (3, 4)
        assert not answer.is_complex()
        # the imaginary part counts
        assert not torch.allclose(answer, model(x.conj().resolve_conj()))


@pytest.mark.parametrize("size", [(17, 22), (19, 31)])
def test_unet_takes_sizes_that_two_does_not_divide(size: tuple[int, int]) -> None:
    model = lookup("model", "complex_unet")((1, *size), 1, width=2, depth=3)
    assert model(torch.randn(2, 1, *size)).shape == (2, 1, *size)


def test_a_residual_unet_starts_from_its_input_and_answers_slice_by_slice() -> None:
    model = lookup("model", "complex_unet")(
        (3, 1, 8, 9), 1, width=2, depth=1, residual=True, normalisation="instance"
    )
    x = torch.randn(2, 3, 1, 8, 9, dtype=torch.complex64)
    assert torch.equal(model(x), x.abs())
    torch.nn.init.ones_(model.last.weight)
    assert torch.allclose(model(x)[1, 2], model(x[1, 2:])[0], atol=1e-5)


def test_a_harmonic_block_starts_from_its_input_and_answers_slice_by_slice() -> None:
    model = lookup("model", "complex_harmonic")((3, 1, 8, 9), 1, size=5)
    x = torch.randn(2, 3, 1, 8, 9, dtype=torch.complex64)
    assert torch.equal(model(x), x.abs())
    torch.nn.init.ones_(model.mix.weight)
    assert torch.allclose(model(x)[1, 2], model(x[1, 2:])[0], atol=1e-5)
    assert parameters("complex_harmonic", (1, 32, 40), 1) == 80


def test_a_harmonic_blocks_responses_are_those_of_2d_cosines_at_equal_power() -> None:
    vectors = cosines(5)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(5))
    x = torch.randn(2, 3, 7, 8, dtype=torch.complex128)
    found = responses(x, vectors.double()).unflatten(1, (3, 24))
    torch.testing.assert_close(
        found.abs().square().mean(dim=(-2, -1)), torch.ones(2, 3, 24, dtype=torch.float64)
    )
    plane = torch.outer(
        vectors[2], vectors[3]
    ).double()  # the middle of a map, where nothing is mirrored
    by_hand = torch.stack(
        [(x[1, 2, 1:6, column : column + 5] * plane).sum() for column in range(4)]
    )
    ratio = by_hand / found[1, 2, 5 * 2 + 3 - 1, 3, 2:6]
    # real, positive, and one for all
    torch.testing.assert_close(ratio, ratio[:1].abs().expand(4).to(ratio))


def test_a_harmonic_block_without_a_signal_stays_finite() -> None:
    model = lookup("model", "complex_harmonic")((1, 8, 9), 1, size=3)
    torch.nn.init.ones_(model.mix.weight)
    assert torch.equal(model(torch.zeros(1, 1, 8, 9)), torch.zeros(1, 1, 8, 9))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="must divide by 32"):
        lookup("model", "vgg11_unet")((1, 48, 64), 1)
    with pytest.raises(UserError, match="at least 32²"):
        lookup("model", "vgg11")((1, 28, 28), 1)
    with pytest.raises(UserError, match=r"model\.groups=3"):
        lookup("model", "vgg11")((1, 32, 32), 1, norm="group", groups=3)
    with pytest.raises(UserError, match=r"model\.depth=4"):
        lookup("model", "complex_unet")((1, 12, 100), 1)
    with pytest.raises(UserError, match=r"model\.size=9: reaches beyond"):
        lookup("model", "complex_harmonic")((1, 4, 100), 1)
    with pytest.raises(UserError, match=r"model=complex_harmonic: 1 channels in, 2 out"):
        lookup("model", "complex_harmonic")((1, 32, 32), 2)
    with pytest.raises(UserError, match=r"model\.channels"):
        lookup("model", "complex_cnn")((1, 3, 3), 1, channels=[4, 4])
    with pytest.raises(UserError, match="halved three times"):
        lookup("model", "complex_sequence_cnn")((1, 7, 32), 4)
    with pytest.raises(UserError, match=r"model\.groups=5"):
        lookup("model", "complex_sequence_cnn")((1, 32, 32), 4, groups=5)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in names("model")
        if not n.endswith(("mlp", "l_linear", "x_linear", "linear_map"))
        and n not in ("lenet5", "model3", "alexnet", "resnet20")
    ],
)
def test_a_network_that_needs_channels_says_so(name: str) -> None:
    if name.endswith("dfa_cnn"):
        pytest.skip("takes [height, width] as one channel")
    options = (
        {"channels": [4]}
        if name.endswith("_cnn") and "sequence" not in name and name != "speech_cnn"
        else {}
    )
    with pytest.raises(
        UserError,
        match=r"takes records of shape \[channels, height, width\], and these are \[28, 28\]",
    ):
        lookup("model", name)((28, 28), 10, **options)


@pytest.mark.parametrize(
    ("name", "shape", "options", "key"),
    [
        ("resnet20", (3, 32, 32), {"groups": 0}, "model.groups=0"),
        ("resnet20", (3, 32, 32), {"groups": 5}, "model.groups=5"),
        ("complex_unet", (1, 32, 32), {"width": 0}, "model.width=0"),
        (
            "complex_harmonic",
            (1, 32, 32),
            {"size": 4},
            "model.size=4: must be an odd number from 3",
        ),
        ("vgg11", (3, 32, 32), {"width": 0}, "model.width=0"),
        ("real_cnn", (3, 32, 32), {"channels": [0]}, r"model.channels=\[0\]"),
        ("complex_mlp", (8, 8), {"hidden": [0]}, r"model.hidden=\[0\]"),
        (
            "complex_mlp",
            (8, 8),
            {"hidden": [8], "activation": "relu"},
            "'relu' is for real numbers.*Take one of cardioid",
        ),
        (
            "real_mlp",
            (8, 8),
            {"hidden": [8], "activation": "cardioid"},
            "'cardioid' is for complex numbers.*Take one of mish",
        ),
        ("lenet5", (28, 28), {"activation": "cardioid"}, "'cardioid' is for complex numbers"),
    ],
)
def test_an_option_that_leaves_no_network_is_named(
    name: str, shape: tuple[int, ...], options: dict, key: str
) -> None:
    with pytest.raises(UserError, match=key):
        lookup("model", name)(shape, 10, **options)


def test_a_real_unet_takes_both_parts_of_a_complex_image() -> None:
    torch.manual_seed(0)
    model = lookup("model", "real_unet")((1, 8, 9), 1, width=8, depth=1, re_im=True, residual=True)
    x = torch.randn(4, 1, 8, 9, dtype=torch.complex64)
    assert torch.allclose(model(x), x.abs())  # the last layer starts at zero
    torch.nn.init.ones_(model.last.weight)
    answer = model(x)
    assert answer.shape == (4, 1, 8, 9)
    assert not answer.is_complex()
    assert not torch.allclose(answer, model(x.conj().resolve_conj()))  # the imaginary part counts
    model(torch.zeros_like(x)).sum().backward()  # no gradient is NaN where the answer is 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_every_model_can_be_built_without_numbers(name: str) -> None:
    """An exported folder's model is built so first, whatever sizes its record announces."""
    case = model_case(name, **({"weights": "untrained"} if "weights" in ZOO[name][2] else {}))
    with torch.device("meta"):
        sketch = case.module(torch.float32).state_dict()
    ours = case.module(torch.float32).state_dict()
    assert all(tensor.is_meta for tensor in sketch.values())
    assert {n: t.shape for n, t in sketch.items()} == {n: t.shape for n, t in ours.items()}
