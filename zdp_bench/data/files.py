"""The files under the data root: find them, check them, fetch them."""

from __future__ import annotations

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
from zdp_bench.disk import name_partial
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.foreign_files import expect, reading

log = logging.getLogger(__name__)

BadExamples = Literal["refuse", "skip"]
T = TypeVar("T")
R = TypeVar("R")
ADVICE = " dataset.bad_examples=skip skips such files."


@dataclass(frozen=True)
class RemoteFile:
    """One file of a release: its path under the data root, size in bytes and MD5."""

    path: str
    bytes: int
    md5: str


@dataclass(frozen=True)
class Card:
    """What a person should know of a data set, from `datasets/NAME.yaml`."""

    name: str
    title: str
    provenance: str
    licence: str
    citation: str
    source: str
    layout: str = ""
    splits: str = ""
    access: str = ""
    uses: str = ""  # the card whose files this one reads
    holds: str = ""  # a pattern that matches if the data is there, where no list of files exists
    public: bool = False  # weights trained on it may start a private run (`model.init_from`)
    stand_in: str = ""  # overrides with small generated data, for `reproduce --profile smoke`
    address: str = ""  # HTTPS; the folder that holds the files
    files: tuple[RemoteFile, ...] = ()
    # release -> file name -> "md5:...", "sha1:..."
    releases: dict[str, dict[str, str]] = field(default_factory=dict)
    # task -> intensities that are shown as black and white
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
    """MD5 of a file in hex, as releases publish it: a guard against damage, not attackers."""
    return checksum(path, "md5").removeprefix("md5:")


def checksum(path: Path, algorithm: str) -> str:
    """A file's checksum by one of hashlib's algorithms, with its name: "sha1:67eb…"."""
    with reading(path), path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex, which is reported to `collect_sources`."""
    digest = checksum(path, "sha256").removeprefix("sha256:")
    note_source(digest)
    return digest


_sources: ContextVar[set[str] | None] = ContextVar("_sources", default=None)


def note_source(digest: str) -> None:
    """Report the SHA-256 of what is read to `collect_sources`; `sha256` does so for a file."""
    sources = _sources.get()
    if sources is not None:
        sources.add(digest[:16])


@contextmanager
def collect_sources() -> Iterator[set[str]]:
    """Yield a set that collects, while open, the first 16 digits of every file's SHA-256."""
    sources: set[str] = set()
    before = _sources.set(sources)
    try:
        yield sources
    finally:
        _sources.reset(before)


def digest(text: str) -> str:
    """SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def verify(
    path: Path,
    expected: RemoteFile,
    dataset: str,
) -> None:
    """Reject a file that is not the released one."""
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


def missing(root: Path, of: Card) -> list[RemoteFile]:
    """Return the files of a card that are not under the root."""
    return [file for file in of.files if not (root / file.path).is_file()]


def resolve_folder(root: Path, folder: str) -> Path:
    """Return the path of `dataset.folder`; links inside the root may lead elsewhere."""
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
    """Return how many of `count` are to test on."""
    held = round(test_share * count)
    rule = f"leaves {count - held} {what} to train on, {held} to test on"
    require(0 < held < count, "dataset.test_share", test_share, rule)
    return held


def has_files(root: Path, of: Card) -> bool:
    """True if every listed file exists or, without a list, any file matches `holds`."""
    return not missing(root, of) and (not of.holds or any(True for _ in root.glob(of.holds)))


def tell_source(of: Card) -> str:
    """Return where a data set that cannot be fetched comes from, and what to do with it."""
    return f"It comes from {of.source}. {of.access}".strip()


class Absent(UserError):  # noqa: N818 - a state of the data root
    """The files of a data set are not in their place."""


def absent(place: Path, dataset: str) -> Absent:
    """Return the error for files that are not in their place, and how to get them."""
    return Absent(f"{place}: is missing. {tell_source(card(dataset))}")


def suggest_stand_in(dataset: str) -> str:
    """Return the sentence that names generated data for a data set, or ''."""
    if dataset not in assets.group(assets.DATASETS):
        return ""
    stand_in = card(dataset).stand_in
    return f" Or use {stand_in.split()[0]}." if stand_in.startswith("dataset=") else ""


def holds_any(folder: Path) -> bool:
    """True if the folder exists and is not empty; hidden files (macOS leaves some) do not count."""
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def require_inside(path: Path, folder: Path) -> Path:
    """Return where a file lies; refuse a link, or `..`, out of the folder, or a link to itself."""
    try:
        real = path.resolve()
        home = folder.resolve()
    except (OSError, RuntimeError):  # which of them depends on Python's version
        raise UserError(f"{path}: is a link to itself; put the file itself there.") from None
    if not real.is_relative_to(home):
        what = "is a link that leads" if path.is_symlink() else "leads"
        raise UserError(f"{path}: {what} out of {folder}; put the file itself there.")
    return real


def visible_files(folder: Path) -> list[Path]:
    """List what is in a folder, sorted by name, without hidden files (macOS leaves some)."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def list_files(
    folder: Path,
    home: Path,
    is_expected: Callable[[Path], bool],
    rule: str,
) -> list[Path]:
    """List the files of a folder by name; none is opened.

    Args:
        home: the data set's folder, out of which no link may lead.
        is_expected: whether a file belongs there.
        rule: what is wrong with one that does not, in words that follow its name.

    Raises:
        UserError: a file leads elsewhere, or does not belong there.
    """
    paths = visible_files(folder)
    for path in paths:
        require_inside(path, home)
        with reading(path):
            expect(is_expected(path), rule)
    return paths


