"""What `dataset.bad_records` does with files that cannot be read: refuse, or skip and name each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Literal, TypeVar

from zdp_bench.errors import UserError

log = logging.getLogger(__name__)

BadRecords = Literal["refuse", "skip"]


T = TypeVar("T")


def refuse_or_skip(bad_records: BadRecords, wrong: str) -> None:
    """Warn of a file that is left out.

    Args:
        wrong: the sentence about it.

    Raises:
        UserError: bad files are refused.
    """
    if bad_records == "refuse":
        raise UserError(f"{wrong} dataset.bad_records=skip leaves such files out.")
    log.warning("%s Skipped.", wrong)


@contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """Name the file that something goes wrong with, and say how to leave it out.

    Raises:
        UserError: it is damaged, or cannot be opened.
    """
    try:
        yield
    except (UserError, OSError) as error:
        refuse_or_skip("refuse", _tell(path, error))


def keep_readable(
    bad_records: BadRecords,
    items: Iterable[T],
    read: Callable[[T], object],
    path_of: Callable[[T], Path] = attrgetter("path"),
) -> list[T]:
    """Return the items that `read` takes; the log names the others.

    Args:
        path_of: an item's file.

    Raises:
        UserError: one cannot be read, and bad files are refused.
    """
    kept = []
    for item in items:
        try:
            read(item)
        except (UserError, OSError) as error:
            refuse_or_skip(bad_records, _tell(path_of(item), error))
        else:
            kept.append(item)
    return kept


def skip_unreadable(
    bad_records: BadRecords | None,
    items: Sequence[T],
    read: Callable[[T], object],
    path_of: Callable[[T], Path] = attrgetter("path"),
) -> list[T]:
    """Return the items that `read` takes if others are skipped, and else all of them, unread.

    Those are then refused where they are read for training (`refuse_damage`).
    """
    return keep_readable("skip", items, read, path_of) if bad_records == "skip" else [*items]


def note_skipped(before: int, after: int) -> str:
    """Return what a record's notes say of files that were left out; empty if none was."""
    return f"{before - after:,} unusable skipped" if after < before else ""


def _tell(path: Path, error: UserError | OSError) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"{path}: cannot be read ({error.strerror or type(error).__name__})."
