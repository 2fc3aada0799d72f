"""The argument parser of `zdp-bench`; each command adds its own arguments."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from zdp_bench import __version__
from zdp_bench.cli.commands import COMMANDS, GROUPS, ORDER
from zdp_bench.cli.completion import SCRIPTS
from zdp_bench.errors import unknown

DESCRIPTION = """\
Differentially private deep learning on medical and complex-valued data, with
numbers that can be trusted.
"""
EPILOG = """\
examples:
  zdp-bench run recipe=quickstart
  zdp-bench run -m recipe=phasemnist seed=1,2,3 optimizer.lr=0.1,0.3
  zdp-bench reproduce zeta_dp_2021/1 --seeds 3
  zdp-bench audit recipe=quickstart
  eval "$(zdp-bench --completion bash)"
"""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one sentence that says what to write instead."""

    def error(self, message: str) -> NoReturn:
        if match := re.match(
            r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)$", message
        ):
            choices = match[3].replace("'", "").split(", ")
            message = str(unknown(match[1].lower(), match[2], choices))
            if match[1] == "VERB" and match[2] in ORDER:
                message = f"'{match[2]}' is of an extra that is not here (zdp_bench/extras)."
        elif match := re.match(r"argument (\S+): (=.*)", message):
            message = match[1] + match[2]
        elif match := re.match(r"argument (\S+): expected", message):
            message = f"{match[1]} needs a value; see `{self.prog} --help`."
        elif match := re.match(r"the following arguments are required: (\S+?)(,|$)", message):
            missing = next(a for a in self._actions if match[1] in (a.metavar, a.dest))
            choices = f"one of {', '.join(missing.choices)}" if missing.choices else match[1]
            message = f"`{self.prog}` needs {choices}; see `{self.prog} --help`."
        print(f"zdp-bench: {message}", file=sys.stderr)
        raise SystemExit(2)


class _PrintCompletion(argparse.Action):
    """Prints a shell's script and ends, as --version does."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        print(SCRIPTS[given[1]], end="")
        parser.exit()


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
    parser.add_argument(
        "--completion",
        choices=["bash", "zsh", "fish"],
        action=_PrintCompletion,
        help="print what teaches a shell to complete words",
    )
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
    """Return the command and its arguments; `key=value` words may stand anywhere among options.

    Ends the process with exit code 2 after one sentence if a word is wrong.
    """
    parser = build_parser()
    options, rest = parser.parse_known_args(words)
    verb = f"zdp-bench {options.verb}"
    pairs = getattr(options, "overrides", getattr(options, "filters", None))
    for word in rest:
        if word.startswith("-"):
            own = Parser(add_help=False)
            COMMANDS[options.verb].add_arguments(own)
            allowed = [option for action in own._actions for option in action.option_strings]
            name = word.partition("=")[0]
            parser.error(str(unknown(f"`{verb}`: option", name, [*allowed, "--help"])))
        # `run` refuses other words itself, and `audit` takes my_script:function.
        free = options.verb == "run" or (options.verb == "audit" and ":" in word)
        if pairs is None or ("=" not in word and not free):
            parser.error(f"'{word}' is not known to `{verb}`; see `{verb} --help`")
        pairs.append(word)
    return options
