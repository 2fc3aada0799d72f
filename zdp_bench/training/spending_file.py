"""Write and read `spending.json`: what a run may release, and which files it reads.

A run writes it before its first step, so that runs that were stopped or are under way count as
well. It identifies the run's files by their content. A record does not, because it may be
published, and anyone who has a file could see that it was used for training.

A site of a federation that has its own data has such a file for each of its nodes, in the folder
RUN/nodes/NN-DATA.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import Unfit, is_file, parse_as, read_json
from zdp_bench.privacy.ledger_files import list_set_aside, read_identity
from zdp_bench.records import Data, Released

FILE = "spending.json"
NODES = "nodes"  # folder of a federated run that has a folder for each node
NODE = "node "  # in the head of a node's ledger, the identity is this and the node's number
_NODE_NAME = re.compile(r"\d{2,8}(-[0-9a-f]{8})?")  # a run's folder has 16 digits


@dataclass(frozen=True)
class Plan:
    """The content of `spending.json`: what a run may release, or what a deleted run has released.

    Attributes:
        recipe: name of the run's recipe.
        data: its data set.
        privacy: its releases.
        sources: names of the data's files (`Splits.sources`), separated by spaces; None if unknown.
            A file whose owner the user states is followed by a colon and the owner's number.
        start_sources: names of the files that the run's starting weights were trained on, likewise.
        run: digest of the run; None in files of older versions.
        max_releases: the most releases that `privacy.max_epsilon` allows, however often the run
            continues, or twice those planned, if it allows more; None if nothing limits them.
    """

    recipe: str
    data: Data
    privacy: Released
    sources: str | None = None
    start_sources: str | None = None
    run: str | None = None
    max_releases: int | None = None

    def write(self, home: Path) -> None:
        """Write `spending.json` into a run's folder."""
        records.write(home / FILE, asdict(self))


class Files(NamedTuple):
    """The files that a run reads.

    Attributes:
        sources: their names (`Splits.sources`); None if they are not known.
        owners: the owner of each file of a single owner, if the user states the owners.
    """

    sources: frozenset[str] | None = None
    owners: Mapping[str, str] = MappingProxyType({})


def read_plan(path: Path) -> Plan:
    """Return the content of a `spending.json`.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        return parse_as(Plan, records.name_owner(read_json(path, records.from_json)))
    except Unfit as error:
        fault = f"{path}: is damaged: it {error}."
    except UserError as error:
        fault = str(error)
    raise UserError(
        f"{fault} So the ε of its run is not known; if you start the run again, it writes this "
        "file again."
    )


def has_plan_of(home: Path, run: str | None) -> bool:
    """Return True if a folder's `spending.json` can be read and is that of a run."""
    with suppress(UserError):  # it is missing or damaged
        return read_plan(home / FILE).run == run
    return False


def read_files(home: Path) -> Files:
    """Return the files that a run reads. A federation of sites reads those of its nodes."""
    paths = [folder / FILE for folder in [home, *find_node_homes(home)]]
    plans = [read_plan(path) for path in paths if is_file(path)]
    if not plans or not all(plan.sources for plan in plans):
        return Files()
    if len(plans) == 1:
        return parse_files(plans[0].sources)
    sources = set[str]()
    owners: dict[str, str] = {}
    for node, plan in enumerate(plans):
        files = parse_files(plan.sources)
        sources |= files.sources or set()
        owners |= {source: f"{node}.{owner}" for source, owner in files.owners.items()}
    return Files(frozenset(sources), owners)


def read_sources(home: Path) -> frozenset[str] | None:
    """Return the files that a run reads (`Splits.sources`), or None if they are not known."""
    return read_files(home).sources


def read_start_sources(home: Path) -> frozenset[str]:
    """Return the files that a run's starting weights were trained on, as far as it states them."""
    path = home / FILE
    start_sources = read_plan(path).start_sources if is_file(path) else None
    return parse_files(start_sources).sources or frozenset()


@lru_cache(maxsize=64)  # runs on the same data share one object
def parse_files(text: str | None) -> Files:
    """Return the files that `format_files` wrote as text."""
    words = [word.partition(":") for word in (text or "").split()]
    sources = frozenset(source for source, _, _ in words)
    owners = {source: owner for source, _, owner in words if owner}
    return Files(sources or None, owners)


def format_files(files: Files) -> str | None:
    """Return the files of a run as text for `Plan.sources`; owners become numbers."""
    if not files.sources:
        return None
    numbers: dict[str, int] = {}
    words = []
    for source in sorted(files.sources):
        word = source
        if source in files.owners:
            number = numbers.setdefault(files.owners[source], len(numbers))
            word = f"{source}:{number}"
        words.append(word)
    return " ".join(words)


def is_node(home: Path) -> bool:
    """Return True if a folder is that of a federation's node, rather than that of a run.

    The runs of a recipe that is called `NODES` are in a folder with that name too. The heads of
    their ledgers tell them from nodes. Without a head, the folder's own name decides.
    """
    if home.parent.name != NODES:
        return False
    ledger = home / "ledger.jsonl"
    for path in [ledger, *list_set_aside(ledger)]:
        with suppress(UserError):  # it cannot be read; who counts its steps reports it
            if is_file(path) and (identity := read_identity(path)) is not None:
                return identity.startswith(NODE)
    return _NODE_NAME.fullmatch(home.name) is not None


def run_of_node(node_home: Path) -> Path:
    """Return the folder of the run that a node's folder is in."""
    return node_home.parent.parent


def find_node_homes(home: Path) -> list[Path]:
    """Return the folders of a run's nodes that have a `spending.json`."""
    return sorted(path.parent for path in home.glob(f"{NODES}/*/{FILE}"))
