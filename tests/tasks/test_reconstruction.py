"""NMSE, PSNR and SSIM of volumes as in fastMRI; one loss per example, in the slice's unit."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from zdp_bench.config import configured
from zdp_bench.data import DatasetInfo
from zdp_bench.errors import UserError
from zdp_bench.tasks.reconstruction import Reconstruction, scale, volume_metrics
from zdp_bench.training.build import check_fit

TASK = Reconstruction()


def volume(seed: int, slices: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 1, (slices, 9, 11))


def ssim_by_hand(a: np.ndarray, b: np.ndarray, largest: float) -> float:
    """Wang et al. 2004 with a uniform 7 x 7 window, unbiased covariances, windows that lie inside:
    scikit-image's default.
    """
    c1, c2 = (0.01 * largest) ** 2, (0.03 * largest) ** 2
    values = []
    for top in range(a.shape[0] - 6):
        for left in range(a.shape[1] - 6):
            x, y = (image[top : top + 7, left : left + 7].ravel() for image in (a, b))
            cov = np.cov(x, y)
            above = (2 * x.mean() * y.mean() + c1) * (2 * cov[0, 1] + c2)
            below = (x.mean() ** 2 + y.mean() ** 2 + c1) * (cov[0, 0] + cov[1, 1] + c2)
            values.append(above / below)
    return float(np.mean(values))


def test_the_metrics_of_a_volume_on_fixed_arrays() -> None:
    reference, answer = volume(0), volume(0) + 0.1 * volume(1)
    metrics = volume_metrics(reference, answer)
    error = answer - reference
    assert metrics["nmse"] == pytest.approx((error**2).sum() / (reference**2).sum())
    assert metrics["psnr"] == pytest.approx(
        10 * math.log10(reference.max() ** 2 / (error**2).mean())
    )
    pairs = zip(reference, answer, strict=True)
    by_hand = [ssim_by_hand(a, b, reference.max()) for a, b in pairs]
    assert metrics["ssim"] == pytest.approx(np.mean(by_hand))


def as_examples(*volumes: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shuffled outputs, right but for the last volume's, targets, and each slice's volume."""
    reference = torch.from_numpy(np.concatenate(volumes)).float()
    targets = torch.stack([reference, 0.7 * reference + 0.1 * reference.flip(-1)], dim=1)
    outputs = (reference / scale(targets))[:, None].clone()
    outputs[-len(volumes[-1]) :] *= 0.9
    groups = torch.cat([torch.full((len(v),), 10 * number) for number, v in enumerate(volumes)])
    shuffled = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))
    return outputs[shuffled], targets[shuffled], groups[shuffled]


def test_slices_of_a_volume_are_measured_together_in_the_scanners_units() -> None:
    bright, dim = 1000 * volume(0), volume(1, slices=2)
    outputs, targets, groups = as_examples(bright, dim)
    metrics = TASK.metrics(outputs, targets, groups)
    # the mean over two volumes, of which one is right
    assert metrics["nmse"] == pytest.approx(0.01 / 2, rel=1e-4)
    expected = volume_metrics(dim, 0.9 * dim)["ssim"]
    assert metrics["ssim"] == pytest.approx((1 + expected) / 2, rel=1e-5)
    baseline = [volume_metrics(v, 0.7 * v + 0.1 * v[..., ::-1]) for v in (bright, dim)]
    for name in ("nmse", "psnr", "ssim"):
        expected = np.mean([b[name] for b in baseline])
        assert metrics[f"zero_filled_{name}"] == pytest.approx(expected, rel=1e-5)
    apart = TASK.metrics(outputs, targets)  # without groups every slice is a volume
    assert apart["psnr"] != pytest.approx(metrics["psnr"]) or math.isinf(apart["psnr"])


def test_black_references_are_left_out_of_the_means(caplog: pytest.LogCaptureFixture) -> None:
    """One of them made every mean infinite or NaN."""
    bright, dim = volume(0), volume(1)
    expected = TASK.metrics(*as_examples(bright, dim))
    outputs, targets, groups = as_examples(bright, dim, np.zeros_like(dim))
    outputs[groups == 10] *= 0.9  # as the last volume of two
    for _ in range(2):
        metrics = TASK.metrics(outputs, targets, groups)
    assert {**metrics, "loss": 0} == pytest.approx({**expected, "loss": 0}, rel=1e-5)
    says = "1 references to test on are black, and are left out of the metrics"
    assert caplog.messages == [says]
    of_none = TASK.metrics(outputs[groups == 20], targets[groups == 20], groups[groups == 20])
    assert math.isnan(of_none["ssim"])
    assert of_none.keys() == metrics.keys()


def test_an_example_that_is_a_volume_measures_the_same() -> None:
    outputs, targets, groups = as_examples(volume(0), volume(2))
    order = groups.argsort(stable=True)
    whole = (each[order].unflatten(0, (2, 3)) for each in (outputs, targets))
    together = TASK.metrics(*whole)
    assert together == pytest.approx(TASK.metrics(outputs[order], targets[order], groups[order]))


def test_the_loss_is_l1_in_the_slices_unit_one_an_example() -> None:
    outputs, targets, _ = as_examples(volume(0), volume(1))
    unit = targets[:, 1].std(dim=(1, 2))
    expected = [(outputs[i, 0] - targets[i, 0] / unit[i]).abs().mean() for i in range(len(outputs))]
    assert torch.allclose(TASK.loss(outputs, targets), torch.stack(expected), atol=1e-6)
    brighter = TASK.loss(outputs, 500 * targets)
    assert torch.allclose(brighter, TASK.loss(outputs, targets), rtol=1e-4, atol=1e-6)
    by_volume = TASK.loss(outputs.unflatten(0, (2, 3)), targets.unflatten(0, (2, 3)))
    means = torch.stack(expected).unflatten(0, (2, 3)).mean(dim=1)
    assert torch.allclose(by_volume, means, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(7, 7), (6, 9), (9, 6)])
def test_images_that_ssim_cannot_measure_are_refused_before_a_step(height: int, width: int) -> None:
    """They failed at the evaluation, after steps had been spent."""
    size = (height, width)
    info = DatasetInfo(
        train=2,
        test=2,
        input_shape=(1, *size),
        outputs=1,
        target_shape=(2, *size),
        target_dtype=torch.float32,
    )
    config = configured(["recipe=mri_recon_small"])
    targets = torch.rand(2, 2, *size)
    if min(size) < 7:
        with pytest.raises(UserError, match=f"at least 7 × 7 pixels, .* have {height} × {width}"):
            check_fit(config, nn.Identity(), TASK, info)
        with pytest.raises(ValueError, match="win_size"):
            TASK.metrics(targets[:, :1], targets)
    else:
        check_fit(config, nn.Identity(), TASK, info)
        TASK.metrics(targets[:, :1], targets)
