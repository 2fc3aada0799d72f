"""Parts that generated data sets share: folders that are written once, and blobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from zdp_bench.data import Dataset, DatasetInfo, Splits
from zdp_bench.data.files import digest, write_whole


class StandIn(Dataset):
    """A data set whose files are generated once, and then read like those of a release.

    The files are under `synthetic/` in the data root. A subclass inherits from this class first,
    and then from the data set that reads the files.

    Attributes:
        drawn: names of the options that determine the files.
    """

    drawn: ClassVar[tuple[str, ...]] = ("count", "seed")

    def write(self, folder: Path) -> None:
        """Write the files to a folder that has the layout of a data root."""
        raise NotImplementedError

    def load(self, root: Path) -> Splits:
        values = [getattr(self, option) for option in self.drawn]
        name = digest(repr(values))[:16]
        folder = root / "synthetic" / f"{type(self).__name__}-{name}"
        if not folder.is_dir():
            with write_whole(folder) as partial:
                self.write(partial)
        return replace(self.read_folder(folder), provenance="synthetic")

    def read_folder(self, folder: Path) -> Splits:
        """Read the generated files like those of the release."""
        return super().load(folder)

    def published_info(self, root: Path) -> DatasetInfo | None:
        """Return None, because there is no release of generated files."""
        return None


def draw_blobs(
    shape: tuple[int, ...],
    count: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Return a sum of Gaussian blobs at random places, float [*shape] in [0, 1]."""
    axes = [np.linspace(-1, 1, side) for side in shape]
    grid = np.meshgrid(*axes, indexing="ij", sparse=True)
    image = np.zeros(shape)
    for _ in range(count):
        squares = []
        for x in grid:
            centre, width = random.uniform(-0.4, 0.4), random.uniform(0.3, 0.6)
            squares.append(((x - centre) / width) ** 2)
        image += np.exp(-sum(squares))
    return image / image.max()
