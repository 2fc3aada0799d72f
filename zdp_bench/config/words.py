"""Check the words of a command line, and recipes from files, before Hydra reads them.

Hydra would call anything that a `_target_` names, write its logs anywhere, and read environment
variables. So the only key of Hydra that a recipe may have is `hydra.sweeper.params`, and the only
resolvers are `RESOLVERS`. Each error of Hydra becomes one sentence.
"""

from __future__ import annotations

import os
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
)
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from zdp_bench.config.compose import files, group_options
from zdp_bench.config.plugins import option_takes_text, plugin_keys
from zdp_bench.config.schema import COMMON_KEYS, GROUPS, PLUGINS, SECTIONS, Run, Scalars
from zdp_bench.config.types import REQUIRED, Count, check_value, hints_of, takes_text
from zdp_bench.disk import expand_home
from zdp_bench.errors import UserError, first_line, unknown
from zdp_bench.foreign_files import parse_yaml, read_text

MAX_TEXT = 1 << 15  # bytes of a recipe
MAX_VALUES = 1_000  # in a recipe
MAX_REFERENCES = 16  # to other keys; nested ones grow exponentially, as YAML aliases do
KEYS = {*GROUPS, *SECTIONS, *(field.name for field in fields(Scalars))} - {"paths"}
RESOLVERS = "oc.select or choose"
REFERENCE = re.compile(r"\$\{(?:choose:|(?:oc\.select:)?(\w+)[\w.]*[,}])")
RECIPE = re.compile(r""""[^"]*"|'[^']*'|[^,]+""")  # one of several values, in quotes or without
QUOTED = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\\.""")  # read as text
NOT_NAMES = {"nan", "inf", "true", "false", "null"}  # Hydra reads these as values
CHOICES = ("recipe", "launcher", *GROUPS)  # groups of which a run chooses one name
# group -> how to combine several plug-ins of it, for errors
COMBINING = {
    "representation": " For several side by side, add representation=joined "
    "'representation.parts=[scattering,patches]'."
}
BATCH = "hydra.sweeper.max_batch_size"
LAUNCHING = ("hydra.launcher.", "hydra/launcher", BATCH)
MAX_RANGE = 10_000  # values of a range


def read_words(words: Sequence[str], sweep: bool = False) -> list[Override]:
    """Parse and check overrides, and register recipes from files with Hydra.

    Args:
        words: the overrides, such as "seed=1".
        sweep: whether overrides may have several values, and configure a launcher. Default: False.

    Raises:
        UserError: a word is not an override, would run a program, or names something that does not
            exist; or a recipe's file is not valid.
    """
    overrides = parse_words([_quote_texts(_adopt_all(word)) for word in words])
    for override in overrides:
        _check_override(override, sweep)
    return overrides


def _quote_texts(word: str) -> str:
    """Return a word with quotes around what Hydra would read as numbers although it is text.

    Hydra would change a text such as 2024_01 to 202401, and 1e3 to 1000.0.
    """
    override = _parse_word(word)
    start, _, typed = word.partition("=")
    value = override.value()
    opening, closing = ("[", "]") if isinstance(value, list) else ("", "")
    values = value.list if isinstance(value, ChoiceSweep) else value
    values = values if isinstance(values, list) else [values]
    texts = typed.strip(opening + closing).split(",")
    quoted = list(map(_quote_if_changed, texts, values))
    # Neither a function, such as choice(1,2), nor several lists, nor a comma in quotes.
    has_lists = any(isinstance(value, list) for value in values)
    is_plain = "(" not in typed and not has_lists and len(texts) == len(values)
    if (is_plain and quoted == texts) or not _takes_text(str(override.key_or_group)):
        return word
    if not is_plain:
        # Each token serves one number: of 1_0,10, both are read as 10, but only one is written so.
        unquoted = QUOTED.sub("''", typed)
        tokens = Counter(token.strip() for token in re.split(r"[,()\[\]]", unquoted))
        numbers = list(_numbers_in(values))
        rewritten = Counter(map(str, numbers)) - tokens
        for number in numbers:
            if isinstance(number, bool) or str(number) in rewritten:
                raise UserError(
                    f"{word}: is a text, of which a part would be read as {number}; put each of "
                    "its values in quotes."
                )
        return word
    return f"{start}={opening}{','.join(quoted)}{closing}"


def _numbers_in(values: Any) -> Iterator[int | float]:
    """Yield the numbers and truth values in nested lists."""
    if isinstance(values, list):
        for value in values:
            yield from _numbers_in(value)
    elif isinstance(values, int | float):
        yield values


def _quote_if_changed(text: str, value: Any) -> str:
    """Return a typed text in quotes if Hydra reads it as a number that is written differently."""
    is_changed = isinstance(value, bool) or (
        isinstance(value, int | float) and text.strip() != str(value)
    )
    return f'"{text.strip()}"' if is_changed else text


def _takes_text(key: str) -> bool:
    """Return True if the value of a key is a text, or a list of texts."""
    section, _, name = key.rpartition(".")
    if section in PLUGINS:
        hint = hints_of(Run).get(name) if name in COMMON_KEYS.get(section, ()) else None
        return takes_text(hint) if hint else option_takes_text(section, name)
    hints = hints_of(SECTIONS.get(section, Scalars))
    return name in hints and takes_text(hints[name])


def split_word(word: str) -> tuple[str, str]:
    """Return key and value of an override. A + or ++ before the key is left out."""
    key, _, value = word.lstrip("+").partition("=")
    return key, value


def write_word(key: str, value: Any) -> str:
    """Return the override that sets a key to a plain value; a text is quoted if it must be."""
    if isinstance(value, str | Path):
        word = f"{key}={value}"
        try:
            if parse_words([word])[0].value() == str(value):
                return word
        except UserError:  # not an override without quotes
            pass
    return f"{key}={_write_value(value)}"


def _write_value(value: Any) -> str:
    """Return a plain value in Hydra's grammar, with each text in quotes."""
    if isinstance(value, str | Path):
        return QuotedString(text=str(value), quote=Quote.double).with_quotes()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_write_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_write_value(inner)}' for key, inner in value.items())}}}"
    return "null" if value is None else str(value).lower()


