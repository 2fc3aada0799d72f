"""The verbs of `zdp-bench`. Nothing heavy is imported before a verb needs it, so `--help` answers at once.

A mistake of the user ends in one sentence and exit code 2; a failed job of a sweep in its sentence and exit code 2 at the end;
an audit with a verdict that was not expected in exit code 1; a run that SIGTERM stopped, saved, in exit code 75 (survival.py).
"""

from __future__ import annotations

import argparse
import atexit
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from zdp_bench import __version__
from zdp_bench.errors import UserError, unknown

EPILOG = """\
examples:
  zdp-bench run recipe=quickstart
  zdp-bench run -m recipe=phasemnist seed=1,2,3 algorithm.noise_multiplier=0.8,1.1
  zdp-bench reproduce zeta_dp_2021/1 --seeds 3
  zdp-bench audit recipe=quickstart
"""


class Parser(argparse.ArgumentParser):
    """argparse, with the nearest spelling for a wrong verb."""

    def error(self, message: str) -> NoReturn:
        if "invalid choice: '" in message:
            word = message.split("invalid choice: '")[1].split("'")[0]
            allowed = message.split("(choose from ")[1].rstrip(")").replace("'", "").split(", ")
            message = str(unknown("argument", word, allowed))
        print(f"zdp-bench: {message}", file=sys.stderr)
        raise SystemExit(2)


