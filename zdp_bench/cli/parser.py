"""The argument parser of `zdp-bench`, to which each command adds its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from zdp_bench import __version__
from zdp_bench.cli.commands import COMMANDS, GROUPS, ORDER
from zdp_bench.errors import print_message, unknown

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
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        sentence = message.removeprefix("argument ")
        if not sentence.endswith("."):  # one of argparse's own
            sentence = f"{sentence}; see `{self.prog} --help`."
        print_message(sentence)
        raise SystemExit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject a word that is not a choice, and suggest the nearest one."""
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
    """Return the lines of the help that list all verbs by group."""
    width = max(map(len, COMMANDS))
    lines = []
    for group, heading in GROUPS.items():
        lines += ["", f"{heading}:"]
        lines += [f"  {v:{width}}  {c.HELP}" for v, c in COMMANDS.items() if group == c.GROUP]
    return lines


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Return the command and its arguments.

    Args:
        words: the command line without the program's name.

    Raises:
        SystemExit: an argument is invalid, which is printed (code 2), or help was printed (0).
    """
    parser = build_parser()
    if not words or words[0] == "help":
        words = [*words[1:2], "--help"]
    options, unparsed = parser.parse_known_args(words)
    verb = f"zdp-bench {options.verb}"
    pairs = getattr(options, "overrides", getattr(options, "filters", None))
    if hasattr(options, "results") and not hasattr(options, "overrides"):
        for word in words:
            if word.lstrip("+").startswith("paths.results="):
                parser.error(f"{word}: write --results {word.partition('=')[2]} for `{verb}`.")
    for word in unparsed:
        if word.startswith("-"):
            command_parser = Parser(add_help=False)
            COMMANDS[options.verb].add_arguments(command_parser)
            actions = command_parser._actions
            allowed = [option for action in actions for option in action.option_strings]
            name, _, value = word.partition("=")
            keys = _list_keys() if hasattr(options, "overrides") else []
            same_name = [key for key in keys if f".{key}".endswith(f".{name.lstrip('-')}")]
            if same_name:
                advice = f"write {same_name[0]}={value or '...'}: a key has no dashes."
                parser.error(f"`{verb}`: option '{name}' is not known; {advice}")
            parser.error(str(unknown(f"`{verb}`: option", name, [*allowed, "--help"])))
        # `run` rejects such words itself, and `audit` takes my_script:function.
        may_lack_equals = options.verb == "run" or (options.verb == "audit" and ":" in word)
        if pairs is None or ("=" not in word and not may_lack_equals):
            parser.error(f"'{word}' is not known to `{verb}`; see `{verb} --help`.")
        pairs.append(word)
    if pairs is not None:  # the first one may be in the place of a table or data set
        _require_distinct_keys(parser, words)
    return options


def _list_keys() -> list[str]:
    from zdp_bench.config.plugins import list_all_keys

    return [key for key, _ in list_all_keys()]


def _require_distinct_keys(parser: Parser, words: Sequence[str]) -> None:
    """Reject a key that is given twice, because its last value would silently win."""
    word_of: dict[str, str] = {}
    for word in words:
        key, equals, _ = word.lstrip("+").partition("=")
        if equals and key in word_of:
            parser.error(f"{key} is given twice: {word_of[key]} and {word}; leave one out.")
        if equals:
            word_of[key] = word
