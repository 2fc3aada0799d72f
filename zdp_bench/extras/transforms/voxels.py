"""Filters at each voxel of a volume: intensity, edges, and contrast at several scales.

`model=real_linear_map` multiplies them by polynomials of the voxel's position. A logistic
regression at each voxel then segments an organ that is in its usual place.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.extras.transforms.normalisation import EPS, normalise_each, require_real
from zdp_bench.registry import register

SCALES = (0.7, 1.0, 2.0, 4.0)  # standard deviations of the Gaussians, in voxels
EDGE_SCALES = SCALES[1:3]  # at which gradients are computed
CONTRAST_SCALES = SCALES[2:]  # at which the local mean and standard deviation are computed


@register("representation", "voxels")
class Voxels(nn.Module):
    """Filters of a volume, each with mean 0 and standard deviation 1 over the volume.

    Shapes: [B, (1,) D, H, W] -> [B, filters, D, H, W].

    Args:
        input_shape: shape of an example.
    """

    version = 1

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels = input_shape[0] if len(input_shape) == 4 else 1
        if len(input_shape) not in (3, 4) or channels != 1:
            raise UserError(
                "representation=voxels: takes volumes [depth, height, width] of one channel, but "
                f"these examples are {list(input_shape)}."
            )

    def forward(self, x: Tensor) -> Tensor:
        require_real(x, "voxels")
        x = x.reshape(len(x), 1, *x.shape[-3:]).float()
        x = normalise_each(x, "layer", groups=1)
        smooth = {scale: blur(x, scale) for scale in SCALES}
        filters = list(smooth.values())
        filters += [fine - coarse for fine, coarse in pairwise(smooth.values())]
        for scale in EDGE_SCALES:
            gradient = torch.gradient(smooth[scale], dim=(-3, -2, -1))
            square = torch.stack(gradient).square().sum(dim=0)
            filters += [*gradient, square.sqrt()]
        for scale in CONTRAST_SCALES:
            mean = smooth[scale]
            variance = blur(x.square(), scale) - mean.square()
            deviation = (variance.clamp(min=0) + EPS).sqrt()
            contrast = (x - mean) / (deviation + 0.1)
            filters += [deviation, contrast]
        stacked = torch.cat(filters, dim=1)
        return normalise_each(stacked, "group", groups=len(filters))


def blur(x: Tensor, sigma: float) -> Tensor:
    """Return x, [B, 1, D, H, W], smoothed by a Gaussian, with replication padding."""
    reach = max(1, round(3 * sigma))
    offsets = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    weights = torch.exp(-(offsets**2) / (2 * sigma**2))
    weights = weights / weights.sum()
    x = F.conv3d(_pad(x, (0, 0, 0, 0, reach, reach)), weights.view(1, 1, -1, 1, 1))
    x = F.conv3d(_pad(x, (0, 0, reach, reach, 0, 0)), weights.view(1, 1, 1, -1, 1))
    return F.conv3d(_pad(x, (reach, reach, 0, 0, 0, 0)), weights.view(1, 1, 1, 1, -1))


def _pad(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    return F.pad(x, padding, mode="replicate")
