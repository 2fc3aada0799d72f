"""Each transform: its definition, shapes, and that it looks at one example only."""

import importlib.util
import io
import os
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zdp_bench.config.plugins import check_plugin
from zdp_bench.errors import UserError
from zdp_bench.extras.transforms.network import PACKAGES
from zdp_bench.extras.transforms.normalisation import Normalise, normalise_each
from zdp_bench.extras.transforms.random_process import Encoder, pooled
from zdp_bench.extras.transforms.scattering import (
    bank_1d,
    bank_2d,
    contract,
    gaussian_1d,
    littlewood_paley,
)
from zdp_bench.models.linear import LinearMap
from zdp_bench.representations import Representation, build

TINY = {"network": "test_efficientnet", "weights": "untrained"}  # timm's own, 360,000 weights
LEADS = {"dims": 1, "J": 3, "L": 2, "normalise": "layer"}
VIT = {"network": "vit_tiny_patch16_224", "weights": "untrained"}


def make(
    name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any
) -> Representation:
    checked = check_plugin("representation", {"name": name, **options})
    return build(name, checked.options, shape, dtype)


FEW = {"pictures": 16}  # generated ones
BOTH = [
    {"name": "scattering", "mirror": True, "weight": 3},
    {"name": "patches", **FEW, "filters": 5},
]


CASES: list[tuple[str, tuple[int, ...], torch.dtype, dict[str, Any], tuple[int, ...]]] = [
    ("scattering", (28, 28), torch.float32, {}, (81, 7, 7)),
    ("scattering", (3, 16, 17), torch.float32, {"L": 2, "groups": 3}, (27, 4, 5)),
    ("scattering", (12, 12), torch.complex64, {"L": 4, "normalise": "layer"}, (50, 3, 3)),
    ("scattering", (9, 8), torch.float32, {"order": 1, "normalise": "none"}, (17, 3, 2)),
    ("scattering", (2, 100), torch.float32, LEADS, (26, 13)),
    ("scattering", (8, 8), torch.float32, {"output": "complex", "groups": 17}, (17, 2, 2)),
    ("network", (9, 8), torch.float32, TINY | {"resize": 32, "groups": 1}, (256,)),
    ("network", (3, 32, 32), torch.float32, TINY | {"pool": False}, (256, 1, 1)),
    ("network", (3, 32, 32), torch.float32, TINY | {"mirror": True}, (256,)),
    ("network", (3, 32, 32), torch.float32, TINY | {"pool": False, "stage": 1}, (24, 8, 8)),
    ("network", (3, 32, 32), torch.float32, TINY | {"stage": 1}, (24,)),
    ("voxels", (1, 6, 7, 8), torch.float32, {}, (19, 6, 7, 8)),
    ("scattering", (3, 9, 8), torch.float32, {"L": 3, "mirror": True, "groups": 3}, (48, 3, 2)),
    ("patches", (11, 10), torch.float32, FEW | {"filters": 5}, (10, 3, 3)),
    ("patches", (3, 32, 32), torch.float32, FEW | {"filters": 7}, (14, 3, 3)),
    ("joined", (3, 16, 16), torch.float32, FEW | {"axes": 9, "parts": BOTH}, (18,)),
    ("joined", (1, 16, 16), torch.float32, FEW | {"axes": 9, "parts": ["scattering"]}, (9,)),
    ("random_process", (16, 17), torch.float32, {}, (3072,)),
    ("random_process", (3, 32, 32), torch.float32, {}, (3072,)),
]


