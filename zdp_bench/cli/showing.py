"""The verbs that show what is there: records, tables, figures, ε, data sets, names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zdp_bench.cli.parser import LISTS
from zdp_bench.errors import UserError


def table(options: argparse.Namespace) -> int:
    from zdp_bench.experiments.sweep import fillings
    from zdp_bench.report import curves, papers, tables
    from zdp_bench.training.progress import console

    fills = fillings(options.table, options.results)
    if papers.is_figure(options.table):
        drawn = curves.build(options.table, options.results, fills)
        console().print(*curves.as_rich(drawn), sep="\n")
        paths = curves.write(drawn, options.results)
    else:
        made = tables.build(options.table, options.results, fills)
        console().print(tables.as_rich(made))
        paths = tables.write(made, options.results)
    print("\n".join(f"written: {path}" for path in paths))
    return 0


def _figure(options: argparse.Namespace) -> int:
    from zdp_bench.report import figures

    for name in options.figures:
        for path in figures.write(
            figures.draw(name, options.results, _root(options)), name, options.results
        ):
            print(f"written: {path}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from zdp_bench.experiments.sweep import fillings
    from zdp_bench.report import page, papers, tables

    made = []
    for name in papers.available():
        if papers.recipes_of(name) and not papers.is_figure(
            name
        ):  # the page shows a figure's table as `table` wrote it
            made.append(tables.build(name, options.results, fillings(name, options.results)))
    print(
        f"written: {page.write(made, options.results, options.output or options.results / 'report.html')}"
    )
    return 0


def _results(options: argparse.Namespace) -> int:
    from zdp_bench.report import results
    from zdp_bench.training.progress import console

    frame = results.select(
        options.results, options.filters, options.columns, options.sort, options.by
    )
    if options.format == "rich":
        console().print(results.as_rich(frame))
    else:
        print(results.as_text(frame, options.format))
    return 0


def _epsilon(options: argparse.Namespace) -> int:
    from zdp_bench.report import epsilon, formats, own_epsilon
    from zdp_bench.training.progress import console

    numbers = (
        "sample_rate",
        "batch_size",
        "records",
        "steps",
        "epochs",
        "delta",
        "sampling",
        "accountant",
        "records_per_patient",
    )
    if options.sigma is None and options.target_epsilon is None:
        for name in numbers:
            if getattr(options, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')} alone says too little: add --sigma or --target-epsilon."
                )
        table = epsilon.rows()
        paths = epsilon.write(table, options.results)
        if options.format == "rich":
            console().print(epsilon.as_rich(table))
            print("\n".join(f"written: {path}" for path in paths))
        else:
            print(
                epsilon.as_markdown(table)
                if options.format == "md"
                else formats.as_text(epsilon.plain(table), options.format)
            )
        return 0
    if options.sigma is not None and options.target_epsilon is not None:
        raise UserError("say either --sigma or --target-epsilon, not both.")
    given = own_epsilon.setting(
        sampling=options.sampling,
        sample_rate=options.sample_rate,
        batch_size=options.batch_size,
        records=options.records,
        steps=options.steps,
        epochs=options.epochs,
        delta=options.delta,
        records_per_patient=options.records_per_patient,
    )
    if options.sigma is not None:
        answers = own_epsilon.for_sigma(given, options.sigma, options.accountant)
    else:
        answers = own_epsilon.for_target(given, options.target_epsilon, options.accountant)
    if options.format == "rich":
        console().print(own_epsilon.as_rich(given, answers))
    else:
        print(own_epsilon.as_text(given, answers, options.format))
    return 0


def _list(options: argparse.Namespace) -> int:
    from rich.table import Table

    from zdp_bench import assets
    from zdp_bench.training.progress import console

    for kind in [options.kind] if options.kind else [k for k in LISTS if k != "keys"]:
        table = Table(title=kind, show_header=False, title_justify="left", box=None, padding=(0, 2))
        for name, line in _listed(kind, assets):
            table.add_row(name, line)
        console().print(table, "")
    return 0


def _listed(kind: str, assets: Any) -> list[tuple[str, str]]:
    """(name, one line) of everything of a kind."""
    if kind == "recipes":
        return [(name, _first_comment(path)) for name, path in assets.group(assets.RECIPES).items()]
    if kind == "datasets":
        from zdp_bench.data.files import cards

        return [(card.name, f"{card.title}: {card.provenance}, {card.licence}") for card in cards()]
    if kind == "tables":
        from zdp_bench.report import papers

        return [
            (name, ", ".join(papers.recipes_of(name)) or "no recipe yet")
            for name in papers.available()
        ]
    if kind == "figures":
        from zdp_bench.registry import lookup, names

        return [
            (name, str(lookup("figure", name).__doc__).splitlines()[0]) for name in names("figure")
        ]
    if kind == "keys":
        from zdp_bench.config.plugins import every_key

        return every_key()
    folder = assets.CONF / kind.removesuffix("s")
    return [(name, _first_comment(path)) for name, path in assets.group(folder).items()]


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ") if first.startswith("# ") else ""


def _data(options: argparse.Namespace) -> int:
    from zdp_bench.data import files
    from zdp_bench.report.data_root import as_rich, state
    from zdp_bench.training.progress import console

    root = _root(options)
    chosen = [files.card(options.dataset)] if options.dataset else files.cards()
    if options.action == "show":
        console().print(as_rich(root, chosen))
        return 0
    if options.action == "fetch":
        if not options.dataset:
            raise UserError(
                "zdp-bench data fetch needs a data set: one of "
                + ", ".join(card.name for card in chosen)
                + "."
            )
        done = [
            path
            for card in _with_sources(chosen)
            for path in files.fetch(root, card, options.mirror)
        ]
        print("\n".join(f"fetched: {path}" for path in done) or "nothing is missing")
        return 0
    wrong = 0
    for card in _with_sources(chosen):
        if not (card.files or card.holds):
            print(f"{card.name}: {state(root, card)}; it needs no files")
        for path, problem in files.inspected(root, card):
            wrong += bool(problem)
            print(
                f"zdp-bench: {problem}" if problem else f"ok: {path}",
                file=sys.stderr if problem else sys.stdout,
            )
    return 2 if wrong else 0


def _with_sources(cards: list[Any]) -> list[Any]:
    """The cards themselves, or the cards whose files they are made from, once each."""
    from zdp_bench.data.files import card

    named = {of.uses or of.name: card(of.uses) if of.uses else of for of in cards}
    return list(named.values())


def _root(options: argparse.Namespace) -> Path:
    import os

    named: Path | None = options.root
    root = (named or Path(os.environ.get("ZDP_DATA") or "~/.cache/zdp-bench")).expanduser()
    if root.is_file():
        raise UserError(
            f"{root}: is a file and no folder, so it holds no data; name the data root by --root, or by ZDP_DATA."
        )
    return root


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "table": table,
    "figure": _figure,
    "report": _report,
    "epsilon": _epsilon,
    "list": _list,
    "data": _data,
    "results": _results,
}
