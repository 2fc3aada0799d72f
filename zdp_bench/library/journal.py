"""The files of a training in your own loop: its ledger, and the state that `save` stores beside it.

By default, a ledger is named after the model's class and a digest of mechanism, sampling and
owners, so that the same training finds its ledger again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zdp_bench.disk import hold_lock, make_folder
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import is_file
from zdp_bench.privacy.ledger_files import read_head
from zdp_bench.privacy.ledger_lines import LedgerError
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.tally import Tally
from zdp_bench.training import checkpoint
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.run_folder import open_ledger

log = logging.getLogger(__name__)
TERMS = "terms"  # key of the file that `save` writes
FOLDER = Path("ledgers")  # of ledgers without the argument `ledger`
# No one who follows this advice may state an ε without steps that the weights have taken.
OTHER_LEDGER = (
    "use another file. Weights that took steps of both ledgers have the ε of both together: "
    "state private.epsilon_with(...)"
)
ADVICE = (
    "To train for more epochs, keep noise_multiplier (target_epsilon would change the noise), "
    "bound, rate and unit. To continue without this saved state, delete it and pass "
    "count_earlier=True, so that every ε includes the steps in the ledger. For other noise, "
    f"{OTHER_LEDGER}."
)


def digest_of_training(mechanism: Mechanism, sampling: Sampling, owners: str) -> str:
    """Return the digest that distinguishes the trainings of a model.

    It does not cover the number of epochs, so that a training can be extended.

    Args:
        mechanism: Mechanism of every step.
        sampling: Sampling of every step.
        owners: What the ledger states about owners.
    """
    return hashlib.sha256(f"{mechanism.digest()}:{sampling}:{owners}".encode()).hexdigest()


def describe_terms(mechanism: Mechanism, sampling: Sampling, owners: str) -> dict[str, Any]:
    """Return what `digest_of_training` covers, by name, for `tell_differences`."""
    blocks = mechanism.blocks
    parameters = [f"{block.name} {block.shape} {block.dtype}" for block in blocks]
    return {
        "trained parameters": hashlib.sha256("".join(parameters).encode()).hexdigest(),
        "noise multiplier": mechanism.z,
        "clipping bound": max(block.bound for block in blocks),
        "number of examples or owners": float(sampling.records),
        "sampling rate": sampling.sample_rate,
        "expected batch size": sampling.expected_batch_size,
        "unit": owners,
    }


def tell_differences(saved: Any, current: dict[str, Any]) -> str:
    """Return in what a saved training differs from the current one, as a part of a sentence.

    Args:
        saved: What `describe_terms` returned for the saved one; older versions saved nothing.
        current: What it returns for the current one.
    """
    if not isinstance(saved, dict):
        return "noise, bound, sampling, unit or model"
    differences = []
    for name, value in current.items():
        before = saved.get(name)
        if before == value:
            continue
        are_numbers = isinstance(before, float) and isinstance(value, float)
        differences.append(f"{name} ({before:.6g}, now {value:.6g})" if are_numbers else name)
    return ", ".join(differences) or "options of the algorithm"


def default_ledger(
    model: nn.Module, training_digest: str, mechanism: Mechanism, owners: str
) -> Path:
    """Return the path of the ledger if the caller names none, and log it.

    Raises:
        UserError: this training may have a ledger under a name that an older version gave it.
    """
    name = type(model).__name__
    path = FOLDER / f"{name}-{training_digest[:8]}.jsonl"
    others = re.compile(re.escape(name) + r"-[0-9a-f]{8}\.jsonl")
    for other in sorted(FOLDER.glob("*.jsonl")):
        if not others.fullmatch(other.name) or other == path or not is_file(other):
            continue
        with suppress(LedgerError):
            head = read_head(other)
            # The digest in the name follows from these two alone.
            if head.mechanism == mechanism.digest() and head.identity == owners:
                raise UserError(
                    f"{other}: may be the ledger of this training under its name in an older "
                    f"version. If so, its steps must count: rename it to {path.name}. If it is of "
                    f'another training, or this one begins anew, set ledger="{path}".'
                )
    log.warning("every step is recorded in %s; set ledger= to use another file", path)
    return path


@dataclass(frozen=True, eq=False)
class Journal:
    """The files of a training, open and locked. Only rank 0 writes them.

    Attributes:
        training_digest: Digest of the training (`digest_of_training`). Checkpoints of other
            trainings are rejected.
        terms: What the digest covers (`describe_terms`).
        path: Path of the ledger.
        ledger: Lists every step before its noise is drawn.
        saved: State that an earlier process saved; None if there is none.
        resources: The lock and the open files.
    """

    training_digest: str
    terms: dict[str, Any]
    path: Path
    ledger: Tally
    saved: checkpoint.Checkpoint | None
    resources: ExitStack


def require_ledger_name(path: str | Path | None) -> None:
    """Reject a ledger whose name does not end in .jsonl."""
    if path is None:
        return
    if not isinstance(path, str | os.PathLike) or Path(path).suffix != ".jsonl":
        raise UserError(f"ledger={path}: give a file name that ends in .jsonl.")


def open_journal(
    path: Path,
    mechanism: Mechanism,
    sampling: Sampling,
    owners: str,
    randomness: str,
    ranks: Ranks,
) -> Journal:
    """Create or continue a training's ledger, and read the state that was saved beside it.

    Rank 0 reads and writes the files. The other ranks receive what they contain.

    Args:
        path: Path of the ledger.
        mechanism: Mechanism of every step.
        sampling: Sampling of every step.
        owners: What the ledger states about owners; it must match an existing ledger.
        randomness: Kind of randomness, which the ledger states.
        ranks: Processes that train together.

    Raises:
        UserError: The ledger or the saved state is damaged or belongs to another training, or a
            file cannot be written.
        Busy: Another training, in this process or another, uses the ledger.
    """
    training_digest = digest_of_training(mechanism, sampling, owners)
    terms = describe_terms(mechanism, sampling, owners)
    saved = None
    # If anything fails, `stack` releases the lock. Otherwise, the journal takes over its resources.
    with ExitStack() as stack, writable("ledger", path):
        make_folder(path.parent)
        if ranks.is_first:
            busy = f"{path}: another run uses this ledger; close() it, or choose another file."
            stack.enter_context(hold_lock(path.with_suffix(".lock"), busy, wait=False))
            saved = _load_saved(path.with_suffix(".pt"), training_digest, terms)
        saved = ranks.broadcast(saved)
        ledger = open_ledger(
            path,
            mechanism,
            repeatable=False,
            checkpoint_position=saved.ledger if saved else None,
            start=None,  # a training in your own loop never repeats a step
            ranks=ranks,
            identity=owners,
            facts={"randomness": randomness},
            advice=OTHER_LEDGER,
        )
        stack.callback(ledger.close)
        resources = stack.pop_all()
    if ledger.releases:
        log.info("%s: %d earlier steps count in every ε", path, ledger.releases)
    return Journal(training_digest, terms, path, ledger, saved, resources)


def _load_saved(
    path: Path, training_digest: str, terms: dict[str, Any]
) -> checkpoint.Checkpoint | None:
    """Return the saved state, or None. Reject that of another training, and state how it differs.

    Args:
        path: The file that `save` writes.
        training_digest: Digest of the training.
        terms: What the digest covers.
    """
    try:
        return checkpoint.load(path, training_digest, ADVICE)
    except checkpoint.OtherRunError as error:
        differences = tell_differences(error.saved.built.get(TERMS), terms)
        raise UserError(
            f"{path}: belongs to another training, which differs in: {differences}. {ADVICE}"
        ) from None


@contextmanager
def writable(key: str, path: str | Path) -> Iterator[None]:
    """Turn a failure to create, write or lock a file or folder into a `UserError`.

    Args:
        key: Name of the argument that states the path.
        path: The file or folder.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{key}={path}: cannot be written ({error.strerror or error}); choose another one."
        ) from None
