"""Find the earlier private trainings that a model's starting weights come from.

Weights are recognized by their digest. A training records the digest of its final weights in this
process when the loop over its batches ends, and in a file beside its ledger when it is saved.
`zdp_bench.load` records the weights that it reads. Weights with an unknown digest are assumed to be
public, and `Private.report` says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from zdp_bench.disk import write_bytes
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import Unfit, parse_as, read_json, resolve
from zdp_bench.library.units import PRIVATE_OWNERS
from zdp_bench.nn.state import state_digest
from zdp_bench.privacy.composition import SpentSteps, compose_epsilon
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.tally import Tally
from zdp_bench.records.record import Noise, Steps

SUFFIX = ".weights.json"  # of the file beside a ledger that names the final weights
PUBLIC = "unknown, declared public"


@dataclass(frozen=True)
class Earlier:
    """An earlier private training of the same weights.

    Attributes:
        ledger: Path of its ledger; in an exported folder, only the name of the file.
        owners: Digest of which owner has which examples; empty if ε protects an example, and
            `PRIVATE_OWNERS` if the number of owners is private.
        z: Effective noise multiplier of its mechanism.
        sampling: Sampling of its steps.
        steps: Number of steps in its ledger.
        id: Name in its ledger of the process that took its last step (`Tally.part`). Two
            descriptions with the same id are of one training, and the one with more steps covers
            the other.
    """

    ledger: str
    owners: str
    z: Noise
    sampling: Sampling
    steps: Steps
    id: str

    @property
    def spent(self) -> SpentSteps:
        """Noise, sampling and number of steps, for composition."""
        return SpentSteps(self.z, self.sampling, self.steps)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"sampling": self.sampling.as_dict()}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Earlier:
        """Return the training that `as_dict` turned into JSON values.

        Raises:
            ValueError: `plain` does not describe a training.
        """
        try:
            return parse_as(Earlier, plain, "trainings")
        except Unfit as error:
            raise ValueError(f"it {error}") from None


@dataclass(frozen=True)
class _Saved:
    """Content of the file beside a ledger.

    Attributes:
        weights: Digest of the weights.
        trainings: The trainings behind them.
        own: Index of the training of this ledger, which is found beside the file even if the folder
            was moved.
    """

    weights: str
    trainings: tuple[Earlier, ...]
    own: int


Trainings = frozenset[Earlier]
# Trainings of this process, by the digest of a model's weights and by that of one trained parameter
_KNOWN: dict[str, Trainings] = {}
_KNOWN_PARAMETERS: dict[str, Trainings] = {}


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters, independent of their names and order."""
    digests = sorted(map(_parameter_digest, model.parameters()))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _parameter_digest(parameter: nn.Parameter) -> str:
    return state_digest({"": parameter})


def note(model: nn.Module, trainings: Iterable[Earlier]) -> None:
    """Record in this process the trainings that a model's weights come from."""
    _KNOWN[weights_digest(model)] = frozenset(trainings)


def note_trained(model: nn.Module, trained: Collection[str], trainings: Iterable[Earlier]) -> None:
    """Record a model's weights like `note`, and each trained parameter, for `find_in_part`.

    Args:
        model: The model.
        trained: Names of the parameters that were trained, which may be frozen by now.
        trainings: The trainings.
    """
    known_trainings = frozenset(trainings)
    note(model, known_trainings)
    for name, parameter in model.named_parameters():
        if name in trained and parameter.numel():  # those without numbers are all the same
            _KNOWN_PARAMETERS[_parameter_digest(parameter)] = known_trainings


def find_in_part(model: nn.Module) -> dict[str, Trainings]:
    """Return the trainings of this process behind each parameter that one of them trained."""
    if not _KNOWN_PARAMETERS:  # without hashing all parameters
        return {}
    return {
        name: trainings
        for name, parameter in model.named_parameters()
        if (trainings := _KNOWN_PARAMETERS.get(_parameter_digest(parameter)))
    }


def merge(trainings: Iterable[Earlier]) -> Trainings:
    """Return the trainings; of several descriptions with the same id, the one with most steps."""
    merged: dict[str, Earlier] = {}
    for training in trainings:
        known = merged.setdefault(training.id, training)
        if training.steps >= known.steps:  # a file beside a moved ledger is read last
            merged[training.id] = training
    return frozenset(merged.values())