def parse_words(words: Sequence[str]) -> list[Override]:
    """Parse overrides without checking them."""
    return [_parse_word(word) for word in words]


@lru_cache(maxsize=1024)  # a run parses each word three times, a millisecond each
def _parse_word(word: str) -> Override:
    try:
        override: Override = OverridesParser.create().parse_overrides([word])[0]
    except OverrideParseException as error:
        raise UserError(_explain_syntax(error.override)) from None
    except RecursionError:
        raise UserError("a value is nested too deep; write the values out.") from None
    if not override.key_or_group:
        raise UserError(_explain_syntax(word))
    return override


def _explain_syntax(word: str) -> str:
    """Return the sentence for a word that does not follow Hydra's grammar."""
    if word in group_options("recipe"):
        return f"'{word}' is a recipe: write recipe={word}."
    return (
        f"'{word}' is not an override: write key=value, such as seed=1, close every bracket and "
        "quote, and put a text with anything but A-Z, a-z, 0-9, spaces and ._/- in quotes within "
        "quotes, as in 'name=\"Müller (2)\"'."
    )


def _check_override(override: Override, sweep: bool) -> None:
    """Reject a word that would run a program, has no effect, or names what does not exist."""
    word, key = str(override.input_line), str(override.key_or_group)
    name, _, value = word.partition("=")
    if re.search(r"(?<!\w)_target_(?!\w)", word) or "@" in name:
        raise UserError(f"{word}: choose what runs by name, such as launcher=NAME.")
    # Not all at once: the checks of what a person typed are by key.
    if key in SECTIONS and key not in CHOICES and not override.is_delete():
        first_key = fields(SECTIONS[key])[0].name
        raise UserError(f"{word}: set each key by itself, such as {key}.{first_key}=VALUE.")
    if key in CHOICES and not override.is_delete():
        _check_choice(override)
    if key == "launcher" or key.startswith(LAUNCHING):
        if not sweep and (key, override.value()) != ("launcher", "local"):
            raise UserError(
                f"{word}: applies to sweeps only; sweep with `zdp-bench run -m`, or remove it."
            )
        if "/" in key and "/" in value:  # a path instead of a name
            raise unknown(key, value, [])
        if key == BATCH:
            check_value(key, Count | None, override.value())
    elif re.split(r"[./]", key)[0] in ("hydra", "launcher") and key != "hydra.verbose":
        raise UserError(
            f"{word}: has no effect here; the supported keys of Hydra are hydra.launcher.*, "
            f"{BATCH} and hydra.verbose."
        )
    if override.is_sweep_override() and not sweep:
        raise UserError(f"{word}: has several values; give one, or sweep with `zdp-bench run -m`.")
    if isinstance(values := override.value(), RangeSweep):
        _require_countable(word, values)


