"""The files of a training in your own loop: its ledger, and the state that `save` stores beside it.

A ledger is named after the model's class and a digest of mechanism, sampling and owners, so that
the same training finds its own again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from zdp_bench.disk import hold_lock, make_folder
from zdp_bench.errors import UserError
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.tally import Tally
from zdp_bench.training import checkpoint
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.plan import Plan
from zdp_bench.training.run_folder import open_ledger

log = logging.getLogger(__name__)
FOLDER = Path("ledgers")  # of those that no argument names
# Nobody may follow them and have an ε that leaves out steps that the weights went through.
OTHER_LEDGER = (
    "use another file. Weights that went through the steps of this one have the ε of both: "
    "state private.epsilon_with(...)"
)
ADVICE = (
    "To go on for more epochs, keep noise_multiplier (a target_epsilon sets other noise), bound, "
    "rate and unit. Without its state, delete it and pass count_earlier=True: the steps in the "
    f"ledger count in every ε. For other noise, {OTHER_LEDGER}."
)


@dataclass(frozen=True)
class TrainingName:
    """Digests that tell one training of a model from another.

    Attributes:
        digest: of mechanism, sampling and owners. The number of epochs is left out, so that a
            training goes on for more.
        older_digest: the one of version 0.1, whose files are still found.
    """

    digest: str
    older_digest: str

    @staticmethod
    def of(mechanism: Mechanism, plan: Plan, owners: str) -> TrainingName:
        """Return the name of a training; `owners` is what its ledger says of them."""
        noise = mechanism.digest()
        return TrainingName(
            _digest(f"{noise}:{plan.sampling}:{owners}"),
            _digest(f"{noise}:{plan}:{owners}"),
        )

    def ledger_of(self, model: nn.Module) -> Path:
        """Return the ledger's path, where no argument names one."""
        name = type(model).__name__
        path = FOLDER / f"{name}-{self.digest[:8]}.jsonl"
        older_path = FOLDER / f"{name}-{self.older_digest[:8]}.jsonl"
        if older_path.exists():
            path = older_path
        log.warning("every step is recorded in %s; set ledger= to use another file", path)
        return path


@dataclass(frozen=True, eq=False)
class Journal:
    """The files of a training, held open and locked. Rank 0 alone writes them.

    Attributes:
        training: the digest of its name; a checkpoint of another is rejected.
        ledger: lists every step before its noise is drawn.
        saved: what `save` stored before this process; None without.
        resources: lock and open files.
    """

    training: str
    path: Path
    ledger: Tally
    saved: checkpoint.Checkpoint | None
    resources: ExitStack


def require_ledger_name(path: str | Path | None) -> None:
    """Reject a file name that no ledger has."""
    if path is not None and Path(path).suffix != ".jsonl":
        raise UserError(f"ledger={path}: give a file name that ends in .jsonl.")


def open_journal(
    path: Path,
    name: TrainingName,
    mechanism: Mechanism,
    owners: str,
    randomness: str,
    ranks: Ranks,
) -> Journal:
    """Open or continue a training's ledger; rank 0 does so for all.

    Raises:
        UserError: the ledger is of another training, or damaged, or cannot be written.
        Busy: another training run, in this process or another, holds it.
    """
    saved = None
    with ExitStack() as held, writable("ledger", path):
        make_folder(path.parent)
        if ranks.is_first:
            busy = f"{path}: another run uses this ledger; close() it, or choose another file."
            held.enter_context(hold_lock(path.with_suffix(".lock"), busy, wait=False))
            digests = name.digest, name.older_digest
            saved = checkpoint.load(path.with_suffix(".pt"), *digests, advice=ADVICE)
        saved = ranks.broadcast(saved)
        ledger = open_ledger(
            path,
            mechanism,
            repeatable=False,
            checkpoint_position=saved.ledger if saved else None,
            start=None,
            ranks=ranks,
            identity=owners,
            facts={"randomness": randomness},
            advice=OTHER_LEDGER,
        )
        held.callback(ledger.close)
        resources = held.pop_all()
    if ledger.releases:
        log.info("%s: %d earlier steps count in every ε", path, ledger.releases)
    return Journal(name.digest, path, ledger, saved, resources)


@contextmanager
def writable(key: str, path: str | Path) -> Iterator[None]:
    """Explain what to do about a file or folder that cannot be created, written or locked."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{key}={path}: cannot be written ({error.strerror or error}); choose another one."
        ) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
