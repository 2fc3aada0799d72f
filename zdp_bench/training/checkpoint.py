"""Save and load the state from which a killed run continues."""

from __future__ import annotations

import errno
import io
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zdp_bench import disk
from zdp_bench.errors import UserError, first_line, is_out_of_memory
from zdp_bench.foreign_files import Shape, copy_verified, misfits, open_regular
from zdp_bench.privacy.tally import Position
from zdp_bench.training.memory_layout import has_repeats, separate_numbers

_FORMAT = 2  # version of the file format
ADVICE = "Add force=true to start again; the steps in its ledger still count."
_SHAPE: Shape = {
    "run": str,
    "step": int,
    "ledger": list,  # a number and a digest
    "epochs": [{"step": int}],
    **dict.fromkeys(("model", "optimizer", "scheduler", "nodes", "last", "built"), dict),
    "carried": {str: int | float},
}


class HasState(Protocol):
    """A part whose state can be saved and loaded, such as a learning rate schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to continue.

    Sampling and noise have no state to save, because they are functions of (key, step).

    Attributes:
        run: digest of the run. A checkpoint of another run is refused.
        step: number of steps that are done.
        model: weights of the trained model; with `trainer.ema`, the averaged ones.
        optimizer: state of the optimizer.
        ledger: end of the ledger.
        epochs: the epochs' metrics, as in the record.
        scheduler: state of the learning rate schedule.
        nodes: what a federation's server knows about each node.
        last: with `trainer.ema`, the weights from which the next step starts.
        carried: numbers that the algorithm carries from step to step; see `Algorithm.carried`.
        built: in a user's own loop, how optimizer and schedule were built.
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
        scheduler: HasState | None,
        carried: dict[str, float],
        average: nn.Module | None = None,
    ) -> None:
        """Load the saved state into a run's parts.

        Args:
            model: gets the weights from which the next step starts.
            optimizer: gets its saved state.
            scheduler: gets its saved state, if there is a schedule.
            carried: gets the numbers that the algorithm carries; updated in place.
            average: gets the averaged weights, with `trainer.ema`.

        Raises:
            Misfit: the saved state does not fit one of the parts.
        """
        separate_numbers(model)
        try:
            # torch reports only some of these differences.
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
        except Exception as error:  # on a state that was changed, torch may raise any error
            raise Misfit(first_line(error)) from error
        carried.update(self.carried)


class OtherRunError(UserError):
    """A checkpoint belongs to another run.

    Attributes:
        saved: The checkpoint.
    """

    def __init__(self, message: str, saved: Checkpoint) -> None:
        super().__init__(message)
        self.saved = saved


class Misfit(ValueError):  # noqa: N818 - a fact about a checkpoint
    """The state of a checkpoint does not fit the parts that should continue from it."""


def _require_alike(
    current: Any,
    saved: Any,
    name: str,
) -> None:
    """Reject a saved state that lacks a key of the current one, or has a value of another type.

    None matches any type.

    Args:
        current: the state of a part of the run.
        saved: its saved state.
        name: name of the part, in the plural, for the error.

    Raises:
        Misfit: `saved` does not match.
    """
    if current is None or saved is None:
        return
    are_numbers = isinstance(current, int | float) and isinstance(saved, int | float)
    if not are_numbers and type(current) is not type(saved):
        raise Misfit(f"{name} have values of other types.")
    if isinstance(current, dict):
        # A new optimizer has no state yet, and may lack `initial_lr`.
        for key in current.keys() - {"state", "initial_lr"}:
            if key not in saved:
                raise Misfit(f"{name} lack '{key}'.")
            _require_alike(current[key], saved[key], name)
    elif isinstance(current, list) and current and isinstance(current[0], dict):
        for current_group, saved_group in zip(current, saved, strict=True):
            _require_alike(current_group, saved_group, name)


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: a kill leaves the old file or the new one."""
    body = {
        **vars(checkpoint),
        "ledger": [checkpoint.ledger.releases, checkpoint.ledger.digest],
        "format": _FORMAT,
    }
    # Save to memory first: torch hides the reason why a file cannot be written.
    buffer = io.BytesIO()
    torch.save(_write_out(body), buffer)
    disk.write_bytes(path, buffer)


def _write_out(node: Any) -> Any:
    """Return a checkpoint's body in which expanded tensors have all their numbers."""
    if isinstance(node, Tensor):
        return node.contiguous() if has_repeats(node) else node
    if isinstance(node, dict):
        return {key: _write_out(entry) for key, entry in node.items()}
    if isinstance(node, list | tuple):
        # A subclass, such as a named tuple, could be saved, but not loaded.
        kind = next(kind for kind in (torch.Size, tuple, list) if isinstance(node, kind))
        return kind(map(_write_out, node))
    return node


def load(
    path: Path,
    run: str,
    advice: str = ADVICE,
) -> Checkpoint | None:
    """Return the checkpoint at `path`, or None if there is none.

    Args:
        path: the checkpoint's file.
        run: digest of the run to which it must belong.
        advice: what to do about a checkpoint that cannot be used, for the error.

    Raises:
        UserError: the file is damaged.
        OtherRunError: it belongs to another run.
    """
    try:
        # torch warns about unusual pickle protocols.
        with open_regular(path) as file, warnings.catch_warnings(action="ignore"):
            body = torch.load(copy_verified(file), weights_only=True, map_location="cpu")
        _require_plain(body)
        releases, digest = body["ledger"]
        has_position = type(releases) is int and isinstance(digest, str)
        if body.pop("format") != _FORMAT or [*misfits(body, _SHAPE)] or not has_position:
            raise ValueError("another format")
        checkpoint = Checkpoint(**body | {"ledger": Position(releases, digest)})
    except FileNotFoundError:
        return None
    except UserError:  # it is not a file
        raise
    except Exception as error:  # on a file that was changed, torch may raise any error
        if reason := _name_refusal(error):
            raise UserError(
                f"{path}: cannot be loaded ({reason}). The file may be intact: remove the cause "
                "and run the command again."
            ) from None
        raise UserError(
            f"{path}: is damaged, or not a checkpoint of this version of zdp-bench. {advice}"
        ) from None
    if checkpoint.run != run:
        message = f"{path}: belongs to run {checkpoint.run[:12]}, not to {run[:12]}. {advice}"
        raise OtherRunError(message, checkpoint)
    return checkpoint


def _name_refusal(error: Exception) -> str:
    """Return why the system refused to read a file; "" if the content of the file is the cause."""
    if is_out_of_memory(error):
        return "memory ran out"
    # Of a file that was changed, torch may seek an invalid position.
    if isinstance(error, OSError) and error.strerror and error.errno != errno.EINVAL:
        return error.strerror
    return ""


def _require_plain(node: Any) -> None:
    """Reject tensors that are not dense, or whose numbers are not all in the file."""
    if isinstance(node, Tensor):
        dense = node.layout == torch.strided and node.device.type == "cpu" and not node.is_nested
        if not dense or node.nbytes > node.untyped_storage().nbytes():
            raise ValueError("a tensor without numbers of its own")
    elif isinstance(node, dict | list | tuple):
        for entry in [*node, *node.values()] if isinstance(node, dict) else node:
            _require_plain(entry)
