"""A run's last saved state, from which a killed run continues, written whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from zdp_bench import disk
from zdp_bench.errors import UserError, first_line
from zdp_bench.foreign_files import Shape, misfits, open_regular
from zdp_bench.privacy.ledger import Position

_FORMAT = 2  # of the file
ADVICE = "Add force=true to start again; the steps in its ledger still count."
_SHAPE: Shape = {
    "run": str,
    "step": int,
    "ledger": [int | str],
    "epochs": [{"step": int}],
    **dict.fromkeys(("model", "optimizer", "scheduler", "nodes", "last", "built"), dict),
    "carried": {str: int | float},
}


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to continue. Sampling and noise are functions of (key, step): no state."""

    run: str  # its digest; a checkpoint of another run is refused
    step: int
    model: dict[str, Any]  # what the run has to show: with `trainer.ema` the average
    optimizer: dict[str, Any]
    ledger: Position
    epochs: list[dict[str, Any]]
    scheduler: dict[str, Any] = field(default_factory=dict)
    nodes: dict[int, dict[str, Any]] = field(default_factory=dict)  # what a server knows of each
    last: dict[str, Any] = field(default_factory=dict)  # with `trainer.ema`, the next step's start
    carried: dict[str, float] = field(default_factory=dict)  # see `Algorithm.carried`
    built: dict[str, Any] = field(default_factory=dict)  # of one's own loop: optimiser, schedule

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        carried: dict[str, float],
        average: nn.Module | None = None,
    ) -> None:
        """Set model, optimiser, scheduler and what the algorithm carries to the saved state."""
        try:
            _require_alike(carried, self.carried, "the numbers that the algorithm carries")
            _require_alike(optimizer.state_dict(), self.optimizer, "the optimizer's options")
            model.load_state_dict(self.last or self.model)
            if average:
                average.load_state_dict(self.model)
            optimizer.load_state_dict(self.optimizer)
            if scheduler:
                _require_alike(
                    scheduler.state_dict(), self.scheduler, "the numbers of the schedule"
                )
                scheduler.load_state_dict(self.scheduler)
        except Exception as error:  # torch may raise anything over a state that was changed
            raise Misfit(first_line(error)) from error
        carried.update(self.carried)


class Misfit(ValueError):  # noqa: N818 - a fact about a checkpoint
    """A checkpoint's state does not fit the parts that are to continue from it."""


def _require_alike(
    own: Any,
    saved: Any,
    what: str,
) -> None:
    """Reject a state that lacks a key of `own`, or has a value of another type; None is of any."""
    if own is None or saved is None:
        return
    number = isinstance(own, int | float) and isinstance(saved, int | float)
    if not number and type(own) is not type(saved):
        raise Misfit(f"{what} have values of other types.")
    if isinstance(own, dict):
        for key in own.keys() - {"state", "initial_lr"}:  # which begin empty
            if key not in saved:
                raise Misfit(f"{what} lack '{key}'.")
            _require_alike(own[key], saved[key], what)
    elif isinstance(own, list) and own and isinstance(own[0], dict):
        for one, other in zip(own, saved, strict=True):
            _require_alike(one, other, what)


def state_digest(*states: dict[str, Any]) -> str:
    """Return the SHA-256 of state dictionaries, bit for bit, on any device."""
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
        "ledger": [checkpoint.ledger.releases, checkpoint.ledger.digest],
        "format": _FORMAT,
    }
    whole = io.BytesIO()  # because torch hides the reason why a file cannot be written
    torch.save(body, whole)
    disk.write_bytes(path, whole.getbuffer())


def load(
    path: Path,
    run: str,
    *older: str,
    advice: str = ADVICE,
) -> Checkpoint | None:
    """Return the checkpoint at `path`, or None if there is none.

    Args:
        run: the digest of the run that it must belong to.
        older: what earlier versions called the same run.
    """
    try:
        # Warnings are of odd pickle protocols.
        with open_regular(path) as file, warnings.catch_warnings(action="ignore"):
            _require_stored(file)
            body = torch.load(file, weights_only=True, map_location="cpu")
        _require_plain(body)
        if body.pop("format") != _FORMAT or [*misfits(body, _SHAPE)]:
            raise ValueError("another format")
        checkpoint = Checkpoint(**body | {"ledger": Position(*body["ledger"])})
    except FileNotFoundError:
        return None
    except UserError:  # it is not a file
        raise
    except Exception:  # a file that somebody changed may make torch raise anything
        raise UserError(
            f"{path}: is damaged, or not a checkpoint of this version of zdp-bench. {advice}"
        ) from None
    if checkpoint.run not in (run, *older):
        raise UserError(
            f"{path}: belongs to run {checkpoint.run[:12]}, not to {run[:12]}. {advice}"
        )
    return checkpoint


def _require_stored(file: BinaryIO) -> None:
    """Reject an archive that unpacks to more bytes than it has, or to others than were packed."""
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > size:
            raise ValueError("unpacks to more than it is")
        if archive.testzip() is not None:  # torch does not look at the checksums
            raise ValueError("has changed")
    file.seek(0)


def _require_plain(node: Any) -> None:
    """Reject tensors of other than dense numbers that are all in the file."""
    if isinstance(node, Tensor):
        dense = node.layout == torch.strided and node.device.type == "cpu" and not node.is_nested
        if not dense or node.nbytes > node.untyped_storage().nbytes():
            raise ValueError("a tensor without numbers of its own")
    elif isinstance(node, dict | list | tuple):
        for one in [*node, *node.values()] if isinstance(node, dict) else node:
            _require_plain(one)
