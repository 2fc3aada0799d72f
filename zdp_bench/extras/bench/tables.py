"""The tables of `zdp-bench bench`: measure their cases (`cases.py`) and write them (`pages.py`).

zeta_dp_2021/6   complex against real: one matrix product, one convolution
zeta_dp_2021/7   conv + linear, real and complex, private against non-private
scaling          time and peak memory of a private step against the batch
algorithms       a private step of each algorithm, on its own paper's network
kernels          steps with the compiled CPU kernels on and off, on the papers' networks
library          a step of a user's whole loop: non-private, ours, Opacus's, with peak memory
deepee_2021/3    VGG-11 and two U-Nets: ours, Opacus, a loop over examples, with peak memory

Every case is measured by itself: `--case` measures some of them again and leaves the others as they
are. What another machine measured, or another number of threads, stays beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from zdp_bench import records
from zdp_bench.errors import UserError, unknown
from zdp_bench.extras.bench import cases
from zdp_bench.extras.bench.cases import Case
from zdp_bench.extras.bench.pages import (
    Measured,
    Row,
    as_csv,
    as_markdown,
    environment,
    machine,
    read_csv,
)
from zdp_bench.extras.bench.peak_memory import hold_memory
from zdp_bench.report import papers

# (quick, threads) -> its cases
TABLES: dict[str, Callable[[bool, int], list[Case]]] = {
    "zeta_dp_2021/6": cases.operations,
    "zeta_dp_2021/7": cases.networks,
    "scaling": cases.scaling,
    "deepee_2021/3": cases.imaging,
    "algorithms": cases.algorithms,
    "kernels": cases.kernels,
    "library": cases.library,
}


def available() -> list[str]:
    """Return the names of the tables."""
    return list(TABLES)


def require_case(names: Sequence[str], quick: bool, threads: int, only: str) -> None:
    """Refuse a case that not every one of the tables has, before any is measured.

    Raises:
        UserError: names the tables that have it.
    """
    having = [name for name in names if not only or _choose(TABLES[name](quick, threads), only)]
    if having and len(having) < len(names):
        raise UserError(
            f"--case '{only}': is in {', '.join(having)} only; name the table, as in `zdp-bench "
            f"bench {having[0]}`."
        )


def _choose(every: list[Case], only: str) -> list[Case]:
    return [case for case in every if only.lower() in case.name.lower()]


def run(
    table: str, quick: bool, threads: int, results: Path, only: str = ""
) -> tuple[list[Row], list[Path]]:
    """Measure a table and write it to `results/tables`.

    Args:
        quick: smaller models, batches and fewer rounds: all tables in under two minutes on two
            cores.
        only: measure the cases whose name contains this; the table's other cases stay.

    Raises:
        UserError: no such table or case, sides that should agree do not, or the file is no table of
            ours.
    """
    if table not in TABLES:
        raise unknown("table", table, TABLES)
    torch.set_num_threads(threads)
    held = hold_memory()
    every = TABLES[table](quick, threads)
    chosen = _choose(every, only)
    if not chosen:
        raise unknown("case", only, [case.name for case in every])
    stem = results / "tables" / f"bench_{table.replace('/', '_table')}{'_quick' if quick else ''}"
    paths = [stem.with_suffix(".md"), stem.with_suffix(".csv")]
    facts = environment(threads) | {"allocator": "held" if held else "as malloc likes"}
    before = read_csv(paths[1]) if paths[1].exists() else []
    fresh = {case.name: list(case.measure()) for case in chosen}
    measured: list[Measured] = []
    for case in every:
        of_case = [(row, on) for row, on in before if row.case == case.name]
        if case.name in fresh:
            of_case = [(row, on) for row, on in of_case if machine(on) != machine(facts)]
        measured += of_case + [(row, facts) for row in fresh.get(case.name, [])]
    records.write_text(paths[0], as_markdown(table, measured))
    records.write_text(paths[1], as_csv(measured))
    return [row for rows in fresh.values() for row in rows], paths


def measure_missing(
    results: Path, others: Collection[str], quick: bool, say: Callable[[str], None]
) -> None:
    """Measure the tables that `results` lacks, but for `others`, which records fill."""
    for name in [name for name in available() if name not in others]:
        if not (results / "tables" / f"{papers.file_stem(name)}.md").exists():
            say(f"measuring {name} ...")
            run(name, quick=quick, threads=2, results=results)
