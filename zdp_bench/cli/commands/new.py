"""Write a commented template that runs unchanged: a recipe NAME.yaml, or a package zdp_NAME with
your own dataset or algorithm.
"""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from pathlib import Path

from zdp_bench.errors import UserError

GROUP = "run"
HELP = "create a commented recipe, data set or algorithm"

KINDS = ("recipe", "dataset", "algorithm")
MAX_NAME = 100  # characters, which leaves room for what is added to it in the name of a file
# In the files of this folder, NAME stands for the name that the user chooses.
_TEMPLATES = Path(__file__).parents[2] / "starts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, help="the kind of template")
    parser.add_argument("name", metavar="NAME", help="a-z, 0-9 and _")


def run(options: argparse.Namespace) -> int:
    for path in write_template(options.kind, options.name, Path()):
        print(f"written: {path}")
    if options.kind == "recipe":
        print(f"next: zdp-bench validate recipe=./{options.name}.yaml")
    else:
        print(f"next: pip install --no-deps -e zdp_{options.name}")
    return 0


def write_template(kind: str, name: str, folder: Path) -> list[Path]:
    """Write a template into a folder, and return its files.

    Args:
        kind: one of `KINDS`. A recipe is one file, NAME.yaml; the others are packages `zdp_NAME`.
        name: name of the new recipe, data set or algorithm.
        folder: the folder.

    Raises:
        UserError: the name is not valid or is taken, or a file exists already.
    """
    from zdp_bench import assets
    from zdp_bench.config.words import NOT_NAMES
    from zdp_bench.disk import write_bytes
    from zdp_bench.registry import names
    from zdp_bench.training.interrupts import require_writable

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"'{name}' cannot be a name: use a-z, 0-9 and _, and begin with a letter.")
    if len(name) > MAX_NAME:
        raise UserError(f"'{name}' cannot be a name: use at most {MAX_NAME} characters.")
    if name in NOT_NAMES:
        raise UserError(f"'{name}' cannot be a name: {kind}={name} would be read as a value.")
    existing_names = assets.group(assets.RECIPES) if kind == "recipe" else names(kind)
    if name in existing_names:
        raise UserError(f"{kind} '{name}' exists already; choose another name.")
    if kind == "recipe":
        templates = {folder / f"{name}.yaml": "recipe.yaml"}
    else:
        package, module = folder / f"zdp_{name}", f"zdp_{name}.py"
        templates = {package / "pyproject.toml": "pyproject.txt", package / module: f"{kind}.txt"}
    for path in templates:
        if path.exists():
            raise UserError(f"{path}: exists already; move it away, or choose another name.")
    if kind != "recipe" and find_spec(f"zdp_{name}"):  # which `pip install` would replace
        raise UserError(f"package 'zdp_{name}' exists already; choose another name.")
    require_writable(folder.absolute())
    for path, template in templates.items():
        content = (_TEMPLATES / template).read_bytes()
        write_bytes(path, content.replace(b"NAME", name.encode()))
    return list(templates)
