"""Which private trainings a model's starting weights went through, by the weights' digest.

A training notes the digest of what it leaves: in this process when a loop over its batches ends,
and in a file beside its ledger when it is saved. `zdp_bench.load` notes what a folder holds.
Weights of no known digest are taken for public, and `Private.report` says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from zdp_bench.disk import write_bytes
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import Shape, misfits, read_json
from zdp_bench.privacy.composition import Spent, together
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.training.checkpoint import state_digest

SUFFIX = ".weights.json"  # of the file beside a ledger
PUBLIC = "unknown, declared public"
UNKNOWN_OWNERS = "owners"  # what `make_private` says where a digest would tell how many they are
NUMBER = int | float
SHAPE: Shape = {
    "ledger": str,
    "owners": str,
    "z": NUMBER,
    "sampling": {"scheme": str, "sample_rate": NUMBER, "records": int},
    "steps": int,
}


@dataclass(frozen=True)
class Earlier:
    """A private training that weights went through.

    Attributes:
        ledger: its file.
        owners: the digest of who owns what; empty where an example is its own owner.
        z: of its mechanism.
        steps: how many its ledger holds.
    """

    ledger: str
    owners: str
    z: float
    sampling: Sampling
    steps: int

    @property
    def spent(self) -> Spent:
        """What it spent."""
        records = max(1, self.sampling.records)  # 0 where their number is private
        return Spent(self.z, replace(self.sampling, records=records), self.steps)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"sampling": self.sampling.as_dict()}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Earlier:
        """Return the training that `as_dict` described.

        Raises:
            ValueError: it describes none.
        """
        try:
            return Earlier(**{**plain, "sampling": Sampling(**plain["sampling"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"this describes no training: {error}") from None


Trainings = frozenset[Earlier]
_KNOWN: dict[str, Trainings] = {}  # digest of weights -> what they went through, in this process


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters, under any names and in any order."""
    each = sorted(state_digest({"": parameter}) for parameter in model.parameters())
    return hashlib.sha256("".join(each).encode()).hexdigest()


def note(model: nn.Module, trainings: Iterable[Earlier]) -> None:
    """Note, in this process, the trainings that a model's weights went through."""
    _KNOWN[weights_digest(model)] = frozenset(trainings)


def save(ledger: Path, model: nn.Module, trainings: Iterable[Earlier]) -> None:
    """Note them in this process, and in a file beside a ledger."""
    note(model, trainings)
    body = {
        "weights": weights_digest(model),
        "trainings": [training.as_dict() for training in trainings],
    }
    write_bytes(ledger.with_suffix(SUFFIX), json.dumps(body, indent=1).encode())


def find(model: nn.Module, folder: Path) -> Trainings:
    """Return the trainings that a model's weights are known to have gone through.

    Args:
        folder: that of the ledgers, where other processes left notes.
    """
    digest = weights_digest(model)
    found = _KNOWN.get(digest, frozenset())
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        body = read_json(path)
        if [*misfits(body, {"weights": str, "trainings": [SHAPE]})]:
            raise UserError(f"{path}: is damaged. Delete it: weights that it names become unknown.")
        if body["weights"] == digest:
            found |= {Earlier.from_dict(training) for training in body["trainings"]}
    return found


def note_export(model: nn.Module, source: Mapping[str, Any], ledger: Path) -> None:
    """Note the trainings of a model that was read from an exported folder.

    Args:
        source: the folder's record, or its report.
        ledger: the folder's.
    """
    privacy = source["privacy"]
    own = source.get("owners")  # a loop's
    if own is None:
        own = "" if privacy["epsilon_of"] == "example" else UNKNOWN_OWNERS
    sampling = Sampling(**privacy["sampling"])
    trainings = {Earlier(str(ledger), own, privacy["z"], sampling, privacy["steps"])}
    before = (privacy.get("start") or {}).get("trainings", ())
    trainings |= {Earlier.from_dict(training) for training in before}
    note(model, trainings)


def describe(own: Earlier, trainings: Trainings, delta: float) -> dict[str, Any]:
    """Return what a report says of starting weights.

    Returns:
        `weights`: how they are known. If they went through trainings, also `trainings`, and
        `epsilon_tight`: of these and the `own` training together, None where none is known.
    """
    if not trainings:
        return {"weights": PUBLIC}
    in_order = sorted(trainings, key=lambda training: (training.ledger, training.steps))
    return {
        "weights": "of earlier trainings",
        "trainings": [
            training.as_dict() | {"ledger": Path(training.ledger).name} for training in in_order
        ],
        "epsilon_tight": _epsilon_of({own, *trainings}, delta),
    }


def _epsilon_of(trainings: Iterable[Earlier], delta: float) -> float | None:
    """Return the tight ε of trainings on the same data; None where none is known."""
    owners = {training.owners for training in trainings}
    if len(owners) > 1 or UNKNOWN_OWNERS in owners:
        return None
    try:
        return together([training.spent for training in trainings], delta)
    except ValueError:  # they compare other neighbours
        return None
