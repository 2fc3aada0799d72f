"""The loop of a training: steps, an evaluation after every epoch, checkpoints, signals.

A central run and the server of a federation share it; a step of the server's plan is a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from zdp_bench.privacy.ledger import BudgetExceeded, Position
from zdp_bench.training import checkpoint
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.evaluation import (
    WATCHED,
    evaluate,
    outputs_are_finite,
    refuse_divergence,
    step_schedule,
)
from zdp_bench.training.interrupts import Stopped
from zdp_bench.training.micro_batches import Size
from zdp_bench.training.model_checks.state import Guard
from zdp_bench.training.plan import Plan
from zdp_bench.training.setup import ModelSetup


class Watcher(Protocol):
    """Follows a run. Nothing it gets costs privacy, or was computed from training examples."""

    def started(self, recipe: str, seed: int, steps: int, done: int) -> None: ...
    def stepped(self, step: int) -> None: ...
    def evaluated(
        self, epoch: int, step: int, metrics: dict[str, float], epsilon: float
    ) -> None: ...


@dataclass
class Loop:
    """A training between two of its steps.

    Attributes:
        run: the run's digest; a checkpoint of another run is refused.
        size: examples at once, in steps and in evaluations.
        checkpoint_steps: save after so many steps, beside the ends of epochs.
        round_steps: private steps in one step of the plan.
        step: steps of the plan that are done.
        epochs: the evaluations so far, as the record lists them.
        average: the averaged weights, with `trainer.ema`.
        guard: finds what changed beside the weights, at the end of every epoch.
    """

    setup: ModelSetup
    plan: Plan
    scheduler: LRScheduler | None
    run: str
    home: Path
    watcher: Watcher
    size: Size
    checkpoint_steps: int | None
    ranks: Ranks = ALONE
    round_steps: int = 1
    step: int = 0
    epochs: list[dict[str, Any]] = field(default_factory=list)
    resumed_at: int | None = None
    average: AveragedModel | None = None
    guard: Guard | None = None

    def __post_init__(self) -> None:
        if (ema := self.setup.config.trainer.ema) is not None:
            self.average = average_weights(self.setup.model, ema)

    @property
    def trained(self) -> nn.Module:
        """The model that is evaluated and saved: the average of the weights, if there is one."""
        return self.average.module if self.average else self.setup.model

    @property
    def steps_done(self) -> int:
        """Private steps that the model has taken."""
        return self.step * self.round_steps

    def restore(self, saved: checkpoint.Checkpoint | None) -> None:
        """Go on from a checkpoint, if there is one."""
        if saved:
            saved.restore(self.setup.model, self.setup.optimizer, self.scheduler)
            self.step, self.epochs = saved.step, saved.epochs
            self.resumed_at = self.steps_done
            if self.average:
                self.average.module.load_state_dict(saved.model)
                self.average.n_averaged.fill_(self.step)

    def states(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the state of the model, the optimiser and the schedule."""
        rates = self.scheduler.state_dict() if self.scheduler else {}
        return self.setup.model.state_dict(), self.setup.optimizer.state_dict(), rates

    def save(self, ledger: Position, nodes: dict[int, dict[str, Any]] | None = None) -> None:
        """Write the checkpoint of this moment."""
        weights, moments, rates = self.states()
        trained, last = (self.trained.state_dict(), weights) if self.average else (weights, {})
        state = checkpoint.Checkpoint(
            self.run, self.step, trained, moments, ledger, self.epochs, rates, nodes or {}, last
        )
        checkpoint.save(self.home / "checkpoint.pt", state)

    def take_steps(
        self,
        take_step: Callable[[int], bool],
        epsilon: Callable[[int], float],
        save: Callable[[], None],
        signal: Callable[[], int],
    ) -> str:
        """Take the steps that are left.

        Args:
            take_step: takes the step of this number, from 0; False if it stopped waiting instead.
            epsilon: the tight ε of so many steps of the plan.
            save: saves the loop.
            signal: the number of a signal that asks to stop, or 0.

        Returns:
            "epochs" after the last step, "budget" if the next one would exceed the budget.

        Raises:
            UserError: the model diverged, or has changed beside its weights.
            Stopped: a signal asked for it; the loop is saved.
        """
        config, plan = self.setup.config, self.plan
        self.watcher.started(
            config.recipe, config.seed, plan.steps * self.round_steps, self.steps_done
        )
        stopped_by = "epochs"
        while self.step < plan.steps and stopped_by == "epochs":
            try:
                if take_step(self.step):
                    self._count_step()
            except BudgetExceeded:
                stopped_by = "budget"
            epoch = plan.epoch_ending_at(self.step)
            every = self.checkpoint_steps
            due = every is not None and self.step % every == 0
            evaluated = bool(self.epochs) and self.epochs[-1]["step"] == self.steps_done
            if (epoch is not None or stopped_by == "budget") and not evaluated:
                if self.guard:
                    self.guard.require_unchanged()
                self._evaluate(epoch, epsilon)
                last = epoch is None or self.step == plan.steps
                due = due or last or (epoch or 0) % config.trainer.checkpoint_epochs == 0
            elif due or self.step % WATCHED == 0:  # before a useless state is saved
                self._check_outputs()
            number = self.ranks.max(signal())
            if due or number:
                save()
            if number and self.step < plan.steps and stopped_by == "epochs":
                raise Stopped(number)
        return stopped_by

    def _count_step(self) -> None:
        self.step += 1
        setup = self.setup
        if self.average:
            self.average.update_parameters(setup.model)
        is_end = self.plan.epoch_ending_at(self.step) is not None
        if self.scheduler and (is_end or getattr(self.scheduler, "each_step", False)):
            step_schedule(
                self.scheduler, self.trained, setup.task, setup.data.validation, setup.device
            )
        self.watcher.stepped(self.steps_done)

    def _evaluate(self, epoch: int | None, epsilon: Callable[[int], float]) -> None:
        """Measure the model on the test set; rank 0 does, for all have the same weights."""
        setup, step = self.setup, self.steps_done
        metrics, spent = {}, 0.0
        if self.ranks.is_first:
            spent = epsilon(self.step)
            metrics = evaluate(
                self.trained, setup.task, setup.data.test, setup.device, self.size.examples
            )
        metrics, spent = self.ranks.broadcast((metrics, spent))
        refuse_divergence(metrics, epoch, step, setup.config.optimizer.options.get("lr"))
        self.epochs.append({"epoch": epoch, "step": step, "epsilon_tight": spent, **metrics})
        self.watcher.evaluated(self.plan.epoch_of(self.step), step, metrics, spent)

    def _check_outputs(self) -> None:
        setup = self.setup
        finite = self.ranks.broadcast(
            self.ranks.is_first and outputs_are_finite(setup.model, setup.data.test, setup.device)
        )
        epoch, rate = self.plan.epoch_of(self.step), setup.config.optimizer.options.get("lr")
        refuse_divergence({"loss": 0.0 if finite else math.nan}, epoch, self.steps_done, rate)


def average_weights(model: nn.Module, decay: float) -> AveragedModel:
    """Return an average that moves by 1 − min(decay, (1 + t)/(10 + t)) at step t.

    The smaller decay of the first steps forgets where training started (De et al. 2022, section 3).
    Without it the average would need 1/(1 − decay) steps to do so. Buffers are the model's own.
    """

    def move(average: Tensor, weights: Tensor, averaged: Tensor | int) -> Tensor:
        t = int(averaged)
        return weights.lerp(average, min(decay, (1 + t) / (10 + t)))

    return AveragedModel(model, avg_fn=move)
