"""Start from the weights of a run on public data: `model.init_from=RECIPE` or `RECIPE/RUN`.

No ε covers what such weights reveal, so their training data must be public: generated, or marked
`public: true` in the data set's card, and not data that the new run should keep private. The same
holds for the data of the run that those weights started from, and so on.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from zdp_bench import records
from zdp_bench.config.digests import run_digest
from zdp_bench.config.plugins import option_types
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.data.files import Card, card
from zdp_bench.disk import expand_home
from zdp_bench.errors import UserError, in_one_line
from zdp_bench.foreign_files import Unfit, parse_as, read_setting
from zdp_bench.models import WeightsFile
from zdp_bench.nn.state import state_digest
from zdp_bench.records import Record
from zdp_bench.registry import lookup
from zdp_bench.training import checkpoint
from zdp_bench.training.machine import plugin_digests
from zdp_bench.training.run_folder import find_weights
from zdp_bench.training.spending_file import read_sources, read_start_sources


@dataclass(frozen=True)
class DataSet:
    """A data set on which weights were trained.

    Attributes:
        name: its name.
        provenance: where it comes from, such as "synthetic".
    """

    name: str
    provenance: str

    @property
    def is_generated(self) -> bool:
        """True if no example is of a person."""
        return self.provenance == "synthetic"

    @property
    def shown(self) -> str:
        """The data set as notes show it, such as 'cifar10 (official)'."""
        return f"{self.name} ({self.provenance})"


@dataclass(frozen=True)
class PublicStart:
    """The weights of a finished run, and where they come from.

    Attributes:
        name: value of `model.init_from`.
        record: the finished run's record.
        weights: the weights, as a state dictionary.
        digest: digest of the weights.
        trained_on: every data set that the weights depend on: that of the run, that of the run it
            started from, and so on.
        sources: files of the data in `trained_on` that is not generated (`Splits.sources`), as far
            as they are known.
    """

    name: str
    record: Record
    weights: dict[str, Any]
    digest: str
    trained_on: tuple[DataSet, ...]
    sources: frozenset[str]

    def require_apart(self, data: Splits) -> None:
        """Reject data on which the weights were trained, even under another name."""
        if self.sources & data.sources:
            names = [data_set.name for data_set in self.trained_on if not data_set.is_generated]
            raise _trained_on_same_data(self.name, " or ".join(names))

    def load_into(self, model: nn.Module) -> None:
        """Load the weights into a model.

        Raises:
            UserError: the weights do not fit the model.
        """
        try:
            model.load_state_dict(self.weights)
        except RuntimeError as error:
            raise UserError(
                f"model.init_from={self.name}: these weights belong to another model or have "
                f"other shapes: {in_one_line(error)}. Set model.init_from=null to start from new "
                "weights."
            ) from None

    def described(self) -> dict[str, Any]:
        """Return the start's entry in the new run's record."""
        record = self.record
        return {
            "recipe": record.recipe,
            "run": record.run,
            "data": {"name": record.data.name, "provenance": record.data.provenance},
            "weights": self.digest,
            "trained_on": [asdict(data_set) for data_set in self.trained_on],
            "public": True,
        }

    def note(self) -> str:
        """Return a sentence about the start, for the notes under a table."""
        shown = ", after ".join(data_set.shown for data_set in self.trained_on)
        return f"starts from public weights: recipe={self.record.recipe} on {shown}"


def find_start(config: Run) -> PublicStart | None:
    """Return the weights that `model.init_from` names, or None if it is not set."""
    if config.init_from is None:
        return None
    if config.federated.nodes:
        raise UserError(
            f"model.init_from={config.init_from}: federated training starts from new weights; "
            "remove it."
        )
    if config.start:
        raise UserError(
            f"model.init_from={config.init_from} with model.start={config.start}: the run's "
            "weights would replace the scaled ones. Use only one of them."
        )
    home = find_weights(config.results, config.init_from, "model.init_from=")
    record = records.read(home / "record.json")
    assert record is not None
    trained_on = _list_trained_on(config.init_from, record)
    for data_set in trained_on:
        _require_public(config, data_set)
    saved = checkpoint.load(home / "checkpoint.pt", record.run)
    assert saved is not None
    digest = state_digest(saved.model)
    sources = read_start_sources(home)
    if not trained_on[0].is_generated:
        sources |= read_sources(home) or frozenset()
    return PublicStart(config.init_from, record, saved.model, digest, trained_on, sources)


def run_digest_of(config: Run, data_digest: str) -> str:
    """Return the digest that identifies a run. It covers experiment, seed, data and start.

    It covers the starting weights, because runs from different weights must not share their noise.
    """
    start = find_start(config)
    inputs_digest = f"{data_digest}:{start.digest}" if start else data_digest
    plugins, files = plugin_digests(config.plugins), digest_weights_files(config)
    return run_digest(config, inputs_digest, plugins, files)


def digest_weights_files(config: Run) -> dict[str, str]:
    """Return the SHA-256 of each file of weights that the model reads, by the option's key.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    digests = {}
    hints = option_types("model", lookup("model", config.model.name))
    for name, value in config.model.options.items():
        for mark in getattr(hints[name], "__metadata__", ()):
            if isinstance(mark, WeightsFile) and value not in mark.names:
                key = f"model.{name}"
                advice = f"Set it to the path of a file, or one of {', '.join(mark.names)}."
                path = expand_home(value)
                content = read_setting(f"{key}={value}", path, mark.max_bytes, advice)
                digests[key] = hashlib.sha256(content).hexdigest()
    return digests


def _list_trained_on(init_from: str, record: Record) -> tuple[DataSet, ...]:
    """Return the data sets on which a run's final weights depend; see `PublicStart.trained_on`.

    Raises:
        UserError: the record does not state what the run's starting weights were trained on.
    """
    own = DataSet(record.data.name, record.data.provenance)
    if record.get("start") is None:
        return (own,)
    try:
        earlier = parse_as(tuple[DataSet, ...], record.get("start.trained_on"))
    except Unfit:
        raise UserError(
            f"model.init_from={init_from}: its record does not state all data that its own "
            "starting weights were trained on, as older versions did not. Carry out that run "
            "again with force=true, or start from another one."
        ) from None
    return (own, *earlier)


def _require_public(config: Run, data: DataSet) -> None:
    """Reject weights that were trained on private data, which no ε of this run covers."""
    if data.is_generated:
        return
    start_card = find_card(data.name)
    if start_card is None or not start_card.public:
        raise UserError(
            f"model.init_from={config.init_from}: it was trained on dataset={data.name}, which is "
            "neither generated nor public, so this run's ε would not cover it. Start from a run on "
            "public data."
        )
    # A data set may read the files of another one, which its card names (`uses`).
    private_card = find_card(config.dataset.name)
    private_names = {config.dataset.name, private_card.uses if private_card else ""}
    start_names = {data.name, start_card.uses or data.name}
    if private_names & start_names:
        raise _trained_on_same_data(config.init_from, data.name)


def _trained_on_same_data(init_from: str | None, dataset: str) -> UserError:
    """Return the error for starting weights that were trained on the run's private data."""
    return UserError(
        f"model.init_from={init_from}: it was trained on dataset={dataset}, whose files this run "
        "should keep private. Start from a run on other data."
    )


def find_card(name: str) -> Card | None:
    """Return the card of a data set, or None if a third-party data set has no card."""
    try:
        return card(name)
    except UserError:
        return None
