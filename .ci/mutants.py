"""Change the private code in small ways and count the changes that no test notices.

    python .ci/mutants.py --seconds 300 [--seed 7] [--only privacy/noise.py]

cosmic-ray makes the mutants. Each is tried in a copy of the repository against the few test files
that cover its module (`mutants.toml`), until the time is over; the seed that is printed draws the
same mutants again. What no test can see is no mutant: types, words of errors, decorators,
assertions, and what only decides how fast something is. A mutant that is known to behave like the
original stands in `mutants.toml` with the reason. Ends with 1 where less than 95 % of the rest die.
"""

from __future__ import annotations

import argparse
import ast
import faulthandler
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from signal import SIGKILL, SIGXCPU
from typing import Any, NamedTuple

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "zdp_bench",
    "tests",
    "conf",
    "datasets",
    "papers",
    "recipes",
    "results/tables",
    "pyproject.toml",
)
CONFIG = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LEAST = 0.95
MOST_SECONDS = 600  # of computing, of a file of tests as the code stands
WAITING = 10  # how many times as long a process may take on a busy machine
REASONS = {
    "failed": "fails",
    "crashed": "ends its process",
    "timeout": f"does not end within {MOST_SECONDS} s",
}
WORDS = {"passed": "survived", "failed": "killed", "crashed": "killed", "timeout": "timeout"}

# An operator is replaced by others that numbers take as well: anything else would only raise a
# TypeError.
ALIKE = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"BitOr", "BitAnd", "BitXor", "LShift", "RShift"},
    {"Eq", "NotEq"},
    {"Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
)


