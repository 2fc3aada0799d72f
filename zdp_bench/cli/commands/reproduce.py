"""Run what is missing from a table, then write the table. With --profile, do so for all tables of
all papers: smoke (a short run of each recipe on generated data; fills no table), here (all recipes
whose data is in the data root), paper (everything). --plan only lists the runs with their times. A
stopped run is saved: `timeout 2h zdp-bench reproduce ...` takes at most two hours, and the same
command continues.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import RESULTS, add_overrides, print_sheet
from zdp_bench.errors import UserError, print_message

GROUP = "reproduce"
HELP = "run what is missing from a table, or all, and write it"
AS_PUBLISHED = "as-published"
PROFILES = ("smoke", "here", "paper")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "table", nargs="?", default="", metavar="PAPER/N", help="see `zdp-bench list tables`"
    )
    parser.add_argument("--profile", choices=PROFILES, help="all tables of all papers")
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="seeds 1 to N of every row (default: as many as the paper has)",
    )
    parser.add_argument("--plan", action="store_true", help="list the runs without running them")
    parser.add_argument("--only", choices=[AS_PUBLISHED], help="leave out our variants")
    parser.add_argument(
        "--launcher",
        default="local",
        metavar="joblib|slurm",
        help="submit the runs to one of Hydra's launchers (hydra.launcher.KEY=VALUE sets it up)",
    )
    add_overrides(parser, "keys that change no result, such as paths.data, threads, device")


def run(options: argparse.Namespace) -> int:
    from zdp_bench.cli.commands.table import write_sheet, write_tables
    from zdp_bench.config import configured
    from zdp_bench.config.words import split_word
    from zdp_bench.experiments import reproduce
    from zdp_bench.experiments.claims import build_table, require_unchanged
    from zdp_bench.experiments.sweep import require_launcher
    from zdp_bench.report import papers
    from zdp_bench.training.interrupts import require_writable

    words = [options.table, *options.overrides]
    options.table = next((word for word in words if "=" not in word), "")
    options.overrides = [word for word in words if word and word != options.table]
    settings = [w for w in options.overrides if w.lstrip("+").startswith("hydra.launcher.")]
    folders = [word for word in options.overrides if split_word(word)[0] == "paths.results"]
    overrides = [word for word in options.overrides if word not in (*settings, *folders)]
    results = configured(["recipe=quickstart", *folders]).results if folders else RESULTS
    require_writable(results)
    if options.seeds is not None and options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: must be at least 1.")
    if bool(options.table) == bool(options.profile):
        raise UserError(
            "zdp-bench reproduce needs a table, PAPER/N, or --profile smoke|here|paper, "
            "and not both."
        )
    require_launcher(options.launcher, settings)
    require_unchanged(overrides)

    is_smoke = options.profile == "smoke"
    folder = results / reproduce.SMOKE_FOLDER if is_smoke else results
    tables = [options.table] if options.table else [*filter(papers.recipes_of, papers.available())]
    profile = options.profile or "paper"
    as_published = options.only is not None
    plan = reproduce.make_plan(tables, profile, options.seeds, folder, overrides, as_published)
    if options.plan:
        print_sheet(plan.sheet(options.launcher, settings), "rich")
        return 0
    failed = reproduce.carry_out(plan, options.launcher, settings)
    if options.table:
        sheet = build_table(options.table, results)
        print_sheet(sheet, "rich")
        write_sheet(sheet, options.table, results)
    elif not is_smoke:
        write_tables(results)
    for why, count in plan.left_out.most_common():
        print_message(f"{count} rows left out: {why}")
    for job, reason in failed:
        print_message(f"{job}: {reason}")
    return 2 if failed else 0
