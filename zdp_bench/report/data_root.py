"""The data root as a table: which data sets are there, what is missing, sources and licences."""

from __future__ import annotations

from pathlib import Path

from zdp_bench.data.files import Card, card, has_files, missing
from zdp_bench.report.sheet import Sheet

COLUMNS = ("data set", "provenance", "state", "from", "licence")


def sheet(root: Path, cards: list[Card]) -> Sheet:
    """Return one row a data set."""
    rows = [[of.name, of.provenance, state(root, of), of.source, of.licence] for of in cards]
    return Sheet.of_words(f"data root: {root}", COLUMNS, rows)


def state(root: Path, of: Card) -> str:
    """Return bundled, made when needed, there, or what is missing and how to get it."""
    needs = card(of.uses) if of.uses else of
    if needs.holds:
        lacks = f"missing: {needs.holds}; `zdp-bench data fetch {of.name}` says how"
        return "there" if has_files(root, needs) else lacks
    if needs.provenance == "own":
        return "yours, where dataset.path says"
    if not needs.files:
        return "made when needed" if needs.provenance == "synthetic" else "bundled"
    lacking = [Path(file.path).name for file in missing(root, needs)]
    if not lacking:
        return "there"
    listed = "all files" if len(lacking) == len(needs.files) else ", ".join(lacking)
    return f"missing: {listed}; `zdp-bench data fetch {of.name}`"