class DropCall(Operator):
    """Leave out a method that is called without positional arguments: `x.conj()` becomes `x`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "atom_expr":
            for name, call in zip(node.children[1:], node.children[2:], strict=False):
                if name.children[0] == "." and call.children[0] == "(" and not _positional(call):
                    yield name.start_pos, call.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        start, end = [*self.mutation_positions(node)][index]
        node.children = [child for child in node.children if not start <= child.start_pos < end]
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class DropStatement(Operator):
    """Leave out a statement that only acts: a call, or an assignment like `+=`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.parent is not None and node.parent.type == "simple_stmt":
            augmented = (
                node.type == "expr_stmt"
                and node.children[1].type == "operator"
                and node.children[1].value != "="
            )
            called = node.type == "atom_expr" and node.children[-1].children[0] == "("
            if augmented or called:
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return parso.python.tree.Name("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _positional(call: Any) -> bool:
    """True if something in these brackets is given by its place."""
    inside = call.children[1:-1]
    given = inside[0].children if inside and inside[0].type == "arglist" else inside
    return any(
        each != "," and (each.type != "argument" or each.children[1] != "=") for each in given
    )


class Mutant(NamedTuple):
    module: str
    operator: Operator
    occurrence: int
    line: int


@dataclass(frozen=True)
class Change:
    """One line before and after, as `mutants.toml` lists it."""

    module: str
    line: str
    becomes: str


def operators() -> Iterator[Operator]:
    yield from (DropCall(), DropStatement())
    for name in operator_names():
        kind, *pair = name.split("/")[1].split("_")
        if pair and "Unary" not in kind and not any(set(pair) <= alike for alike in ALIKE):
            continue
        operator = get_operator(name)
        if kind not in ("RemoveDecorator", "NoOp") and not operator.arguments():
            yield operator()


def places(module: str) -> Iterator[list[Mutant]]:
    """The mutants of every place in a module where there are some."""
    text = (ROOT / "zdp_bench" / module).read_text(encoding="utf-8")
    tree = get_ast(text)
    stars = [
        (node.start_pos, node.end_pos)
        for node in ast_nodes(tree)
        if node.type == "operator" and node.parent.type == "parameters"
    ]  # in front of keyword arguments: no product
    unseen = [*_unseen(ast.parse(text)), *stars]
    at: dict[tuple[str, Any], list[Mutant]] = defaultdict(list)
    for operator in operators():
        positions = (
            place for node in ast_nodes(tree) for place in operator.mutation_positions(node)
        )
        for occurrence, (start, _) in enumerate(positions):
            if not any(first <= start < last for first, last in unseen):
                family = type(operator).__name__.split("_")[0]
                at[family, start].append(Mutant(module, operator, occurrence, start[0]))
    yield from at.values()


def _unseen(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the places that no test should hold: from (line, column) up to (line, column)."""
    compiled = {
        node.args[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "compiled"
        if isinstance(node.args[0], ast.Name)
    }
    fast = compiled | {*CONFIG["speed"]}
    for node in ast.walk(tree):
        parts: list[Any] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            parts = [*node.decorator_list, getattr(node, "returns", None)]
            jitted = {
                name.id
                for each in node.decorator_list
                for name in ast.walk(each)
                if isinstance(name, ast.Name)
            }
            if node.name in fast or jitted & {"inlined", "njit"}:
                parts = [node]
        elif isinstance(node, ast.Assign):
            assigned = {
                name.id
                for name in ast.walk(node)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
            parts = [node] if assigned & fast else []
        elif isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
            parts = [node]
        elif isinstance(node, ast.keyword) and node.arg == "strict":  # asserts equal lengths
            parts = [node.value]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "require"
        ):
            parts = node.args[1:]
        yield from (
            ((p.lineno, p.col_offset), (p.end_lineno, p.end_col_offset))
            for p in parts
            if p is not None
        )


def change_of(module: str, before: str, after: str) -> Change:
    """The lines that differ, joined."""
    was, now = before.splitlines(), after.splitlines()
    while was[:1] == now[:1]:
        was, now = was[1:], now[1:]
    while was[-1:] == now[-1:]:
        was, now = was[:-1], now[:-1]
    return Change(module, *(" ".join(line.strip() for line in lines) for lines in (was, now)))


def changes_of(entry: dict[str, Any]) -> list[Change]:
    """Return the changes that an entry of `mutants.toml` lists."""
    becomes = entry["becomes"]
    lines = [becomes] if isinstance(becomes, str) else becomes
    return [Change(entry["module"], entry["line"], line) for line in lines]


def is_code(text: str) -> bool:
    try:
        compile(text, "", "exec")
    except SyntaxError:
        return False
    return True


def run_tests(folder: Path, tests: list[str], limit: float) -> tuple[str, float]:
    """Run tests in a process of its own, which has torch at hand.

    Args:
        folder: the copy of the repository. Its file `output` receives what is printed; of tests
            that only wait, also where every thread was.
        tests: files or names of tests.
        limit: seconds of computing that the process has. They are not those of the clock, which
            say how busy the machine is; pytest itself ends a test that waits for 5 minutes.

    Returns:
        "passed", "failed", "crashed" (a signal ended the process) or "timeout", and the seconds of
        computing.
    """
    before = _children_seconds()
    child = multiprocessing.get_context("fork").Process(target=_test, args=(folder, tests, limit))
    child.start()
    child.join(WAITING * limit)
    is_late = child.is_alive()
    with suppress(ProcessLookupError):  # where nothing is left: else a test left processes behind
        os.killpg(child.pid or 0, SIGKILL)
    child.join()
    seconds = _children_seconds() - before
    code = child.exitcode or 0
    if is_late or code == -SIGXCPU:
        return "timeout", seconds
    if code < 0:
        return "crashed", seconds
    return "failed" if code else "passed", seconds


def _children_seconds() -> float:
    """Return the seconds of computing of all processes of tests that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _test(folder: Path, tests: list[str], limit: float) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (ceil(limit), resource.RLIM_INFINITY))
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[0] = str(folder)
    with (folder / "output").open("w") as file, redirect_stdout(file), redirect_stderr(file):
        faulthandler.dump_traceback_later(0.95 * WAITING * limit, file=file)
        import pytest

        code, cases = 1, ["-k", CONFIG["only"].replace("\n", " ")]
        with suppress(
            Exception
        ):  # what pytest itself raises at the end, of files that a mutant leaves open
            code = int(
                pytest.main(
                    ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", *cases, *tests]
                )
            )
    os._exit(code)


def time_tests(folder: Path, test: str) -> float:
    """Return the seconds of computing of a file of tests, which must pass as the code stands."""
    ended, seconds = run_tests(folder, [test], MOST_SECONDS)
    if ended != "passed":
        printed = (folder / "output").read_text(encoding="utf-8")
        reason = REASONS[ended]
        raise SystemExit(f"{test} {reason} as the code stands:\n{printed[-5000:]}")
    return seconds


def try_mutants(
    folder: Path, seconds: float, seed: int, only: list[str], most: int
) -> dict[str, int]:
    """How many were killed, ran out of time, survived, or are listed as equivalent."""
    equivalent = {change for entry in CONFIG["equivalent"] for change in changes_of(entry)}
    modules = only or [*CONFIG["tests"]]
    drawn = [place for module in modules for place in places(module)]
    rng = random.Random(seed)
    rng.shuffle(drawn)
    print(
        f"{len(drawn):,} places in {len(modules)} modules, "
        f"{sum(map(len, drawn)):,} mutants; seed {seed}",
        flush=True,
    )
    counts, needed, end = (
        dict.fromkeys(("killed", "timeout", "survived", "equivalent"), 0),
        {},
        time.monotonic() + seconds,
    )
    for mutant in map(rng.choice, drawn):
        if time.monotonic() > end or sum(counts.values()) >= most:
            break
        path, tests = folder / "zdp_bench" / mutant.module, CONFIG["tests"][mutant.module]
        for test in tests:
            if test not in needed:
                start = time.monotonic()
                needed[test] = time_tests(folder, test)
                end += time.monotonic() - start  # what was asked for is the time of mutants
        before = path.read_text(encoding="utf-8")
        after = mutate_code(before, mutant.operator, mutant.occurrence)
        change = change_of(mutant.module, before, after)
        if not is_code(after):  # the star in front of arguments is no product
            continue
        if change in equivalent:
            counts["equivalent"] += 1
            continue
        path.write_text(after, encoding="utf-8")
        start = time.monotonic()
        ended, _ = run_tests(folder, tests, 15 + 3 * sum(needed[test] for test in tests))
        path.write_text(before, encoding="utf-8")
        word = WORDS[ended]
        counts[word] += 1
        where = f"{mutant.module}:{mutant.line} {type(mutant.operator).__name__}"
        print(f"{word:8} {time.monotonic() - start:4.0f} s  {where}", flush=True)
        if word != "killed":
            print(f"    - {change.line}\n    + {change.becomes}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--most", type=int, default=10**9, help="mutants")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", nargs="*", default=[], help="modules")
    asked = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }  # as tests/conftest.py has it, before numpy is loaded
    import dp_accounting  # noqa: F401  what takes long to load is loaded once, and forked
    import hypothesis  # noqa: F401
    import pandas  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        for each in COPIED:
            source, target = ROOT / each, folder / each
            shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)
        counts = try_mutants(folder, asked.seconds, asked.seed, asked.only, asked.most)
    died, tried = counts["killed"] + counts["timeout"], sum(counts.values()) - counts["equivalent"]
    share = died / tried if tried else 1.0
    print(
        ", ".join(f"{count} {word}" for word, count in counts.items())
        + f": {share:.1%} of {tried} died"
    )
    return 0 if share >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
