"""Scattering of mirrors, patches, and representations along the axes of generated pictures."""

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from tests.extras.transforms.test_transforms import make
from zdp_bench.config import configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.data import Examples, Splits
from zdp_bench.errors import UserError
from zdp_bench.extras.transforms import joined, patches
from zdp_bench.extras.transforms.generated import as_examples, pictures, seeded_pictures
from zdp_bench.extras.transforms.joined import NORM, POWER, REGULARISATION, axes_of
from zdp_bench.extras.transforms.patches import RIDGE, standardise, whitening_of
from zdp_bench.representations import NUM_COMPARED, NUM_PROBES, build, represent, represent_splits
from zdp_bench.training.representation import build_representation

FEW: dict[str, Any] = {"pictures": 16}
AXES = FEW | {"axes": 6}


@pytest.mark.parametrize(("J", "L", "order"), [(2, 8, 2), (2, 3, 2), (1, 4, 1), (3, 5, 0)])
def test_the_scattering_of_a_mirror_image_is_a_permutation(J: int, L: int, order: int) -> None:
    options = {"J": J, "L": L, "order": order, "normalise": "none", "mirror": True}
    representation = make("scattering", (3, 32, 32), **options)
    x = torch.rand(2, 3, 32, 32)
    averaged, permutation = representation(x), representation.module.mirrored
    torch.testing.assert_close(representation(x.flip(-1)), averaged, rtol=0, atol=1e-6)
    representation.module.mirrored = None
    alone = representation(x).unflatten(1, (3, -1))
    mirrored = representation(x.flip(-1)).unflatten(1, (3, -1))
    torch.testing.assert_close(mirrored, alone[:, :, permutation].flip(-1), rtol=0, atol=1e-6)
    torch.testing.assert_close(((alone + mirrored) / 2).flatten(1, 2), averaged, rtol=0, atol=1e-6)


def test_coefficients_of_mirrors_average_around_the_centres_of_squares() -> None:
    ramp = torch.arange(64.0).expand(1, 64, 64).contiguous()  # its average is its value
    options = {"J": 2, "order": 0, "normalise": "none", "mirror": True}
    representation = make("scattering", (64, 64), **options)
    representation.module.mirrored = None
    inner = representation(ramp)[0, 0, 4, 3:13]
    torch.testing.assert_close(inner, 4.0 * torch.arange(3, 13) + 1.5, rtol=1e-4, atol=1e-3)


def test_the_zca_matrix_whitens_up_to_its_ridge() -> None:
    rows = torch.randn(5000, 6) @ torch.randn(6, 6) + 2
    mean, whiten = whitening_of(rows)
    torch.testing.assert_close(whiten, whiten.T)
    covariance = torch.cov(rows.T, correction=0)
    ridged = whiten @ (covariance + RIDGE * torch.eye(6)) @ whiten
    torch.testing.assert_close(ridged, torch.eye(6), rtol=0, atol=1e-3)
    torch.testing.assert_close(mean, rows.mean(dim=0))


