"""What lies under the data root, what is missing, where it comes from and on what terms."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from zdp_bench.data.files import Card, card, has_files, missing


def as_rich(root: Path, chosen: list[Card]) -> Table:
    """One row a data set."""
    table = Table(title=f"data root: {root}", title_justify="left")
    for column in ("data set", "provenance", "state", "from", "licence"):
        table.add_column(column)
    for of in chosen:
        table.add_row(of.name, of.provenance, state(root, of), of.source, of.licence)
    return table


def state(root: Path, of: Card) -> str:
    """In words: bundled, made when needed, there, or what is missing and what fetches it or says how to get it."""
    needs = card(of.uses) if of.uses else of
    if needs.holds:
        return (
            "there"
            if has_files(root, needs)
            else f"missing: {needs.holds}; `zdp-bench data fetch {of.name}` says how"
        )
    if not needs.files:
        return "made when needed" if needs.provenance == "synthetic" else "bundled"
    lacking = [Path(file.path).name for file in missing(root, needs)]
    if not lacking:
        return "there"
    listed = "all files" if len(lacking) == len(needs.files) else ", ".join(lacking)
    return f"missing: {listed}; `zdp-bench data fetch {of.name}`"
