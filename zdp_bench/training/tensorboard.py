"""TensorBoard's event files of a run: `execution.tensorboard=true`, then `tensorboard --logdir results/tensorboard`.

They hold test metrics and tight ε by step, the numbers of the record, and no more: what comes from training records costs
privacy.
"""

from __future__ import annotations

from typing import Any

from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.training.loop import Watcher


class Board:
    """An `experiment.Watcher` that writes event files, and tells another one all that it is told."""

    def __init__(self, beside: Watcher, config: Run) -> None:
        """Nothing is written before the run's first evaluation.

        Raises:
            UserError: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise UserError(
                "execution.tensorboard=true needs TensorBoard: `pip install 'zdp-bench[tensorboard]'`."
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
        with self._open(
            str(self._folder), purge_step=step
        ) as board:  # what a killed process wrote of this step goes
            for name, value in metrics.items():
                board.add_scalar(f"test/{name}", value, step)
            board.add_scalar("privacy/epsilon_tight", epsilon, step)
        self._beside.evaluated(epoch, step, metrics, epsilon)
