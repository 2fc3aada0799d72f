"""What can be said to `zdp-bench`: its verbs and their arguments."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from zdp_bench import __version__
from zdp_bench.errors import unknown

N = TypeVar("N", int, float)
RESULTS = Path("results")  # the default: it need not be there yet
EPILOG = """\
examples:
  zdp-bench run recipe=quickstart
  zdp-bench run -m recipe=phasemnist seed=1,2,3 algorithm.noise_multiplier=0.8,1.1
  zdp-bench reproduce zeta_dp_2021/1 --seeds 3
  zdp-bench audit recipe=quickstart
"""
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

    run = verbs.add_parser(
        "run",
        help="train a recipe and write its record",
        description="Train a recipe and write its record.",
    )
    run.add_argument(
        "-m", "--multirun", action="store_true", help="sweep over comma-separated values"
    )
    _overrides(run)

    federate = verbs.add_parser(
        "federate",
        help="the server, or one node, of a federation over the network",
        description="Train a recipe with federated.nodes over the network: one server, one client a node, TLS between them. "
        "`zdp-bench run` does the same on one machine. Needs the extra federated.",
    )
    federate.add_argument(
        "role", choices=["server", "client"], help="what this process is; a client is one node"
    )
    federate.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="recipe=NAME, and any key; federated.* says where",
    )

    table = verbs.add_parser(
        "table",
        help="print a paper's table beside ours, and write it",
        description="Print and write a table.",
    )
    table.add_argument("table", metavar="PAPER/N", help="`zdp-bench list tables` names them")
    _results(table)

    reproduce = verbs.add_parser(
        "reproduce",
        help="run what a table lacks, or all tables, then write them",
        description="Run what a table lacks and write it; or, with --profile, all tables of all papers: smoke (generated data, "
        "minutes; fills no paper's cell), here (what the data root holds), paper (everything, estimated first).",
    )
    reproduce.add_argument(
        "table", nargs="?", default="", metavar="PAPER/N", help="`zdp-bench list tables` names them"
    )
    reproduce.add_argument("--profile", metavar="smoke|here|paper", help="all tables of all papers")
    reproduce.add_argument(
        "--seeds",
        type=whole(1),
        default=1,
        metavar="N",
        help="seeds 1 to N of every row (default 1)",
    )
    reproduce.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="where and how: paths.data, threads, device",
    )
    _results(reproduce)

    check = verbs.add_parser(
        "validate",
        help="what a recipe would do, without training: model, clipping, every ε, time, memory, data",
        description="Work a recipe out without training it and without reading a record: parameters, layers and how they are "
        "clipped, replaced layers, sampling, z, claimed and tight ε of a record and of a patient, time and memory, data.",
    )
    _overrides(check)
    check.add_argument(
        "--format", choices=["rich", "json"], default="rich", help="a table, or JSON (default rich)"
    )

    finder = verbs.add_parser(
        "find-lr",
        help="a learning-rate range test on the recipe's records, and what it costs in ε",
        description="Try growing learning rates in private steps and watch the loss of public validation records. Every step is "
        "a release: the ε of the test, and of the recipe's run after it, are told; privacy.range_test_steps=N counts it there.",
    )
    _overrides(finder)
    finder.add_argument(
        "--lowest",
        type=number("above 0"),
        default=1e-5,
        metavar="LR",
        help="first rate (default 1e-5)",
    )
    finder.add_argument(
        "--highest",
        type=number("above --lowest"),
        default=1.0,
        metavar="LR",
        help="last rate (default 1)",
    )
    finder.add_argument(
        "--steps", type=whole(3), default=50, metavar="N", help="at most N steps (default 50)"
    )
    finder.add_argument(
        "--format", choices=["rich", "json"], default="rich", help="a table, or JSON (default rich)"
    )

    audit = verbs.add_parser(
        "audit",
        help="attack a recipe's mechanism, and mechanisms known to be broken: a lower bound on ε",
        description="Attack a recipe's own mechanism and run, and built-in mechanisms known to be sound or broken. Exits with 1 "
        "when a verdict is not the expected one: when the recipe's own mechanism is caught, or a broken one is not.",
    )
    _overrides(audit)
    audit.add_argument(
        "--cases",
        default="all",
        metavar="all|recipe|NAME,...",
        help="built-in cases to attack (default all)",
    )
    audit.add_argument(
        "--confidence",
        type=number("0.5 or more, and below 1"),
        default=0.99,
        help="of every bound (default 0.99)",
    )
    audit.add_argument(
        "--canaries",
        type=whole(10),
        default=1000,
        metavar="M",
        help="in the attacks on a whole run (default 1000)",
    )
    audit.add_argument(
        "--steps",
        type=whole(1),
        default=1000,
        metavar="N",
        help="at most N steps of the run (default 1000)",
    )
    audit.add_argument(
        "--format",
        choices=["rich", "md", "csv", "json"],
        default="rich",
        help="a table, or text for other programs (default rich)",
    )
    _results(audit)

    listing = verbs.add_parser(
        "list",
        help="what there is: algorithms, models, datasets, recipes, tables, ...",
        description="Name what there is, each with a line on it; `zdp-bench list keys` shows every key with its default.",
    )
    listing.add_argument("kind", nargs="?", choices=[*LISTS], help="one kind only")

    data = verbs.add_parser(
        "data",
        help="what is under the data root, and what is missing",
        description="Look after the data root.",
    )
    actions = "what is there (the default), whether each file is what was published, or download what is missing"
    data.add_argument(
        "action", nargs="?", choices=["show", "check", "fetch"], default="show", help=actions
    )
    data.add_argument("dataset", nargs="?", help="one data set only (needed for fetch)")
    data.add_argument(
        "--root", type=Path, help="the data root (default: $ZDP_DATA or ~/.cache/zdp-bench)"
    )
    data.add_argument("--mirror", help="fetch from this address instead of the card's")

    bench = verbs.add_parser(
        "bench",
        help="measure what private and complex training cost",
        description="Measure, as ratios in one run.",
    )
    bench.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        help="zeta_dp_2021/6, zeta_dp_2021/7, scaling, deepee_2021/3, algorithms (default: all)",
    )
    bench.add_argument(
        "--quick", action="store_true", help="smaller, in under two minutes on two cores"
    )
    bench.add_argument(
        "--case",
        default="",
        metavar="TEXT",
        help="only the cases whose name contains TEXT; the others stay",
    )
    bench.add_argument(
        "--threads",
        type=whole(1),
        default=2,
        metavar="N",
        help="CPU threads of every side (default 2)",
    )
    _results(bench)

    figure = verbs.add_parser(
        "figure", help="draw a paper's figure, as PNG and SVG", description="Draw a paper's figure."
    )
    figure.add_argument(
        "figures", nargs="+", metavar="PAPER/figN", help="`zdp-bench list figures` names them"
    )
    figure.add_argument(
        "--root", type=Path, help="the data root (default: $ZDP_DATA or ~/.cache/zdp-bench)"
    )
    _results(figure)

    report = verbs.add_parser(
        "report",
        help="everything on one HTML page",
        description="Every table, ε, curve and figure on one HTML page that needs no network: open it, mail it, print it.",
    )
    report.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where (default: report.html in the results folder)",
    )
    _results(report)

    results = verbs.add_parser(
        "results", help="the records as a table", description="The records as a table."
    )
    results.add_argument(
        "filters", nargs="*", metavar="column=value", help="only records with these values"
    )
    results.add_argument("--columns", help="comma-separated columns (default: the most telling)")
    results.add_argument(
        "--by", metavar="COLUMN,...", help="one line a group: n, mean and deviation of the value"
    )
    results.add_argument("--sort", metavar="COLUMN", help="sort by a column")
    results.add_argument(
        "--format",
        choices=["rich", "md", "csv", "json"],
        default="rich",
        help="a table, or text for other programs (default rich)",
    )
    _results(results)
    _epsilon_arguments(
        verbs.add_parser("epsilon", help="every ε of the five papers, or the ε of your own numbers")
    )
    return top


def _epsilon_arguments(of: argparse.ArgumentParser) -> None:
    of.description = "Without numbers: every ε of the five papers, reproduced and tight. With numbers: their ε, or the σ for a target."
    of.add_argument(
        "--sigma",
        type=number("0 or more"),
        metavar="σ",
        help="noise multiplier: its ε by every accountant",
    )
    of.add_argument(
        "--target-epsilon", type=number("above 0"), metavar="E", help="the σ that gives this ε"
    )
    of.add_argument(
        "--sample-rate",
        type=number("above 0, and 1 at most"),
        metavar="Q",
        help="chance of a record in a step, or batch / records",
    )
    of.add_argument(
        "--batch-size",
        type=whole(1),
        metavar="M",
        help="instead of the sample rate; needs --records",
    )
    of.add_argument("--records", type=whole(1), metavar="N", help="training records")
    of.add_argument("--steps", type=whole(1), metavar="T", help="steps of training")
    of.add_argument("--epochs", type=whole(1), metavar="E", help="instead of steps")
    of.add_argument("--delta", type=number("above 0 and below 1"), metavar="δ", help="default 1e-5")
    of.add_argument(
        "--sampling",
        metavar="SCHEME",
        help="poisson (default), uniform (fixed-size batches) or full",
    )
    of.add_argument(
        "--accountant",
        metavar="NAME",
        help="one accountant only; `zdp-bench list accountants` names them",
    )
    of.add_argument(
        "--records-per-patient",
        type=whole(1),
        metavar="K",
        help="also the ε of a patient or image with K records",
    )
    of.add_argument(
        "--format",
        choices=["rich", "md", "csv", "json"],
        default="rich",
        help="a table, or text for other programs (default rich)",
    )
    _results(of)


def _overrides(of: argparse.ArgumentParser) -> None:
    """A run's configuration, for every verb that looks at one."""
    of.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="recipe=NAME, and any key of the configuration",
    )


