"""A run's last saved state, from which a killed run goes on. It is written whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from zdp_bench.errors import UserError
from zdp_bench.foreign_files import open_regular
from zdp_bench.privacy.ledger import Position

_FORMAT = 2  # of the file


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on. Sampling and noise are functions of (key, step): no state.

    Attributes:
        run: the run's digest; a checkpoint of another run is refused.
        step: steps that are done.
        model: what the run has to show: with `trainer.ema` the average.
        last: with `trainer.ema`, the weights that the next step starts from; else empty.
        scheduler: empty without a schedule.
        nodes: what a federation's server knows of each node.
        carried: what the algorithm hands from step to step.
        built: of a loop of one's own: how optimiser and schedule were built.
    """

    run: str
    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    ledger: Position
    epochs: list[dict[str, Any]]
    scheduler: dict[str, Any] = field(default_factory=dict)
    nodes: dict[int, dict[str, Any]] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, float] = field(default_factory=dict)
    built: dict[str, Any] = field(default_factory=dict)

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        carried: dict[str, float],
    ) -> None:
        """Set model, optimiser, scheduler and what the algorithm carries to the saved state."""
        model.load_state_dict(self.last or self.model)
        optimizer.load_state_dict(self.optimizer)
        if scheduler:
            scheduler.load_state_dict(self.scheduler)
        carried.update(self.carried)


def state_digest(*states: dict[str, Any]) -> str:
    """Return the SHA-256 of state dictionaries, bit for bit, whatever device they are on."""
    chain = hashlib.sha256()

    def take(node: Any) -> None:
        if isinstance(node, Tensor):
            value = node.detach().cpu().resolve_conj().contiguous()
            chain.update(f"{value.dtype}{list(value.shape)}".encode())
            chain.update(value.flatten().view(torch.uint8).numpy().data)
        elif isinstance(node, dict):
            for key in sorted(node, key=str):
                chain.update(f"{key!r}:".encode())
                take(node[key])
        elif isinstance(node, list | tuple):
            for entry in node:
                take(entry)
        else:
            chain.update(repr(node).encode())
        chain.update(b";")

    for state in states:
        take(state)
    return chain.hexdigest()


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write atomically: a kill leaves the old file or the new one, never half of one."""
    body = {
        **vars(checkpoint),
        "ledger": [checkpoint.ledger.entries, checkpoint.ledger.digest],
        "format": _FORMAT,
    }
    whole = io.BytesIO()  # because torch hides the reason why a file cannot be written
    torch.save(body, whole)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(whole.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def load(
    path: Path,
    run: str,
    advice: str = "Delete the run's folder, or add force=true, to start it anew.",
) -> Checkpoint | None:
    """Return the checkpoint at `path`, or None if there is none.

    Args:
        advice: what to do about one that cannot be used.

    Raises:
        UserError: it is damaged or belongs to another run.
    """
    try:
        # Warnings are of odd pickle protocols.
        with open_regular(path) as file, warnings.catch_warnings(action="ignore"):
            body = torch.load(file, weights_only=True, map_location="cpu")
        entries, digest = body.pop("ledger")
        if body.pop("format") != _FORMAT:
            raise ValueError("another format")
        checkpoint = Checkpoint(ledger=Position(entries, digest), **body)
    except FileNotFoundError:
        return None
    except (  # OSError too: torch seeks past the end of a file that was cut short
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        OSError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ):
        raise UserError(
            f"{path}: is damaged, or no checkpoint of this version of zdp-bench. {advice}"
        ) from None
    if checkpoint.run != run:
        raise UserError(
            f"{path}: belongs to run {checkpoint.run[:12]}, not to {run[:12]}. {advice}"
        )
    return checkpoint
