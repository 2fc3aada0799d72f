"""Medical Segmentation Decathlon: whole volumes of one size with a binary mask.

The files, parts and windows are those of `msd.py`; an example is a volume, so its ε is the
volume's. Each is resized to one grid, mask and image alike, and Dice is taken on that grid. Where
intensities have no unit, a volume is scaled between its own 1st and 99th percentile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.data import Dataset, DatasetInfo, Examples, Splits
from zdp_bench.data.bad_records import BadRecords, note_skipped, refuse_damage
from zdp_bench.data.cache import consecutive, load_or_make
from zdp_bench.data.files import digest, holds_any, sha256
from zdp_bench.data.formats import nifti
from zdp_bench.data.formats.labelled_volumes import Case, find_cases, list_pairs
from zdp_bench.data.formats.planes import Window, to_bytes
from zdp_bench.data.msd import PIXELS, TASKS, Msd
from zdp_bench.errors import require
from zdp_bench.registry import register


@register("dataset", "msd_volumes")
@dataclass(frozen=True, kw_only=True)
class MsdVolumes(Dataset):
    """Volumes float32 [1, *shape] of a task, with masks uint8 [*shape]; axes are RAS+."""

    task: str = "hippocampus"
    shape: list[int]
    window: list[float] | None = None
    channel: int = 0
    validation_share: float = 0.1
    test_share: float = 0.2
    split_seed: int = 0
    bad_records: BadRecords | None = None

    def __post_init__(self) -> None:
        fits = len(self.shape) == 3 and all(4 <= side <= 512 for side in self.shape)
        require(fits, "dataset.shape", self.shape, "must be three numbers between 4 and 512")
        self._as_slices()

    def _as_slices(self) -> Msd:
        """Return the data set of the same volumes' slices, which splits them."""
        return Msd(
            task=self.task,
            window=self.window,
            channel=self.channel,
            validation_share=self.validation_share,
            test_share=self.test_share,
            split_seed=self.split_seed,
            bad_records=self.bad_records,
        )

    def _split(self, cases: list[Case]) -> dict[str, list[Case]]:
        chosen = self._as_slices().choose(cases, self.split_seed)
        return {part: [case for case, _ in members] for part, members in chosen.items()}

    def load(self, root: Path) -> Splits:
        """A folder with dataset.json and as many volumes as were released is 'official'."""
        name, released = TASKS[self.task]
        folder, window = root / name, self._as_slices().geometry().window
        cases = find_cases(folder, self.channel, self.bad_records)
        skipped = note_skipped(len(list_pairs(folder)), len(cases))
        whole = (folder / "dataset.json").is_file() and len(cases) == released and not skipped
        split = self._split(cases)
        files = "".join(f"{c.name}:{sha256(c.image)}:{sha256(c.label)}" for c in cases)
        shares = (self.validation_share, self.test_share, self.split_seed)
        made = digest(f"{files}:{(self.shape, window, self.channel, shares)!r}")
        blocks = (
            read_volume(case, self.shape, window, self.channel)[None]
            for members in split.values()
            for case in members
        )
        arrays = torch.from_numpy(
            load_or_make(
                f"volumes-{nifti.READING}", made, (len(cases), 2, *self.shape), np.uint8, blocks
            )
        )
        counts = {part: len(members) for part, members in split.items()}
        parts = {
            part: Examples(
                arrays[rows, :1], arrays[rows, 1], torch.arange(len(cases))[rows], PIXELS
            )
            for part, rows in consecutive(counts).items()
        }
        notes = (
            f"{counts['train']} volumes to train, {counts['validation']} to validate (public), "
            f"{counts['test']} to test, resized to {'×'.join(map(str, self.shape))}, where Dice "
            "is taken; labels above 0 are one mask"
        )
        return Splits(
            parts["train"],
            parts["test"],
            input_shape=(1, *self.shape),
            outputs=1,
            provenance="official" if whole else "derived",
            digest=digest(f"{made}:{PIXELS}"),
            notes="; ".join(filter(None, [notes, skipped])),
            validation=parts["validation"] if counts["validation"] else None,
            unit="volume",
        )

    def info(self, root: Path) -> DatasetInfo:
        """Count by headers, or as released."""
        name, released = TASKS[self.task]
        found = holds_any(root / name)
        cases = (
            find_cases(root / name, self.channel, self.bad_records)
            if found
            else [Case.announce(1)] * released
        )
        counts = {part: len(members) for part, members in self._split(cases).items()}
        return DatasetInfo(
            **counts,
            input_shape=(1, *self.shape),
            outputs=1,
            target_shape=tuple(self.shape),
            target_dtype=torch.uint8,
            unit="volume",
            owners=counts["train"],
            found=found,
        )

    def check_files(self, root: Path) -> Iterator[tuple[Path, str]]:
        """Read every labelled volume and its segmentation."""
        return self._as_slices().check_files(root)


def read_volume(case: Case, shape: list[int], window: Window, channel: int) -> np.ndarray:
    """Read a volume of a case as bytes [2, *shape]: image, and mask of 0 and 1.

    Raises:
        UserError: a file cannot be read.
    """
    with refuse_damage(case.image):
        image, label = nifti.read(case.image).data, nifti.read_labels(case.label).data
    image = image[..., channel] if image.ndim == 4 else image
    label = label[..., 0] if label.ndim == 4 else label
    resized = [
        resize(torch.from_numpy(np.ascontiguousarray(v)).float(), shape) for v in (image, label > 0)
    ]
    pixels = to_bytes(resized[0].flatten(1).unsqueeze(0), window).reshape(shape)
    mask = resized[1] >= 0.5
    return torch.stack([pixels.round(), mask.float()]).to(torch.uint8).numpy()


def resize(volume: Tensor, shape: list[int]) -> Tensor:
    """Resize a volume [X, Y, Z] trilinearly; one much finer is averaged by whole factors first."""
    factors = [max(1, side // target) for side, target in zip(volume.shape, shape, strict=True)]
    coarse = F.avg_pool3d(volume[None, None], factors)
    return F.interpolate(coarse, tuple(shape), mode="trilinear", align_corners=False)[0, 0]
