"""The data root and the files in it: where they should be, whether they are the right ones, and how to get them."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from zdp_bench import assets
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.registry import lookup, names

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFile:
    """One file of a release: its path under the data root, size in bytes, MD5, and its name under a mirror."""

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
    holds: str = ""  # a pattern under the data root of what is there if anything is, where no list of files was published
    stand_in: str = ""  # overrides that put generated data in its place, small, for `zdp-bench reproduce --profile smoke`
    mirrors: tuple[str, ...] = ()
    files: tuple[RemoteFile, ...] = field(default_factory=tuple)
    releases: dict[str, dict[str, str]] = field(
        default_factory=dict
    )  # release -> file name -> "md5:...", "sha1:..."
    windows: dict[str, list[float]] = field(
        default_factory=dict
    )  # task -> intensities that are shown as black and white


def card(name: str) -> Card:
    """The card of a data set.

    Raises:
        UserError: there is no such card.
    """
    cards = assets.group(assets.DATASETS)
    if name not in cards:
        raise unknown("dataset", name, cards)
    body: dict[str, Any] = dict(assets.read_yaml(cards[name])["card"])
    files = tuple(RemoteFile(**file) for file in body.pop("files", []))
    return Card(name=name, files=files, mirrors=tuple(body.pop("mirrors", [])), **body)


def cards() -> list[Card]:
    """Every card, by name."""
    return [card(name) for name in assets.group(assets.DATASETS)]


def md5(path: Path) -> str:
    """MD5 of a file, in hex: what the releases publish; a guard against damage, not against an attacker."""
    return checksum(path, "md5").removeprefix("md5:")


def checksum(path: Path, algorithm: str) -> str:
    """A file's checksum by any of hashlib's algorithms, named: "sha1:67eb…"."""
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()}"


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return checksum(path, "sha256").removeprefix("sha256:")


def verify(path: Path, expected: RemoteFile, dataset: str) -> None:
    """Refuse a file that is not the released one.

    Raises:
        UserError: size or checksum differ; the sentence names the file and what to do.
    """
    advice = (
        f"Delete it and run `zdp-bench data fetch {dataset}`, or set paths.data to another folder."
    )
    size = path.stat().st_size
    if size != expected.bytes:
        raise UserError(f"{path}: {size:,} bytes where {expected.bytes:,} were expected. {advice}")
    if (found := md5(path)) != expected.md5:
        raise UserError(
            f"{path}: MD5 {found} where {expected.md5} was expected, so it is not the released file. {advice}"
        )


def missing(root: Path, of: Card) -> list[RemoteFile]:
    """The files of a card that are not under the root."""
    return [file for file in of.files if not (root / file.path).is_file()]


def within(root: Path, folder: str) -> Path:
    """A folder that a person named as `dataset.folder`, under the data root. The root's own links may lead elsewhere.

    Raises:
        UserError: the name leads out of the root.
    """
    inside = Path(os.path.normpath(root / folder)).is_relative_to(os.path.normpath(root))
    require(
        inside,
        "dataset.folder",
        folder,
        f"must be a folder under the data root {root}; paths.data names another root",
    )
    return root / folder


def has_files(root: Path, of: Card) -> bool:
    """Whether a card's own files are under the root, all that are listed, or any where none are; generated sets always are."""
    return not missing(root, of) and (not of.holds or any(True for _ in root.glob(of.holds)))


def origin(of: Card) -> str:
    """Where a set comes from that is not fetched, and what to do with it."""
    return f"It comes from {of.source}. {of.access}".strip()


def holds_any(folder: Path) -> bool:
    """Whether there is such a folder and something in it; what macOS hides does not count."""
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def inspected(root: Path, of: Card) -> Iterator[tuple[Path, str]]:
    """Every file of a card, and what is wrong with it: '' for nothing.

    Files with published checksums are held to them. Where there are none, the adapter reads file by file, by a function under
    `@register("check", NAME)`: (data root) -> the same pairs.
    """
    for file in of.files:
        path = root / file.path
        try:
            if not path.is_file():
                raise UserError(f"{path}: is missing. Run `zdp-bench data fetch {of.name}`.")
            verify(path, file, of.name)
            yield path, ""
        except UserError as error:
            yield path, str(error)
    if not has_files(root, of):
        if not of.files:
            yield root / of.holds, f"{root / of.holds}: is missing. {origin(of)}"
    elif of.name in names("check"):
        try:
            yield from lookup("check", of.name)(root)
        except UserError as error:  # of the whole set
            yield root / of.holds, str(error)


def fetch(root: Path, of: Card, mirror: str | None = None) -> list[Path]:
    """Download what is missing, check it against its MD5, and put it in place only when it is whole.

    Args:
        mirror: a base address instead of the card's own; HTTPS, or a server on this machine.

    Raises:
        UserError: the data set is not to be downloaded freely, no mirror can be reached, or what came is damaged.
    """
    import pooch
    import requests

    wanted = missing(root, of)
    mirrors = (mirror,) if mirror else of.mirrors
    if not mirrors and not has_files(root, of):
        raise UserError(
            f"dataset '{of.name}' is not under {root}, and has no download of its own. {origin(of)}"
        )
    for address in mirrors:
        if urlsplit(address).scheme != "https" and urlsplit(address).hostname not in (
            "127.0.0.1",
            "localhost",
            "::1",
        ):
            raise UserError(f"mirror '{address}' is not HTTPS; data is fetched over HTTPS only.")
    done = []
    reason = ""
    for file in wanted:
        target = root / file.path
        _make(target.parent)
        for address in mirrors:
            try:
                log.info("fetching %s from %s", target.name, address)
                pooch.retrieve(
                    address.rstrip("/") + "/" + target.name,
                    known_hash=f"md5:{file.md5}",
                    fname=target.name,
                    path=target.parent,
                    downloader=pooch.HTTPDownloader(timeout=20),
                )
                done.append(target)
                break
            except ValueError:  # pooch deletes what does not match
                reason = f"what {address} sent for {target.name} does not match its MD5 {file.md5}"
            except (requests.RequestException, ConnectionError, TimeoutError) as error:
                reason = f"{address} could not be reached ({type(error).__name__})"
            except OSError as error:
                raise _unwritable(target.parent, error) from None
        else:
            names = ", ".join(Path(f.path).name for f in missing(root, of))
            raise UserError(
                f"dataset '{of.name}' lacks {names} in {target.parent}, and {reason}. Put the files there by hand, name another "
                f"folder with paths.data=..., or try `zdp-bench data fetch {of.name}` again."
            )
    return done


def _make(folder: Path) -> None:
    """Make a folder of the data root, and those above it.

    Raises:
        UserError: they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> UserError:
    why = error.strerror or type(error).__name__
    return UserError(
        f"{folder}: cannot be written ({why}). Set paths.data, or --root, to a folder that you may write."
    )


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A folder to fill beside `folder`, which takes its place at the end: nobody ever sees it half full.

    Where another process was first, what it made stands.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    _make(partial)
    yield partial
    try:
        os.replace(partial, folder)
    except OSError:
        shutil.rmtree(partial)
