"""TensorBoard's event files of a run, with `execution.tensorboard=true`.

To look at them: `tensorboard --logdir results/tensorboard`.

They hold the record's test metrics and tight ε by step. Numbers from training examples would cost
privacy.
"""

from __future__ import annotations

from typing import Any

from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.training.loop import Watcher


class Board:
    """A `loop.Watcher` that writes event files and passes everything on to another watcher."""

    def __init__(self, beside: Watcher, config: Run) -> None:
        """Nothing is written before the run's first evaluation.

        Raises:
            UserError: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise UserError(
                "execution.tensorboard=true needs TensorBoard: `pip install "
                "'zdp-bench[tensorboard]'`."
            ) from None
        self._beside = beside
        name = f"{config.recipe}-{experiment_digest(config)[:8]}-seed{config.seed}"
        self._folder = config.results / "tensorboard" / name
        self._open: Any = SummaryWriter

    def started(self, recipe: str, seed: int, steps: int, done: int) -> None:
        self._beside.started(recipe, seed, steps, done)

    def stepped(self, step: int) -> None:
        self._beside.stepped(step)

    def evaluated(self, epoch: int, step: int, metrics: dict[str, float], epsilon: float) -> None:
        # Purged: what a killed process wrote of this step.
        with self._open(str(self._folder), purge_step=step) as board:
            for name, value in metrics.items():
                board.add_scalar(f"test/{name}", value, step)
            board.add_scalar("privacy/epsilon_tight", epsilon, step)
        self._beside.evaluated(epoch, step, metrics, epsilon)
