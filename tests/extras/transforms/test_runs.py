"""`representation=NAME` in a run: made once, named in digests, part of what is exported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zdp_bench
from tests.training.test_run import Silent
from zdp_bench import registry, representations
from zdp_bench.config import configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.data import Examples, Part, Splits
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.extras.sharing.export import export
from zdp_bench.extras.sharing.loading import config_of, find_representation, predict_file
from zdp_bench.extras.sharing.verification import verify
from zdp_bench.extras.transforms.patches import Patches
from zdp_bench.representations import (
    NUM_COMPARED,
    NUM_PROBES,
    Representation,
    build,
    represent,
    represent_splits,
)
from zdp_bench.training.representation import build_representation, shares_data
from zdp_bench.training.run import execute
from zdp_bench.training.setup import build_dataset, describe_data, load_data

WORDS = [
    *("recipe=quickstart", "representation=scattering", "representation.L=2"),
    *("representation.normalise=layer", "model=real_linear", "algorithm=dp_sgd"),
    *("trainer.epochs=1", "privacy.unit=patient"),
]


AUGMENTED = ["dataset.augment=crop_flip", "privacy.unit=example"]


def splits(count: int = 20, shuffle: bool = False) -> Splits:
    torch.manual_seed(0)
    inputs, targets = torch.randn(30, 9, 9), torch.arange(30) % 3
    rows = torch.randperm(count) if shuffle else torch.arange(count)
    train = Examples(inputs[rows], targets[rows], rows)
    return Splits(train, Examples(inputs[20:], targets[20:]), (9, 9), 3, "synthetic", "abc")


def scattering(**options: object) -> Representation:
    return build("scattering", {"L": 2, "normalise": "layer", **options}, (9, 9), torch.float32)


def test_it_is_made_once_and_then_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    representation = scattering()
    made = represent_splits(representation, splits(), "once")
    assert made.input_shape == representation.gives
    assert made.digest != "abc"
    calls = []
    plain = representation.module.forward
    monkeypatch.setattr(
        representation.module, "forward", lambda x: calls.append(len(x)) or plain(x)
    )
    again = represent_splits(representation, splits(), "once")
    # Some test examples are tried, and the first of each part compared.
    assert sum(calls) <= 6 * NUM_PROBES + 2 * NUM_COMPARED
    inputs, targets = again.train.batch(torch.arange(20))
    assert torch.equal(inputs, made.train.batch(torch.arange(20))[0])
    assert torch.equal(targets, torch.arange(20) % 3)
    other = represent_splits(scattering(order=1), splits(), "once")
    assert other.digest != made.digest
    assert other.input_shape != made.input_shape


EVEN = torch.tensor([0, 2])


class Scaled(nn.Module):
    """A plug-in's transform, whose code or weights a user may change."""

    def __init__(self, weight: float, exponent: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor(weight))
        self.exponent = exponent

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.abs() ** self.exponent


