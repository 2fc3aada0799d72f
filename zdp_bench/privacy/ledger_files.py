"""Find the ledgers in a folder, set them aside, and tell copies from originals.

A ledger that is SET ASIDE is renamed to NAME.1, NAME.2 and so on, so that a new one can begin at
its path. Its releases still count. A COPY is the beginning of another ledger, such as a backup that
the run then continued past. Its releases are those of the original, and count once.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from zdp_bench import disk
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import exists, is_file
from zdp_bench.privacy.ledger_lines import (
    MAX_LINE,
    Head,
    LedgerError,
    OtherVersionError,
    Step,
    holds_line,
    open_ledger_file,
    open_possible_ledger,
    parse,
    read_ledger,
    unreadable,
)


def is_ledger(path: Path) -> bool:
    """Return True if a file is called ledger.jsonl or, under another name, is written like one.

    Damage must not hide a ledger. So the more its name says, the less its content must:
        - ledger.jsonl, or ledger.jsonl.N if set aside: the name alone suffices, even of a link that
          leads nowhere.
        - Another name with .jsonl: one intact line of a ledger suffices. A log of metrics has none.
        - Any other name: the first line must be a head.
    """
    if re.fullmatch(r"ledger\.jsonl(\.\d+)?", path.name):
        return not path.is_dir()
    if re.fullmatch(r".*\.jsonl(\.\d+)?", path.name):
        return exists(path) and not path.is_dir() and holds_line(path)
    if path.is_symlink() or not is_file(path):
        return False
    try:
        read_head(path)
    except OtherVersionError:
        return True
    except LedgerError:
        return False
    return True


def read_head(path: Path) -> Head:
    """Return the first line of a ledger.

    Raises:
        LedgerError: the first line of the file is not the head of a ledger.
    """
    with open_possible_ledger(path) as file:
        first_line = file.readline(MAX_LINE)
    entry, _ = parse(first_line)
    if not isinstance(entry, Head):
        raise LedgerError(f"{path}, line 1: not the first line of a ledger")
    return entry


def read_identity(path: Path) -> str | None:
    """Return the identity that the head of a ledger states, or None if the head is damaged."""
    try:
        return read_head(path).identity
    except LedgerError:
        return None


def has_steps(path: Path) -> bool:
    """Return True if a ledger holds a step, or is damaged and may hold one."""
    try:
        return any(isinstance(line.entry, Step) for line in read_ledger(path))
    except LedgerError:
        return True


def find_ledgers(
    folder: Path, ignored: Collection[str] = (), follow_links: bool = True
) -> list[Path]:
    """Return the ledgers in a folder and its subfolders, sorted by path.

    Args:
        folder: the folder.
        ignored: names of files directly in `folder` that are known not to be ledgers.
        follow_links: whether to include linked subfolders.

    Raises:
        UserError: a subfolder cannot be read.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise unreadable(error)

    ledgers = []
    for subfolder, names in disk.walk(folder, refuse, follow_links=follow_links):
        if subfolder == folder:
            names = [name for name in names if name not in ignored]
        ledgers += [path for path in (subfolder / name for name in names) if is_ledger(path)]
    return sorted(ledgers)


def require_single_link(path: Path) -> None:
    """Raise an error for a symbolic link, and for a file with a second hard link.

    Locks are per path, so two runs could write to the same file at once.
    """
    if os.path.lexists(path) and _is_linked(path):
        raise UserError(
            f"{path}: is a link, or has a second hard link, through which another run could write "
            "to it: give the path of the file itself, or of a copy (cp)."
        )


def _is_linked(path: Path) -> bool:
    """Return True for a symbolic link, and for a file with a second hard link."""
    status = os.lstat(path)
    return stat.S_ISLNK(status.st_mode) or status.st_nlink > 1


def set_aside(path: Path) -> None:
    """If there is a ledger at `path`, rename it to `NAME.1`, or to the next free number.

    A new ledger can then begin at `path`. No ledger is ever deleted.
    """
    if exists(path):
        disk.rename(path, next_aside(path))


def next_aside(path: Path) -> Path:
    """Return the path to which `set_aside` renames the ledger at `path`."""
    number = 1
    while exists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    return aside


