"""Image reconstruction: L1 loss of the magnitude; NMSE, PSNR and SSIM of volumes, as in fastMRI.

Metrics follow Zbontar et al. 2018 (arXiv:1811.08839), section 5.2, and their code. NMSE and PSNR of
a volume are computed over all of its slices together, and SSIM is the mean over slices. The data
range of PSNR and SSIM is the volume's largest value. Results are averaged over volumes; those whose
reference is black, for which none is defined, are left out.
"""

from __future__ import annotations

import logging
import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from zdp_bench.registry import register
from zdp_bench.tasks import keeps_apart, mean_of
from zdp_bench.tasks.metric import LOSS, NMSE, PSNR, SSIM, ZERO_FILLED

log = logging.getLogger(__name__)

EPS = 1e-11  # added to a slice's standard deviation, as in fastMRI
SSIM_WINDOW = 7  # pixels; SSIM compares windows of this height and width


def scale(targets: Tensor) -> Tensor:
    """Return the standard deviation of each slice's zero-filled magnitude, [..., 1, 1].

    It is the unit of the network's outputs.
    """
    return targets[..., 1, :, :].std(dim=(-2, -1), keepdim=True) + EPS


@register("task", "reconstruction")
class Reconstruction:
    """L1 loss of magnitudes [B, 1, H, W], which are in units of each slice (see `scale`).

    Targets [B, 2, H, W] are the reference and the zero-filled magnitude, in the scanner's units. If
    an example is a volume, both are [B, slices, ...], and its loss is the mean over its slices.
    """

    headline = SSIM.name
    measures = (NMSE, PSNR, SSIM, *ZERO_FILLED, LOSS)
    targets = "a reference and its zero-filled image [2, height, width]"
    min_side = SSIM_WINDOW

    @keeps_apart
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        reference = targets[..., 0, :, :] / scale(targets)
        return (outputs[..., 0, :, :] - reference).abs().flatten(1).mean(dim=1)  # [B]

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        """Return NMSE, PSNR in dB and SSIM, and the same for the zero-filled image.

        Args:
            outputs: magnitudes, in units of the slice.
            targets: references and zero-filled magnitudes.
            groups: index of the volume of each slice, [n]. Default: each example is a volume.
        """
        answers = outputs[..., 0, :, :] * scale(targets)
        if groups is None:
            groups = torch.arange(len(targets))
        by_volume: dict[str, list[float]] = {measure.name: [] for measure in self.measures}
        num_black = 0
        for volume in groups.unique():
            slices = torch.nonzero(groups == volume).flatten()
            pairs = targets[slices].flatten(0, -4).double()  # [slices, 2, H, W]
            reference, zero_filled = pairs.numpy().swapaxes(0, 1)
            if not reference.any():
                num_black += 1
                continue
            answer = answers[slices].flatten(0, -3).double()
            for name, value in volume_metrics(reference, answer.numpy()).items():
                by_volume[name].append(value)
            for name, value in volume_metrics(reference, zero_filled).items():
                by_volume[f"zero_filled_{name}"].append(value)
        if num_black:
            _warn_of_black(num_black)
        metrics = {
            name: float(np.mean(values)) if values else math.nan
            for name, values in by_volume.items()
        }
        metrics["loss"] = mean_of(self.loss(outputs, targets))
        return metrics

    def example(
        self,
        outputs: Tensor,
        targets: Tensor,
    ) -> dict[str, np.ndarray]:
        """Return the middle slice of the test set for a figure.

        Returns:
            Reference, zero-filled and reconstructed magnitudes, each [H, W].
        """
        middle = len(targets) // 2
        answers = outputs[..., 0, :, :] * scale(targets)
        pair, answer = targets[middle], answers[middle]
        if targets.dim() == 5:  # a volume: show its last slice
            pair, answer = pair[-1], answer[-1]
        reference, zero_filled = pair.numpy()
        return {
            "reference": reference,
            "zero_filled": zero_filled,
            "reconstruction": answer.numpy(),
        }


@cache
def _warn_of_black(count: int) -> None:
    """Warn once, although metrics are computed after each epoch."""
    log.warning("%d references to test on are black, and are left out of the metrics", count)


def volume_metrics(
    reference: np.ndarray,
    answer: np.ndarray,
) -> dict[str, float]:
    """Return NMSE, PSNR and SSIM of one volume, float [slices, H, W], in double precision."""
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity  # takes a second

    reference = reference.astype(np.float64)
    answer = answer.astype(np.float64)
    error = ((reference - answer) ** 2).sum()
    largest = reference.max()
    psnr = peak_signal_noise_ratio(reference, answer, data_range=largest)
    ssim_of_slices = [
        structural_similarity(
            reference_slice, answer_slice, data_range=largest, win_size=SSIM_WINDOW
        )
        for reference_slice, answer_slice in zip(reference, answer, strict=True)
    ]
    return {
        "nmse": float(error / (reference**2).sum()),
        "psnr": float(psnr),
        "ssim": float(np.mean(ssim_of_slices)),
    }