def _require_countable(word: str, values: RangeSweep) -> None:
    """Reject a range of too many values, or of infinitely many: Hydra lists them all."""
    start, stop, step = (value or 0 for value in (values.start, values.stop, values.step))
    try:
        is_countable = abs(stop - start) <= MAX_RANGE * abs(step)  # false if one of them is NaN
    except OverflowError:  # of a fraction and an integer beyond all fractions
        is_countable = False
    if not is_countable:
        raise UserError(f"{word}: must have at most {MAX_RANGE:,} values, between two numbers.")


def _check_choice(override: Override) -> None:
    """Reject a name that is not in a group, and several choices of one group."""
    word, group, value = override.input_line, str(override.key_or_group), override.value()
    if override.is_add() or isinstance(value, list | dict):
        advice = COMBINING.get(group, "")
        raise UserError(
            f"{word}: a run has one {group}; write {group}=NAME, or sweep with -m.{advice}"
        )
    choices = value.list if isinstance(value, ChoiceSweep) else [value]
    for choice in choices:
        if isinstance(choice, Glob | RangeSweep):
            continue
        name = "null" if choice is None else str(choice)
        if name not in group_options(group):
            raise unknown(group, name, group_options(group))


@contextmanager
def readable_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Turn exceptions of Hydra and OmegaConf into a `UserError` of one sentence."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, overrides)) from None
    except (ValueError, TypeError, AssertionError, AttributeError, KeyError, IndexError) as error:
        if not is_raised_in(error, "hydra", "omegaconf"):  # a bug of ours, shown as one
            raise
        raise UserError(
            f"'{' '.join(overrides)}' cannot be composed: {first_line(error)}"
        ) from None


def is_raised_in(error: Exception, *packages: str) -> bool:
    """Return True if the code of one of these packages raised an exception."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return bool({*packages} & {*raised_in.parts})


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """Return an error of Hydra as one sentence, with a suggestion for an unknown key."""
    while not str(error).strip() and isinstance(error.__cause__, Exception):
        error = error.__cause__  # Hydra wraps some errors in one without text
    if absent := re.search(r"Could not delete from config\. '([^']+)' does not", str(error)):
        return f"~{absent[1]}: there is no such key, or it is null already; leave this word out."
    unknown_key = re.search(r"Could not override '([^']+)'", str(error))
    if unknown_key:
        return _explain_unknown(unknown_key[1], overrides)
    if "You must specify 'recipe'" in str(error):
        return "recipe=NAME is missing; `zdp-bench list recipes` lists them."
    merged = re.match(r"Error merging override (.*)", str(error), re.DOTALL)
    if merged and isinstance(error.__cause__, Exception):
        return f"{merged[1]}: {first_line(error.__cause__)}"
    # Hydra's reason is on a second line.
    sentence = first_line(ValueError(str(error).replace("config:\n", "config: ")))
    key = getattr(error, "full_key", None)
    return f"{key}: {sentence}" if key and key not in sentence else sentence


def _explain_unknown(key: str, overrides: Sequence[str]) -> str:
    """Return the sentence for a key that is not in any YAML file."""
    from zdp_bench.config import compose, to_plain

    if key.startswith("hydra."):
        return f"key '{key}' is not a key of this launcher."
    chosen = [word for override in parse_words(overrides) if (word := _first_choice(override))]
    (section, _, name), sections = key.partition("."), to_plain(compose(chosen))
    plugin = (sections.get(section) or {}).get("name") if section in PLUGINS else None
    if plugin and name in plugin_keys(section, plugin):
        return f"key '{key}' is not set by this recipe: write +{key}=... to add it."
    known = [f"{section}.{name}" for section in SECTIONS for name in sections[section]]
    known += [f"{kind}.{name}" for kind in PLUGINS for name in sections[kind] or {}]
    return str(unknown("key", key, [*known, *KEYS]))


def _first_choice(override: Override) -> str:
    """Return a word that chooses the first of an override's names; empty for other overrides."""
    group, value = str(override.key_or_group), override.value()
    if group not in ("recipe", *GROUPS) or override.is_delete():
        return ""
    if isinstance(value, Glob):
        return next((f"{group}={name}" for name in value.filter(group_options(group))), "")
    name = value.list[0] if isinstance(value, ChoiceSweep) else value
    return f"{group}={name}"


