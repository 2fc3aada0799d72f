"""The one error a user is meant to read: a sentence that says what is wrong, where, and what to do.

Everything that can be wrong with what a person typed, configured or stored raises `UserError`; the command line prints its
sentence and exits with 2. Any other exception is a bug of ours and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LISTED = 24  # names that a sentence may hold and still be read


class UserError(Exception):
    """Bad input, told in one sentence a tired person can act on."""


class Busy(UserError):  # noqa: N818 - a state of a run, not a fault
    """Another process is at this very run."""


def suggestion(word: str, allowed: Iterable[str]) -> str:
    """The nearest right spelling as ` Did you mean 'x'?`, or an empty string when nothing is near."""
    near = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.55)
    return f" Did you mean '{near[0]}'?" if near else ""


def unknown(what: str, word: str, allowed: Iterable[str]) -> UserError:
    """The error for a name that is not among `allowed`: it suggests the nearest, and lists them all where they are few."""
    options = sorted(allowed)
    near = suggestion(word, options)
    if len(options) <= LISTED:
        return UserError(
            f"{what} '{word}' is not known.{near} Allowed: {', '.join(options) or 'none'}."
        )
    if near:
        return UserError(
            f"{what} '{word}' is not known.{near} There are {len(options)}; `zdp-bench list` shows what there is."
        )
    alike = sorted(
        options, key=lambda option: -difflib.SequenceMatcher(None, word, option).ratio()
    )[: LISTED // 2]
    return UserError(
        f"{what} '{word}' is not known. The nearest of {len(options)}: {', '.join(alike)}."
    )


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """Refuse a configured value: `require(x > 0, "algorithm.max_grad_norm", x, "must be positive")`.

    Raises:
        UserError: the condition does not hold.
    """
    if not condition:
        raise UserError(f"{key}={'null' if value is None else value}: {rule}.")


def first_line(error: Exception) -> str:
    """What another library's exception says, as a sentence: its first line, or its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".") + "."