def exclude(trainings: Trainings, ledger: Tally) -> Trainings:
    """Return the trainings whose steps a ledger does not count, wherever theirs is now."""
    return frozenset(
        training for training in trainings if not ledger.holds(training.id, training.steps)
    )


def save(
    ledger: Path,
    model: nn.Module,
    trained: Collection[str],
    own: Earlier,
    earlier: Iterable[Earlier],
) -> None:
    """Record the trainings in this process, and in a file beside a ledger for other processes.

    Args:
        ledger: Path of the ledger of the last training.
        model: The model, with its final weights.
        trained: Names of the parameters that were trained.
        own: The last training.
        earlier: The earlier trainings that the weights come from.
    """
    trainings = [own, *earlier]
    note_trained(model, trained, trainings)
    body = {
        "weights": weights_digest(model),
        "trainings": [training.as_dict() for training in trainings],
        "own": 0,
    }
    write_bytes(ledger.with_suffix(SUFFIX), json.dumps(body, indent=1).encode())


def find(model: nn.Module, folder: Path) -> Trainings:
    """Return the trainings that a model's weights are known to come from.

    Args:
        model: The model.
        folder: Folder of the ledgers, where other processes recorded their trainings.

    Raises:
        UserError: A file in the folder is damaged.
    """
    digest = weights_digest(model)
    trainings = [*_KNOWN.get(digest, ())]
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            saved = parse_as(_Saved, read_json(path))
        except Unfit as error:
            raise UserError(
                f"{path}: is damaged: it {error}. Delete it; the origin of its weights is then "
                "unknown."
            ) from None
        if saved.weights != digest:
            continue
        ledger = path.with_name(path.name.removesuffix(SUFFIX) + ".jsonl")
        for index, training in enumerate(saved.trainings):
            is_own = index == saved.own
            trainings.append(
                replace(training, ledger=str(ledger.resolve())) if is_own else training
            )
    return merge(trainings)


def note_export(model: nn.Module, source: Mapping[str, Any], ledger: Path) -> None:
    """Record the trainings of a model that was read from an exported folder.

    Args:
        model: The model, with the exported weights.
        source: Content of the record or report in the folder.
        ledger: Path of the ledger in the folder.

    Raises:
        UserError: The record or report is damaged.
    """
    privacy = source["privacy"]
    owners = "" if privacy["epsilon_of"] == "example" else PRIVATE_OWNERS
    earlier: Iterable[Any] = ()
    if "config" not in source:  # a report of your own loop, which states owners and trainings
        owners = source["owners"]
        earlier = (privacy.get("start") or {}).get("trainings") or ()
    try:
        sampling = parse_as(Sampling, privacy["sampling"], "privacy.sampling")
        path, z, steps = str(resolve(ledger)), privacy["z"], privacy["steps"]
        digest = weights_digest(model)
        trainings = [Earlier(path, owners, z, sampling, steps, digest)]
        trainings += map(Earlier.from_dict, earlier)
    except (Unfit, ValueError, OSError) as error:  # of a link to itself
        raise UserError(f"{ledger.parent}: is damaged: {error}.") from None
    note(model, trainings)


def describe(this_training: Earlier, trainings: Sequence[Earlier], delta: float) -> dict[str, Any]:
    """Describe starting weights for a report.

    Args:
        this_training: The training that started from the weights.
        trainings: The earlier trainings that the weights come from. All of them count.
        delta: δ at which ε is computed.

    Returns:
        `weights`, which says what is known about them. If there are earlier trainings, also
        `trainings`, which lists them, and `epsilon_tight`, the ε of all trainings together or None
        if it is unknown.
    """
    if not trainings:
        return {"weights": PUBLIC}
    return {
        "weights": "of earlier trainings",
        "trainings": [
            training.as_dict() | {"ledger": Path(training.ledger).name} for training in trainings
        ],
        "epsilon_tight": _epsilon_of([this_training, *trainings], delta),
    }


def _epsilon_of(trainings: Sequence[Earlier], delta: float) -> float | None:
    """Return the tight ε of trainings on the same data; None if it is unknown."""
    owners = {training.owners for training in trainings}
    if len(owners) > 1 or PRIVATE_OWNERS in owners:
        return None
    try:
        return compose_epsilon([training.spent for training in trainings], delta)
    except ValueError:  # their neighbouring relations differ
        return None