def parser() -> Parser:
    """All verbs with their arguments."""
    top = Parser(
        prog="zdp-bench",
        description="Differentially private deep learning on medical and complex-valued data, with numbers that can be trusted.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"zdp-bench {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)

    run = verbs.add_parser("run", help="train a recipe and write its record", description="Train a recipe and write its record.")
    run.add_argument("-m", "--multirun", action="store_true", help="sweep over comma-separated values")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME, and any key of the configuration")

    federate = verbs.add_parser(
        "federate",
        help="the server, or one node, of a federation over the network",
        description="Train a recipe with federated.nodes over the network: one server, one client a node, TLS between them. "
        "`zdp-bench run` does the same on one machine. Needs the extra federated.",
    )
    federate.add_argument("role", choices=["server", "client"])
    federate.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME, and any key; federated.* says where")

    table = verbs.add_parser(
        "table", help="print a paper's table beside ours, and write it", description="Print and write a table."
    )
    table.add_argument("table", metavar="PAPER/N")
    _results(table)

    reproduce = verbs.add_parser(
        "reproduce",
        help="run what a table lacks, or all tables, then write them",
        description="Run what a table lacks and write it; or, with --profile, all tables of all papers: smoke (generated data, "
        "minutes; fills no paper's cell), here (what the data root holds), paper (everything, estimated first).",
    )
    reproduce.add_argument("table", nargs="?", default="", metavar="PAPER/N")
    reproduce.add_argument("--profile", metavar="smoke|here|paper", help="all tables of all papers")
    reproduce.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 1 to N of every row (default 1)")
    reproduce.add_argument("overrides", nargs="*", metavar="key=value", help="where and how: paths.data, threads, device")
    _results(reproduce)

    check = verbs.add_parser(
        "validate",
        help="what a recipe would do, without training: model, clipping, every ε, time, memory, data",
        description="Work a recipe out without training it and without reading a record: parameters, layers and how they are "
        "clipped, replaced layers, sampling, z, claimed and tight ε of a record and of a patient, time and memory, data.",
    )
    check.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME, and any key of the configuration")
    check.add_argument("--format", choices=["rich", "json"], default="rich")

    finder = verbs.add_parser(
        "find-lr",
        help="a learning-rate range test on the recipe's records, and what it costs in ε",
        description="Try growing learning rates in private steps and watch the loss of public validation records. Every step is "
        "a release: the ε of the test, and of the recipe's run after it, are told; privacy.range_test_steps=N counts it there.",
    )
    finder.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME, and any key of the configuration")
    finder.add_argument("--lowest", type=float, default=1e-5, metavar="LR", help="first rate (default 1e-5)")
    finder.add_argument("--highest", type=float, default=1.0, metavar="LR", help="last rate (default 1)")
    finder.add_argument("--steps", type=int, default=50, metavar="N", help="at most N steps (default 50)")
    finder.add_argument("--format", choices=["rich", "json"], default="rich")

    audit = verbs.add_parser(
        "audit",
        help="attack a recipe's mechanism, and mechanisms known to be broken: a lower bound on ε",
        description="Attack a recipe's own mechanism and run, and built-in mechanisms known to be sound or broken. Exits with 1 "
        "when a verdict is not the expected one: when the recipe's own mechanism is caught, or a broken one is not.",
    )
    audit.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME, and any key of the configuration")
    audit.add_argument("--cases", default="all", metavar="all|recipe|NAME,...", help="built-in cases to attack (default all)")
    audit.add_argument("--confidence", type=float, default=0.99, help="of every bound (default 0.99)")
    audit.add_argument("--canaries", type=int, default=1000, metavar="M", help="in the attacks on a whole run (default 1000)")
    audit.add_argument("--steps", type=int, default=1000, metavar="N", help="at most N steps of the run (default 1000)")
    audit.add_argument("--format", choices=["rich", "md", "csv", "json"], default="rich")
    _results(audit)

    listing = verbs.add_parser("list", help="what there is: algorithms, models, datasets, recipes, tables, ...")
    listing.add_argument("kind", nargs="?", choices=[*LISTS], help="one kind only")

    data = verbs.add_parser(
        "data", help="what is under the data root, and what is missing", description="Look after the data root."
    )
    data.add_argument("action", nargs="?", choices=["show", "check", "fetch"], default="show")
    data.add_argument("dataset", nargs="?", help="one data set only (needed for fetch)")
    data.add_argument("--root", type=Path, help="the data root (default: $ZDP_DATA or ~/.cache/zdp-bench)")
    data.add_argument("--mirror", help="fetch from this address instead of the card's")

    bench = verbs.add_parser(
        "bench", help="measure what private and complex training cost", description="Measure, as ratios in one run."
    )
    bench.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        help="zeta_dp_2021/6, zeta_dp_2021/7, scaling, deepee_2021/3, algorithms (default: all)",
    )
    bench.add_argument("--quick", action="store_true", help="smaller, in under two minutes on two cores")
    bench.add_argument("--case", default="", metavar="TEXT", help="only the cases whose name contains TEXT; the others stay")
    bench.add_argument("--threads", type=int, default=2, metavar="N", help="CPU threads of every side (default 2)")
    _results(bench)

    figure = verbs.add_parser("figure", help="draw a paper's figure, as PNG and SVG", description="Draw a paper's figure.")
    figure.add_argument("figures", nargs="+", metavar="PAPER/figN", help="`zdp-bench list figures` names them")
    figure.add_argument("--root", type=Path, help="the data root (default: $ZDP_DATA or ~/.cache/zdp-bench)")
    _results(figure)

    report = verbs.add_parser(
        "report",
        help="everything on one HTML page",
        description="Every table, ε, curve and figure on one HTML page that needs no network: open it, mail it, print it.",
    )
    report.add_argument("--output", type=Path, metavar="FILE", help="where (default: report.html in the results folder)")
    _results(report)

    results = verbs.add_parser("results", help="the records as a table", description="The records as a table.")
    results.add_argument("filters", nargs="*", metavar="column=value", help="only records with these values")
    results.add_argument("--columns", help="comma-separated columns (default: the most telling)")
    results.add_argument("--by", metavar="COLUMN,...", help="one line a group: n, mean and deviation of the value")
    results.add_argument("--sort", metavar="COLUMN", help="sort by a column")
    results.add_argument("--format", choices=["rich", "md", "csv", "json"], default="rich")
    _results(results)
    _epsilon_arguments(verbs.add_parser("epsilon", help="every ε of the five papers, or the ε of your own numbers"))
    return top


