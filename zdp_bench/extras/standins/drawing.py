"""What stand-ins share: folders that are written once, and blobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from zdp_bench.data.files import write_whole
from zdp_bench.errors import UserError

LARGEST = 32 * 10**9  # bytes; stand-ins have some megabytes


def require_modest(keys: str, size: float) -> None:
    """Refuse to generate more than `LARGEST` bytes, before the work and not by a full disk.

    Args:
        keys: what makes the size, for the sentence: `dataset.count`.
        size: in bytes, estimated.
    """
    if size > LARGEST:
        raise UserError(
            f"{keys}: makes about {size / 1e9:,.0f} GB of data, and at most {LARGEST / 1e9:g} GB "
            "are generated. Take less."
        )


def find_or_write(root: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return the folder of that name under `synthetic/`, which is written once, all or none."""
    folder = root / "synthetic" / name
    if not folder.is_dir():
        with write_whole(folder) as partial:
            write(partial)
    return folder


def draw_blobs(shape: tuple[int, ...], count: int, random: np.random.Generator) -> np.ndarray:
    """Draw Gaussian blobs at random places of a grid: float [*shape] in [0, 1]."""
    axes = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij", sparse=True)
    image = np.zeros(shape)
    for _ in range(count):
        far = [((x - random.uniform(-0.4, 0.4)) / random.uniform(0.3, 0.6)) ** 2 for x in axes]
        image += np.exp(-sum(far))
    return image / image.max()
