"""The error for users: one sentence that says what is wrong, where, and what to do.

Whatever is wrong with what a person typed, configured or stored raises `UserError`; the command
line prints its sentence and exits with 2. Any other exception is a bug and shows its traceback.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# What only some runs need, and the extra that brings it.
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
LISTED = 24  # the most names in a sentence
NEAREST = 5  # of more
# What moves a terminal's cursor, names its window or turns its text around; no tab, no line break.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
LONG_NUMBER = re.compile(r"(\d{12})\d{49,}")  # longer than any that means something


class UserError(Exception):
    """Invalid input, explained in one sentence: what is wrong, where, and what to do.

    What it quotes may hold line breaks, control characters or hundreds of digits: it stays on one
    line, is printable, and a number is cut.
    """

    def __init__(self, sentence: str = "") -> None:
        on_one_line = printable(re.sub(r"\s*[\r\n]+\s*", " ", sentence))
        super().__init__(LONG_NUMBER.sub(lambda n: f"{n[1]}… ({len(n[0])} digits)", on_one_line))


def printable(text: str) -> str:
    """Return a text for a terminal: a question mark in the place of each control character."""
    return CONTROL.sub("?", text)


def show_warnings() -> None:
    """Print warnings of any package as plain lines on standard error, unless logging is set up."""
    plain = logging.StreamHandler()
    plain.setLevel(logging.WARNING)
    logging.basicConfig(format="%(message)s", handlers=[plain])
    # "No CUDA runtime is found", where there is CUDA's toolkit and no GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


# Whether the reader of an error called Python, rather than typed a command or wrote a recipe.
_FOR_PYTHON = ContextVar("_FOR_PYTHON", default=False)


@contextmanager
def for_python() -> Iterator[None]:
    """Name settings as arguments in the errors that are raised inside."""
    before = _FOR_PYTHON.set(True)
    try:
        yield
    finally:
        _FOR_PYTHON.reset(before)


def is_for_python() -> bool:
    """Return True if errors are read by who called Python."""
    return _FOR_PYTHON.get()


def setting_name(key: str) -> str:
    """Return a setting's key as its reader knows it: `algorithm.gamma`, in Python `gamma`."""
    return key.rpartition(".")[2] if is_for_python() else key


def setting(key: str, value: object) -> str:
    """Return a setting as its reader gives it: `algorithm.noise=circular`, `noise="circular"`."""
    if not is_for_python():
        shown = "null" if value is None else str(value)
    elif isinstance(value, str):
        shown = f'"{value}"'
    else:
        shown = str(value)
    return f"{setting_name(key)}={shown}"


class Busy(UserError):  # noqa: N818 - a state of a run, not a fault
    """Another process carries out this run."""


def suggestion(word: str, allowed: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?`, or an empty string if nothing is near.

    Near is a name in other letter case, a dotted name that ends in the word (`lr`: `optimizer.lr`),
    a longer name that contains it (`chest`: `chest_xray`), or the nearest spelling.
    """
    options = list(allowed)
    near = [option for option in options if option.lower() == word.lower()]
    near = near or [option for option in options if option.endswith(f".{word}")]
    near = near or _containing(word, options)
    near = near or difflib.get_close_matches(word, options, n=1, cutoff=0.55)
    return f" Did you mean '{near[0]}'?" if near else ""


def _containing(word: str, options: Iterable[str]) -> list[str]:
    """Return the options that begin with a word of three letters or more, or contain it."""
    found = [option for option in options if len(word) > 2 and word in option]
    return sorted(found, key=lambda option: (not option.startswith(word), len(option), option))


def unknown(what: str, word: str, allowed: Iterable[str]) -> UserError:
    """Return the error for a name that is not among `allowed`, with the nearest or all of them."""
    options = sorted(allowed)
    near = suggestion(word, options)
    if len(options) <= LISTED:
        return UserError(
            f"{what} '{word}' is not known.{near} Allowed: {', '.join(options) or 'none'}."
        )
    alike = _containing(word, options) + difflib.get_close_matches(word, options, NEAREST, cutoff=0)
    alike = list(dict.fromkeys(alike))[:NEAREST]
    return UserError(
        f"{what} '{word}' is not known.{near} The nearest of {len(options)}: {', '.join(alike)}."
    )


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """Reject a configured value: `require(x > 0, "trainer.epochs", x, "must be positive")`."""
    if not condition:
        raise UserError(f"{setting(key, value)}: {rule}.")


def explain_missing(error: ImportError) -> UserError | None:
    """Return the sentence for what is not installed: a package of an extra, or locks on Windows.

    None for any other.
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
    """Return the first line of an exception's text as a sentence, or its name if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".") + "."


def in_one_line(error: Exception) -> str:
    """Return an exception's whole text on one line of at most 300 characters, without its stop."""
    return " ".join(str(error).split())[:300].rstrip(".")