def _epsilon_arguments(of: argparse.ArgumentParser) -> None:
    of.description = (
        "Without numbers: every ε of the five papers, reproduced and tight. With numbers: their ε, or the σ for a target."
    )
    of.add_argument("--sigma", type=float, metavar="σ", help="noise multiplier: its ε by every accountant")
    of.add_argument("--target-epsilon", type=float, metavar="E", help="the σ that gives this ε")
    of.add_argument("--sample-rate", type=float, metavar="Q", help="chance of a record in a step, or batch / records")
    of.add_argument("--batch-size", type=int, metavar="M", help="instead of the sample rate; needs --records")
    of.add_argument("--records", type=int, metavar="N", help="training records")
    of.add_argument("--steps", type=int, metavar="T")
    of.add_argument("--epochs", type=int, metavar="E", help="instead of steps")
    of.add_argument("--delta", type=float, metavar="δ", help="default 1e-5")
    of.add_argument("--sampling", metavar="SCHEME", help="poisson (default), uniform (fixed-size batches) or full")
    of.add_argument("--accountant", metavar="NAME", help="one accountant only; `zdp-bench list accountants` names them")
    of.add_argument("--records-per-patient", type=int, metavar="K", help="also the ε of a patient who owns K records")
    of.add_argument("--format", choices=["rich", "md", "csv", "json"], default="rich")
    _results(of)


def _results(of: argparse.ArgumentParser) -> None:
    of.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="the results folder (default: results)")


