"""Find, verify and download the files under the data root, and read the cards of data sets."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from zdp_bench import assets
from zdp_bench.disk import is_left_behind, list_partial, name_partial
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.foreign_files import Unavailable, expect, is_file, reading, resolve

log = logging.getLogger(__name__)

BadExamples = Literal["refuse", "skip"]
T = TypeVar("T")
R = TypeVar("R")
MAX_FILE = 1 << 35  # bytes of a file of data, which takes seconds to hash
ADVICE = " dataset.bad_examples=skip skips such files."
# Numbers of the errors of a full disk, which only writing raises. Those of HDF5 name no file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class RemoteFile:
    """One file of a release: path under the data root, size in bytes, and MD5 checksum."""

    path: str
    bytes: int
    md5: str


@dataclass(frozen=True)
class Card:
    """What a user should know about a data set, from `datasets/NAME.yaml`."""

    name: str
    title: str
    provenance: str
    licence: str
    citation: str
    source: str
    layout: str = ""
    splits: str = ""
    access: str = ""
    uses: str = ""  # name of the card whose files this data set reads
    holds: str = ""  # without a list of files, a pattern that matches a file if the data is present
    public: bool = False  # weights trained on it may start a private run (`model.init_from`)
    stand_in: str = ""  # overrides that select generated data, for `reproduce --profile smoke`
    address: str = ""  # HTTPS address of the folder with the files
    files: tuple[RemoteFile, ...] = ()
    # release -> file name -> "md5:...", "sha1:..."
    releases: dict[str, dict[str, str]] = field(default_factory=dict)
    # task -> intensities that become black and white
    windows: dict[str, list[float]] = field(default_factory=dict)


def card(name: str) -> Card:
    """Read the card of a data set."""
    cards = assets.group(assets.DATASETS)
    if name not in cards:
        raise unknown("dataset", name, cards)
    body: dict[str, Any] = dict(assets.read_yaml(cards[name])["card"])
    files = tuple(RemoteFile(**file) for file in body.pop("files", []))
    return Card(name=name, files=files, **body)


def cards() -> list[Card]:
    """Read every card, sorted by name."""
    return [card(name) for name in assets.group(assets.DATASETS)]


def md5(path: Path) -> str:
    """Return a file's MD5 in hex, as releases publish it; it detects damage, not attacks."""
    return checksum(path, "md5").removeprefix("md5:")


def checksum(path: Path, algorithm: str) -> str:
    """Return a file's checksum with the name of the `hashlib` algorithm: "sha1:67eb…"."""
    with reading(path, MAX_FILE), path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def sha256(path: Path, owner: str | None = None) -> str:
    """Return a file's SHA-256 in hex, and report it to `collect_sources`.

    Args:
        path: path of the file.
        owner: who owns all examples in the file, if the user states it. Default: the definition of
            the data set states it.
    """
    digest = checksum(path, "sha256").removeprefix("sha256:")
    note_source(digest, owner)
    return digest


_sources: ContextVar[dict[str, set[str]] | None] = ContextVar("_sources", default=None)


def note_source(digest: str, owner: str | None = None) -> None:
    """Report the SHA-256 of data that is read to `collect_sources`; for files, `sha256` does."""
    sources = _sources.get()
    if sources is not None:
        owners = sources.setdefault(digest[:16], set())
        owners |= {owner} if owner is not None else set()


@contextmanager
def collect_sources() -> Iterator[dict[str, set[str]]]:
    """Yield a dictionary that collects all data read inside.

    It maps the first 16 hex digits of the SHA-256 to the owners, if the user states them.
    """
    sources: dict[str, set[str]] = {}
    token = _sources.set(sources)
    try:
        yield sources
    finally:
        _sources.reset(token)


