"""Every architecture: shapes, sizes that its paper states, what trains, and what it refuses."""

import os
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from torch import nn
from torchvision.models import ResNet18_Weights

from tests.gradients.zoo import ZOO, model_case, resnet18_weights
from zdp_bench import assets
from zdp_bench.config import configured
from zdp_bench.config.plugins import check_options
from zdp_bench.errors import UserError
from zdp_bench.gradients.clipping import trainable
from zdp_bench.models.harmonic import cosines, responses
from zdp_bench.models.speech_cnn import SpeechCNN
from zdp_bench.nn.activations import IGaussian
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.surgery import replace_batchnorm, surgery
from zdp_bench.registry import lookup, names
from zdp_bench.training.setup import Setup


def parameters(name: str, shape: tuple[int, ...], outputs: int, **options: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in lookup("model", name)(shape, outputs, **options).parameters())


def test_every_model_has_a_configuration_that_builds_it() -> None:
    assert set(assets.group(assets.CONF / "model")) == set(names("model"))
    for name in names("model"):
        options = dict(assets.read_yaml(assets.CONF / "model" / f"{name}.yaml"))
        assert options.pop("name") == name
        assert set(check_options("model", lookup("model", name), options)) == set(options)


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "least", "most"),
    [
        ("complex_conv_linear", (3, 32, 32), 1, 29_697, 29_697),  # 28800 inputs: Table 7
        ("vgg11", (3, 224, 224), 1000, 132_863_336, 132_863_336),
        ("transposed_unet", (1, 256, 256), 2, 30.9e6, 31.1e6),  # as everywhere quoted
        ("complex_unet", (1, 320, 320), 1, 7.7e6, 7.8e6),  # fastMRI's
        ("complex_harmonic", (1, 32, 40), 1, 80, 80),
        ("lenet5", (28, 28), 10, 44_426, 44_426),  # LeCun's
        ("resnet20", (3, 32, 32), 10, 269_722, 269_722),  # He's
    ],
)
def test_it_has_as_many_parameters_as_its_paper_says(
    name: str, shape: tuple[int, ...], outputs: int, least: float, most: float
) -> None:
    assert least <= parameters(name, shape, outputs) <= most


SMALL_VGG: dict[str, object] = {"norm": "group", "groups": 4, "width": 4, "pool": 2, "hidden": 4}


@pytest.mark.parametrize(
    ("name", "shape", "answer", "options"),
    [
        ("vgg11", (1, 32, 32), (1,), SMALL_VGG),
        ("vgg11", (1, 96, 96), (1,), SMALL_VGG),
        ("complex_unet", (1, 16, 24), (3, 16, 24), {"width": 4, "depth": 2}),
        ("complex_unet", (1, 19, 31), (1, 19, 31), {"width": 2, "depth": 3}),  # padded on the way
        ("real_unet", (1, 16, 24), (3, 16, 24), {"width": 4, "depth": 2}),
        ("transposed_unet", (1, 16, 24), (3, 16, 24), {"width": 4, "depth": 2}),
        ("vgg11_unet", (3, 32, 64), (2, 32, 64), {"width": 4}),
        ("speech_cnn", (1, 14, 14), (2,), {}),
        ("resnet18_transfer", (3, 32, 32), (10,), {"weights": "untrained"}),  # without a file
    ],
)
def test_it_answers_with_a_real_map_or_logits(
    name: str, shape: tuple[int, ...], answer: tuple[int, ...], options: dict[str, object]
) -> None:
    dtype = torch.complex64 if name == "speech_cnn" else torch.float32  # the others convert it
    x = torch.randn(2, *shape, dtype=dtype)
    outputs = lookup("model", name)(shape, answer[0], **options)(x)
    assert outputs.shape == (2, *answer)
    assert not outputs.is_complex()


@pytest.mark.parametrize("name", ["vgg11", "vgg11_unet"])
def test_batchnorm_as_deepee_ran_it_is_an_instance_norm(name: str) -> None:
    """deepee runs one copy of the network per example: BatchNorm over one example, with its running
    statistics switched off.
    """
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


@pytest.mark.parametrize("name", ["complex_unet", "real_unet"])
@pytest.mark.parametrize("how", ["group", "instance"])
def test_unet_takes_a_norm_behind_every_convolution(name: str, how: str) -> None:
    shape, width, depth = (1, 16, 24), 8, 2
    plain = parameters(name, shape, 1, width=width, depth=depth)
    normed = parameters(name, shape, 1, width=width, depth=depth, normalisation=how)
    # two convolutions a block, each with scale and shift
    assert normed == plain + 2 * 2 * (width + 2 * width + 4 * width + 2 * width + width)


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


@pytest.mark.parametrize(
    ("name", "last", "options"),
    [
        ("complex_unet", "last", {"width": 2, "depth": 1, "residual": True}),
        ("complex_harmonic", "mix", {"size": 5}),
    ],
)
def test_a_network_that_starts_from_its_input_answers_slice_by_slice(
    name: str, last: str, options: dict[str, object]
) -> None:
    model = lookup("model", name)((3, 1, 8, 9), 1, **options)
    x = torch.randn(2, 3, 1, 8, 9, dtype=torch.complex64)
    assert torch.equal(model(x), x.abs())
    torch.nn.init.ones_(model.get_submodule(last).weight)
    assert torch.allclose(model(x)[1, 2], model(x[1, 2:])[0], atol=1e-5)


