"""Learning rate schedules over the steps of a run."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zdp_bench.registry import register


@register("scheduler", "warmup_cosine")
class WarmupCosine(LambdaLR):
    """Linear warm-up, then half a cosine (Loshchilov and Hutter 2017).

    It is stepped after each step of the optimizer.

    Args:
        optimizer: the optimizer.
        steps: number of steps of the run.
        warmup: fraction of the steps in which the rate rises to the optimizer's. Default: 0.05.
        final: fraction of the optimizer's rate at which the cosine ends. Default: 0.
    """

    each_step = True  # torch's own schedules are stepped after each epoch

    def __init__(
        self,
        optimizer: Optimizer,
        steps: int,
        warmup: float = 0.05,
        final: float = 0.0,
    ) -> None:
        rising = math.ceil(warmup * steps)

        def factor(step: int) -> float:
            if step < rising:
                return (step + 1) / (rising + 1)
            done = min(1.0, (step - rising) / max(1, steps - rising))
            return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

        super().__init__(optimizer, factor)