def digest(text: str) -> str:
    """Return the SHA-256 of a text in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def verify(
    path: Path,
    expected: RemoteFile,
    dataset: str,
) -> None:
    """Reject a file whose size or MD5 is not that of the released one.

    Args:
        path: path of the file.
        expected: the released file.
        dataset: name of the data set, for the error.
    """
    advice = (
        f"Delete it and run `zdp-bench data fetch {dataset}`, or set paths.data to another folder."
    )
    size = path.stat().st_size
    if size != expected.bytes:
        raise UserError(f"{path}: {size:,} bytes where {expected.bytes:,} were expected. {advice}")
    checksum = md5(path)
    if checksum != expected.md5:
        raise UserError(
            f"{path}: MD5 {checksum} where {expected.md5} was expected, so it is not the released "
            f"file. {advice}"
        )


def missing(root: Path, data_card: Card) -> list[RemoteFile]:
    """Return the files of a card that are not under the data root."""
    return [file for file in data_card.files if not is_file(root / file.path)]


def resolve_folder(root: Path, folder: str) -> Path:
    """Return the path of `dataset.folder`, which must be under the data root.

    Links inside the data root may lead elsewhere: its owner made them.
    """
    inside = Path(os.path.normpath(root / folder)).is_relative_to(os.path.normpath(root))
    require(
        inside,
        "dataset.folder",
        folder,
        f"must be a folder under the data root {root}; set paths.data to another root",
    )
    return root / folder


def count_held_out(
    count: int,
    test_share: float,
    what: str,
) -> int:
    """Return the number of volumes, patients or other units to test on.

    Args:
        count: number of all units.
        test_share: fraction of them to test on.
        what: what they are, for the error.

    Raises:
        UserError: A part would be empty.
    """
    held = round(test_share * count)
    rule = f"leaves {count - held} {what} to train on, {held} to test on"
    require(0 < held < count, "dataset.test_share", test_share, rule)
    return held


def has_files(root: Path, data_card: Card) -> bool:
    """Return True if every listed file exists or, without a list, a file matches `holds`."""
    if missing(root, data_card):
        return False
    return not data_card.holds or bool(find_visible(root, data_card.holds))


def tell_source(data_card: Card) -> str:
    """Return the sentences that say where to get a data set that cannot be downloaded."""
    return f"It comes from {data_card.source}. {data_card.access}".strip()


class Absent(UserError):  # noqa: N818 - a state of the data root
    """The files of a data set are missing."""


def absent(path: Path, dataset: str) -> Absent:
    """Return the error for missing files, which says how to get them."""
    return Absent(f"{path}: is missing. {tell_source(card(dataset))}")


def suggest_stand_in(dataset: str) -> str:
    """Return a sentence that names generated data to use instead, or '' if there are none."""
    if dataset not in assets.group(assets.DATASETS):
        return ""
    stand_in = card(dataset).stand_in
    return f" Or use {stand_in}." if stand_in.startswith("dataset=") else ""


def holds_any(folder: Path) -> bool:
    """Return True if a folder contains anything but hidden files, which macOS creates."""
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def is_file_name(name: str) -> bool:
    """Return True if a name is of one file or folder, and not a path to somewhere else."""
    is_path = "/" in name or "\\" in name or ":" in name
    return name.isprintable() and not is_path and name not in ("", ".", "..")


def require_inside(path: Path, folder: Path) -> Path:
    """Return the resolved path of a file; reject one that leads out of the folder.

    Raises:
        UserError: A link or `..` leads out of the folder, or a link leads to itself.
    """
    try:
        real = resolve(path)
        home = resolve(folder)
    except OSError:
        raise UserError(f"{path}: is a link to itself; put the file itself there.") from None
    if not real.is_relative_to(home):
        what = "is a link that leads" if path.is_symlink() else "leads"
        raise UserError(f"{path}: {what} out of {folder}; put the file itself there.")
    return real


def find_visible(folder: Path, pattern: str) -> list[Path]:
    """Return the paths below a folder that match a pattern, sorted, without hidden ones.

    Args:
        folder: path of the folder.
        pattern: pattern of `Path.glob`, such as "**/*.hea".
    """
    paths = []
    for path in sorted(folder.glob(pattern)):
        parts = path.relative_to(folder).parts
        if not any(part.startswith(".") for part in parts):
            _require_utf8(path)
            paths.append(path)
    return paths


def visible_files(folder: Path) -> list[Path]:
    """List the entries of a folder, sorted by name, without hidden files, which macOS creates.

    Raises:
        UserError: A name is not UTF-8.
    """
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in paths:
        _require_utf8(path)
    return paths


def _require_utf8(path: Path) -> None:
    """Reject a name that is not UTF-8, which can be neither digested nor written as a text."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise UserError(f"{shown}: its name is not UTF-8; rename it.") from None