@pytest.mark.parametrize(("name", "shape", "dtype", "options", "gives"), CASES)
def test_of_a_batch_it_is_that_of_each_example_alone(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    options: dict[str, Any],
    gives: tuple[int, ...],
) -> None:
    representation, inputs = (
        make(name, shape, dtype, **options),
        torch.randn(11, *shape, dtype=dtype),
    )
    together = representation(inputs)
    assert together.shape == (11, *gives)
    assert together.dtype == representation.dtype
    assert not any(parameter.requires_grad for parameter in representation.module.parameters())
    alone = torch.cat([representation(example) for example in inputs.split(1)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    order = torch.randperm(11)
    torch.testing.assert_close(representation(inputs[order]), together[order], rtol=1e-4, atol=1e-4)
    torch.manual_seed(1)
    again = make(name, shape, dtype, **options)
    assert again.digest == representation.digest
    assert torch.equal(again(inputs), together)


@pytest.mark.parametrize(("J", "L"), [(1, 3), (2, 8), (3, 4)])
def test_no_frequency_gains_energy(J: int, L: int) -> None:
    phi = torch.fft.fft(gaussian_1d(48, 0.8 * 2 ** (J - 1))).real
    two, one_dimensional = (phi.unsqueeze(1) * phi, bank_2d(48, 48, J, L)), (phi, bank_1d(48, J, L))
    for low, (bank, _) in (two, one_dimensional):
        energy = littlewood_paley(low, contract(low, bank))
        assert 0.99 < float(energy.max()) <= 1 + 1e-9
        assert bank.flatten(1)[:, 0].abs().max() < 1e-9  # a wavelet's mean is 0


def convolve(x: Tensor, filter: Tensor) -> Tensor:
    """The circular convolution of x with a filter in space, by its definition."""
    convolved = torch.zeros(x.shape, dtype=torch.complex64)
    for row, column in product(*map(range, x.shape)):
        convolved += x[row, column] * filter.roll((row, column), (0, 1))
    return convolved


@pytest.mark.parametrize("output", ["modulus", "complex"])
def test_scattering_is_what_direct_convolutions_give(output: str) -> None:
    picture = torch.randn(7, 6)
    module = make("scattering", (7, 6), L=2, output=output, normalise="none").module
    first, low = torch.fft.ifft2(module.first), torch.fft.ifft2(module.phi)
    padded = torch.nn.functional.pad(picture[None, None], (4, 4, 4, 4), mode="reflect")[0, 0]

    def sample(map: Tensor) -> Tensor:
        return map[4:11:4, 4:10:4]

    bands = [convolve(padded, psi) for psi in first]  # scale 0, 0, 1, 1
    expected = [sample(convolve(padded, low))]
    if output == "complex":
        expected += [sample(band) for band in bands]
    else:
        expected += [sample(convolve(band.abs(), low)) for band in bands]
        for band, psi in product(bands[:2], first[2:]):
            expected.append(sample(convolve(convolve(band.abs(), psi).abs(), low)))
        expected = [each.real for each in expected]
    coefficients = module(picture[None])[0]
    torch.testing.assert_close(coefficients, torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalise", ["layer", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_normalisation_is_of_one_example(normalise: Normalise, dtype: torch.dtype) -> None:
    x = 3 + 5 * torch.randn(4, 6, 5, 5, dtype=dtype)
    normalised = normalise_each(x, normalise, 3).reshape(4, 3 if normalise == "group" else 1, -1)
    assert normalised.mean(dim=2).abs().max() < 1e-4
    assert (normalised.abs().square().mean(dim=2) - 1).abs().max() < 1e-3
    moved = normalise_each(7 * x + 2, normalise, 3)
    torch.testing.assert_close(moved, normalise_each(x, normalise, 3), atol=1e-4, rtol=0)


def test_a_logistic_regression_a_voxel_has_274_features() -> None:
    shape = (19, 4, 3, 5)
    model = LinearMap(shape, 1, degree=2, bias_degree=6)
    assert sum(p.numel() for p in model.parameters()) == 274
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, *shape)
    features = (x.flatten(2).unsqueeze(2) * model.scales.T).flatten(1, 2)  # [B, 190, places]
    whole = torch.cat([features, model.shifts.T.expand(2, -1, -1)], dim=1)
    weights = torch.cat([model.linear.weight.T.flatten(), model.shift.weight[0]])
    expected = torch.einsum("bfv,f->bv", whole, weights)
    torch.testing.assert_close(model(x)[:, 0].flatten(1), expected, rtol=1e-4, atol=1e-3)


def test_the_package_s_weights_are_imagenet_s() -> None:
    pytest.importorskip(PACKAGES["tf_efficientnet_lite0"][0])
    facts = make("network", (3, 8, 8), resize=32).described()
    assert facts["sha256"].startswith("579344248a93e230")
    assert (facts["licence"], facts["trained_on"]) == ("Apache-2.0", "imagenet")


def test_a_picture_and_its_mirror_are_averaged() -> None:
    x = torch.rand(2, 3, 32, 32)
    alone = make("network", (3, 32, 32), **TINY, normalise="none")
    both = make("network", (3, 32, 32), **TINY, normalise="none", mirror=True)
    assert both.digest != alone.digest
    expected = (alone(x) + alone(x.flip(-1))) / 2
    torch.testing.assert_close(both(x), expected, rtol=1e-4, atol=1e-5)


def test_weights_come_from_a_file_that_says_what_trained_it(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(3)
    weights = timm.create_model("test_efficientnet").state_dict()
    torch.save({f"other.{name}": tensor for name, tensor in weights.items()}, tmp_path / "w.pth")
    options = TINY | {"weights": str(tmp_path / "w.pth"), "resize": 32}
    with pytest.raises(UserError, match="trained_on=null: state what"):
        make("network", (3, 8, 8), **options)
    with pytest.raises(UserError, match="state what"):
        make("network", (3, 8, 8), **options, trained_on=" _")
    representation = make("network", (3, 8, 8), **options, trained_on="birds")
    random = make("network", (3, 8, 8), **TINY, resize=32)
    assert representation.facts["trained_on"] == "birds"
    assert representation.digest != random.digest
    x = torch.rand(1, 3, 8, 8)
    assert not torch.allclose(representation(x), random(x), atol=1e-3)


@pytest.mark.parametrize(
    ("name", "shape", "options", "sentence"),
    [
        ("scattering", (4, 28), {}, "representation.J=2: 2.J must be less than the 4"),
        ("scattering", (1024, 1024), {"J": 8, "L": 64}, "512 wavelets of .* more than 512 MiB"),
        ("scattering", (4000, 64, 64), {}, "in 4,000 channels take more than 512 MiB"),
        ("scattering", (100,), {}, "takes examples of 2 dimensions"),
        ("network", (100,), {}, "takes pictures"),
        ("network", (8, 8), {"pool": False, "mirror": True}, "needs representation.mirror=false"),
        ("network", (3, 8, 8), {"network": "efficientlite"}, "timm has no network"),
        ("network", (3, 8, 8), {"network": "resnet18"}, "there are packages for tf_eff"),
        ("network", (3, 8, 8), {"weights": "none.pth"}, "file not found"),
        ("network", (3, 8, 8), VIT, "Set representation.resize=224"),
        ("network", (3, 8, 8), TINY | {"stage": 9}, "stage=9: the network has no such stage"),
        ("scattering", (28, 28), {"dims": 1}, "a signal has fewer channels than samples"),
        ("scattering", (28, 28), {"order": 1}, "groups=27: must .* one of 1, 17"),
        ("voxels", (28, 28), {}, "takes volumes"),
        ("scattering", (28, 30), {"mirror": True}, "mirror=True: needs .* a width divisible by 4"),
        ("scattering", (64,), LEADS | {"mirror": True}, "mirror=True: needs dims=2"),
        ("patches", (3, 9, 32), {}, "with sides of at least 10 pixels"),
        ("patches", (32, 32), FEW | {"filters": 8000}, "increase representation.pictures"),
        ("patches", (2000, 2000), {}, "filters=384: makes 764,931,072 responses of an example"),
        ("joined", (32, 32), {}, r"parts is empty: list representations"),
        (
            "joined",
            (32, 32),
            {"parts": ["scattering"] * 5},
            "has 5 representations; join at most 4",
        ),
        (
            "joined",
            (3, 224, 224),
            {"parts": ["scattering"]},
            "pictures=4096: the .* numbers, more than",
        ),
        ("joined", (32, 32), {"parts": [{"name": "network", "weights": "w.pth"}]}, "not a file"),
        ("joined", (32, 32), FEW | {"parts": ["scattering"]}, "axes=1024: 16 generated pictures"),
        ("joined", (100,), {"parts": [LEADS | {"name": "scattering"}]}, "takes pictures"),
        ("random_process", (3, 8, 8), {}, "sides of at least 16 pixels"),
    ],
)
def test_what_it_cannot_take_is_refused(
    name: str, shape: tuple[int, ...], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        make(name, shape, **options)


def test_of_complex_examples_no_part_is_dropped() -> None:
    for name, shape, options in (("network", (32, 32), TINY), ("voxels", (6, 7, 8), {})):
        with pytest.raises(UserError, match="takes real numbers"):
            make(name, shape, torch.complex64, **options)


def test_what_is_no_file_of_tensors_is_refused_in_our_words(tmp_path: Path) -> None:
    import timm

    options = TINY | {"trained_on": "birds"}
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "folder.pth").mkdir()
    torch.save({"a": Path("b")}, tmp_path / "pickle.pth")
    weights = timm.create_model("test_efficientnet").state_dict()
    next(iter(weights.values()))[0] = torch.nan
    torch.save(weights, tmp_path / "nan.pth")
    (tmp_path / "large.pth").touch()
    os.truncate(tmp_path / "large.pth", 1 << 36)
    # A tensor of 64 MB in an archive of 64 kB.
    torch.save({"w": torch.zeros(1 << 24)}, whole := io.BytesIO())
    deflated = zipfile.ZipFile(tmp_path / "deflated.pth", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(whole) as stored, deflated as archive:
        for name in stored.namelist():
            archive.writestr(name, stored.read(name))
    for name, sentence in (
        ("pipe", "is not a regular file"),
        ("folder", "Is a directory|is not a regular file"),
        ("pickle", "contains more than tensors"),
        ("large", r"is larger than [\d,]+ bytes"),
        ("deflated", "unpacks to more than it is"),
        ("nan", "its weights contain values that are not finite"),
    ):
        with pytest.raises(UserError, match=sentence) as refused:
            make("network", (3, 32, 32), **options | {"weights": f"{tmp_path}/{name}.pth"})
        assert "weights_only" not in str(refused.value)


# ------------------------------------ the script that learns features on random processes

SCRIPT = Path(__file__).parents[3] / "datasets" / "random_process.py"
spec = importlib.util.spec_from_file_location("random_process_script", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.fixture(scope="module")
def pool() -> torch.Tensor:
    torch.manual_seed(0)
    return script.pictures(10, torch.device("cpu"))


def test_pictures_follow_from_the_seed_and_differ(pool: torch.Tensor) -> None:
    torch.manual_seed(0)
    assert torch.equal(script.pictures(10, torch.device("cpu")), pool)
    assert (pool.shape, pool.dtype) == ((10, 3, 64, 64), torch.uint8)
    assert (pool.float().std((1, 2, 3)) > 1).all()
    assert len(torch.unique(pool.flatten(1), dim=0)) == 10


def test_two_views_of_a_picture_differ_and_stay_in_range(pool: torch.Tensor) -> None:
    view, other = script.viewed(pool), script.viewed(pool)
    assert view.shape == (10, 3, 32, 32)
    assert float(view.min()) >= 0
    assert float(view.max()) <= 1
    assert ((view - other).abs().mean((1, 2, 3)) > 0).all()


def test_a_step_learns_something(pool: torch.Tensor) -> None:
    torch.manual_seed(1)
    before = Encoder()
    torch.manual_seed(1)
    after, steps = script.learn(pool, 0.1, batch=4)
    assert steps >= 1
    assert not torch.equal(after.third[1].conv2.weight, before.third[1].conv2.weight)
    x = torch.rand(3, 3, 32, 32)
    assert not after.training
    for stage, mirrored in zip(pooled(after, x), pooled(after, x.flip(-1)), strict=True):
        torch.testing.assert_close(mirrored, stage, rtol=1e-4, atol=1e-4)
