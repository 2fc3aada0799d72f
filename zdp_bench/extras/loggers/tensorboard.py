"""TensorBoard's event files; to look at them: `tensorboard --logdir results/tensorboard`."""

from __future__ import annotations

from typing import Any

from torch.utils.tensorboard.writer import SummaryWriter

from zdp_bench.config.schema import Run


class Logger:
    """Writes event files into `results/tensorboard/NAME`."""

    def __init__(self, config: Run, name: str, settings: dict[str, Any]) -> None:
        self._folder = config.results / "tensorboard" / name

    def write(self, numbers: dict[str, float], step: int) -> None:
        # Purged: what a killed process wrote of this step.
        with SummaryWriter(str(self._folder), purge_step=step) as board:
            for name, value in numbers.items():
                board.add_scalar(name, value, step)

    def close(self) -> None: ...
