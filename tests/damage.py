"""Damage to files: other values in their JSON, other bytes, something else in their place."""

import json
import os
import random
import re
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from zdp_bench.errors import UserError

VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 3, 2**31, 10**9, 10**12, 2**63, 10**30, 10**400),
    *(0.5, -0.0, 1e-300, 1e308),
    *("", "inf", "-inf", "nan", "x", "ε" * 3000, "\ud800", "\x1b]0;a\x07", "${oc.env:HOME}", "???"),
    *([], {}, [1], [[]], [None], [10**7, 10**7], [10**10], {"": 1}, {"name": []}, [3] * 2000),
    *("float32", "bool", "nn", "complex128", "none", "/dev/zero", "../../x"),
]

WORDS = ["", "0", "-1", "1", "7", "1e30", "1e400", "9" * 30, "9" * 5000, "nan", "inf", "null"]
WORDS += ["true", "x", "'", '"', '""', ",", ";", ":", "- ", "&a", "*a", "!!python/name:os.system"]
WORDS += ["${seed}", "${oc.env:HOME}", "../../x", "/dev/zero", "ε" * 300, "\t", "{", "[", "]", " "]


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value within."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


def edit_values(body: Any, draw: random.Random) -> None:
    """Change, drop or add some values of a JSON document."""
    for _ in range(draw.choice([1, 1, 1, 3])):
        known = [(node, key) for node, key in places(body) if not isinstance(node, list) or node]
        if not known:
            return
        node, key = draw.choice(known)
        how = draw.randrange(8)
        if how == 0:
            del node[key]
        elif how == 1 and isinstance(node, dict):
            node[draw.choice(["x", "nodes", "start", "weights", "hydra"])] = deepcopy(
                draw.choice(VALUES)
            )
        elif how == 2 and isinstance(node[key], int | float):
            node[key] *= draw.choice([-1, 0, 1000, 10**9])
        else:
            node[key] = deepcopy(draw.choice(VALUES))


def replace_file(path: Path, draw: random.Random, largest: int = 1 << 36) -> None:
    """Put something else in the place of a file, of at most so many bytes."""
    path.unlink()
    links = ["/dev/zero", "/dev/random", "/dev/tty", path.name, "/none"]
    texts = ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "null", "[]"]
    makers: list[Callable[[], object]] = [
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(draw.choice(links)),
        lambda: path.mkdir(),
        lambda: path.write_bytes(draw.randbytes(draw.choice([0, 1, 100]))),
        lambda: path.write_text(draw.choice(texts)),
        lambda: (path.touch(), os.truncate(path, largest)),
    ]
    draw.choice(makers)()


def replace_ledger(path: Path, draw: random.Random) -> None:
    """Put something else in the place of a ledger, which is read however long it is."""
    replace_file(path, draw, 1 << 24)


def spoil_bytes(path: Path, draw: random.Random) -> None:
    """Flip, cut or double bytes of a file."""
    body = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 4])):
        place, how = draw.randrange(len(body)), draw.randrange(3)
        if how == 0:
            body[place] ^= 1 << draw.randrange(8)
        elif how == 1:
            del body[place : place + draw.choice([1, 100, 10**6])]
            body = body or bytearray(b"\xff")
        else:
            body[place:place] = draw.choice([b"\xff\xfe", b"\n", b"\x00", b"[" * 5000])
    path.write_bytes(body)


