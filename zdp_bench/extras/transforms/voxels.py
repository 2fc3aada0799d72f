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
from zdp_bench.extras.transforms.normalisation import require_real
from zdp_bench.registry import register

SCALES = (0.7, 1.0, 2.0, 4.0)  # deviations of the Gaussians, in voxels
EDGES = SCALES[1:3]  # of the gradients
CONTRASTS = SCALES[2:]  # of the local mean and deviation
EPS = 1e-5


@register("representation", "voxels")
class Voxels(nn.Module):
    """Smoothed filters of a volume, each with mean 0 and deviation 1 over it.

    Shapes: [B, (1,) D, H, W] -> [B, filters, D, H, W].
    """

    version = 1

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        if len(input_shape) not in (3, 4) or (len(input_shape) == 4 and input_shape[0] != 1):
            raise UserError(
                "representation=voxels: takes volumes [depth, height, width] of one channel, and "
                f"these examples are {list(input_shape)}."
            )

    def forward(self, x: Tensor) -> Tensor:
        require_real(x, "voxels")
        x = standardise(x.reshape(len(x), 1, *x.shape[-3:]).float())
        smooth = {scale: blur(x, scale) for scale in SCALES}
        found = list(smooth.values())
        found += [a - b for a, b in pairwise(found)]
        for scale in EDGES:
            edges = torch.gradient(smooth[scale], dim=(-3, -2, -1))
            found += [*edges, torch.stack(edges).square().sum(dim=0).sqrt()]
        for scale in CONTRASTS:
            variance = (blur(x.square(), scale) - smooth[scale].square()).clamp(min=0)
            deviation = (variance + EPS).sqrt()
            found += [deviation, (x - smooth[scale]) / (deviation + 0.1)]
        return standardise(torch.cat(found, dim=1))


def standardise(x: Tensor) -> Tensor:
    """Give each channel of each volume mean 0 and deviation 1 over its voxels."""
    centred = x - x.mean(dim=(-3, -2, -1), keepdim=True)
    power = centred.square().mean(dim=(-3, -2, -1), keepdim=True)
    return centred * torch.rsqrt(power + EPS)


def blur(x: Tensor, sigma: float) -> Tensor:
    """Return x [B, 1, D, H, W] averaged by a Gaussian; the outermost voxels go on outside."""
    reach = max(1, round(3 * sigma))
    at = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    weights = torch.exp(-(at**2) / (2 * sigma**2))
    weights = weights / weights.sum()
    for axis in range(3):
        shape, padding = [1, 1, 1, 1, 1], [0] * 6
        shape[2 + axis] = len(at)
        padding[2 * (2 - axis)] = padding[2 * (2 - axis) + 1] = reach
        x = F.conv3d(F.pad(x, padding, mode="replicate"), weights.view(shape))
    return x