@pytest.mark.parametrize(("weight", "exponent"), [(2.0, 1), (1.0, 3)], ids=["weights", "code"])
def test_a_transform_that_was_changed_is_computed_again(
    weight: float,
    exponent: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """The features of the earlier transform were used, silently, where it has the same version."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = splits()
    items = [(data.train.inputs[row], 0) for row in range(20)]
    for module, is_changed in (
        (Scaled(1.0, 1), False),
        (Scaled(weight, exponent), True),
        (Scaled(weight, exponent), False),
    ):
        monkeypatch.setitem(
            registry._builders["representation"], "scaled", lambda shape, module=module: module
        )
        caplog.clear()
        transform = build("scaled", {}, (9, 9), torch.float32)
        expected = module(data.train.inputs)
        train = represent_splits(transform, data, "changed").train
        torch.testing.assert_close(train.batch(torch.arange(20))[0], expected)
        torch.testing.assert_close(represent(items, "scaled").tensors[0], expected)
        assert ("is made again" in caplog.text) == is_changed


def test_features_that_another_device_computed_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """TF32 rounds products to 10 bits; computing all features again may take hours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = splits()
    infinite = replace(data.train, inputs=data.train.inputs.clone().index_fill_(0, EVEN, torch.inf))
    for source in (data, replace(data, train=infinite)):
        for weight in (1.0, 1.001):
            monkeypatch.setitem(
                registry._builders["representation"],
                "scaled",
                lambda shape, weight=weight: Scaled(weight, 1),
            )
            transform = build("scaled", {}, (9, 9), torch.float32)
            represent_splits(transform, source, f"device {source is data}")
    assert "is made again" not in caplog.text


@pytest.mark.parametrize("scale", ["standardised", "bytes"])
def test_a_network_rejects_pixels_of_another_scale_unless_it_is_told(scale: str) -> None:
    """Its features of standardised pixels were useless, in silence."""
    options = {"network": "test_efficientnet", "weights": "untrained", "normalise": "none"}
    unit = torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mean, deviation = (0.5, 0.25) if scale == "standardised" else (0, 1 / 255)
    pictures = (unit - mean) / deviation
    data = Splits(
        Examples(pictures, torch.zeros(12)), Examples(pictures, torch.zeros(12)), (3, 32, 32), 1,
        "own", scale,
    )  # fmt: skip
    network = build("network", options, (3, 32, 32), torch.float32)
    with pytest.raises(UserError, match=r"pixels in \[0, 1\].* or .* representation\.pixels"):
        represent_splits(network, data, scale)
    scaled_network = build(
        "network", options | {"pixels": [mean, deviation]}, (3, 32, 32), torch.float32
    )
    features = represent_splits(scaled_network, data, scale).train.inputs
    torch.testing.assert_close(features, network(unit), rtol=1e-3, atol=1e-3)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0, keepdim=True)


@pytest.mark.parametrize("num_test", [1, 2, 9])
def test_a_transform_that_mixes_is_refused_whatever_the_number_of_test_examples(
    num_test: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._builders["representation"], "mixing", lambda shape: Mixing())
    mixing = build("mixing", {}, (9, 9), torch.float32)
    data = splits()
    few = replace(data, test=Part(data.test, torch.arange(num_test)))
    with pytest.raises(UserError, match="depends on other examples"):
        represent_splits(mixing, few, f"mixing {num_test}")


def test_neither_other_examples_nor_their_order_matter() -> None:
    representation = scattering()
    whole = represent_splits(representation, splits(), "whole").train
    few = represent_splits(representation, splits(5), "few").train
    mixed = represent_splits(representation, splits(shuffle=True), "mixed").train
    inputs = whole.batch(torch.arange(20))[0]
    torch.testing.assert_close(few.batch(torch.arange(5))[0], inputs[:5], rtol=0, atol=1e-5)
    shuffled = mixed.batch(torch.arange(20))[0]
    torch.testing.assert_close(shuffled, inputs[mixed.groups], rtol=0, atol=1e-5)


class OfALargeBatch(nn.Module):
    """What must not be: each example less the mean of all, in a batch of three or more."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0) if len(x) > 2 else x


class OfTheLastBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.last, last = x.mean(dim=0), self.last
        return x - last


class Remembering(nn.Module):
    """Gives the same as yet, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


