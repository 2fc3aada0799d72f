"""What Hydra and OmegaConf refuse, in one sentence with the nearest right spelling."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from zdp_bench.config.compose import find_chosen, group_options, known_keys
from zdp_bench.config.plugins import explain_unknown_key, own_keys
from zdp_bench.config.schema import GROUPS, PLUGINS
from zdp_bench.errors import UserError, first_line, suggestion, unknown

CHOICES = ("recipe", "launcher", *GROUPS)  # a run has one of each, by name


@contextmanager
def readable_errors(overrides: list[str]) -> Iterator[None]:
    """Turn Hydra's and OmegaConf's exceptions into one sentence."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, overrides)) from None
    except (ValueError, TypeError, AssertionError, AttributeError, KeyError, IndexError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not {"hydra", "omegaconf"} & set(raised_in.parts):  # a bug of ours, shown as one
            raise
        if sentence := _explain_name(overrides):
            raise UserError(sentence) from None
        raise UserError(
            f"'{' '.join(overrides)}' cannot be composed: {first_line(error)} "
            "Give groups a name and keys a value."
        ) from None


def typed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Return the keys and groups that overrides set: `algorithm.noise_multiplier`, `algorithm`.

    Raises:
        UserError: a group is given several names.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with readable_errors(list(overrides)):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    for override in parsed:
        group = override.key_or_group
        if group in CHOICES and isinstance(override.value(), list):
            raise UserError(
                f"{override.input_line}: a run has one {group}; name one, or sweep with -m."
            )
    return frozenset(str(override.key_or_group) for override in parsed)


def _explain_syntax(word: str) -> str:
    """Return the sentence for a word that Hydra's grammar does not take."""
    if not re.match(r"[+~]{0,2}\w+([./@]\w+)*=.", word):
        return (
            f"'{word}' is no override: write key=value, such as seed=1 or "
            "algorithm.noise_multiplier=0.8."
        )
    return (
        f"{word}: its value cannot be read; close every bracket and quote, and put a text that has "
        "any of ()[]{}:,= in quotes within quotes, as in 'claims.row=\"A (b)\"'."
    )


def _explain_name(overrides: Sequence[str]) -> str | None:
    """Return the sentence for the first word that names no group member: `algorithm=3`, `=3`."""
    for word in overrides:
        group, _, name = word.lstrip("+").partition("=")
        if not group:
            return _explain_syntax(word)
        if group in CHOICES and name not in group_options(group):
            return str(unknown(group, name, group_options(group)))
    return None


def _explain(error: Exception, overrides: list[str]) -> str:
    """Return what Hydra or OmegaConf meant. Their English is that of Hydra 1.3, OmegaConf 2.3."""
    while not str(error).strip() and isinstance(error.__cause__, Exception):
        error = error.__cause__  # Hydra wraps some of its errors in one without words
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error.override)
    text, key = str(error), getattr(error, "full_key", None)

    def found(pattern: str) -> re.Match[str] | None:
        return re.search(pattern, text)

    def near(word: str) -> str:
        return suggestion(word, known_keys(overrides))

    if match := found(r"Interpolation key '([^']+)' not found"):
        name = match[1]
        return f"{key or 'a value'}: ${{{name}}} names no key of the run.{near(name)}"
    if "Could not override ''" in text and (sentence := _explain_name(overrides)):
        return sentence
    if match := found(
        r"Multiple values for (\S+)\. To override a value use 'override \S+: ([^']+)'"
    ):
        group, word = match[1], f"{match[1]}={match[2]}"
        return f"+{word}: a run has one {group} already; leave the + out: {word}."
    if match := found(r"Could not delete from config\. '([^']+)' does not exist"):
        return f"~{match[1]}: there is no such key to take out.{near(match[1])}"
    if match := found(r"Could not delete (?:from config\. The value of )?'([^'=]+)"):
        return (
            f"~{match[1]}: takes out only the value that is there; "
            f"to have another, write {match[1]}=VALUE."
        )
    if match := found(r"Could not find '([^/']+)/+'"):
        return f"{match[1]}= has no name. Allowed: {', '.join(group_options(match[1]))}."
    if match := found(r"(?:Ambiguous value for argument|Sweep parameters) '([^']+)'"):
        return (
            f"{match[1]}: names several values; "
            f"add -m, as in `zdp-bench run -m {match[1]}`, or give one."
        )
    if match := found(r"Could not append to config\. An item is already at '([^']+)'"):
        return f"+{match[1]}: is there already; leave the + out: {match[1]}=VALUE."
    if match := found(r"Value '(.*)' of type '\w+' could not be converted to (Integer|Float)"):
        kind = {"Integer": "a whole number", "Float": "a number"}[match[2]]
        return f"{key or 'a key'}={match[1]}: must be {kind}."
    if match := found(r"Could not (?:find|load) '([^/']+)/+([^']+)'"):
        if match[1] == "recipe" and (file := Path(f"{match[2]}.yaml")).is_file():
            return f"recipe '{match[2]}' is not known, but {file} is here: write recipe=./{file}."
        return str(unknown(match[1], match[2], group_options(match[1])))
    if match := found(r"You must specify '(\w+)'"):
        return f"{match[1]}=NAME is missing. Allowed: {', '.join(group_options(match[1]))}."
    if match := found(r"Could not override '([^']+)'"):
        return _explain_unknown(match[1], overrides)
    return first_line(error)


def _explain_unknown(word: str, overrides: list[str]) -> str:
    """Return the sentence for a key that no YAML file names."""
    kind, _, key = word.partition(".")
    if kind in PLUGINS and key:
        names = find_chosen(overrides, kind)
        name = next((name for name in names if key not in own_keys(kind, name)), names[0])
        if key in own_keys(kind, name):  # torch has it, our YAML does not name it
            return f"key '{word}' is not set by {kind}={name}: write +{word}=... to add it."
        return explain_unknown_key(kind, name, key)
    if kind in GROUPS and not key:
        return f"{kind}: name one with {kind}=NAME, or set one of its keys."
    if kind == "hydra":
        return (
            f"key '{word}' is not known: it is none of this launcher's; "
            "choose one beside it, such as launcher=joblib."
        )
    near = suggestion(word, known_keys(overrides))
    return f"key '{word}' is not known.{near} `zdp-bench list keys` shows them all."
