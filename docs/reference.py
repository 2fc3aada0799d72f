"""The pages of docs/ that are made from the code: commands, keys, plug-ins and Python modules."""

from __future__ import annotations

import argparse
import inspect
import json
import pkgutil
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from zdp_bench import assets
from zdp_bench.cli.parser import build_parser
from zdp_bench.config import schema
from zdp_bench.config.plugins import TORCH, find_builder, plugin_keys

SECTIONS = {
    "trainer": schema.Trainer,
    "privacy": schema.Privacy,
    "execution": schema.Execution,
    "federated": schema.Federated,
    "claims": schema.Claims,
    "paths": schema.Paths,
    "": schema.Scalars,
}
MADE = ["reference", "papers"]  # pages that no file says are out of date

RESULTS = Path(__file__).parent.parent / "results"


def fill(page: str) -> str:
    """Replace each `<!-- made by NAME ARGUMENTS -->`, up to `<!-- end -->`, by what it names.

    What is between the two is for those who read the page in the repository.
    """
    made: dict[str, Callable[..., str]] = {
        "commands": commands,
        "keys": keys,
        "plugins": plugins,
        "recipes": recipes,
        "modules": modules,
        "coverage": coverage,
    }

    def replace(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        return made[name](*arguments)

    instead = r"(?:(?:(?!<!--).)*<!-- end -->)?"
    return re.sub(rf"<!-- made by (.*?) -->{instead}", replace, page, flags=re.DOTALL)


def coverage(paper: str = "") -> str:
    """How much of a paper's tables and figures is filled, or of those of all papers."""
    from zdp_bench.report import coverage

    if not paper:
        return coverage.overview(RESULTS)
    said = []
    for kind, unit, figures in (("Tables", "number", False), ("Figures", "curve", True)):
        if of := coverage.of_paper(RESULTS, paper, figures):
            said.append(f"{kind}: {coverage.sentence(of, unit)}")
    return f"*{' '.join(said)}*"


def commands() -> str:
    """Every command with its arguments, from the parser itself."""
    (verbs,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    lines = []
    for verb, parser in verbs.choices.items():
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        lines += [f"### {verb}", "", f"    {usage}", "", prose(parser.description or ""), ""]
        actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
        rows = [(_written(a), prose(a.help or "")) for a in actions]
        lines += [table(("argument", "meaning"), rows), ""] if rows else []
    return "\n".join(lines)


def _written(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings)
    value = action.metavar or ("|".join(action.choices) if action.choices else action.dest)
    return code(f"{name} {value}".strip() if action.nargs != 0 else name)


def keys(*sections: str) -> str:
    """Sections of the configuration, or what is in none: keys with type, default and meaning."""
    return "\n\n".join(_keys_of(section) for section in sections or ("",))


def _keys_of(section: str) -> str:
    of = SECTIONS[section]
    meanings, hints = _attributes(inspect.getdoc(of) or ""), get_type_hints(of)
    defaults = assets.read_yaml(assets.CONF / "config.yaml")
    defaults["trainer"] = assets.read_yaml(assets.CONF / "trainer/poisson.yaml")
    defaults = defaults[section] if section else defaults
    rows = [
        (
            code(f"{section}.{key}".strip(".")),
            _kind(hints[key]),
            code(shown(defaults[key])),
            prose(meaning),
        )
        for key, meaning in meanings.items()
    ]
    head = f"### {section}\n\n" if section else ""
    return head + table(("key", "type", "default", "meaning"), rows)


def _attributes(doc: str) -> dict[str, str]:
    """The `Attributes:` of a docstring, by name."""
    entries = re.split(r"\n    (?=\S)", doc.partition("Attributes:")[2])
    pairs = [entry.strip().partition(": ") for entry in entries if ": " in entry]
    return {name: " ".join(text.split()) for names, _, text in pairs for name in names.split(", ")}


def plugins(*kinds: str) -> str:
    """Every plug-in of some kinds, with its options."""
    return "\n\n".join(map(_plugins_of, kinds))


def _plugins_of(kind: str) -> str:
    folder = assets.DATASETS if kind == "dataset" else assets.CONF / kind
    each = [_plugin(kind, name, path) for name, path in assets.group(folder).items()]
    return "\n".join([f"### {kind}", "", *each])


def _plugin(kind: str, name: str, path: Any) -> str:
    if name == "none":
        return ""
    text, node = path.read_text(encoding="utf-8"), assets.read_yaml(path)
    said = dict(re.findall(r"^(\w+):.*?# (.*)$", text, flags=re.MULTILINE))
    builder = find_builder(kind, name)
    about = "" if kind in TORCH else (inspect.getdoc(builder) or "").split("\n\n")[0]
    about = about or " ".join(re.findall(r"^# (.*)$", text, flags=re.MULTILINE))
    hints = _hints(builder) if kind not in TORCH else {}
    rows = [
        (code(f"{kind}.{key}"), _kind(hints.get(key)), code(shown(value)), prose(said.get(key, "")))
        for key, value in node.items()
        if key not in ("name", "card")
    ]
    parts = [f"#### `{kind}={name}`", "", prose(about), ""]
    if card := node.get("card"):
        parts += [prose(f"{card['title']}: {card['provenance']}, {card['licence']}."), ""]
    if kind in TORCH and (others := sorted({*plugin_keys(kind, name)} - {*node})):
        others = [code(f"{kind}.{key}") for key in others]
        parts += [f"Also, with torch's own defaults: {', '.join(others)}.", ""]
    return "\n".join(parts + ([table(("key", "type", "default", ""), rows), ""] if rows else []))


def _hints(builder: Any) -> dict[str, Any]:
    if inspect.isclass(builder) and not is_dataclass(builder):
        builder = builder.__init__
    return get_type_hints(builder)


def recipes() -> str:
    """Every recipe, with the first line of its file."""
    rows = []
    for path in sorted(assets.RECIPES.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        rows.append((code(f"recipe={path.stem}"), prose(first)))
    return table(("recipe", ""), rows)


def modules(*packages: str) -> str:
    """Autodoc of modules, and of every module in those that are packages."""
    lines = ["```{eval-rst}"]
    for package in packages:
        found = import_module(package)
        inside = pkgutil.walk_packages(getattr(found, "__path__", []), f"{package}.")
        for name in [package, *(module.name for module in inside)]:
            lines += [name, "-" * len(name), "", f".. automodule:: {name}", "   :members:", ""]
    return "\n".join([*lines, "```"])


def escaped(lines: list[str]) -> list[str]:
    """A docstring, which is plain text with code in backticks, as reStructuredText."""
    found: list[str] = []
    section = formula = False
    last = ""
    for line in lines:
        depth, before = len(line) - len(line.lstrip()), len(last) - len(last.lstrip())
        section = section or bool(re.match(r"[A-Z]\w*( \w+)?:$", line))  # at most two words
        was_formula = formula
        formula = (formula or not last) and not section and depth >= 4 if line else formula
        if formula and not was_formula:
            found += ["::", ""]
        elif (
            line
            and last
            and not formula
            and depth != before
            and (not section or depth > 8 or before > 8)
        ):
            found.append("")
        found.append(line if formula else _escape(line))
        last = line
    return found


def _escape(line: str) -> str:
    parts = re.split(r"`+([^`]+)`+", line)
    parts[::2] = [re.sub(r"([*|\\]|(?<=\w)_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"``{part}``" for part in parts[1::2]]
    return "".join(parts)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def prose(text: str) -> str:
    """Text of the code in one line of Markdown; what stands in backticks stays."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    parts[::2] = [re.sub(r"([*_<\[\]#])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _kind(hint: Any) -> str:
    if hint is None:
        return ""
    choices = [a for a in get_args(hint) if a is not type(None)] or [hint]
    if get_origin(hint) is Literal:
        return " | ".join(map(str, choices))
    if get_origin(hint) in (list, tuple):
        return f"list of {_kind(choices[0])}"
    names = [_kind(c) if get_origin(c) else getattr(c, "__name__", str(c)) for c in choices]
    return " or ".join(names) + (" or null" if type(None) in get_args(hint) else "")
