"""The argument parser of `zdp-bench`, to which each command adds its arguments; and completion:

`eval "$(zdp-bench --completion bash)"`, or zsh; for fish, pipe it to `source`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
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
  eval "$(zdp-bench --completion bash)"
"""


BASH = """\
_zdp_bench() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local cur="${line##* }" word
    read -ra before <<< "${line%"$cur"}"
    COMPREPLY=()
    while IFS= read -r word; do
        # bash has split the word at its "=", and replaces what stands behind it
        [[ $COMP_WORDBREAKS == *"="* && $cur == *=* ]] && word="${word#"${cur%%=*}"=}"
        COMPREPLY+=("$word")
    done < <(zdp-bench --complete "${before[@]:1}" "$cur" 2> /dev/null)
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -F _zdp_bench zdp-bench
"""
ZSH = """\
_zdp_bench() {
    local -a found
    found=("${(@f)$(zdp-bench --complete "${(@)words[2,CURRENT]}" 2> /dev/null)}")
    compadd -Q -S '' -- "${found[@]}"
}
compdef _zdp_bench zdp-bench
"""
FISH = """\
function __zdp_bench
    set -l words (commandline -opc) (commandline -ct)
    zdp-bench --complete $words[2..-1] 2> /dev/null
end
complete -c zdp-bench -f -a '(__zdp_bench)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


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


class _PrintCompletion(argparse.Action):
    """Print a shell's completion script and exit, as --version does."""

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
        choices=[*SCRIPTS],
        action=_PrintCompletion,
        help="print a script that completes words in your shell",
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
            keys = _overrides("") if hasattr(options, "overrides") else []
            if near := [key for key in keys if f".{key}".endswith(f".{name.lstrip('-')}=")]:
                said = f"write {near[0]}{value or '...'}: a key has no dashes."
                parser.error(f"`{verb}`: option '{name}' is not known; {said}")
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


# Completion: the shells' scripts ask `zdp-bench --complete WORD...`, which imports nothing heavy.


def complete(words: list[str]) -> list[str]:
    """Return the completions of the last word, given those before it, sorted."""
    *before, current = words or [""]
    return sorted({word for word in _candidates(before, current) if word.startswith(current)})


def _candidates(before: list[str], current: str) -> Iterable[str]:
    if not before:
        return [*COMMANDS, "--help", "--version", "--completion"]
    if before[0] not in COMMANDS:
        return SCRIPTS if before == ["--completion"] else []
    own = argparse.ArgumentParser()
    COMMANDS[before[0]].add_arguments(own)
    asked = [a for a in own._actions if before[-1] in a.option_strings and a.nargs != 0]
    if not asked and current.startswith("-"):
        return (option for action in own._actions for option in action.option_strings)
    found: list[str] = []
    for action in asked or [a for a in own._actions if not a.option_strings]:
        found += map(str, action.choices or ())
        if complete_one := COMPLETERS.get(str(action.metavar)):
            found += complete_one(current)
    return found


def _tables(current: str, starts: str = "") -> list[str]:
    """Return every table and figure of a paper: 'zeta_dp_2021/1', 'gredp_2024/fig5'."""
    from zdp_bench import assets

    paths = assets.PAPERS.glob(f"*/{starts}*.csv")
    return [f"{path.parent.name}/{path.stem.removeprefix('table')}" for path in paths]


def _runs(current: str) -> list[str]:
    """Return the recipes with runs in `results`; behind a '/', also each run's first digits."""
    digits = "/*" if "/" in current else ""
    paths = Path("results/runs").glob(f"[!.]*{digits}")
    paths = (path for path in paths if path.is_dir())
    return [f"{path.parent.name}/{path.name[:8]}" if digits else path.name for path in paths]


def _columns(current: str) -> list[str]:
    """Return the columns of `results`, behind those that a list already has."""
    from zdp_bench.records import COLUMNS

    listed, comma, _ = current.rpartition(",")
    keys = (key[:-1] for key in _overrides("") if "." in key)
    return [f"{listed}{comma}{column}" for column in (*COLUMNS, *keys)]


def _filters(current: str) -> list[str]:
    if current.startswith("recipe="):
        return [f"recipe={name}" for name in _runs("")]
    return [f"{column}=" for column in _columns("")]


def _overrides(current: str) -> list[str]:
    """Return the members of a group behind its '=', else every group and key with one."""
    from zdp_bench import assets

    folders = {path.name: path for path in assets.CONF.iterdir() if path.is_dir()}
    folders |= {"recipe": assets.RECIPES, "dataset": assets.DATASETS}
    group, equals, _ = current.partition("=")
    if equals:
        names = assets.group(folders[group]) if group in folders else {}
        return [f"{group}={name}" for name in names]
    keys = _dotted(assets.read_yaml(assets.CONF / "config.yaml"))
    for name in folders.keys() - {"recipe", "launcher"}:
        for path in assets.group(folders[name]).values():
            options = assets.read_yaml(path)
            keys += _dotted({name: {k: v for k, v in options.items() if k not in ("name", "card")}})
    own = (key for key in keys if not key.startswith(("hydra", "defaults")))
    return [f"{key}=" for key in (*folders, *own)]


# What an argument takes, by its metavar.
COMPLETERS: dict[str, Callable[[str], list[str]]] = {
    "key=value": _overrides,
    "column=value,...": _filters,
    "A,B,...": _columns,
    "PAPER/N": _tables,
    "PAPER/figN": partial(_tables, starts="fig"),
    "RUN": _runs,
    "KIND|WORD": lambda current: [*COMMANDS["list"].KINDS],
}


def _dotted(node: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of a nested mapping's leaves."""
    names: list[str] = []
    for key, value in node.items():
        of = isinstance(value, dict) and value
        names += _dotted(value, f"{prefix}{key}.") if of else [f"{prefix}{key}"]
    return names