def spoil_head(path: Path, draw: random.Random) -> None:
    """Overwrite up to eight bytes near the beginning of a file, as with another number."""
    body = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 2])):
        place, count = draw.randrange(min(len(body), 512)), draw.choice([1, 1, 2, 4, 8])
        new = draw.choice([b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff", b"0", b"9", b"-"])
        body[place : place + count] = new * len(body[place : place + count])
    path.write_bytes(body)


def edit_text(path: Path, draw: random.Random) -> None:
    """Change words of a text, or drop, repeat, swap or cut its lines."""
    lines = path.read_text().splitlines()
    number, how = draw.randrange(len(lines)), draw.randrange(7)
    if how == 0:
        del lines[number]
    elif how == 1:
        lines.insert(number, lines[draw.randrange(len(lines))])
    elif how == 2:
        lines[number] = lines[number][: draw.randrange(len(lines[number]) + 1)]
    else:
        words = re.split(r"(\W+)", lines[number])
        words[draw.randrange(len(words))] = draw.choice(WORDS)
        lines[number] = "".join(words)
    path.write_text("\n".join(lines) + "\n")


def edit_lines(path: Path, draw: random.Random) -> None:
    """Change values in a line of a file of JSON lines, or drop, repeat or swap lines."""
    lines = path.read_text().splitlines()
    number, how = draw.randrange(len(lines)), draw.randrange(5)
    if how == 0:
        del lines[number]
    elif how == 1:
        lines.insert(number, lines[draw.randrange(len(lines))])
    else:
        body = json.loads(lines[number])
        edit_values(body, draw)
        lines[number] = json.dumps(body)
    path.write_text("\n".join(lines) + "\n")


def edit_json(path: Path, draw: random.Random) -> None:
    """Change, drop or add some values of a JSON file."""
    body = json.loads(path.read_text())
    edit_values(body, draw)
    text = json.dumps(body, indent=1)
    path.write_text(text.replace("NaN", '"nan"') if draw.random() < 0.5 else text)


class Hangs(BaseException):
    """A block takes too long. No `Exception`, which readers take for a fault of the file."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise `Hangs` inside after so many seconds of computing, or ten times as many of waiting."""

    def stop(*_: object) -> None:
        raise Hangs(f"longer than {seconds} s")

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def name_error(error: BaseException) -> str:
    """Return an error in short, with the file and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-2 if isinstance(error, Hangs) else -1]
    return f"{error!r:.200} {last.filename}:{last.lineno}"


SECONDS = 60  # for one file; the ε of a billion steps takes 25
Damage = Callable[[Path, random.Random], None]
BYTES: list[Damage] = [spoil_bytes, spoil_bytes, spoil_head, spoil_head, replace_file]
TEXT: list[Damage] = [*[edit_text] * 4, spoil_bytes, replace_file]
JSON: list[Damage] = [*[edit_json] * 4, spoil_bytes, replace_file]
LINES: list[Damage] = [*[edit_lines] * 4, spoil_bytes, replace_ledger]


@dataclass(frozen=True)
class Subject:
    """Files, and what reads them.

    Attributes:
        write: writes sound files into an empty folder.
        damages: what is done to one of the files.
        read: reads a folder.
        files: pattern of the files that are damaged.
        holds: whether what was read of damaged files may be, given what was read of sound ones.
    """

    write: Callable[[Path], object]
    damages: list[Damage]
    read: Callable[[Path], Any]
    files: str = "*"
    holds: Callable[[Any, Any], bool] = field(default=lambda sound, damaged: True)


def equal(sound: Any, damaged: Any) -> bool:
    return bool(sound == damaged)


def seeds_of(config: pytest.Config, many: bool, few: int = 3) -> range:
    """Return the seeds of a test's damages: a few or, if `many`, as many as --damaged says."""
    if not many:
        return range(few)
    seed: int = config.getoption("seed")
    return range(seed, seed + (config.getoption("damaged") or few))


def attack(subject: Subject, place: Path, seeds: range) -> list[str]:
    """Return what reading did with the files of each seed that it must not."""
    sound = place / "sound"
    sound.mkdir(parents=True)
    subject.write(sound)
    first = Path(shutil.copytree(sound, place / "first"))
    expected = subject.read(first)
    failed: list[str] = []
    for seed in seeds:
        draw = random.Random(seed)
        damaged = Path(shutil.copytree(sound, place / f"{seed}"))
        files = [path for path in damaged.glob(subject.files) if path.is_file()]
        path = draw.choice(sorted(files))
        damage = draw.choice(subject.damages)
        try:
            damage(path, draw)
        except (ValueError, TypeError):  # the values do not fit one another
            continue
        what = ""
        try:
            with within(SECONDS):
                content = subject.read(damaged)
            if not subject.holds(expected, content):
                what = f"{content!r:.200} instead of {expected!r:.200}"
        except UserError as error:
            if len(str(error)) > 20_000 or "\n" in str(error):
                what = f"says {error!s:.200}"
        except BaseException as error:
            what = name_error(error)
        if what:
            failed.append(f"{seed} {damage.__name__} {path.name}: {what}")
        shutil.rmtree(damaged)
    return failed
