"""Encode pictures by comparing whitened patches with a dictionary of patches (Coates & Ng 2011).

Whitening and dictionary are computed from generated pictures (`generated.py`), without photographs
and without the data set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from zdp_bench.config.types import SEED
from zdp_bench.errors import UserError, require
from zdp_bench.extras.transforms.generated import (
    MAX_PICTURES,
    as_examples,
    seeded_pictures,
)
from zdp_bench.extras.transforms.normalisation import as_real_pictures, require_pictures
from zdp_bench.registry import register

SIDE = 6  # pixels of a patch
STRIDE = 2
GRID = 3  # cells along a side in which responses are averaged
CONTRAST = (10 / 255) ** 2  # added to a patch's variance, so that noise is not amplified
RIDGE = 0.1  # added to the eigenvalues of the covariance before whitening
THRESHOLD = 0.5  # subtracted from a response before ReLU
MIN_CONTRAST = 0.5  # smallest mean square of a whitened patch in the dictionary
BATCH_SIZE = 64  # generated pictures whose patches are computed together
PATCHES_PER_PICTURE = 16  # drawn from each generated picture
MAX_NUMBERS = 2**25  # of an example's responses, 128 MiB in float32


def flat_patches(x: Tensor) -> Tensor:
    """Return all patches of pictures [n, C, H, W] as rows: [n, places, C · SIDE²]."""
    return F.unfold(x, SIDE, stride=STRIDE).mT


def standardise(patches: Tensor) -> Tensor:
    """Return patches [..., pixels] with mean 0 and, unless contrast is low, variance near 1."""
    centred = patches - patches.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    return centred * torch.rsqrt(variance + CONTRAST)


def whitening_of(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean [pixels] and the ZCA matrix [pixels, pixels] of patches [n, pixels]."""
    exact = patches.double()
    mean = exact.mean(dim=0)
    centred = exact - mean
    variances, axes = torch.linalg.eigh(centred.T @ centred / len(exact))
    whiten = axes * torch.rsqrt(variances + RIDGE) @ axes.T
    return mean.float(), whiten.float()


def _choose_patches(
    pictures: Tensor, input_shape: tuple[int, ...], draw: torch.Generator
) -> Tensor:
    """Return patches at random places of pictures, resized to examples of a shape, as rows.

    Shapes: uint8 [n, 3, 64, 64] -> [n · PATCHES_PER_PICTURE, pixels].
    """
    size = len(pictures), PATCHES_PER_PICTURE
    places = torch.randint(math.prod(_grid_of(input_shape)), size, generator=draw)
    chosen = []
    # Some pictures at a time, because the patches of an example are nine times as large as it.
    for part, part_places in zip(pictures.split(BATCH_SIZE), places.split(BATCH_SIZE), strict=True):
        examples = as_examples(part, input_shape)
        patches = flat_patches(examples.reshape(len(part), -1, *input_shape[-2:]))
        rows = torch.arange(len(part)).unsqueeze(1)
        chosen.append(patches[rows, part_places].flatten(0, 1))
    return torch.cat(chosen)


def _grid_of(shape: Sequence[int]) -> list[int]:
    """Return the numbers of patches along the sides of a picture [..., H, W]."""
    return [(side - SIDE) // STRIDE + 1 for side in shape[-2:]]


@register("representation", "patches")
class Patches(nn.Module):
    """Responses of patches to a dictionary of generated patches, averaged over a coarse grid.

    Shapes: pictures float [B, (C,) H, W] with pixels in [0, 1] -> [B, 2 · filters, 3, 3].

    Each patch of 6 × 6 pixels is standardised by its own statistics and whitened. For its inner
    product p with a filter, the responses are ReLU(p − 0.5) and ReLU(−p − 0.5). Responses of a
    picture and its mirror image are averaged.

    Args:
        input_shape: shape of an example.
        filters: number of patches in the dictionary.
        pictures: number of generated pictures, from which whitening and dictionary are computed.
        seed: seed of the generated pictures and of the choice of their patches.
    """

    version = 1
    takes_unit_pixels = True
    mean: Tensor
    filters: Tensor

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        filters: Annotated[int, Interval(ge=1, le=8192)] = 384,
        pictures: Annotated[int, Interval(ge=16, le=MAX_PICTURES)] = 4096,
        seed: Annotated[int, SEED] = 0,
    ) -> None:
        super().__init__()
        channels = require_pictures("patches", input_shape, min_side=SIDE + STRIDE * (GRID - 1))
        responses = 2 * filters * math.prod(_grid_of(input_shape))
        rule = f"makes {responses:,} responses of an example, more than {MAX_NUMBERS:,}; lower it"
        require(responses <= MAX_NUMBERS, "representation.filters", filters, rule)
        self._input_shape = tuple(input_shape)
        self._fitting = pictures, seed
        self.register_buffer("mean", torch.zeros(channels * SIDE**2))
        self.register_buffer("filters", torch.zeros(channels * SIDE**2, filters))

    def fit(self) -> None:
        """Compute whitening and dictionary from generated pictures."""
        pictures, seed = self._fitting
        filters = self.filters.shape[1]
        public = seeded_pictures(pictures, seed)
        draw = torch.Generator().manual_seed(seed)
        chosen = standardise(_choose_patches(public, self._input_shape, draw))
        mean, whiten = whitening_of(chosen)
        whitened = (chosen - mean) @ whiten
        contrasted = whitened[whitened.square().mean(dim=1) > MIN_CONTRAST]
        if len(contrasted) < filters:
            raise UserError(
                f"representation.filters={filters}: {pictures} generated pictures have only "
                f"{len(contrasted)} patches of enough contrast; increase representation.pictures."
            )
        order = torch.randperm(len(contrasted), generator=draw)
        dictionary = F.normalize(contrasted[order[:filters]], dim=1)
        self.mean = mean
        # The dictionary, with whitening included: the ZCA matrix is symmetric.
        self.filters = whiten @ dictionary.T

    def forward(self, x: Tensor) -> Tensor:
        x = as_real_pictures(x, "patches")
        mirrored = self._respond(x.flip(-1))
        return (self._respond(x) + mirrored) / 2

    def _respond(self, x: Tensor) -> Tensor:
        """Return the averaged responses of pictures [B, C, H, W]: [B, 2 · filters, 3, 3]."""
        patches = standardise(flat_patches(x))
        products = ((patches - self.mean) @ self.filters).mT
        both_signs = torch.cat([products, -products], dim=1)
        responses = F.relu(both_signs - THRESHOLD)
        maps = responses.unflatten(2, _grid_of(x.shape))
        return F.adaptive_avg_pool2d(maps, GRID)
