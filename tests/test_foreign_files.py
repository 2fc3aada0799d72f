"""Files of strangers are read within limits, or refused at once and in one sentence."""

import errno
import json
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from zdp_bench import assets
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import (
    MAX_TEXT,
    Unavailable,
    Unfit,
    compile_pattern,
    exists,
    is_file,
    read_bytes,
    read_json,
    read_text,
    read_yaml,
    reading,
    resolve,
)


def test_only_what_is_certainly_missing_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for path, there, regular in [
        (tmp_path, True, False),
        (tmp_path / "file", True, True),
        (tmp_path / "file/below", False, False),
        (tmp_path / "loop", False, False),
        (tmp_path / "null\0", False, False),
        (tmp_path / "missing", False, False),
    ]:
        assert (exists(path), is_file(path)) == (there, regular)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        for look in (exists, is_file):
            with pytest.raises(PermissionError):
                look(tmp_path / "file")
        refusal = pytest.raises(UserError, match=r"cannot be read \(Permission denied\)")
        with refusal, reading(tmp_path / "file"):
            pass


@pytest.mark.parametrize(
    ("error", "is_about_file"),
    [
        (MemoryError("out of memory"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (OSError(errno.ESTALE, "Stale file handle"), False),
        (OSError("image file is truncated"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (OSError(errno.EINVAL, "Invalid argument"), True),
        (ValueError("bad magic"), True),
    ],
)
def test_what_the_system_refuses_is_not_the_file_s_fault(
    tmp_path: Path, error: Exception, is_about_file: bool
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught, reading(tmp_path / "file"):
        raise error
    assert isinstance(caught.value, Unavailable) != is_about_file


def test_too_many_open_files_are_seen_behind_a_library_s_own_error(tmp_path: Path) -> None:
    """libsndfile says "System error"."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    (tmp_path / "file").touch()

    def fail() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        raise RuntimeError("System error.")

    try:
        with pytest.raises(Unavailable, match="Too many open files"), reading(tmp_path / "file"):
            fail()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_links_are_resolved_unless_one_leads_to_itself(tmp_path: Path) -> None:
    home = tmp_path.resolve()
    (home / "loop").symlink_to("loop")
    (home / "link").symlink_to("folder/file")
    assert resolve(home / "link") == home / "folder/file"  # which is missing
    for path in (home / "loop", home / "loop/below"):
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            resolve(path)


LEVELS = "abcdefghi"
TEN = [", ".join([f"*{before}"] * 10) for before in LEVELS]
GROWING = "a: &a [1]\n" + "".join(
    f"{name}: &{name} [{inner}]\n" for name, inner in zip(LEVELS[1:], TEN, strict=False)
)
MERGING = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{inner}]}}\n" for name, inner in zip(LEVELS[1:], TEN, strict=False)
)
HOSTILE = {
    "growing": GROWING,
    "merging": MERGING,
    "of itself": "a: &a [*a]",
    "in itself": "a: &a {b: {c: *a}}",
    "deep": "[" * 3000,
    "deep mappings": "".join(f"{' ' * level}a:\n" for level in range(300)),
    "wide": f"a: [{', '.join('1' * 50_000)}]",
    "large": "#" * (MAX_TEXT + 1),
    "twice": "seed: 1\nmodel: {a: 1, a: 2}\n",
    "object": "a: !!python/object/apply:os.system [id]",
    **{
        f"tag {tag}": f"a: !!{tag} '{text}'"
        for tag, text in (("bool", "maybe"), ("timestamp", "x"), ("int", ""), ("float", ""))
    },
    "no character": r'a: "\UFFFFFFFF"',
    "sexagesimal": f"a: 1{':00' * 3000}.0",
    "date": "a: [2024-01-01]",
    "key of bytes": "? !!binary YQ==\n: 1\n",
    "key of a list": "? [1]\n: 1\n",
    "key of null": "a: {null: 1}",
    "key of nothing": "a:\n  : 1\n",
    "key of true": "a: {true: 1}",
    "key of false": "off: 1\n",
    "digits": "a: " + "9" * 5000,
    "two": "a: 1\n---\nb: 2\n",
    "unclosed": "a: [",
    "control": "a: \x01",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_yaml_is_refused_at_once(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    begun = time.process_time()
    with pytest.raises(UserError, match=r"a\.yaml: .*\.$"):
        read_yaml(path)
    assert time.process_time() - begun < 10


def test_all_our_yaml_is_read_as_it_was(tmp_path: Path) -> None:
    ours = [
        path
        for folder in (assets.CONF, assets.DATASETS, assets.PAPERS, assets.RECIPES)
        for path in folder.rglob("*.yaml")
    ]
    for path in ours:
        assert read_yaml(path) == yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    anchored = tmp_path / "anchored.yaml"
    anchored.write_text("a: &a {x: [1, null]}\nb: {<<: *a, y: 2.5}\nc: *a\n", encoding="utf-8")
    assert read_yaml(anchored) == {
        "a": {"x": [1, None]},
        "b": {"x": [1, None], "y": 2.5},
        "c": {"x": [1, None]},
    }
    anchored.write_text("", encoding="utf-8")
    assert read_yaml(anchored) is None


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, json.dumps([1]).replace("1", "[" * 50 + "]" * 50), ""]
)
def test_a_hostile_json_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.json: .*\.$"):
        read_json(path)


def test_only_regular_files_of_text_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes").write_bytes(b"a: \xff")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "large").write_bytes(b"a" * 11)
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path)  # the path of a socket must be short
        listener.bind("socket")
    for name in ("fifo", "device", "folder", "socket", "bytes", "round", "large", "missing"):
        with pytest.raises(UserError, match=rf"{name}: .*\.$"):
            read_text(tmp_path / name, 10)
    with pytest.raises(UserError, match="socket: is not a regular file"):
        read_bytes(tmp_path / "socket", 10)
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "plain").write_text("ε", encoding="utf-8")
    assert read_text(tmp_path / "link", 2) == "ε"


CONTROLS = [chr(code) for code in range(32) if chr(code) not in "\t\n\v\f\r"]


@pytest.mark.parametrize("control", CONTROLS, ids=repr)
@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_text, "plain 10{}0\n"),
        (read_yaml, "gain: 10{}0\n"),
        (read_yaml, "# a comment{}\ngain: 100\n"),
        (read_json, '{{"gain": "10{}0"}}'),
        (read_json, '{{"gain": 100}}\n{}'),
    ],
)
def test_no_text_with_a_control_character_is_parsed(
    read: Callable[[Path], object], text: str, control: str, tmp_path: Path
) -> None:
    """One parser drops it, so that 10<NUL>0 is 100, and the next stops there."""
    path = tmp_path / "a.txt"
    path.write_text(text.format(control), encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.txt: .*control character"):
        read(path)


@pytest.mark.parametrize(
    ("pattern", "text", "matched"),
    [
        ("^(p[0-9]+)_", "p12_scan.nii", "p12"),
        (r"sub-(\w{2,4})[_.]", "a sub-0007_x", "0007"),
        (r"(?:left|right)\+([^/]+?)\.", "left+ab.png", "ab"),
        (r"[]x]([^]]*)\]", "]a]", "a"),
        (r".*(NORM|IMI).*", "x\nIMI", "IMI"),
        (r"^(sub-\d+)_ses-\d+_run-\d+[.]", "sub-07_ses-1_run-2.nii", "sub-07"),
        (r"^(a|b|c|d|e|f|g|h|i|j)_?x{3}", "h_xxx", "h"),
    ],
)
def test_a_simple_regular_expression_is_taken(pattern: str, text: str, matched: str) -> None:
    match = compile_pattern(pattern).search(text)
    assert match
    assert match[1] == matched


SLOW = [r"((\w+)+)+!", "(a|a)*!", "(a*)*", "(?:a?){30}a{30}", r"(a+)\1+!", "(?=(a+))+", "x*" * 5]
SLOW += ["a?" * 26 + "a" * 26, "(a|a)" * 26 + "!", "a|" * 30 + "(a|a)" * 26, r"\\+" * 8 + "x"]
SLOW += ["a{0,9}" * 9, "a{2,}" * 5, "^a*|a*a*a*", "[]" * 60 + "(?", "[]" * 60 + "*{"]
SLOW += ["(" * 3000 + ")" * 3000, "a*" * 100_000]


@pytest.mark.parametrize("pattern", [*SLOW, "(", "a{2", "[a", "(?i)a", "*a", "a**", "\\"])
def test_a_regular_expression_that_may_hang_or_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(Unfit, match=r"is not a (simple )?regular expression"):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["^a*a*a*!", "a*?a*?!", "a?" * 13 + "!", "(a|a)" * 13 + "!", "^(a|a|a)a*a*?(a|a)!"]
)
def test_the_slowest_patterns_that_are_taken_match_any_name_in_seconds(pattern: str) -> None:
    start = time.process_time()
    compile_pattern(pattern).search("a" * 255)
    assert time.process_time() - start < 5


@given(st.text("ab1.\\w[]^-()|*+?{},", max_size=14), st.text("ab1", max_size=255))
def test_what_is_taken_matches_fast(pattern: str, text: str) -> None:
    try:
        compiled = compile_pattern(pattern)
    except Unfit:
        return
    start = time.process_time()
    compiled.search(text + "!")
    compiled.fullmatch(text + "!")
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError("Unable to allocate 3 GiB"), "MemoryError: Unable to allocate 3 GiB"),
        (RuntimeError("you can't allocate memory"), "RuntimeError: you can't allocate memory"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
    ],
)
def test_what_the_system_refuses_is_not_the_files_fault(
    tmp_path: Path, error: Exception, says: str
) -> None:
    """Users were told that an intact file was damaged."""
    path = tmp_path / "a.npz"
    path.touch()
    with pytest.raises(UserError) as refused, reading(path):
        raise error
    assert str(refused.value) == f"{path}: cannot be read ({says})."
