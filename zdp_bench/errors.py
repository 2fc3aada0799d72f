"""`UserError`, the exception for invalid input, and functions that word its sentence.

Everything that is wrong with what a person typed, configured or stored raises `UserError`. The
command line prints its sentence and exits with status 2. Any other exception is a bug, and shows
its traceback.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO

# package that only some runs need -> the extra that installs it
EXTRAS = {
    "SimpleITK": "itk",
    "flwr": "federated",
    "h5py": "medical",
    "mlflow": "mlflow",
    "nibabel": "medical",
    "opacus": "peers",
    "optuna": "search",
    "pydicom": "medical",
    "soundfile": "audio",
    "tensorboard": "tensorboard",
    "timm": "representations",
    "wandb": "wandb",
    "wfdb": "medical",
}
MAX_LISTED = 24  # names that a sentence lists
MAX_NEAREST = 5  # names that it lists if more than MAX_LISTED are allowed
# What the messages for memory that ran out contain: those of the GPU, of torch and of the linker.
NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "failed to map segment",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# Characters that move a terminal's cursor, rename its window or reverse its text; tabs and line
# breaks are not among them.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
LONG_NUMBER = re.compile(r"(\d{12})\d{49,}")  # more digits than any meaningful number has


class UserError(Exception):
    """Invalid input, explained in one sentence: what is wrong, where, and what to do.

    The sentence may quote untrusted text. Line breaks are removed, control characters replaced and
    very long numbers truncated, so that it stays one printable line.
    """

    def __init__(self, sentence: str = "") -> None:
        on_one_line = printable(re.sub(r"\s*[\r\n]+\s*", " ", sentence))
        super().__init__(LONG_NUMBER.sub(lambda n: f"{n[1]}… ({len(n[0])} digits)", on_one_line))


def print_message(sentence: str) -> None:
    """Print a sentence to standard error.

    If there is none, it is closed, its disk is full or its reader has ended, this and all that
    follows is lost, but raises no error, so that the process still ends with its exit code.
    """
    if sys.stderr is None:  # for which `print` would take standard output
        return
    try:
        print(f"zdp-bench: {sentence}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Discard buffered output, which Python would otherwise try to write again when it exits."""
    # A closed stream, or one without a file, as in a notebook, has nothing that is written again.
    with suppress(OSError, ValueError, AttributeError):
        descriptor = stream.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory ran out, on the GPU or on the CPU."""
    has_code = isinstance(error, OSError) and error.errno == errno.ENOMEM
    has_message = any(message in str(error) for message in NO_MEMORY)
    return has_code or has_message or isinstance(error, MemoryError)


def printable(text: str) -> str:
    """Replace each control character by a question mark, so that a terminal can show the text."""
    return CONTROL.sub("?", text)


def show_warnings() -> None:
    """Print warnings of all packages to standard error, unless logging is already configured."""
    plain = logging.StreamHandler()
    plain.setLevel(logging.WARNING)
    logging.basicConfig(format="%(message)s", handlers=[plain])
    # It warns "No CUDA runtime is found" on machines with CUDA's toolkit but no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


# True while Python code calls the library, False for the command line and recipes.
_FOR_PYTHON = ContextVar("_FOR_PYTHON", default=False)


@contextmanager
def for_python() -> Iterator[None]:
    """Make errors that are raised inside name settings as Python arguments."""
    token = _FOR_PYTHON.set(True)
    try:
        yield
    finally:
        _FOR_PYTHON.reset(token)


def is_for_python() -> bool:
    """Return True if errors should name settings as Python arguments."""
    return _FOR_PYTHON.get()


def setting_name(key: str) -> str:
    """Return a setting's name: its key, such as `algorithm.gamma`, or in Python `gamma`."""
    return key.rpartition(".")[2] if is_for_python() else key


def setting(key: str, value: object) -> str:
    """Return a setting as its user writes it.

    That is `algorithm.noise=circular` or, in Python, `noise="circular"`.
    """
    if not is_for_python():
        shown = "null" if value is None else str(value)
    elif isinstance(value, str):
        shown = f'"{value}"'
    else:
        shown = str(value)
    return f"{setting_name(key)}={shown}"


