"""Delete runs, except for what they have spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zdp_bench import disk, records
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import exists
from zdp_bench.privacy.composition import Spending
from zdp_bench.training.run_folder import MAX_LISTED, only_one_process, settle_replaced, start_anew
from zdp_bench.training.spending import keep_spending
from zdp_bench.training.spending_file import FILE, NODES


@dataclass(frozen=True)
class Deletion:
    """A run that was deleted.

    Attributes:
        name: RECIPE/RUN.
        size: bytes that were freed.
        spending: what the run has spent, which still counts.
    """

    name: str
    size: int
    spending: Spending


def find_homes(results: Path, words: Sequence[str]) -> list[Path]:
    """Return the folder of the run that each word names, whether or not it has finished.

    A run that several words name has its folder in the list once.

    Args:
        words: RECIPE/RUN, RUN (four or more digits of its digest), a run's name, or a recipe with
            one run.

    Raises:
        UserError: a word names no run, or several.
    """
    runs = results / "runs"
    homes = {
        runs.joinpath(*path.relative_to(runs).parts[:2])  # RECIPE/RUN
        for name in ("record.json", FILE, f"{NODES}/*/{FILE}")
        for path in runs.glob(f"*/*/{name}")
    }
    present = sorted(home for home in homes if not records.is_deleted(home))
    named = [_find_home(present, word) for word in words]
    return list(dict.fromkeys(named))


def _find_home(homes: Sequence[Path], word: str) -> Path:
    matching = [home for home in homes if records.is_named(word, home.parent.name, home.name)]
    matching = matching or [home for home in homes if _label_of(home) == word]
    if not matching:
        raise UserError(f"{word}: does not match any run. `zdp-bench results` lists them.")
    if len(matching) > 1:
        names = [_name_of(home) for home in matching[:MAX_LISTED]]
        more = ", ..." if len(matching) > MAX_LISTED else ""
        raise UserError(
            f"{word}: names {len(matching)} runs. Name each to delete: {', '.join(names)}{more}."
        )
    return matching[0]


def _label_of(home: Path) -> str | None:
    """Return the name that the user gave a finished run."""
    record = records.read(home / "record.json")
    return record.labels.name if record else None


def _name_of(home: Path) -> str:
    return f"{home.parent.name}/{home.name[:8]}"


def delete(home: Path) -> Deletion:
    """Delete the files of a run, except for its ledgers and its spending.

    These move to a separate folder, which `budget`, `privacy.total_budget` and `search` still
    count. If the same run is carried out again, it counts again.

    Raises:
        UserError: what the run spent is not known.
        Busy: another process is carrying out the run.
    """
    with only_one_process(home, wait=False):
        settle_replaced(home)  # what the run before has spent may be in its record alone
        size_before = _size_of(home)
        # Before anything is deleted, so that the run counts even if this process is killed.
        spending = keep_spending(home)
        start_anew(home)
        size_after = _size_of(home)
        number = 1
        while exists(new_home := home.with_name(f"{home.name}{records.DELETED}{number}")):
            number += 1
        disk.rename(home, new_home)
    return Deletion(_name_of(home), max(0, size_before - size_after), spending)


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