def test_a_harmonic_blocks_responses_are_those_of_2d_cosines_at_equal_power() -> None:
    vectors = cosines(5)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(5))
    x = torch.randn(2, 3, 7, 8, dtype=torch.complex128)
    maps = responses(x, vectors.double()).unflatten(1, (3, 24))
    powers = maps.abs().square().mean(dim=(-2, -1))
    torch.testing.assert_close(powers, torch.ones_like(powers))
    plane = torch.outer(vectors[2], vectors[3]).double()
    # the middle of a map, where nothing is mirrored
    windows = [x[1, 2, 1:6, column : column + 5] for column in range(4)]
    by_hand = torch.stack([(window * plane).sum() for window in windows])
    ratio = by_hand / maps[1, 2, 5 * 2 + 3 - 1, 3, 2:6]
    # real, positive, and one for all
    torch.testing.assert_close(ratio, ratio[:1].abs().expand(4).to(ratio))


def test_a_harmonic_block_without_a_signal_stays_finite() -> None:
    model = lookup("model", "complex_harmonic")((1, 8, 9), 1, size=3)
    torch.nn.init.ones_(model.mix.weight)
    assert torch.equal(model(torch.zeros(1, 1, 8, 9)), torch.zeros(1, 1, 8, 9))


# Networks that take [height, width] as one channel, or any shape.
WITHOUT_CHANNELS = ("mlp", "l_linear", "x_linear", "linear_map", "dfa_cnn", "lenet5", "model3")
WITHOUT_CHANNELS += ("alexnet", "resnet20")
RELU = {"hidden": [8], "activation": "relu"}
CARDIOID = {"hidden": [8], "activation": "cardioid"}
CHANNELS = {f"{kind}_cnn": {"channels": [4]} for kind in ("complex", "real")}
NO_CHANNEL = r"needs examples of shape \[channels, height, width\], but these are \[28, 28\]"
REFUSED = [
    ("vgg11_unet", (1, 48, 64), {}, "must be divisible by 32"),
    ("vgg11", (1, 28, 28), {}, "at least 32²"),
    ("vgg11", (1, 32, 32), {"norm": "group", "groups": 3}, r"model\.groups=3"),
    ("complex_unet", (1, 12, 100), {}, r"model\.depth=4"),
    ("complex_harmonic", (1, 4, 100), {}, r"model\.size=9: reaches beyond"),
    ("complex_harmonic", (1, 32, 32), {}, r"model=complex_harmonic: 1 channels in, 10 out"),
    ("complex_harmonic", (1, 32, 32), {"size": 4}, r"model\.size=4: must be an odd number from 3"),
    ("complex_cnn", (1, 3, 3), {"channels": [4, 4]}, r"model\.channels"),
    ("complex_sequence_cnn", (1, 7, 32), {}, "halved three times"),
    ("resnet20", (3, 32, 32), {"groups": 5}, r"model\.groups=5"),
    ("lenet5", (8, 8), {}, "images of 8×8 are too small for the network"),
    ("speech_cnn", (1, 13, 40), {}, "at least 14×14"),
    ("complex_mlp", (8, 8), RELU, "'relu' is for real numbers.*Use one of cardioid"),
    ("real_mlp", (8, 8), CARDIOID, "'cardioid' is for complex numbers.*Use one of mish"),
    *(
        (name, (28, 28), CHANNELS.get(name, {}), NO_CHANNEL)
        for name in names("model")
        if not name.endswith(WITHOUT_CHANNELS)
    ),
]


