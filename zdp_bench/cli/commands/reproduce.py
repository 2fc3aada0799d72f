"""Run what a table lacks and write it; or, with --profile, all tables of all papers: smoke (a
short run of each recipe on generated data, up to 9 GB a core; fills no paper's cell), here (what
the data root holds), paper (everything). --plan says what that is and how long it takes, and runs
nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from zdp_bench.cli.arguments import add_overrides, print_sheet, whole
from zdp_bench.cli.commands.table import print_table
from zdp_bench.errors import UserError, unknown

if TYPE_CHECKING:
    from zdp_bench.experiments.reproduce import Job, Reproduction, ReproductionPlan

GROUP = "reproduce"
HELP = "run what a table lacks, or all tables, then write them"
AS_PUBLISHED = "as-published"
PROFILES = ("smoke", "here", "paper")
UNASKED = 1.0  # hours that may start without --yes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "table", nargs="?", default="", metavar="PAPER/N", help="`zdp-bench list tables` names them"
    )
    parser.add_argument("--profile", choices=PROFILES, help="all tables of all papers")
    parser.add_argument(
        "--seeds",
        type=whole(1),
        metavar="N",
        help="seeds 1 to N of every row (default: as many as the paper has)",
    )
    parser.add_argument(
        "--plan", action="store_true", help="list the runs, with hours, and run nothing"
    )
    parser.add_argument(
        "--budget", metavar="40h", help="what fits in a time (40h, 90m), most rows per hour first"
    )
    parser.add_argument("--only", choices=[AS_PUBLISHED], help="no variants of ours")
    parser.add_argument(
        "--launcher",
        metavar="joblib|slurm",
        help="give the runs to one of Hydra's launchers (hydra.launcher.KEY=VALUE sets it up)",
    )
    parser.add_argument(
        "--yes", action="store_true", help=f"start also what takes over {UNASKED:g} hour"
    )
    add_overrides(parser, "where and how: paths.data, threads, device")


def run(options: argparse.Namespace) -> int:
    from zdp_bench.experiments import reproduce
    from zdp_bench.experiments.claims import require_unchanged
    from zdp_bench.report import papers
    from zdp_bench.training.interrupts import require_writable

    require_writable(options.results)
    if "=" in options.table:
        options.table, options.overrides = "", [options.table, *options.overrides]
    settings = [w for w in options.overrides if w.startswith("hydra.launcher.")]
    where = [word for word in options.overrides if word.startswith("paths.results=")]
    extra = [word for word in options.overrides if word not in (*settings, *where)]
    _check(options)
    require_unchanged(extra)

    smoke = options.profile == "smoke"
    folder = options.results / reproduce.SMOKE_FOLDER if smoke else options.results
    names = [name for name in papers.available() if papers.recipes_of(name)]
    names = [options.table] if options.table else names
    if options.profile:
        _say(f"working out what {len(names)} tables want ...")
    profile = options.profile or "paper"
    plan = reproduce.make_plan(
        names, profile, options.seeds, folder, extra, options.only == AS_PUBLISHED
    )
    if options.plan:
        return _print_plan(options, plan)
    jobs = plan.jobs if smoke else _choose(options, plan)
    if options.launcher:
        failed = reproduce.launch_jobs(jobs, folder, extra, options.launcher, settings)
    else:
        workers = (os.cpu_count() or 1) if smoke else 1
        failed = reproduce.run_jobs(jobs, workers, _say)
    if options.table:
        print_table(options.table, options.results)
    else:
        _print_verdicts(reproduce.write_all(plan, failed, profile, folder, _say))
    for job, reason in failed:
        print(f"zdp-bench: {job}: {reason}", file=sys.stderr)
    return 2 if failed else 0


def _check(options: argparse.Namespace) -> None:
    from zdp_bench.config.compose import group_options
    from zdp_bench.experiments.reproduce import read_duration
    from zdp_bench.report import papers

    if options.seeds is not None and options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: must be at least 1.")
    if bool(options.table) == bool(options.profile):
        raise UserError(
            "zdp-bench reproduce needs a table, PAPER/N, or --profile smoke|here|paper, "
            "and not both."
        )
    if options.table:
        papers.recipes_of(options.table)
    if options.launcher and options.launcher not in group_options("launcher"):
        raise unknown("launcher", options.launcher, group_options("launcher"))
    if options.budget:
        read_duration(options.budget)
    if options.profile == "smoke" and (options.plan or options.budget or options.launcher):
        raise UserError(
            "--profile smoke is a run of each recipe: leave --plan, --budget and --launcher out."
        )


def _choose(options: argparse.Namespace, plan: ReproductionPlan) -> list[Job]:
    """Return the jobs to run now, in order: those with a record, then what was asked for.

    Raises:
        UserError: it would take over an hour, and nobody said that it may.
    """
    from zdp_bench.experiments import reproduce

    if options.yes and not options.budget:
        return plan.jobs
    ordered = reproduce.order(plan, options.results)
    lacking = {id(work.job) for work in ordered}
    done = [job for job in plan.jobs if id(job) not in lacking]
    hours = reproduce.hours(ordered)
    unknown = sum(work.seconds is None and not work.lacks for work in ordered)
    if options.budget:
        ordered = reproduce.within(reproduce.read_duration(options.budget), ordered)
    elif hours > UNASKED or unknown:
        more = f" and {unknown} of unknown length" if unknown else ""
        raise UserError(
            f"{len(ordered) - unknown} runs of about {hours:.1f} hours together{more}: say --yes "
            "to start all, --budget 2h for what fits in that time, or --plan to read the list."
        )
    return [*done, *(work.job for work in ordered)]


def _print_plan(options: argparse.Namespace, plan: ReproductionPlan) -> int:
    from zdp_bench.experiments import reproduce

    ordered = reproduce.order(plan, options.results)
    if options.budget:
        ordered = reproduce.within(reproduce.read_duration(options.budget), ordered)
    print_sheet(reproduce.sheet(plan, ordered), "rich")
    return 0


def _print_verdicts(outcome: Reproduction) -> None:
    from zdp_bench.report.cells import RULE, Count
    from zdp_bench.report.sheet import Sheet

    columns = ("table", "row", "metric", "verdict", "why")
    rows = [[getattr(verdict, column) for column in columns] for verdict in outcome.verdicts]
    print_sheet(Sheet("Every cell", columns, rows), "rich")
    counted = Count.count(verdict.standing for verdict in outcome.verdicts)
    print(f"{counted.sentence} {RULE}")
    print("\n".join(f"written: {path}" for path in outcome.pages))


def _say(line: str) -> None:
    print(line, flush=True)
