"""Medical Segmentation Decathlon: whole volumes of one size with a binary mask.

The files, parts and windows are those of `msd.py`; an example is a volume, so its ε is the
volume's. Each is resized to one grid, mask and image alike, and Dice is taken on that grid. Where
intensities have no unit, a volume is scaled between its own 1st and 99th percentile.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Interval, Len
from torch import Tensor

from zdp_bench.data import (
    Dataset,
    DatasetInfo,
    Examples,
    Provenance,
    PublicShare,
    Splits,
    Window,
    nifti,
)
from zdp_bench.data.cache import consecutive, load_or_make
from zdp_bench.data.files import digest, holds_any, sha256
from zdp_bench.data.msd import (
    PIXELS,
    TASKS,
    Geometry,
    LabelledSlices,
    LabelledVolume,
    Msd,
    find_cases,
    read_case,
)
from zdp_bench.data.nifti import to_bytes
from zdp_bench.registry import register


@dataclass(frozen=True, kw_only=True)
class LabelledVolumes(Dataset):
    """Volumes float32 [1, *shape], with masks uint8 [*shape]; axes are RAS+."""

    shape: Annotated[list[Annotated[int, Interval(ge=4, le=512)]], Len(3, 3)]
    validation_share: PublicShare = 0.1
    test_share: float = 0.2

    def __post_init__(self) -> None:
        self.as_slices()

    def as_slices(self) -> LabelledSlices:
        """Return the data set of the same volumes' slices, which splits them."""
        raise NotImplementedError

    def split(self, cases: list[LabelledVolume], seed: int) -> dict[str, list[LabelledVolume]]:
        """Return the volumes of each part, those of the slices with the same seed."""
        chosen = self.as_slices().choose(cases, seed)
        return {part: [case for case, _ in members] for part, members in chosen.items()}

    def load_cases(self, cases: list[LabelledVolume], provenance: Provenance, seed: int) -> Splits:
        """Read a task's volumes; `groups` number them."""
        geometry, split = self.as_slices().geometry(), self.split(cases, seed)
        files = "".join(f"{c.name}:{sha256(c.image)}:{sha256(c.label)}" for c in cases)
        shares = (self.validation_share, self.test_share, seed)
        how = (self.shape, geometry.window, geometry.channel, shares)
        made, shape = digest(f"{files}:{how!r}"), (len(cases), 2, *self.shape)
        every = [case for members in split.values() for case in members]
        blocks = (read_volume(case, self.shape, geometry)[None] for case in every)
        arrays = torch.from_numpy(
            load_or_make(f"volumes-{nifti.READING}", made, shape, np.uint8, blocks)
        )
        counts, groups = {part: len(each) for part, each in split.items()}, torch.arange(len(every))
        parts = {
            part: Examples(arrays[rows, :1], arrays[rows, 1], groups[rows], PIXELS)
            for part, rows in consecutive(counts).items()
        }
        return Splits(
            parts["train"],
            parts["test"],
            input_shape=(1, *self.shape),
            outputs=1,
            provenance=provenance,
            digest=digest(f"{made}:{PIXELS}"),
            notes=f"{counts['train']} volumes to train, {counts['validation']} to validate "
            f"(public), {counts['test']} to test, resized to {'×'.join(map(str, self.shape))}, "
            "where Dice is taken; labels above 0 are one mask",
            validation=parts["validation"] if counts["validation"] else None,
            unit="volume",
        )

    def describe(self, cases: list[LabelledVolume], seed: int, found: bool = True) -> DatasetInfo:
        """Count volumes."""
        counts = {part: len(members) for part, members in self.split(cases, seed).items()}
        return DatasetInfo(
            train=counts["train"],
            test=counts["test"],
            validation=counts["validation"],
            input_shape=(1, *self.shape),
            outputs=1,
            target_shape=tuple(self.shape),
            target_dtype=torch.uint8,
            unit="volume",
            owners=counts["train"],
            found=found,
        )


@register("dataset", "msd_volumes")
@dataclass(frozen=True, kw_only=True)
class MsdVolumes(LabelledVolumes):
    """A task of the decathlon under the data root."""

    task: str = "hippocampus"
    window: Window | None = None
    channel: int = 0
    split_seed: int = 0

    def as_slices(self) -> Msd:
        """Return the same task's slices, with its window."""
        return Msd(
            task=self.task,
            window=self.window,
            channel=self.channel,
            validation_share=self.validation_share,
            test_share=self.test_share,
        )

    def load(self, root: Path) -> Splits:
        """A folder with dataset.json and as many volumes as were released is 'official'."""
        name, released = TASKS[self.task]
        labels = nifti.paths_of(root / name / "labelsTr")
        cases = find_cases(root / name, self.channel)
        whole = (root / name / "dataset.json").is_file() and len(labels) == released
        return self.load_cases(cases, "official" if whole else "derived", self.split_seed)

    def info(self, root: Path) -> DatasetInfo:
        """Count by headers, or as released."""
        name, released = TASKS[self.task]
        if holds_any(root / name):
            return self.describe(find_cases(root / name, self.channel), self.split_seed)
        return self.describe([LabelledVolume.announce(1)] * released, self.split_seed, found=False)


def read_volume(case: LabelledVolume, shape: list[int], geometry: Geometry) -> np.ndarray:
    """Read a volume of a case as bytes [2, *shape]: image, and mask of 0 and 1."""
    resized = [
        resize(torch.from_numpy(part).float(), shape) for part in read_case(case, geometry.channel)
    ]
    pixels = to_bytes(resized[0].flatten(1).unsqueeze(0), geometry.window).reshape(shape)
    mask = resized[1] >= 0.5
    return torch.stack([pixels.round(), mask.float()]).to(torch.uint8).numpy()


def resize(volume: Tensor, shape: list[int]) -> Tensor:
    """Resize a volume [X, Y, Z] trilinearly; one much finer is averaged by whole factors first."""
    factors = [max(1, side // target) for side, target in zip(volume.shape, shape, strict=True)]
    coarse = F.avg_pool3d(volume[None, None], factors)
    return F.interpolate(coarse, tuple(shape), mode="trilinear", align_corners=False)[0, 0]
