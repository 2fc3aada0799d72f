"""A stand-in for MIT-BIH: generated beats written as the release stores them, and read as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zdp_bench.data import Dataset, DatasetInfo, Splits
from zdp_bench.data.files import write_whole
from zdp_bench.data.mitbih import BLOCKED, RATE, MitBih
from zdp_bench.errors import require
from zdp_bench.extras.standins.ecg import draw_beat
from zdp_bench.registry import register

STEP = 300  # samples from beat to beat


def write_recording(
    folder: Path, name: str, leads: Sequence[str], symbols: Sequence[str], seed: int
) -> None:
    """Write `name.hea`, `.dat` and `.atr`: two leads with one beat for each symbol.

    The first and the last beat are so near to the ends that no window around them is whole.
    """
    import wfdb

    count = len(symbols)
    length = STEP * count
    places = np.array([20, *range(STEP, STEP * (count - 1), STEP), length - 10])
    t = np.arange(length)
    signal = np.zeros(length)
    for place, symbol in zip(places, symbols, strict=True):
        signal += draw_beat((t - place) / RATE, symbol == "L")
    noise = np.random.default_rng([seed, int(name)]).normal(0, 0.05, (length, 2))
    wfdb.wrsamp(
        name,
        fs=RATE,
        units=["mV", "mV"],
        sig_name=list(leads),
        p_signal=signal[:, None] + noise,
        fmt=["212", "212"],
        adc_gain=[200, 200],
        baseline=[1024, 1024],
        write_dir=str(folder),
    )
    wfdb.wrann(name, "atr", places, list(symbols), write_dir=str(folder))


@register("dataset", "mitbih_synthetic")
@dataclass(frozen=True, kw_only=True)
class MitBihSynthetic(Dataset):
    """Generated recordings, written once under `synthetic/` and read as MIT-BIH's are.

    patients: how many have N beats; four more have L beats.
    beats: of each patient.
    """

    fold: int = 0
    patients: int = 12
    beats: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("patients", "beats"):
            count = getattr(self, key)
            require(2 <= count <= 100, f"dataset.{key}", count, "must lie between 2 and 100")
        self.info(Path())

    @property
    def reader(self) -> MitBih:
        return MitBih(fold=self.fold)

    def load(self, root: Path) -> Splits:
        folder = root / "synthetic" / f"mitbih-{self.patients}-{self.beats}-{self.seed}"
        if not folder.is_dir():
            with write_whole(folder) as partial:
                for name in (*self.names, *BLOCKED):
                    symbols = ["L" if name in BLOCKED else "N"] * (self.beats + 2)
                    write_recording(partial, name, ("MLII", "V1"), symbols, self.seed)
        return self.reader.load_folder(folder, synthetic=True)

    def info(self, root: Path) -> DatasetInfo:
        counts = dict.fromkeys(self.names, (self.beats, 0))
        counts |= dict.fromkeys(BLOCKED, (0, self.beats))
        return self.reader.describe(root / "synthetic", counts, found=True)

    @property
    def names(self) -> list[str]:
        """The recordings with N beats; numbers that the release does not use."""
        return [str(300 + number) for number in range(self.patients)]
