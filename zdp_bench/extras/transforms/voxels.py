"""Smoothed filters at each voxel of a volume: intensity, edges, and contrast at several scales.

With the polynomials of the place that `model=real_linear_map` multiplies them by, a logistic
regression at each voxel segments an organ that lies where it usually lies.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.extras.transforms.normalisation import EPS, normalise_each, require_real
from zdp_bench.registry import register

SCALES = (0.7, 1.0, 2.0, 4.0)  # deviations of the Gaussians, in voxels
EDGES = SCALES[1:3]  # of the gradients
CONTRASTS = SCALES[2:]  # of the local mean and deviation


@register("representation", "voxels")
class Voxels(nn.Module):
    """Smoothed filters of a volume, each with mean 0 and deviation 1 over it.

    Shapes: [B, (1,) D, H, W] -> [B, filters, D, H, W].
    """

    version = 1

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels = input_shape[0] if len(input_shape) == 4 else 1
        if len(input_shape) not in (3, 4) or channels != 1:
            raise UserError(
                "representation=voxels: takes volumes [depth, height, width] of one channel, and "
                f"these examples are {list(input_shape)}."
            )

    def forward(self, x: Tensor) -> Tensor:
        require_real(x, "voxels")
        x = x.reshape(len(x), 1, *x.shape[-3:]).float()
        x = normalise_each(x, "layer", groups=1)
        smooth = {scale: blur(x, scale) for scale in SCALES}
        filters = list(smooth.values())
        filters += [fine - coarse for fine, coarse in pairwise(smooth.values())]
        for scale in EDGES:
            gradient = torch.gradient(smooth[scale], dim=(-3, -2, -1))
            square = torch.stack(gradient).square().sum(dim=0)
            filters += [*gradient, square.sqrt()]
        for scale in CONTRASTS:
            mean = smooth[scale]
            variance = blur(x.square(), scale) - mean.square()
            deviation = (variance.clamp(min=0) + EPS).sqrt()
            contrast = (x - mean) / (deviation + 0.1)
            filters += [deviation, contrast]
        stacked = torch.cat(filters, dim=1)
        return normalise_each(stacked, "group", groups=len(filters))


def blur(x: Tensor, sigma: float) -> Tensor:
    """Return x [B, 1, D, H, W] averaged by a Gaussian; the outermost voxels go on outside."""
    reach = max(1, round(3 * sigma))
    offsets = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    weights = torch.exp(-(offsets**2) / (2 * sigma**2))
    weights = weights / weights.sum()
    x = F.conv3d(_pad(x, (0, 0, 0, 0, reach, reach)), weights.view(1, 1, -1, 1, 1))
    x = F.conv3d(_pad(x, (0, 0, reach, reach, 0, 0)), weights.view(1, 1, 1, -1, 1))
    return F.conv3d(_pad(x, (reach, reach, 0, 0, 0, 0)), weights.view(1, 1, 1, 1, -1))


def _pad(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    return F.pad(x, padding, mode="replicate")