def is_file_name(recipe: str) -> bool:
    """Return True if a value of `recipe=` names a file."""
    return recipe.endswith((".yaml", ".yml"))


def _adopt_all(word: str) -> str:
    """Return a word in which each recipe file is replaced by the recipe's name."""
    key, _, value = word.partition("=")
    # Not by Hydra, whose grammar takes ASCII alone without quotes.
    if choice := re.fullmatch(r"choice\((.*)\)", value):
        value = choice[1]
    parts = [part.strip().strip("\"'") for part in RECIPE.findall(value)]
    if key != "recipe" or not any(map(is_file_name, parts)):
        return word
    _require_names_of_one_file(word, [part for part in parts if is_file_name(part)])
    return f"recipe={','.join(map(_adopt, parts))}"


def _require_names_of_one_file(word: str, file_names: list[str]) -> None:
    """Reject two files of one name: Hydra and the records would take them for one recipe."""
    path_of: dict[str, str] = {}  # recipe's name -> its file
    for file_name in file_names:
        path = expand_home(file_name)
        # Not `Path.resolve`, which raises an error for a link to itself. `_adopt` refuses it.
        real_path = os.path.realpath(path)
        if path_of.setdefault(path.stem, real_path) != real_path:
            raise UserError(
                f"{word}: two files have the name {path.stem}, under which their runs would be "
                "recorded; rename one of them."
            )


def _adopt(value: str) -> str:
    """Register a recipe from a file with Hydra, and return its name. Return a name unchanged."""
    if not is_file_name(value):
        return value
    path, word = expand_home(value), f"recipe={value}"
    text = read_text(path, MAX_TEXT)
    is_name = re.fullmatch(r"[A-Za-z]\w*", path.stem, re.ASCII)
    if not is_name or path.stem.lower() in NOT_NAMES or path.stem in files("recipe"):
        raise UserError(
            f"{word}: rename the file: a recipe's name consists of A-Z, a-z, 0-9 and _, begins "
            f"with a letter, and differs from {', '.join(sorted(NOT_NAMES))} and our own recipes."
        )
    body = parse_yaml(text, word, MAX_VALUES)
    try:
        check_recipe(body)
        _require_quotes("", body, yaml.load(text, yaml.BaseLoader))
    except UserError as error:
        raise UserError(f"{word}: {error}") from None
    node = {**body, "recipe": path.stem}
    ConfigStore.instance().store(group="recipe", name=path.stem, node=node, package="_global_")
    return path.stem