LISTS = (
    "algorithms",
    "models",
    "datasets",
    "tasks",
    "optimizers",
    "schedulers",
    "accountants",
    "recipes",
    "tables",
    "figures",
    "keys",
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Carry out one command line; exits with 0, or with 2 after one sentence."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _run_arguments(words) if words[:1] == ["run"] else _arguments(words)
    verbs = {
        "run": _run,
        "federate": _federate,
        "table": _table,
        "figure": _figure,
        "reproduce": _reproduce,
        "report": _report,
        "epsilon": _epsilon,
        "validate": _validate,
        "find-lr": _find_lr,
        "audit": _audit,
        "bench": _bench,
        "list": _list,
        "data": _data,
        "results": _results_verb,
    }
    from zdp_bench.survival import Stopped, between_runs

    atexit.register(gc.freeze)  # or the interpreter walks through all of torch once more before it ends, for a second
    try:
        with between_runs():
            raise SystemExit(verbs[options.verb](options))
    except UserError as error:
        print(f"zdp-bench: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Stopped as stop:
        print(f"zdp-bench: {stop}.", file=sys.stderr)
        raise SystemExit(stop.exit_code) from None
    except KeyboardInterrupt:
        print("zdp-bench: interrupted; the same command goes on from the last checkpoint.", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(0) from None


def _arguments(words: list[str]) -> argparse.Namespace:
    """Any verb but `run`; `key=value` words may stand before or after options."""
    options, rest = parser().parse_known_args(words)
    for word in rest:
        pairs = next((getattr(options, name) for name in ("overrides", "filters") if hasattr(options, name)), None)
        if word.startswith("-") or "=" not in word or pairs is None:
            parser().error(f"'{word}' is not known to `zdp-bench {options.verb}`; see `zdp-bench {options.verb} --help`")
        pairs.append(word)
    return options


def _run_arguments(words: list[str]) -> argparse.Namespace:
    """`run` takes -m anywhere among Hydra's overrides, some of which (`~key`, `+key=…`) argparse would not know."""
    if {"-h", "--help"} & set(words):
        parser().parse_args(["run", "--help"])
    overrides = [word for word in words[1:] if word not in ("-m", "--multirun")]
    for word in overrides:
        if word.startswith("-"):
            allowed = ["-m", "--multirun", "--help"]
            raise SystemExit(print(f"zdp-bench: {unknown('option', word, allowed)}", file=sys.stderr) or 2)
    return argparse.Namespace(verb="run", multirun=len(overrides) < len(words) - 1, overrides=overrides)


# ------------------------------------------------------------------------------------------------------------- run


def _run(options: argparse.Namespace) -> int:
    from zdp_bench import distributed
    from zdp_bench.config.store import hydra_session
    from zdp_bench.config.words import readable
    from zdp_bench.sweep import Job, sweep

    if options.multirun and distributed.launched():
        raise UserError("torchrun carries out one run: leave -m out, or sweep with launcher=joblib or launcher=slurm.")
    with readable(options.overrides), hydra_session() as driver:
        if not options.multirun:
            outcome = driver.run(config_name="config", task_function=Job(), overrides=options.overrides).return_value
            if isinstance(outcome, UserError):
                raise outcome
            return 0
        count, failed = sweep(driver, options.overrides)
    if "recipe=algorithm_faceoff" in options.overrides:
        return _faceoff(options.overrides, failed)
    print(f"sweep: {count} jobs, {len(failed)} failed")
    for overrides, error in failed:
        print(f"zdp-bench: {' '.join(overrides)}: {error}", file=sys.stderr)
    return 2 if failed else 0


def _faceoff(overrides: list[str], failed: list[tuple[list[str], str]]) -> int:
    """What a face-off ends in: who was skipped and why, a table of each setting tried, and one figure.

    Raises:
        UserError: every job failed.
    """
    from zdp_bench.config import compose, parse
    from zdp_bench.report import faceoff, figures
    from zdp_bench.terminal import console

    for error in dict.fromkeys(error for _, error in failed):
        console().print(f"skipped: {error}")
    single = [word for word in overrides if "," not in word and not word.startswith(("algorithm", "seed", "privacy.target_"))]
    config = parse(compose(single))
    found = faceoff.read(config.results)
    if not found:
        raise UserError("the face-off has no run to show: every job was skipped.")
    for one in found:
        console().print(faceoff.as_rich(one))
        for path in faceoff.write(one, config.results):
            print(f"written: {path}")
    for path in figures.write(figures.draw("faceoff", config.results, config.data_root), "faceoff", config.results):
        print(f"written: {path}")
    return 0


def _federate(options: argparse.Namespace) -> int:
    if options.role == "client":
        from zdp_bench.config import compose, parse
        from zdp_bench.federated.supernode import attend

        attend(parse(compose(options.overrides)), lambda line: print(line, flush=True))
    else:
        from zdp_bench.federated.superlink import served
        from zdp_bench.sweep import run_one

        run_one(options.overrides, served)
    return 0


# ---------------------------------------------------------------------------------------------- tables, reproduction


def _table(options: argparse.Namespace) -> int:
    from zdp_bench.report import curves, tables
    from zdp_bench.sweep import fillings
    from zdp_bench.terminal import console

    fills = fillings(options.table, options.results)
    if curves.is_figure(options.table):
        drawn = curves.build(options.table, options.results, fills)
        console().print(*curves.as_rich(drawn), sep="\n")
        paths = curves.write(drawn, options.results)
    else:
        made = tables.build(options.table, options.results, fills)
        console().print(tables.as_rich(made))
        paths = tables.write(made, options.results)
    print("\n".join(f"written: {path}" for path in paths))
    return 0


def _reproduce_all(options: argparse.Namespace) -> int:
    from rich.table import Table

    from zdp_bench import reproduce
    from zdp_bench.report import verdicts
    from zdp_bench.terminal import console

    if options.profile not in reproduce.PROFILES:
        raise unknown("profile", options.profile, reproduce.PROFILES)

    def say(line: str) -> None:
        print(line, flush=True)

    closing = reproduce.carry_out(options.profile, options.seeds, options.results, options.overrides, say)
    shown = Table("table", "row", "metric", "verdict", "why", title="Every cell", title_justify="left")
    for verdict in closing.verdicts:
        shown.add_row(verdict.table, verdict.row, verdict.metric, verdict.verdict, verdict.why)
    console().print(shown)
    counted = ", ".join(f"{count} {kind}" for kind, count in verdicts.counts(closing.verdicts).items())
    print(f"{len(closing.verdicts)} cells: {counted}. {verdicts.RULE}")
    print("\n".join(f"written: {path}" for path in closing.pages))
    for job, reason in closing.failed:
        print(f"zdp-bench: {job}: {reason}", file=sys.stderr)
    return 2 if closing.failed else 0


def _report(options: argparse.Namespace) -> int:
    from zdp_bench.report import curves, page, tables
    from zdp_bench.sweep import fillings

    made = []
    for name in tables.available():
        if tables.recipes_of(name) and not curves.is_figure(name):  # the page shows a figure's table as `table` wrote it
            made.append(tables.build(name, options.results, fillings(name, options.results)))
    print(f"written: {page.write(made, options.results, options.output or options.results / 'report.html')}")
    return 0


def _figure(options: argparse.Namespace) -> int:
    from zdp_bench.report import figures

    for name in options.figures:
        for path in figures.write(figures.draw(name, options.results, _root(options)), name, options.results):
            print(f"written: {path}")
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from zdp_bench.sweep import fillings, run_one

    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: must be at least 1.")
    if "=" in options.table:
        options.table, options.overrides = "", [options.table, *options.overrides]
    if bool(options.table) == bool(options.profile):
        raise UserError("zdp-bench reproduce needs a table, PAPER/N, or --profile smoke|here|paper, and not both.")
    if options.profile:
        return _reproduce_all(options)
    failed = []
    for filling in (f for f in fillings(options.table, options.results) if not f.on):
        job = [f"recipe={filling.recipe}", *filling.overrides]
        for seed in range(1, options.seeds + 1):
            try:
                run_one([*job, f"seed={seed}", f"paths.results={options.results}", *options.overrides])
            except UserError as error:
                failed.append(f"{' '.join(job)} seed={seed}: {error}")
                print(f"zdp-bench: {failed[-1]}", file=sys.stderr)
    _table(options)
    return 2 if failed else 0


# ------------------------------------------------------------------------------------------------------------ audit


def _audit(options: argparse.Namespace) -> int:
    import dataclasses

    from zdp_bench.audit import audit
    from zdp_bench.config import compose, parse
    from zdp_bench.report import audit as table
    from zdp_bench.terminal import console

    config = parse(compose(options.overrides))
    findings, title = [], f"Audit of recipe {config.recipe}, seed {config.seed}"
    with console().status("attacking ..."):
        for finding in audit(config, options.cases, options.confidence, options.canaries, options.steps):
            findings.append(dataclasses.asdict(finding))
    if options.format == "rich":
        console().print(table.as_rich(findings, title))
    else:
        print(table.as_text(findings, options.format, title))
    if options.cases == "all":
        for path in table.write(findings, options.results, config.recipe, title):
            print(f"written: {path}", file=sys.stderr)
    return int(not all(table.as_expected(finding) for finding in findings))


def _validate(options: argparse.Namespace) -> int:
    import dataclasses
    import json

    from zdp_bench.config import compose, parse
    from zdp_bench.report import validation
    from zdp_bench.terminal import console
    from zdp_bench.validate import validate

    report = dataclasses.asdict(validate(parse(compose(options.overrides))))
    if options.format == "json":
        print(json.dumps(report, indent=1))
    else:
        for table in validation.as_rich(report):
            console().print(table)
    return 0


def _find_lr(options: argparse.Namespace) -> int:
    import dataclasses
    import json

    from zdp_bench.config import compose, parse
    from zdp_bench.range_test import range_test
    from zdp_bench.report import range_test as report
    from zdp_bench.terminal import console

    with console().status("trying learning rates ..."):
        found = range_test(parse(compose(options.overrides)), options.lowest, options.highest, options.steps)
    if options.format == "json":
        print(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        console().print(report.as_rich(dataclasses.asdict(found)))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from rich.table import Table

    from zdp_bench.bench import pages, tables
    from zdp_bench.terminal import console

    if options.threads < 1:
        raise UserError(f"--threads {options.threads}: must be at least 1.")
    for name in options.tables:
        if name not in tables.available():
            raise unknown("table", name, tables.available())
    for name in options.tables or tables.available():
        rows, paths = tables.run(name, options.quick, options.threads, options.results, options.case)
        for case in dict.fromkeys(row.case for row in rows):
            shown = Table(*pages.COLUMNS, title=case, title_justify="left")
            for row in rows:
                if row.case == case:
                    shown.add_row(*pages.cells(row).values())
            console().print(shown)
        for path in paths:
            print(f"written: {path}")
    return 0


# --------------------------------------------------------------------------------------------------- list, data, results


def _list(options: argparse.Namespace) -> int:
    from rich.table import Table

    from zdp_bench import assets
    from zdp_bench.terminal import console

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
        from zdp_bench.report import tables

        return [(name, ", ".join(tables.recipes_of(name)) or "no recipe yet") for name in tables.available()]
    if kind == "figures":
        from zdp_bench.registry import lookup, names

        return [(name, str(lookup("figure", name).__doc__).splitlines()[0]) for name in names("figure")]
    if kind == "keys":
        from zdp_bench.config.store import known_keys

        return [(key, "") for key in known_keys([])]
    folder = assets.CONF / kind.removesuffix("s")
    return [(name, _first_comment(path)) for name, path in assets.group(folder).items()]


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ") if first.startswith("# ") else ""


def _root(options: argparse.Namespace) -> Path:
    import os

    named: Path | None = options.root
    return (named or Path(os.environ.get("ZDP_DATA") or "~/.cache/zdp-bench")).expanduser()


def _data(options: argparse.Namespace) -> int:
    from zdp_bench.data import files
    from zdp_bench.terminal import console

    root = _root(options)
    chosen = [files.card(options.dataset)] if options.dataset else files.cards()
    if options.action == "show":
        from zdp_bench.report.data_root import as_rich

        console().print(as_rich(root, chosen))
        return 0
    if options.action == "fetch":
        if not options.dataset:
            raise UserError("zdp-bench data fetch needs a data set: one of " + ", ".join(card.name for card in chosen) + ".")
        done = [path for card in _with_sources(chosen) for path in files.fetch(root, card, options.mirror)]
        print("\n".join(f"fetched: {path}" for path in done) or "nothing is missing")
        return 0
    wrong = 0
    for card in _with_sources(chosen):
        for path, problem in files.inspected(root, card):
            wrong += bool(problem)
            print(f"zdp-bench: {problem}" if problem else f"ok: {path}", file=sys.stderr if problem else sys.stdout)
    return 2 if wrong else 0


def _with_sources(cards: list[Any]) -> list[Any]:
    """The cards themselves, or the cards whose files they are made from, once each."""
    from zdp_bench.data.files import card

    named = {of.uses or of.name: card(of.uses) if of.uses else of for of in cards}
    return list(named.values())


def _results_verb(options: argparse.Namespace) -> int:
    from zdp_bench.report import listing
    from zdp_bench.terminal import console

    frame = listing.select(options.results, options.filters, options.columns, options.sort, options.by)
    if options.format == "rich":
        console().print(listing.as_rich(frame))
    else:
        print(listing.as_text(frame, options.format))
    return 0


def _epsilon(options: argparse.Namespace) -> int:
    from zdp_bench.report import epsilon, lines, own_epsilon
    from zdp_bench.terminal import console

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
                raise UserError(f"--{name.replace('_', '-')} alone says too little: add --sigma or --target-epsilon.")
        table = epsilon.rows()
        paths = epsilon.write(table, options.results)
        if options.format == "rich":
            console().print(epsilon.as_rich(table))
            print("\n".join(f"written: {path}" for path in paths))
        else:
            print(epsilon.as_markdown(table) if options.format == "md" else lines.as_text(epsilon.plain(table), options.format))
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