@pytest.mark.parametrize("module", [OfALargeBatch, OfTheLastBatch, Remembering])
def test_a_transform_of_several_examples_is_refused(
    module: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixing = replace(scattering(), module=module(), gives=(9, 9))
    with pytest.raises(UserError, match=r"would affect another|depends on other"):
        represent_splits(mixing, splits(), "mixing")
    monkeypatch.setattr(representations, "lookup", lambda kind, name: lambda shape, **_: module())
    own = torch.utils.data.TensorDataset(torch.randn(20, 9, 9), torch.arange(20) % 3)
    with pytest.raises(UserError, match=r"would affect another|depends on other"):
        represent(own, "scattering")


def test_examples_that_change_as_they_are_drawn_are_refused() -> None:
    changing = replace(splits(), augment=lambda inputs, uniforms: inputs)
    with pytest.raises(UserError, match=r"dataset\.augment=null"):
        represent_splits(scattering(), changing, "changing")


def network_of_own_weights(folder: Path, *more: str) -> list[str]:
    """Save a small network's weights in `folder`, and return the words of a run with them."""
    import timm

    torch.save(timm.create_model("test_efficientnet").state_dict(), folder / "w.pth")
    words = ["representation=network", "representation.network=test_efficientnet"]
    return ["recipe=mnist", *words, f"representation.weights={folder}/w.pth", *more]


def test_weights_trained_on_the_private_data_are_refused(tmp_path: Path) -> None:
    words = network_of_own_weights(tmp_path, "dataset=cifar10")
    private = configured([*words, "representation.trained_on=CIFAR10"])
    with pytest.raises(UserError, match="trained on CIFAR10"):
        build_representation(private, (3, 32, 32), torch.float32)
    other = configured([*words, "representation.trained_on=svhn"])
    build_representation(other, (3, 32, 32), torch.float32)


@pytest.mark.parametrize(
    ("trained_on", "private", "shared"),
    [
        ("CIFAR-10", "cifar10", True),
        ("cifar 10, 100 epochs", "cifar10", True),
        ("CIFAR-100", "cifar10", False),
        ("Fashion MNIST, train", "fashion_mnist", True),
        ("chest_xray/train", "chest_xray", True),
        ("phasemnist", "mnist", True),
        ("mnist", "phasemnist", True),
        ("fashion_mnist", "mnist", False),
        ("imagenet", "cifar10", False),
        ("医学影像", "folder", False),
        ("a folder of public photographs", "folder", False),
        ("folder", "folder", True),
        ("Фото", "chest_xray", False),
    ],
)
def test_names_of_the_same_data_are_known(trained_on: str, private: str, shared: bool) -> None:
    assert shares_data(trained_on, private) == shared


def test_without_one_nothing_is_in_the_digest() -> None:
    plain = configured(["recipe=quickstart"])
    content = plain.resolved["representation"]
    assert content == {"name": None}
    without = {key: value for key, value in plain.resolved.items() if key != "representation"}
    assert experiment_digest(plain) == experiment_digest(replace(plain, resolved=without))
    other = configured(["recipe=quickstart", "representation=scattering"])
    assert experiment_digest(plain) != experiment_digest(other)
    says = r"representation\.J'? is not known|representation=none has no keys"
    for words in (["+representation.J=3"], ["representation=none", "representation.J=3"]):
        with pytest.raises(UserError, match=says):
            configured(["recipe=quickstart", *words])


def test_what_is_exported_takes_raw_examples(tmp_path: Path) -> None:
    config = configured([*WORDS, f"paths.results={tmp_path}"])
    record = execute(config, Silent()).record.document
    assert record["representation"]["name"] == "scattering"
    assert record["data"]["example"]["input_shape"] == [*load_data(config).input_shape]
    assert tuple(record["data"]["example"]["input_shape"]) == describe_data(config).input_shape
    export(tmp_path, "quickstart", tmp_path / "model")
    assert not [check for check in verify(tmp_path / "model") if check.state == "failed"]
    raw = build_dataset(config).load(config.data_root).test
    inputs, targets = raw.batch(torch.arange(len(raw)))
    np.save(tmp_path / "raw.npy", inputs.numpy())
    predict_file(tmp_path / "model", tmp_path / "raw.npy", tmp_path / "out.npy")
    outputs = torch.from_numpy(np.load(tmp_path / "out.npy"))
    accuracy = float((outputs.argmax(dim=1) == targets).double().mean())
    assert accuracy == pytest.approx(record["metrics"]["accuracy"])
    torch.testing.assert_close(zdp_bench.load(tmp_path / "model")(inputs), outputs)
    assert "public transform `scattering`" in (tmp_path / "model" / "README.md").read_text()


def test_no_weights_are_computed_for_a_record_that_its_model_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load` generated all pictures before it compared anything."""
    words = ["recipe=mnist", "representation=patches", "representation.pictures=8192"]
    config = configured(words)
    described = build_representation(config, (28, 28), torch.float32, fit=False).described()
    monkeypatch.setattr(Patches, "fit", lambda _: pytest.fail("computes its weights"))
    example = {"input_shape": [100]}
    record = {"representation": described | {"digest": "0" * 64}, "data": {"example": example}}
    with pytest.raises(UserError, match="weights or the version"):
        find_representation(tmp_path, config, record)
    record["representation"] = described
    with pytest.raises(UserError, match=r"takes examples of \[100\], but .* gives \[768, 3, 3\]"):
        find_representation(tmp_path, config, record)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("patches", {"pictures": 65536}),
        ("joined", {"parts": ["patches"], "pictures": 65536}),
        ("joined", {"parts": [{"name": "patches", "pictures": 65536}]}),
        ("joined", {"parts": ["patches"], "axes": 65536}),
    ],
)
def test_a_record_states_no_representation_that_takes_hours(
    name: str, options: dict[str, Any]
) -> None:
    record = {"config": {"representation": {"name": name, **options}}}
    with pytest.raises(UserError, match="must be less than or equal to 8192"):
        config_of(record)


def test_a_huge_network_is_refused_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record could state any network of timm, such as one of 17 GiB."""
    monkeypatch.setattr("zdp_bench.extras.transforms.network.MAX_WEIGHTS", 10_000)
    words = ["representation.network=test_efficientnet", "representation.weights=untrained"]
    config = configured(["recipe=mnist", "representation=network", *words])
    with pytest.raises(UserError, match=r"network=test_efficientnet: has more than 10,000 weights"):
        build_representation(config, (28, 28), torch.float32, fit=False)


def test_no_path_of_a_stranger_s_record_is_opened(tmp_path: Path) -> None:
    more = ("representation.trained_on=birds", "representation.resize=32")
    config = configured(network_of_own_weights(tmp_path, *more))
    described = build_representation(config, (28, 28), torch.float32).described()
    record = {"representation": described, "data": {"example": {"input_shape": [256]}}}
    with pytest.raises(UserError, match="Paths in a record are never opened"):
        find_representation(tmp_path, config, record)
    copy = (tmp_path / "w.pth").rename(tmp_path / "copy.pth")
    representation = find_representation(tmp_path, config, record, copy)
    assert representation.digest == described["digest"]
    network_of_own_weights(tmp_path)
    (tmp_path / "w.pth").rename(copy)
    with pytest.raises(UserError, match="weights or the version"):
        find_representation(tmp_path, config, record, copy)
    with pytest.raises(UserError, match=r"not trained on .* leave .*copy\.pth out\.$"):
        find_representation(tmp_path, replace(config, representation=None), {}, copy)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dataset=fashion_mnist", *AUGMENTED], "is computed once"),
        (["trainer.augmentations=4"], "all its views"),
    ],
)
def test_validate_refuses_what_a_run_refuses(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        validate(configured([*WORDS, *words]), trial=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dataset_of_one_s_own_is_represented_in_single_precision(dtype: torch.dtype) -> None:
    inputs, targets = torch.randn(120, 9, 9, dtype=dtype), torch.arange(120) % 3
    own = torch.utils.data.TensorDataset(inputs, targets)
    made = represent(own, "scattering", L=2, normalise="layer")
    torch.testing.assert_close(made.tensors[0], scattering()(inputs.float()), rtol=0, atol=1e-5)
    assert torch.equal(made.tensors[1], targets)


def pairs(*inputs: Tensor) -> list[tuple[Tensor, int]]:
    return [(example, 0) for example in inputs]


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (None, "must be a map-style dataset"),
        ([], "must be a map-style dataset with examples"),
        ([torch.ones(9, 9)] * 3, "must be pairs"),
        ([("cat", 1)], "must be pairs"),
        (pairs(torch.ones(9, 9), torch.ones(9, 8)), "of one shape"),
        (pairs(torch.ones(9, 9), *[torch.ones(9, 9)] * 199, torch.ones(9, 8)), "of one shape"),
        (pairs(torch.ones(9, 9, dtype=torch.bfloat16)), "float32 inputs"),
        (pairs(torch.full((9, 9), torch.nan)), "not finite"),
        ([(torch.ones(9, 9), "cat")], "must be pairs"),
    ],
)
def test_a_dataset_that_cannot_be_represented_is_refused(dataset: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        represent(dataset, "scattering", L=2, normalise="layer")