def _require_quotes(key: str, value: Any, written: Any) -> None:
    """Reject a number instead of a text, if YAML reads another one than is written: 010 as 8.

    Args:
        key: key of the recipe; empty for all of it.
        value: its value.
        written: its value, with each number as the text that is in the file.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in written:  # rather than merged from another mapping
                _require_quotes(f"{key}.{name}".lstrip("."), inner, written[name])
    elif isinstance(value, list):
        for inner, text in zip(value, written, strict=True):
            _require_quotes(key, inner, text)
    elif type(value) in (int, float) and str(value) != written and _takes_text(key):
        raise UserError(f"{key}: {written}: YAML reads this as {value}; put it in quotes.")


def check_recipe(body: Any) -> None:
    """Reject a recipe that contains anything but keys of a run, with plain values."""
    if not isinstance(body, dict):
        raise UserError("holds no keys of a run; see recipes/quickstart.yaml.")
    check_values(body)
    for key, value in _walk(body):
        if value == REQUIRED:  # Hydra would keep the default
            raise UserError(f"{key}: {REQUIRED} is no value; write one, or remove the key.")
    for key, node in body.items():
        if key == "defaults":
            _check_defaults(node)
        elif key == "hydra":
            _check_sweep(node)
        elif key not in KEYS:
            raise unknown("key", str(key), KEYS)


def check_values(node: Any, max_references: int = MAX_REFERENCES) -> None:
    """Reject special keys of Hydra, and references to anything but other keys of the run.

    Args:
        node: the content of a recipe, or a part of it.
        max_references: maximum number of references. Default: `MAX_REFERENCES`.
    """
    num_references = 0
    for key, value in _walk(node):
        if re.fullmatch(r"_\w+_", key):
            raise UserError(f"{key}: would run a program; remove it.")
        for opening in re.finditer(r"\$\{", value):
            num_references += 1
            reference = REFERENCE.match(value, opening.start())
            # Group 1 is the section that a reference names; `choose` names none.
            if not reference or (reference[1] or "recipe") not in KEYS:
                raise UserError(
                    f"{value[:80]}: may name a key of the run as ${{SECTION.KEY}}, with "
                    f"{RESOLVERS} at most; write the value itself."
                )
    if num_references > max_references:
        raise UserError(
            f"refers to other keys {num_references} times, but at most {max_references} times are "
            "allowed; write the values themselves."
        )


def _walk(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, "") for each key of a nested value, and (key, text) for each text in it."""
    if isinstance(node, dict):
        for name, inner in node.items():
            yield str(name), ""
            yield from _walk(inner, str(name))
            yield from _walk(name) if isinstance(name, str) else ()
    elif isinstance(node, list):
        for inner in node:
            yield from _walk(inner, key)
    elif isinstance(node, str):
        yield key, node


def _check_defaults(node: Any) -> None:
    """Reject entries other than `_self_` and `override /GROUP: NAME`, or with an unknown name."""
    chosen: set[str] = set()
    for entry in node if isinstance(node, list) else [node]:
        pairs = entry.items() if isinstance(entry, dict) else [(entry, None)]
        for key, name in pairs:
            group = str(key).removeprefix("override /")
            if group in GROUPS and str(key) != group:
                if name not in group_options(group):
                    raise unknown(group, str(name), group_options(group))
                if group in chosen:  # Hydra would take the first
                    raise UserError(f"defaults: override /{group}: is there twice; leave one out.")
                chosen.add(group)
            elif key != "_self_":
                raise UserError(
                    f"defaults: {key}: must be 'override /GROUP: NAME', and GROUP one of "
                    f"{', '.join(GROUPS)}."
                )


def _check_sweep(node: Any) -> None:
    """Reject all keys of Hydra except a sweep over keys of the run."""
    params = node
    for key in ("sweeper", "params"):
        if not isinstance(params, dict) or list(params) != [key]:
            raise UserError("hydra: a recipe may only contain hydra.sweeper.params.")
        params = params[key]
    for key, value in params.items() if isinstance(params, dict) else [("", params)]:
        if str(key).partition(".")[0] not in KEYS - {"recipe"}:
            raise unknown("key of hydra.sweeper.params,", str(key), KEYS - {"recipe"})
        (override,) = read_words([f"{key}={value}"], sweep=True)
        read = str(override.input_line)
        if read != f"{key}={value}":  # which Hydra would read itself
            raise UserError(
                f"hydra.sweeper.params.{key}: {value}: has a number where a text is needed; write "
                f"'{read.partition('=')[2]}'."
            )