def list_files(
    folder: Path,
    home: Path,
    is_expected: Callable[[Path], bool],
    fault: str,
) -> list[Path]:
    """List the files in a folder, sorted by name, without opening them.

    Args:
        folder: path of the folder.
        home: folder of the data set; no link may lead out of it.
        is_expected: returns True if a file belongs in the folder.
        fault: what is wrong with any other file, worded to follow the file's name.

    Raises:
        UserError: A file leads out of `home`, or does not belong in the folder.
    """
    paths = visible_files(folder)
    for path in paths:
        require_inside(path, home)
        with reading(path):
            expect(is_expected(path), fault)
    return paths


def require_distinct(
    paths: Iterable[Path],
    key: Callable[[Path], str],
    what: str,
) -> None:
    """Reject two files with the same key.

    Args:
        paths: paths of the files.
        key: returns the key of a file, such as the name of its patient or volume.
        what: what a key identifies, such as "volume", for the error.
    """
    first_with_key: dict[str, Path] = {}
    for path in paths:
        other = first_with_key.setdefault(key(path), path)
        if other != path:
            raise UserError(
                f"{path}: is the same {what} as {other.parent.name}/{other.name}; each may occur "
                "once, so remove one of them."
            )


def check_files(root: Path, data_card: Card) -> Iterator[tuple[Path, str]]:
    """Verify the files that have published checksums.

    Yields:
        The path of each file and what is wrong with it, '' if nothing. Without published checksums,
        the path that a run needs if it is missing.
    """
    expected = {root / file.path: file for file in data_card.files}

    def check(path: Path) -> None:
        if not is_file(path):
            raise UserError(f"{path}: is missing. Run `zdp-bench data fetch {data_card.name}`.")
        verify(path, expected[path], data_card.name)

    yield from try_each(expected, check)
    if not data_card.files and not has_files(root, data_card):
        yield root / data_card.holds, str(absent(root / data_card.holds, data_card.name))


def fetch(root: Path, data_card: Card) -> list[Path]:
    """Download the missing files of a card and verify their MD5.

    A file gets its name only once it is complete.

    Returns:
        The paths of the downloaded files.

    Raises:
        UserError: A file cannot be downloaded or written, or has the wrong MD5; or something else,
            such as a folder or a broken link, is in its place.
    """
    wanted = missing(root, data_card)
    name = data_card.name
    if not data_card.address and not has_files(root, data_card):
        raise UserError(
            f"dataset '{name}' is not under {root}, and cannot be downloaded. "
            f"{tell_source(data_card)}"
        )
    for file in wanted:
        path = root / file.path
        if os.path.lexists(path):  # pooch would read a pipe or device without end
            raise UserError(
                f"{path}: is not a regular file, or is a broken link; delete it, or put the "
                "file itself there."
            )
        reason = _download(data_card.address, path, file.md5)
        if reason:
            names = ", ".join(Path(lacking.path).name for lacking in missing(root, data_card))
            raise UserError(
                f"dataset '{name}' lacks {names} in {path.parent}, and {reason}. Put the "
                "files there by hand, set another folder with paths.data=..., or try "
                f"`zdp-bench data fetch {name}` again."
            )
    return [root / file.path for file in wanted]