def list_set_aside(path: Path) -> list[Path]:
    """Return the ledgers that were `set_aside` at `path`, in the order of their numbers."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)")
    try:
        names = os.listdir(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbered: list[tuple[int, str]] = []
    for name in names:
        if match := pattern.fullmatch(name):
            numbered.append((int(match[1]), name))
    return [path.with_name(name) for _, name in sorted(numbered)]


def set_aside_others(path: Path, identity: str = "") -> None:
    """Set aside all other ledgers of a training beside its ledger at `path`, so that they count.

    Every ledger in the folder of `path` is taken to be of this training, because it may have been
    renamed or moved there by hand. A ledger in a subfolder, where a federation's server keeps those
    of its nodes, is of this training if its head states `identity`, or if `identity` is empty.

    A copy of another ledger stays where it is, and does not count. But if the ledger at `path`, or
    one that was set aside, is the beginning of an undamaged longer one, that one takes its place.

    Args:
        path: the training's ledger.
        identity: identity of the ledger at `path`; see `Ledger`.
    """
    in_place = [ledger for ledger in [path, *list_set_aside(path)] if exists(ledger)]
    others = []
    for ledger in find_ledgers(path.parent, follow_links=False):  # a link may lead to another run
        is_in_folder = ledger.parent == path.parent
        is_own = not identity or is_in_folder or read_identity(ledger) == identity
        if is_own and ledger not in in_place:
            others.append(ledger)
    # Those in place come first: of ledgers with the same content, the first is the original.
    original_of_copy = _find_originals([*in_place, *others])
    moved = _replace_by_longer(in_place, others, original_of_copy)
    for ledger in others:
        if ledger not in original_of_copy and ledger not in moved:
            disk.rename(ledger, next_aside(path))


def _replace_by_longer(
    in_place: Sequence[Path], others: Sequence[Path], original_of_copy: Mapping[Path, Path]
) -> set[Path]:
    """Replace each ledger in place that is the beginning of a longer one by the longer one.

    A longer one that is damaged stays where it is, and links stay. Return the paths from which the
    longer ones were moved.
    """
    moved: set[Path] = set()
    for ledger in in_place:
        if ledger not in original_of_copy:
            continue
        longer = original_of_copy[ledger]
        if longer not in others or longer in moved:  # it is in place already
            continue
        is_linked = ledger.is_symlink() or _is_linked(longer)
        if not is_linked and _is_undamaged(longer):
            disk.rename(longer, ledger)
            moved.add(longer)
    return moved


def _is_undamaged(path: Path) -> bool:
    try:
        for _ in read_ledger(path):
            pass
    except LedgerError:
        return False
    return True


def drop_copies(ledgers: Sequence[Path]) -> list[Path]:
    """Return the ledgers, sorted by path, without those that are copies of another one.

    A copy may be shorter than its original, which was written to later. Of ledgers with the same
    content, the first in `ledgers` is the original.
    """
    original_of_copy = _find_originals(ledgers)
    return sorted(ledger for ledger in ledgers if ledger not in original_of_copy)


def _find_originals(ledgers: Sequence[Path]) -> dict[Path, Path]:
    """Return the original of each ledger that is a copy of another one, by the path of the copy."""
    if len(ledgers) < 2:
        return {}
    contents = {}
    for path in ledgers:
        with open_ledger_file(path) as file:
            contents[path] = file.read()
    original_of_copy: dict[Path, Path] = {}
    # A stable sort: of ledgers with the same content, the first stays first.
    longest_first = sorted(ledgers, key=lambda path: len(contents[path]), reverse=True)
    for index, path in enumerate(longest_first):
        for other in longest_first[:index]:
            if other not in original_of_copy and _is_copy(contents[path], contents[other]):
                original_of_copy[path] = other
                break
    return original_of_copy


def _is_copy(content: bytes, original: bytes) -> bool:
    """Return True if a ledger is provably a copy of the beginning of another one.

    In a repeatable ledger, equal lines are equal releases. In others, the lines of steps state only
    numbers, so two runs may write the same lines for different releases. There, nonces tell them
    apart: the head has that of the process that began the file, and each process that continues the
    file adds its own before its first step. The heads of older versions have none, so equal lines
    prove nothing.
    """
    if not content:
        return True  # it lists no step
    if not original.startswith(content):
        return False
    first_line, _, _ = content.partition(b"\n")
    try:
        head, _ = parse(first_line)
    except LedgerError:
        return False
    return isinstance(head, Head) and (head.repeatable or bool(head.nonce))
