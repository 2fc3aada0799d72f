"""The argument parser of `zdp-bench`, to which each command adds its arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from zdp_bench import __version__
from zdp_bench.cli.commands import COMMANDS, GROUPS, ORDER
from zdp_bench.errors import unknown

DESCRIPTION = """\
Differentially private deep learning on medical and complex-valued data, with
an ε that holds for what actually ran.
"""
EPILOG = """\
examples:
  zdp-bench run recipe=quickstart
  zdp-bench run -m recipe=phasemnist seed=1,2,3 optimizer.lr=0.1,0.3
  zdp-bench reproduce zeta_dp_2021/1 --seeds 3
  zdp-bench audit recipe=quickstart
"""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        said = message.removeprefix("argument ")
        more = "" if said.endswith(".") else f"; see `{self.prog} --help`."
        print(f"zdp-bench: {said}{more}", file=sys.stderr)
        raise SystemExit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject a word that is not a choice, and name the nearest one."""
        if action.choices is None or value in action.choices:
            return
        if action.dest == "verb" and value in ORDER:
            self.error(f"'{value}' belongs to an extra that is not installed (zdp_bench/extras).")
        name = "/".join(action.option_strings) or str(action.metavar or action.dest).lower()
        self.error(str(unknown(name, str(value), map(str, action.choices))))


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="zdp-bench",
        usage="zdp-bench VERB ...",
        description=DESCRIPTION + "\n".join(_list_verbs()),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zdp-bench {__version__}")
    verbs = parser.add_subparsers(
        dest="verb", metavar="VERB", prog="zdp-bench", required=True, help=argparse.SUPPRESS
    )
    for verb, command in COMMANDS.items():
        command.add_arguments(verbs.add_parser(verb, description=command.__doc__))
    return parser


def _list_verbs() -> list[str]:
    """Return the lines that name every verb, in their groups."""
    width = max(map(len, COMMANDS))
    lines = []
    for group, heading in GROUPS.items():
        lines += ["", f"{heading}:"]
        lines += [f"  {v:{width}}  {c.HELP}" for v, c in COMMANDS.items() if group == c.GROUP]
    return lines


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Return the command and its arguments; exit with code 2 after a sentence if one is wrong."""
    parser = build_parser()
    if not words or words[0] == "help":
        known = [word for word in words[1:2] if word in COMMANDS]
        words = [*known, "--help"]
    options, rest = parser.parse_known_args(words)
    verb = f"zdp-bench {options.verb}"
    pairs = getattr(options, "overrides", getattr(options, "filters", None))
    if hasattr(options, "results") and not hasattr(options, "overrides"):
        for word in words:
            if word.startswith("paths.results="):
                parser.error(f"{word}: write --results {word.partition('=')[2]} for `{verb}`.")
    for word in rest:
        if word.startswith("-"):
            own = Parser(add_help=False)
            COMMANDS[options.verb].add_arguments(own)
            allowed = [option for action in own._actions for option in action.option_strings]
            name, _, value = word.partition("=")
            keys = list_keys() if hasattr(options, "overrides") else []
            near = [key for key in keys if f".{key}".endswith(f".{name.lstrip('-')}")]
            if near:
                advice = f"write {near[0]}={value or '...'}: a key has no dashes."
                parser.error(f"`{verb}`: option '{name}' is not known; {advice}")
            parser.error(str(unknown(f"`{verb}`: option", name, [*allowed, "--help"])))
        # `run` refuses other words itself, and `audit` takes my_script:function.
        free = options.verb == "run" or (options.verb == "audit" and ":" in word)
        if pairs is None or ("=" not in word and not free):
            parser.error(f"'{word}' is not known to `{verb}`; see `{verb} --help`.")
        pairs.append(word)
    _refuse_twice(parser, pairs or ())
    return options


def _refuse_twice(parser: Parser, pairs: Sequence[str]) -> None:
    """Reject a key that is given two values: the last would silently win."""
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, _ = pair.lstrip("+").partition("=")
        if equals and key in given:
            parser.error(f"{key} is given twice: {given[key]} and {pair}; leave one out.")
        given[key] = pair


def list_keys() -> list[str]:
    """Return every group and dotted key that our YAML names, for the nearest to a wrong word."""
    from zdp_bench import assets

    folders = {path.name: path for path in assets.CONF.iterdir() if path.is_dir()}
    folders |= {"recipe": assets.RECIPES, "dataset": assets.DATASETS}
    keys = [*folders, *_dotted(assets.read_yaml(assets.CONF / "config.yaml"))]
    for group in folders.keys() - {"recipe", "launcher"}:
        for path in assets.group(folders[group]).values():
            options = assets.read_yaml(path)
            own = {key: value for key, value in options.items() if key not in ("name", "card")}
            keys += _dotted({group: own})
    return [key for key in keys if not key.startswith(("hydra", "defaults"))]


def _dotted(node: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of a nested mapping's leaves."""
    names: list[str] = []
    for key, value in node.items():
        if isinstance(value, dict) and value:
            names += _dotted(value, f"{prefix}{key}.")
        else:
            names.append(f"{prefix}{key}")
    return names
