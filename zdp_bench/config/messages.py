"""What Hydra and OmegaConf refuse, in one sentence with the nearest right spelling."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from zdp_bench.config.compose import chosen, group_options, known_keys
from zdp_bench.config.plugins import no_such_key, own_keys
from zdp_bench.config.schema import GROUPS, PLUGINS
from zdp_bench.errors import UserError, first_line, suggestion, unknown

CHOICES = ("recipe", "launcher", *GROUPS)  # what a run has one of, by name


@contextmanager
def readable(overrides: list[str]) -> Iterator[None]:
    """Turn Hydra's and OmegaConf's exceptions into one sentence."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence(error, overrides)) from None
    except (ValueError, TypeError, AssertionError, AttributeError, KeyError, IndexError) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if not {"hydra", "omegaconf"} & set(
            Path(raised_in).parts
        ):  # a bug of ours, and shown as one
            raise
        if told := no_name(overrides):
            raise UserError(told) from None
        said = " ".join(overrides)
        raise UserError(
            f"'{said}' cannot be composed: {first_line(error)} Give groups a name and keys a value."
        ) from None


def no_override(word: str) -> str:
    """The sentence for a word that sets nothing."""
    return f"'{word}' is no override: write key=value, such as seed=1 or algorithm.noise_multiplier=0.8."


def unreadable(word: str) -> str:
    """The sentence for a word that Hydra's grammar does not take: it sets nothing, or its value cannot be read."""
    if not re.match(r"[+~]{0,2}\w+([./@]\w+)*=.", word):
        return no_override(word)
    return (
        f"{word}: its value cannot be read; close every bracket and quote, and put a text that has any of ()[]{{}}:,= in quotes "
        "within quotes, as in 'claims.row=\"A (b)\"'."
    )


def no_name(overrides: Sequence[str]) -> str | None:
    """The sentence for the first word that gives a group, or nothing at all, what is no name: `algorithm=3`, `=3`."""
    for word in overrides:
        group, _, name = word.lstrip("+").partition("=")
        if not group:
            return no_override(word)
        if group in CHOICES and name not in group_options(group):
            return str(unknown(group, name, group_options(group)))
    return None


def typed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """The keys and groups that a user's words set, as they are written: `algorithm.noise_multiplier`, `algorithm`.

    Raises:
        UserError: a group is given several names.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with readable(list(overrides)):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    for override in parsed:
        if override.key_or_group in CHOICES and isinstance(override.value(), list):
            raise UserError(
                f"{override.input_line}: a run has one {override.key_or_group}; name one, or sweep with -m."
            )
    return frozenset(str(override.key_or_group) for override in parsed)


def sentence(error: Exception, overrides: list[str]) -> str:
    """What Hydra meant, in one sentence with the nearest right spelling."""
    while not str(error).strip() and isinstance(error.__cause__, Exception):
        error = error.__cause__  # Hydra wraps some of its errors in one without words
    text = str(error)
    if isinstance(error, OverrideParseException):
        return unreadable(error.override)
    if match := re.search(r"Interpolation key '([^']+)' not found", text):
        where = getattr(error, "full_key", None) or "a value"
        return f"{where}: ${{{match[1]}}} names no key of the run.{suggestion(match[1], known_keys(overrides))}"
    if "Could not override ''" in text and (told := no_name(overrides)):
        return told
    if match := re.search(
        r"Multiple values for (\S+)\. To override a value use 'override \S+: ([^']+)'", text
    ):
        return f"+{match[1]}={match[2]}: a run has one {match[1]} already; leave the + out: {match[1]}={match[2]}."
    if match := re.search(r"Could not delete from config\. '([^']+)' does not exist", text):
        return f"~{match[1]}: there is no such key to take out.{suggestion(match[1], known_keys(overrides))}"
    if match := re.search(r"Could not delete (?:from config\. The value of )?'([^'=]+)", text):
        return f"~{match[1]}: takes out only the value that is there; to have another, write {match[1]}=VALUE."
    if match := re.search(r"Could not find '([^/']+)/+'", text):
        return f"{match[1]}= has no name. Allowed: {', '.join(group_options(match[1]))}."
    if match := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '([^']+)'", text):
        return f"{match[1]}: names several values; add -m, as in `zdp-bench run -m {match[1]}`, or give one."
    if match := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"+{match[1]}: is there already; leave the + out: {match[1]}=VALUE."
    if match := re.search(
        r"Value '(.*)' of type '\w+' could not be converted to (Integer|Float)", text
    ):
        kind = {"Integer": "a whole number", "Float": "a number"}[match[2]]
        return f"{getattr(error, 'full_key', None) or 'a key'}={match[1]}: must be {kind}."
    if match := re.search(r"Could not (?:find|load) '([^/']+)/+([^']+)'", text):
        return str(unknown(match[1], match[2], group_options(match[1])))
    if match := re.search(r"You must specify '(\w+)'", text):
        return f"{match[1]}=NAME is missing. Allowed: {', '.join(group_options(match[1]))}."
    if match := re.search(r"Could not override '([^']+)'", text):
        kind, _, key = match[1].partition(".")
        if kind in PLUGINS and key:
            names = chosen(overrides, kind)
            name = next((name for name in names if key not in own_keys(kind, name)), names[0])
            if key in own_keys(kind, name):  # torch has it, our YAML does not name it
                return f"key '{match[1]}' is not set by {kind}={name}: write +{match[1]}=... to add it."
            return no_such_key(kind, name, key)
        if kind in GROUPS and not key:
            return f"{kind}: name one with {kind}=NAME, or set one of its keys."
        if kind == "hydra":
            return f"key '{match[1]}' is not known: it is none of this launcher's; choose one beside it, such as launcher=joblib."
        keys = known_keys(overrides)
        return f"key '{match[1]}' is not known.{suggestion(match[1], keys)} `zdp-bench list keys` shows them all."
    return first_line(error)