@pytest.mark.parametrize(("name", "shape", "options", "says"), REFUSED)
def test_what_leaves_no_network_is_named(
    name: str, shape: tuple[int, ...], options: dict[str, object], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        lookup("model", name)(shape, 10, **options)


def test_a_real_unet_takes_both_parts_of_a_complex_image() -> None:
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


@pytest.mark.parametrize(
    ("name", "shape"), [("lenet5", (28, 28)), ("model3", (3, 32, 32)), ("alexnet", (3, 32, 32))]
)
def test_circulant_layers_stand_where_dense_ones_do(name: str, shape: tuple[int, ...]) -> None:
    make = lookup("model", name)
    dense, circulant = (make(shape, 10, linear=kind) for kind in ("dense", "circulant"))
    both = zip(dense.modules(), circulant.modules(), strict=True)
    pairs = [(a, b) for a, b in both if isinstance(b, CirculantLinear | nn.Linear)]
    assert len(pairs) in (2, 3)
    for of_dense, of_circulant in pairs:
        assert of_circulant.dense().shape == of_dense.weight.shape
    assert pairs[-1][1].block == 10
    x = torch.randn(2, *shape)
    assert dense(x).shape == circulant(x).shape == (2, 10)


@pytest.fixture(scope="module")
def weights() -> str:
    return resnet18_weights()


@pytest.mark.parametrize("convolutions", [1, 2])
def test_transfer_trains_the_last_convolutions_and_a_new_head(
    weights: str, convolutions: int
) -> None:
    options = {"convolutions": convolutions, "weights": weights}
    model = lookup("model", "resnet18_transfer")((3, 32, 32), 10, **options)
    started = torch.load(weights)
    retrained = [f"network.layer4.1.conv{number}.weight" for number in (1, 2)][-convolutions:]
    assert list(trainable(model)) == [*retrained, "network.fc.weight", "network.fc.bias"]
    torch.testing.assert_close(model.network.conv1.weight, started["conv1.weight"])
    x = torch.randn(3, 3, 32, 32)
    # nothing mixes examples, and nothing is kept of them
    alone, several = model.train()(x[:1]), model(x)
    torch.testing.assert_close(alone, several[:1])
    assert torch.equal(model.network.bn1.running_mean, started["bn1.running_mean"])


def test_without_weights_there_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise URLError("no network")

    make = lookup("model", "resnet18_transfer")
    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", unreachable)
    with pytest.raises(UserError, match=r"model\.weights=FILE"):
        make((3, 32, 32), 10)
    (tmp_path / "text.pth").write_text("no weights")
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    torch.save({1: torch.zeros(1)}, tmp_path / "numbered.pth")
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    (tmp_path / "large.pth").touch()
    os.truncate(tmp_path / "large.pth", 1 << 36)
    for name, says in (
        ("absent", r"model\.weights=.*absent\.pth: file not found"),
        ("text", "contains more than tensors"),
        ("numbered", "contains more than tensors"),
        ("list", "contains more than tensors"),
        ("large", "is larger than 134,217,728 bytes"),
        ("other", "not the weights of a ResNet-18"),
    ):
        with pytest.raises(UserError, match=says):
            make((3, 32, 32), 10, weights=str(tmp_path / f"{name}.pth"))


def test_a_damaged_download_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    path = tmp_path / "checkpoints" / "resnet18-f37072fd.pth"
    path.parent.mkdir()
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.weights=imagenet: cannot be read as weights"):
        lookup("model", "resnet18_transfer")((3, 32, 32), 10)


def test_it_is_the_network_of_the_appendix() -> None:
    model = SpeechCNN((1, 124, 129), 10)
    convolutions = [m for m in model.modules() if isinstance(m, ComplexConv2d)]
    channels = [(m.in_channels, m.out_channels) for m in convolutions]
    assert channels == [(1, 8), (8, 16), (16, 32), (32, 64)]
    assert {(m.kernel_size, m.padding) for m in convolutions} == {((3, 3), (0, 0))}
    two = ["ComplexConv2d", "IGaussian"] * 2
    layers = [*two, "MagnitudeMaxPool2d", *two, "AdaptiveMagnitudeMaxPool2d"]
    assert [type(m).__name__ for m in model.features] == layers
    assert sum(isinstance(m, IGaussian) for m in model.modules()) == 6
    seen = {}
    model.features[-2].register_forward_hook(lambda m, i, out: seen.update(shape=out.shape))
    logits = model(torch.randn(2, 1, 124, 129, dtype=torch.complex64))
    assert seen["shape"] == (2, 64, 56, 58)
    assert logits.shape == (2, 10)
    assert not logits.is_complex()
    assert (logits < 1).all()  # the inverted Gaussian after the output layer


def test_options_do_what_they_say() -> None:
    options = {"activation": "cardioid_per_feature", "last_activation": False, "pooled": 2}
    plain = SpeechCNN((1, 40, 30), 3, **options)
    torch.manual_seed(0)
    louder = SpeechCNN((1, 40, 30), 3, **options, gain=2.0)
    assert torch.equal(louder.head[0].weight, 2 * plain.head[0].weight)
    assert torch.equal(louder.head[0].bias, plain.head[0].bias)
    assert plain.head[0].weight.shape == (64, 64 * 4)
    assert len(plain.head) == 3
    biases = [a.bias.numel() for a in plain.modules() if hasattr(a, "per_feature")]
    assert biases == [8, 16, 32, 64, 64]


def test_real_pictures_are_complex_ones_without_an_imaginary_part() -> None:
    model, pictures = SpeechCNN((1, 40, 30), 3), torch.randn(2, 1, 40, 30)
    assert torch.equal(model(pictures), model(pictures + 0j))


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (
            "model=real_cnn model.channels=[]",
            r"^model\.channels=\[\]: must list at least one width",
        ),
        ("model=lenet5 model.kernels=[]", r"^model\.kernels=\[\]: must list at least one width"),
        ("model=lenet5 model.kernels=[0]", r"^model\.kernels"),
        ("model=lenet5 model.kernels=[-1]", r"^model\.kernels"),
    ],
)
def test_widths_that_make_no_network_are_refused(option: str, error: str) -> None:
    images = "dataset=synthetic_images", "dataset.shape=[1,32,32]", "dataset.train=60"
    with pytest.raises(UserError, match=error):
        Setup.of(configured(["recipe=quickstart", "algorithm=dp_sgd", *images, *option.split()]))