class Busy(UserError):  # noqa: N818 - a state of a run, not a fault
    """Another process is carrying out this run."""


def suggestion(word: str, allowed: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?`, or an empty string if no allowed name is similar.

    The first of these that exists is suggested: the same name in other letter case, a dotted name
    that ends in the word (`optimizer.lr` for `lr`), a longer name that contains it (`chest_xray`
    for `chest`), its initials (`optimizer.lr` for `optimizer.learning_rate`), and the closest
    spelling.
    """
    options = list(allowed)
    near = [option for option in options if option.lower() == word.lower()]
    near = near or [option for option in options if option.endswith(f".{word}")]
    near = near or _containing(word, options)
    near = near or _abbreviating(word, options)
    near = near or difflib.get_close_matches(word, options, n=1, cutoff=0.55)
    return f" Did you mean '{near[0]}'?" if near else ""


def _containing(word: str, options: Iterable[str]) -> list[str]:
    """Return the options that contain a word of at least three letters, best first.

    Options that begin with the word come first, then shorter ones.
    """
    if len(word) < 3:
        return []
    containing = [option for option in options if word in option]
    return sorted(containing, key=lambda option: (not option.startswith(word), len(option), option))


def _abbreviating(word: str, options: Iterable[str]) -> list[str]:
    """Return the options whose last part has the initials of the word's last part, as `lr` has."""
    prefix, dot, name = word.rpartition(".")
    initials = "".join(part[0] for part in name.split("_") if part)
    if len(initials) < 2:
        return []
    abbreviated = f"{prefix}{dot}{initials}"
    return [option for option in options if f".{option}".endswith(f".{abbreviated}")]


def unknown(what: str, word: str, allowed: Iterable[str]) -> UserError:
    """Return the error for a name that is not among the allowed ones.

    It lists the allowed names, or the nearest of them if there are many.

    Args:
        what: what the name stands for, such as "model".
        word: the name.
        allowed: the allowed names.
    """
    options = sorted(allowed)
    hint = suggestion(word, options)
    if len(options) <= MAX_LISTED:
        return UserError(
            f"{what} '{word}' is not known.{hint} Allowed: {', '.join(options) or 'none'}."
        )
    nearest = _containing(word, options)
    nearest += difflib.get_close_matches(word, options, MAX_NEAREST, cutoff=0)
    nearest = list(dict.fromkeys(nearest))[:MAX_NEAREST]
    return UserError(
        f"{what} '{word}' is not known.{hint} The nearest of {len(options)}: {', '.join(nearest)}."
    )


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """Reject a configured value unless a condition holds.

    For example, `require(x > 0, "trainer.epochs", x, "must be positive")`.

    Args:
        condition: the condition.
        key: dotted key of the setting.
        value: value of the setting.
        rule: what is wrong if the condition does not hold, worded to follow the setting.

    Raises:
        UserError: The condition does not hold.
    """
    if not condition:
        raise UserError(f"{setting(key, value)}: {rule}.")


def wrong_type(name: str, value: object, expected: str, instead: str) -> UserError:
    """Return the error for an argument of a wrong type.

    Args:
        name: name of the argument.
        value: its value, of which only the type is stated.
        expected: what is required, such as "a torch.nn module".
        instead: what to write instead.
    """
    given = f"a value of type {type(value).__name__}"
    if isinstance(value, type):
        given = f"the class {value.__name__}"
    return UserError(f"{name}: {given} was given, but {expected} is required: {instead}.")


def explain_missing(error: ImportError) -> UserError | None:
    """Return the sentence for a package of an extra, or for file locks on Windows.

    None if the import failed for another reason.
    """
    package = (error.name or "").partition(".")[0]
    if package == "fcntl":
        return UserError(
            "this needs the file locks of a POSIX system (fcntl), which Windows does not have: "
            "use WSL, or the Dockerfile's image."
        )
    if package not in EXTRAS:
        return None
    extra = EXTRAS[package]
    return UserError(
        f"this needs {package}, which is not installed: `pip install 'zdp-bench[{extra}]'`."
    )


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its type's name, as a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".") + "."


def in_one_line(error: Exception) -> str:
    """Return an exception's message on one line, without full stop, cut to 300 characters."""
    return " ".join(str(error).split())[:300].rstrip(".")