def test_responses_are_those_of_each_patch_to_the_dictionary() -> None:
    # nine patches: one a place of the grid
    representation = make("patches", (3, 10, 10), filters=4, **FEW)
    module, x = representation.module, torch.rand(1, 3, 10, 10)
    expected = torch.zeros(8, 3, 3)
    for picture in (x[0], x[0].flip(-1)):
        for row in range(3):
            for column in range(3):
                patch = picture[:, 2 * row : 2 * row + 6, 2 * column : 2 * column + 6].flatten()
                product = (standardise(patch) - module.mean) @ module.filters
                both = torch.cat([product, -product])
                expected[:, row, column] += (both - 0.5).clamp(min=0) / 2
    torch.testing.assert_close(representation(x)[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(representation(x.flip(-1)), representation(x), rtol=1e-5, atol=1e-6)


def test_brightness_changes_no_response_and_a_plain_picture_has_none() -> None:
    representation, x = make("patches", (16, 16), filters=4, **FEW), torch.rand(2, 16, 16) / 2
    torch.testing.assert_close(representation(x + 0.3), representation(x), rtol=1e-3, atol=1e-4)
    assert float(representation(torch.full((1, 16, 16), 0.4)).abs().max()) < 0.5


def test_rows_along_their_axes_have_the_stated_variances() -> None:
    rows = torch.randn(40, 5) @ torch.diag(torch.tensor([9.0, 4, 1, 0.3, 0.01])) + 1
    mean, axes = axes_of(rows, 4)
    along = (rows - mean) @ axes.T
    covariance = torch.cov(along.T, correction=0)
    variances = torch.linalg.eigvalsh(torch.cov(rows.T, correction=0)).flip(0)[:4]
    expected = variances * (variances / variances[0] + REGULARISATION) ** (2 * POWER)
    torch.testing.assert_close(covariance, expected.diag(), rtol=1e-3, atol=1e-3)
    assert (axes.gather(1, axes.abs().argmax(dim=1, keepdim=True)) > 0).all()


def test_each_part_has_the_norm_of_its_weight() -> None:
    parts = [{"name": "scattering", "weight": 3}, "scattering"]
    representation, x = make("joined", (16, 16), parts=parts, **AXES), torch.rand(3, 16, 16)
    first, second = representation(x).split(6, dim=1)
    torch.testing.assert_close(first.norm(dim=1), torch.full((3,), NORM * math.sqrt(0.75)))
    torch.testing.assert_close(first, second * math.sqrt(3))


def test_a_representation_is_described_without_being_fitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = ["scattering", {"name": "patches", "filters": 4, **FEW}]
    options = {"parts": parts, **AXES}
    fitted = build("joined", options, (16, 16), torch.float32)
    for module in (joined, patches):
        monkeypatch.setattr(module, "seeded_pictures", Mock(side_effect=AssertionError))
    described = build("joined", options, (16, 16), torch.float32, fit=False)
    assert described.described() == fitted.described()
    assert (described.gives, described.dtype) == (fitted.gives, fitted.dtype)
    shapes = {name: tensor.shape for name, tensor in fitted.module.state_dict().items()}
    assert {name: x.shape for name, x in described.module.state_dict().items()} == shapes


def test_the_cache_keeps_each_part_for_other_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = torch.rand(12, 16, 16), torch.arange(12) % 3
    data = Splits(
        Examples(inputs, targets), Examples(inputs[:9], targets[:9]), (16, 16), 3, "synthetic", "a"
    )
    plain: dict[str, Any] = {"name": "scattering", "normalise": "none"}
    orders = [plain | {"order": order} for order in (0, 1)]
    both = make("joined", (16, 16), parts=[orders[0] | {"weight": 3}, orders[1]], **AXES)
    rows = represent_splits(both, data, "parts").train.batch(torch.arange(12))[0]
    torch.testing.assert_close(rows, both(inputs), rtol=1e-4, atol=1e-4)
    for order, of_both in zip(orders, rows.split(6, dim=1), strict=True):
        alone = make("joined", (16, 16), parts=[order | {"weight": 7}], **AXES)
        spy = Mock(wraps=alone.module.forward)
        monkeypatch.setattr(alone.module, "forward", spy)
        again = represent_splits(alone, data, "parts").train.batch(torch.arange(12))[0]
        seen = sum(len(call.args[0]) for call in spy.call_args_list)
        num_tried = 6 * NUM_PROBES + 2 * NUM_COMPARED
        assert seen <= num_tried, "only what tells that examples do not mix, and the first ones"
        weight = float(of_both.norm() / again.norm())
        torch.testing.assert_close(of_both, weight * again)


def test_a_part_is_standardised_by_generated_pictures_alone() -> None:
    options = {"order": 0, "normalise": "none"}
    representation = make("joined", (16, 16), parts=[{"name": "scattering", **options}], **AXES)
    plain = make("scattering", (16, 16), **options)
    public = plain(as_examples(seeded_pictures(16, 0), (16, 16))).flatten(1)
    rows = ((public - public.mean()) / public.std(correction=0)).clamp(-6, 6)
    mean, axes = axes_of(rows, 6)
    expected = NORM * F.normalize((rows - mean) @ axes.T, dim=1)
    own = representation(as_examples(seeded_pictures(16, 0), (16, 16)))
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)


def test_the_generated_pictures_follow_from_their_seed() -> None:
    plain = make("joined", (16, 16), parts=["scattering"], **AXES)
    other = make("joined", (16, 16), parts=["scattering"], **AXES, seed=1)
    x = torch.rand(2, 16, 16)
    assert plain.digest != other.digest
    assert not torch.allclose(plain(x), other(x), atol=0.1)
    assert not torch.equal(seeded_pictures(16, 0), seeded_pictures(16, 1))


@pytest.mark.parametrize("count", [0, 1, 2, 11])
def test_any_number_of_pictures_can_be_generated(count: int) -> None:
    """257 failed: the last block of one picture has no texture for its shapes."""
    assert pictures(count, torch.device("cpu")).shape == (count, 3, 64, 64)


def test_generated_pictures_come_in_the_shape_of_examples() -> None:
    made = seeded_pictures(16, 0)
    whole = as_examples(made, (3, 64, 64))
    torch.testing.assert_close(whole * 255, made.float())
    small = as_examples(made, (3, 32, 32))
    torch.testing.assert_close(small, F.avg_pool2d(whole, 2), rtol=0, atol=0.6 / 255)
    grey = as_examples(made, (1, 16, 20))
    assert grey.shape == (16, 1, 16, 20)
    torch.testing.assert_close(as_examples(made, (16, 20)), grey[:, 0])


NEEDING_UNIT_PIXELS: list[tuple[str, dict[str, Any]]] = [
    ("joined", {"parts": ["scattering"], **AXES}),
    ("patches", {"filters": 4, **FEW}),
    ("random_process", {}),
]


@pytest.mark.parametrize(("name", "options"), NEEDING_UNIT_PIXELS)
def test_pictures_that_were_standardised_are_refused(name: str, options: dict[str, Any]) -> None:
    unit, labels = torch.rand(12, 16, 16), torch.arange(12) % 3
    dark, bright = unit - 0.3, unit + 0.3
    representation = make(name, (16, 16), **options)
    for pixels in (dark, bright):
        examples = Examples(pixels, labels)
        data = Splits(examples, examples, (16, 16), 3, "official", "a")
        with pytest.raises(UserError, match=r"pixels in \[0, 1\].* dataset\.normalise=unit"):
            represent_splits(representation, data, "standardised")
        with pytest.raises(UserError, match=r"pixels in \[0, 1\]"):
            represent(TensorDataset(pixels, labels), name, **options)
    assert represent(TensorDataset(unit, labels), name, **options)[0][0].isfinite().all()


WORDS = ["recipe=quickstart", "representation=joined", "model=real_linear", "algorithm=dp_sgd"]


def test_parts_are_part_of_a_run_s_identity() -> None:
    weighted = "[{name: scattering, weight: 2},patches]"
    chosen = ("[scattering]", "[patches]", "[scattering,patches]", weighted)
    digests = [
        experiment_digest(configured([*WORDS, f"representation.parts={parts}"])) for parts in chosen
    ]
    assert len(set(digests)) == len(chosen)
    spelled = configured([*WORDS, "representation.parts=[{name: scattering, J: 2, weight: 3}]"])
    assert experiment_digest(spelled) == digests[0]


WRONG_PARTS = {
    "[{name: scattering, L: 0}]": r"representation\.L",
    "[scatering]": "Did you mean 'scattering'",
    "[joined]": "cannot be a part of itself",
    "[{nam: scattering}]": r"representation\.parts: a part has no name",
    "[{weight: 1}]": r"representation\.parts: a part has no name",
    "[{name: scattering, weigth: 2}]": r"Did you mean 'representation\.parts\.weight'",
    "[{name: scattering, weight: 0}]": r"representation\.parts\.weight=0",
}


@pytest.mark.parametrize("parts", WRONG_PARTS)
def test_a_wrong_part_is_refused_before_anything_is_read(parts: str) -> None:
    with pytest.raises(UserError, match=WRONG_PARTS[parts]):
        configured([*WORDS, f"representation.parts={parts}"])


def test_a_part_with_complex_outputs_is_refused_before_it_is_fitted() -> None:
    """It ended in torch's NotImplementedError."""
    parts = "[{name: scattering, output: complex, groups: 1}]"
    small = ["representation.axes=4", "representation.pictures=8"]
    words = [*WORDS, f"representation.parts={parts}", *small]
    with pytest.raises(UserError, match="representation=joined: takes no examples of float32"):
        build_representation(configured(words), (1, 16, 16), torch.float32)


def test_weights_of_a_part_trained_on_the_private_data_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from zdp_bench.extras.transforms import network

    facts = {"weights": "w", "trained_on": "CIFAR-10", "sha256": "0"}
    monkeypatch.setattr(network, "_load", lambda *_: facts)
    part = "[scattering,{name: network, network: test_efficientnet, resize: 32}]"
    small = ("representation.axes=4", "representation.pictures=8")
    words = ["recipe=cifar10_network", "representation=joined", f"representation.parts={part}"]
    with pytest.raises(UserError, match="trained on CIFAR-10"):
        build_representation(configured([*words, *small]), (3, 32, 32), torch.float32)
