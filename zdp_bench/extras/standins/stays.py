"""A stand-in for PhysioNet's Challenge 2012 without a download: stays in intensive care.

A third of the patients die; their vital signs are worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Interval

from zdp_bench.data.physionet2012 import FOLDER, HEADER, OUTCOMES, SETS, Physionet2012
from zdp_bench.extras.standins.drawing import StandIn
from zdp_bench.registry import register

# variable -> (mean of patients who live, mean of patients who die, standard deviation)
SIGNS = {
    "GCS": (14, 8, 2),
    "HR": (85, 105, 12),
    "MAP": (85, 65, 10),
    "Lactate": (1.5, 4, 0.6),
}
FIRST = {"a": 132_000, "b": 142_000}  # set -> number of its first patient


@register("dataset", "physionet2012_synthetic")
@dataclass(frozen=True, kw_only=True)
class Physionet2012Synthetic(StandIn, Physionet2012):
    """Generated stays in intensive care, with `count` patients in each of the two sets."""

    count: Annotated[int, Interval(ge=6, le=4000)] = 400
    seed: int = 0

    def write(self, folder: Path) -> None:
        home = folder / FOLDER
        for name in SETS:
            (home / f"set-{name}").mkdir(parents=True)
            outcomes = [",".join(OUTCOMES)]
            for number in range(FIRST[name], FIRST[name] + self.count):
                random = np.random.default_rng([self.seed, number])
                dies = number % 3 == 0
                record = "\n".join(draw_record(number, dies, random))
                (home / f"set-{name}" / f"{number}.txt").write_text(f"{record}\n")
                outcomes.append(f"{number},10,5,7,-1,{int(dies)}")
            (home / f"Outcomes-{name}.txt").write_text("\n".join(outcomes) + "\n")


def draw_record(
    number: int,
    dies: bool,
    random: np.random.Generator,
) -> list[str]:
    """Return the lines of a patient's record; each vital sign is missing with probability 1/5."""
    lines = [
        HEADER,
        f"00:00,RecordID,{number}",
        f"00:00,Age,{random.integers(40, 90)}",
        f"00:00,Gender,{random.integers(2)}",
        f"00:00,Height,{random.choice([-1, 165, 180])}",
        f"00:00,ICUType,{random.integers(1, 5)}",
        "00:00,Weight,80",
    ]
    measured = [name for name in SIGNS if random.random() < 0.8]
    for hour in range(1, 48, 6):
        for name in measured:
            mean_alive, mean_dying, deviation = SIGNS[name]
            mean = mean_dying if dies else mean_alive
            value = max(0, random.normal(mean, deviation))
            lines.append(f"{hour:02d}:30,{name},{value:.1f}")
    return lines