def _download(address: str, path: Path, expected_md5: str) -> str:
    """Download a file, and return why that failed; empty if it succeeded.

    Args:
        address: HTTPS address of the folder with the file.
        path: path to which the file is written.
        expected_md5: MD5 of the file.

    Raises:
        UserError: the file cannot be written.
    """
    import pooch
    import requests

    _make(path.parent)
    log.info("fetching %s from %s", path.name, address)
    try:
        pooch.retrieve(
            f"{address}/{path.name}",
            known_hash=f"md5:{expected_md5}",
            fname=path.name,
            path=path.parent,
            downloader=pooch.HTTPDownloader(timeout=20),
        )
    except ValueError:  # pooch deletes a file whose hash does not match
        return f"what {address} sent for {path.name} does not match its MD5 {expected_md5}"
    except (requests.RequestException, ConnectionError, TimeoutError) as error:
        return f"{address} could not be reached ({type(error).__name__})"
    except OSError as error:
        raise _unwritable(path.parent, error) from None
    return ""


def _make(folder: Path) -> None:
    """Make a folder of the data root, and its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> UserError:
    # The text of HDF5's errors has several lines.
    why = os.strerror(error.errno) if error.errno else type(error).__name__
    return UserError(
        f"{folder}: cannot be written ({why}). Set paths.data, or --root, to a folder that you can "
        "write to."
    )


@contextmanager
def write_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `folder` if the block ends without an error.

    `folder` is therefore never incomplete. If another process has made it meanwhile, that one is
    kept. Temporary folders that killed processes left beside it are deleted.

    Raises:
        UserError: The folder cannot be written, or the disk is full.
    """
    partial = name_partial(folder)
    _make(partial)
    for path in list_partial(folder.parent):
        with suppress(OSError):  # another process may delete it at the same time
            if is_left_behind(path):
                shutil.rmtree(path)
    try:
        try:
            yield partial
        except OSError as error:
            if error.errno not in FULL:  # such as an error in reading another file
                raise
            raise _unwritable(folder, error) from None
        try:
            os.replace(partial, folder)
        except OSError as error:
            if not folder.is_dir():  # otherwise, another process has made it
                raise _unwritable(folder, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# ---------------------------------------------------------------------- unreadable files


def try_each(paths: Iterable[Path], read: Callable[[Path], object]) -> Iterator[tuple[Path, str]]:
    """Yield each path and the sentence of the `UserError` that `read` raises; '' for none."""
    for path in paths:
        try:
            read(path)
            yield path, ""
        except UserError as error:
            yield path, str(error)


def read_each(
    items: Iterable[T],
    read: Callable[[T], R],
    bad_examples: BadExamples,
) -> Iterator[tuple[T, R]]:
    """Yield each item with its content.

    Args:
        items: the items.
        read: reads one item; raises a `UserError` if that is impossible.
        bad_examples: "refuse" raises that error; "skip" logs it and leaves the item out, unless it
            is `Unavailable`: the next run would have other examples.
    """
    for item in items:
        try:
            with advise_skipping():
                content = read(item)
        except UserError as error:
            if bad_examples == "refuse" or isinstance(error, Unavailable):
                raise
            log.warning("%s Skipped.", str(error).removesuffix(ADVICE))
        else:
            yield item, content


@contextmanager
def advise_skipping() -> Iterator[None]:
    """Add to a `UserError` about a file how to skip such files."""
    try:
        yield
    except Unavailable:
        raise
    except UserError as error:
        raise UserError(f"{error}{ADVICE}") from None


def count_parts(counts: Mapping[str, int]) -> str:
    """Return the sizes of the parts in words, such as "5 to train, 2 to test"."""
    verbs = {"train": "train", "validation": "validate (public)", "test": "test"}
    return ", ".join(f"{count:,} to {verbs[part]}" for part, count in counts.items() if count)


def note_skipped(count: int) -> str:
    """Return the note on files that were skipped; '' if there are none."""
    return f"{count:,} unusable skipped" if count else ""
