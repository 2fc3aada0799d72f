"""What a run tells experiment trackers, with `execution.loggers=[tensorboard,mlflow,wandb]`.

They get the record's test metrics and tight ε by step, and the recorded configuration. Numbers from
training examples, such as a loss or a batch's size, would cost privacy, as would time and memory of
a step: no logger gets any. Nothing is sent over a network: each writes below the results folder.

To add one, write a class as `Logger` below, under `@register("logger", "NAME")`.
"""

from __future__ import annotations

from typing import Any, Protocol

from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import OPERATIONAL, Run
from zdp_bench.errors import UserError, unknown
from zdp_bench.records import flatten
from zdp_bench.registry import lookup, names
from zdp_bench.training.loop import Watcher


class Logger(Protocol):
    """Writes numbers of one run; a run that goes on after a kill opens it again."""

    def __init__(self, config: Run, name: str, settings: dict[str, Any]) -> None:
        """Write nothing yet.

        Args:
            name: of the run, the same whenever it goes on.
            settings: the recorded configuration by dotted key.
        """

    def write(self, numbers: dict[str, float], step: int) -> None:
        """Write numbers by name, 'test/accuracy' or 'privacy/epsilon_tight'."""

    def close(self) -> None:
        """End it; nothing was written if the run was found done."""


class Reporter:
    """A `loop.Watcher` that tells loggers and passes everything on; a context manager.

    Raises:
        UserError: there is no such logger, or its package is not installed.
    """

    def __init__(self, beside: Watcher, config: Run) -> None:
        self._beside = beside
        name = f"{config.recipe}-{experiment_digest(config)[:8]}-seed{config.seed}"
        kept = {key: value for key, value in config.resolved.items() if key not in OPERATIONAL}
        asked = dict.fromkeys(config.execution.loggers or ())
        self._loggers: list[Logger] = [
            _find(logger)(config, name, flatten(kept)) for logger in asked
        ]

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.close()

    def started(self, recipe: str, seed: int, steps: int, done: int) -> None:
        self._beside.started(recipe, seed, steps, done)

    def stepped(self, step: int) -> None:
        self._beside.stepped(step)

    def evaluated(self, epoch: int, step: int, metrics: dict[str, float], epsilon: float) -> None:
        numbers = {f"test/{name}": value for name, value in metrics.items()}
        for logger in self._loggers:
            logger.write(numbers | {"privacy/epsilon_tight": epsilon}, step)
        self._beside.evaluated(epoch, step, metrics, epsilon)


def _find(name: str) -> type[Logger]:
    if name not in names("logger"):
        raise unknown("logger", name, names("logger"))
    try:
        found: Any = lookup("logger", name)
    except ImportError:
        raise UserError(
            f"execution.loggers=[{name}]: its package is not installed: "
            f"`pip install 'zdp-bench[{name}]'`."
        ) from None
    return found