def _results(of: argparse.ArgumentParser) -> None:
    of.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="the results folder (default: results)",
    )


def whole(least: int) -> Callable[[str], int]:
    """A reader of whole numbers, for argparse; whether one is in range is asked where it is used."""
    return _reader(int, f"must be a whole number, {least} or more")


def number(which: str) -> Callable[[str], float]:
    """A reader of numbers, as `whole`."""
    return _reader(
        float,
        f"must be a number {which}" if which.startswith("above") else f"must be a number, {which}",
    )


def _reader(kind: Callable[[str], N], rule: str) -> Callable[[str], N]:
    def read(word: str) -> N:
        try:
            return kind(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"={word}: {rule}.") from None

    return read


class Parser(argparse.ArgumentParser):
    """argparse, with a sentence that says what to write in place of its own."""

    def error(self, message: str) -> NoReturn:
        if match := re.match(
            r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)$", message
        ):
            message = str(
                unknown(match[1].lower(), match[2], match[3].replace("'", "").split(", "))
            )
        elif match := re.match(r"argument (\S+): (=.*)", message):
            message = match[1] + match[2]
        elif match := re.match(r"argument (\S+): expected", message):
            message = f"{match[1]} needs a value; see `{self.prog} --help`."
        elif match := re.match(r"the following arguments are required: (.*)", message):
            missing = [
                action
                for action in self._actions
                if str(action.metavar or action.dest) in match[1].split(", ")
            ]
            message = f"`{self.prog}` needs {_wanted(missing[0])}; see `{self.prog} --help`."
        print(f"zdp-bench: {message}", file=sys.stderr)
        raise SystemExit(2)