def require_distinct(
    paths: Iterable[Path],
    key: Callable[[Path], str],
    what: str,
) -> None:
    """Reject two files with one key: they are the same of a kind, such as a volume or clip."""
    first: dict[str, Path] = {}
    for path in paths:
        other = first.setdefault(key(path), path)
        if other != path:
            raise UserError(
                f"{path}: is the same {what} as {other.parent.name}/{other.name}; each may occur "
                "once, so remove one of them."
            )


def check_files(root: Path, of: Card) -> Iterator[tuple[Path, str]]:
    """Yield every file with a published checksum and what is wrong with it: '' for nothing.

    Where there are no checksums, what a run needs and does not find.
    """
    expected = {root / file.path: file for file in of.files}

    def check(path: Path) -> None:
        if not path.is_file():
            raise UserError(f"{path}: is missing. Run `zdp-bench data fetch {of.name}`.")
        verify(path, expected[path], of.name)

    yield from try_each(expected, check)
    if not of.files and not has_files(root, of):
        yield root / of.holds, str(absent(root / of.holds, of.name))


def fetch(root: Path, of: Card) -> list[Path]:
    """Download the missing files, check their MD5, and put each in place only when it is whole."""
    import pooch
    import requests

    wanted = missing(root, of)
    if not of.address and not has_files(root, of):
        raise UserError(
            f"dataset '{of.name}' is not under {root}, and cannot be downloaded. {tell_source(of)}"
        )
    for file in wanted:
        target = root / file.path
        _make(target.parent)
        log.info("fetching %s from %s", target.name, of.address)
        try:
            pooch.retrieve(
                f"{of.address}/{target.name}",
                known_hash=f"md5:{file.md5}",
                fname=target.name,
                path=target.parent,
                downloader=pooch.HTTPDownloader(timeout=20),
            )
            continue
        except ValueError:  # pooch deletes what does not match
            reason = f"what {of.address} sent for {target.name} does not match its MD5 {file.md5}"
        except (requests.RequestException, ConnectionError, TimeoutError) as error:
            reason = f"{of.address} could not be reached ({type(error).__name__})"
        except OSError as error:
            raise _unwritable(target.parent, error) from None
        names = ", ".join(Path(lacking.path).name for lacking in missing(root, of))
        raise UserError(
            f"dataset '{of.name}' lacks {names} in {target.parent}, and {reason}. Put the "
            "files there by hand, set another folder with paths.data=..., or try "
            f"`zdp-bench data fetch {of.name}` again."
        )
    return [root / file.path for file in wanted]


def _make(folder: Path) -> None:
    """Make a folder of the data root, and those above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> UserError:
    why = error.strerror or type(error).__name__
    return UserError(
        f"{folder}: cannot be written ({why}). Set paths.data, or --root, to a folder that you may "
        "write."
    )


@contextmanager
def write_whole(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to `folder` at the end: it is never half full.

    If another process was faster, its folder stays.
    """
    partial = name_partial(folder)
    _make(partial)
    try:
        yield partial
        with suppress(OSError):
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# --------------------------------------------------------------------- what cannot be read


def try_each(paths: Iterable[Path], read: Callable[[Path], object]) -> Iterator[tuple[Path, str]]:
    """Yield each path and the sentence that `read` refuses it with; '' for none."""
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
    """Yield each item with what `read` makes of it; without those that it refuses, if skipped."""
    for item in items:
        try:
            with advise_skipping():
                content = read(item)
        except UserError as error:
            if bad_examples == "refuse":
                raise
            log.warning("%s Skipped.", str(error).removesuffix(ADVICE))
        else:
            yield item, content


@contextmanager
def advise_skipping() -> Iterator[None]:
    """Add to the error for a file how to leave it out."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}{ADVICE}") from None


def count_parts(counts: Mapping[str, int]) -> str:
    """Return how many of what there are in each part that is not empty, for a note."""
    verbs = {"train": "train", "validation": "validate (public)", "test": "test"}
    return ", ".join(f"{count:,} to {verbs[part]}" for part, count in counts.items() if count)


def note_skipped(count: int) -> str:
    """Return a record's note on files that were left out; '' if there are none."""
    return f"{count:,} unusable skipped" if count else ""
