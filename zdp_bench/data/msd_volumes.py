"""Medical Segmentation Decathlon: whole volumes of one size with a binary mask.

Files, parts and intensity windows are those of `msd.py`. An example is a volume, so ε per example
is ε per volume. Images and masks are resized to one grid, on which Dice is measured. If intensities
have no unit, each volume is scaled between its own 1st and 99th percentile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Interval, Len
from torch import Tensor

from zdp_bench.data import Fraction, PublicFraction, Splits
from zdp_bench.data.files import digest
from zdp_bench.data.msd import PIXELS, Decathlon, LabelledVolume, read_case
from zdp_bench.data.nifti import to_bytes
from zdp_bench.registry import register


@register("dataset", "msd_volumes")
@dataclass(frozen=True, kw_only=True)
class MsdVolumes(Decathlon):
    """Volumes, float32 [1, *shape], with masks, uint8 [*shape], on RAS+ axes.

    Args:
        shape: size of the grid, [X, Y, Z] in voxels.
    """

    array: ClassVar[str] = "volumes"

    task: str = "hippocampus"
    shape: Annotated[list[Annotated[int, Interval(ge=4, le=512)]], Len(3, 3)]
    validation_share: PublicFraction = 0.1
    test_share: Fraction = 0.2

    @property
    def sides(self) -> tuple[int, ...]:
        return tuple(self.shape)

    def count(self, thickness: int, part: str) -> int:
        return 1

    def read(
        self,
        case: LabelledVolume,
        part: str,
    ) -> np.ndarray:
        volume, organ = read_case(case, self.channel)
        image = resize(torch.from_numpy(volume).float(), self.shape)
        mask = resize(torch.from_numpy(organ).float(), self.shape) >= 0.5
        pixels = to_bytes(image.flatten(1).unsqueeze(0), self.limits).reshape(self.shape)
        example = torch.stack([pixels.round(), mask.float()])
        return example.to(torch.uint8).numpy()[None]

    def digest_arrays(self, contents: str, cases: Sequence[LabelledVolume]) -> str:
        split = (self.validation_share, self.test_share, self.split_seed)
        settings: tuple[Any, ...] = (self.shape, self.limits, self.channel, split)
        # Only these are resized otherwise than before, so the digests of other records hold.
        if any(is_averaged_unevenly(case.header.shape[:3], self.shape) for case in cases):
            settings = (*settings, "whole axes")
        return digest(f"{contents}:{settings!r}")

    def load(self, root: Path) -> Splits:
        splits = super().load(root)
        return replace(
            splits,
            digest=digest(f"{splits.digest}:{PIXELS}"),
            notes=f"{splits.notes}, resized to {'×'.join(map(str, self.shape))}, "
            "where Dice is taken; labels above 0 are one mask",
        )


def resize(volume: Tensor, shape: list[int]) -> Tensor:
    """Resize a volume [X, Y, Z] to `shape` by trilinear interpolation.

    An axis that shrinks by a factor of 2 or more is resized to a multiple of its new length, and
    averaged over blocks of that many voxels, which prevents aliasing.
    """
    factors = [max(1, side // target) for side, target in zip(volume.shape, shape, strict=True)]
    fine = [factor * target for factor, target in zip(factors, shape, strict=True)]
    resized = F.interpolate(volume[None, None], fine, mode="trilinear", align_corners=False)
    return F.avg_pool3d(resized, factors)[0, 0]


def is_averaged_unevenly(sides: Sequence[int], shape: Sequence[int]) -> bool:
    """Return True if an axis is averaged, and not all axes shrink by whole numbers."""
    pairs = list(zip(sides, shape, strict=True))
    is_averaged = any(side >= 2 * target for side, target in pairs)
    return is_averaged and any(side % target for side, target in pairs)