def _wanted(action: argparse.Action) -> str:
    return (
        f"one of {', '.join(map(str, action.choices))}"
        if action.choices
        else str(action.metavar or action.dest)
    )


def arguments(words: list[str]) -> argparse.Namespace:
    """The verb and its arguments, of one command line; ends the process after one sentence where they are wrong."""
    return _run_arguments(words) if words[:1] == ["run"] else _any_arguments(words)


def _any_arguments(words: list[str]) -> argparse.Namespace:
    """Any verb but `run`; `key=value` words may stand before or after options."""
    options, rest = parser().parse_known_args(words)
    for word in rest:
        pairs = next(
            (getattr(options, name) for name in ("overrides", "filters") if hasattr(options, name)),
            None,
        )
        if word.startswith("--"):
            parser().error(str(_unknown_option(options.verb, word)))
        if word.startswith("-") or "=" not in word or pairs is None:
            parser().error(
                f"'{word}' is not known to `zdp-bench {options.verb}`; see `zdp-bench {options.verb} --help`"
            )
        pairs.append(word)
    return options


def _unknown_option(verb: str, word: str) -> Exception:
    verbs = next(action.choices for action in parser()._actions if action.dest == "verb")
    allowed = [
        option
        for action in verbs[verb]._actions  # type: ignore[index]
        for option in action.option_strings
        if option.startswith("--")
    ]
    return unknown(f"`zdp-bench {verb}`: option", word.partition("=")[0], allowed)


def _run_arguments(words: list[str]) -> argparse.Namespace:
    """`run` takes -m anywhere among Hydra's overrides, some of which (`~key`, `+key=…`) argparse would not know."""
    if {"-h", "--help"} & set(words):
        parser().parse_args(["run", "--help"])
    overrides = [word for word in words[1:] if word not in ("-m", "--multirun")]
    for word in overrides:
        if word.startswith("-"):
            allowed = ["-m", "--multirun", "--help"]
            raise SystemExit(
                print(f"zdp-bench: {unknown('option', word, allowed)}", file=sys.stderr) or 2
            )
    return argparse.Namespace(
        verb="run", multirun=len(overrides) < len(words) - 1, overrides=overrides
    )
