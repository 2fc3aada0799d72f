"""Shell completion: `eval "$(zdp-bench --completion bash)"`, or zsh; for fish, pipe it to `source`.

The scripts ask `zdp-bench --complete WORD...` for the words that may follow. It reads YAML and
nothing heavy, so it answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from zdp_bench.cli.commands import COMMANDS

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
TABLES = ("table", "reproduce", "figure")  # the commands that take one of a paper's tables


def complete(words: list[str]) -> list[str]:
    """Return what may stand in the place of the last word, given those before it, sorted."""
    *before, current = words or [""]
    return sorted({word for word in _candidates(before, current) if word.startswith(current)})


def _candidates(before: list[str], current: str) -> Iterable[str]:
    if not before:
        return [*COMMANDS, "--help", "--version", "--completion"]
    if before[0] not in COMMANDS:
        return SCRIPTS if before == ["--completion"] else []
    own = argparse.ArgumentParser()
    COMMANDS[before[0]].add_arguments(own)
    asked = next((a for a in own._actions if before[-1] in a.option_strings), None)
    if asked and asked.nargs != 0:
        return map(str, asked.choices or ())
    if current.startswith("-"):
        return (option for action in own._actions for option in action.option_strings)
    found = [str(c) for a in own._actions if not a.option_strings for c in a.choices or ()]
    found += _tables() if before[0] in TABLES else []
    if any(action.dest == "overrides" for action in own._actions):
        found += _overrides(current)
    return found


def _tables() -> list[str]:
    """Return every table and figure of a paper: 'zeta_dp_2021/1', 'gredp_2024/fig5'."""
    from zdp_bench import assets

    paths = assets.PAPERS.glob("*/*.csv")
    return [f"{path.parent.name}/{path.stem.removeprefix('table')}" for path in paths]


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


def _dotted(node: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of a nested mapping's leaves."""
    names: list[str] = []
    for key, value in node.items():
        of = isinstance(value, dict) and value
        names += _dotted(value, f"{prefix}{key}.") if of else [f"{prefix}{key}"]
    return names
