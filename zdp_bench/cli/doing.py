"""The verbs that compute something: they train, attack, measure or work out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from zdp_bench.cli.showing import table
from zdp_bench.errors import UserError, unknown


def _run(options: argparse.Namespace) -> int:
    from zdp_bench.config.compose import hydra_session
    from zdp_bench.config.messages import readable
    from zdp_bench.experiments.sweep import Job, sweep
    from zdp_bench.training import distributed

    if options.multirun and distributed.launched():
        raise UserError(
            "torchrun carries out one run: leave -m out, or sweep with launcher=joblib or launcher=slurm."
        )
    launchers = [
        word
        for word in options.overrides
        if word.startswith("launcher=") and word != "launcher=local"
    ]
    if launchers and not options.multirun:
        raise UserError(
            f"{launchers[-1]}: a launcher carries out a sweep; add -m, or leave it out."
        )
    with readable(options.overrides), hydra_session() as driver:
        if not options.multirun:
            outcome = driver.run(
                config_name="config", task_function=Job(), overrides=options.overrides
            ).return_value
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
    from zdp_bench.config import configured
    from zdp_bench.experiments.sweep import faceoff_command
    from zdp_bench.report import faceoff, figures
    from zdp_bench.training.progress import console

    for error in dict.fromkeys(error for _, error in failed):
        console().print(f"skipped: {error}")
    single = [
        word
        for word in overrides
        if "," not in word and not word.startswith(("algorithm", "seed", "privacy.target_"))
    ]
    config = configured(single)
    found = faceoff.read(config.results)
    if not found:
        raise UserError("the face-off has no run to show: every job was skipped.")
    for one in found:
        console().print(faceoff.as_rich(one))
        for path in faceoff.write(one, config.results, faceoff_command(one)):
            print(f"written: {path}")
    for path in figures.write(
        figures.draw("faceoff", config.results, config.data_root), "faceoff", config.results
    ):
        print(f"written: {path}")
    return 0


def _federate(options: argparse.Namespace) -> int:
    if options.role == "client":
        from zdp_bench.config import configured
        from zdp_bench.federated.network.supernode import run_client

        run_client(configured(options.overrides), lambda line: print(line, flush=True))
    else:
        from zdp_bench.experiments.sweep import run_one
        from zdp_bench.federated.network.superlink import run_server

        run_one(options.overrides, run_server)
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from zdp_bench.experiments.sweep import fillings, require_unchanged, run_one

    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: must be at least 1.")
    if "=" in options.table:
        options.table, options.overrides = "", [options.table, *options.overrides]
    if bool(options.table) == bool(options.profile):
        raise UserError(
            "zdp-bench reproduce needs a table, PAPER/N, or --profile smoke|here|paper, and not both."
        )
    require_unchanged(options.overrides)
    if options.profile:
        return _reproduce_all(options)
    failed = []
    for filling in (f for f in fillings(options.table, options.results) if not f.on):
        job = [f"recipe={filling.recipe}", *filling.overrides]
        for seed in range(1, options.seeds + 1):
            try:
                run_one(
                    [*job, f"seed={seed}", f"paths.results={options.results}", *options.overrides]
                )
            except UserError as error:
                failed.append(f"{' '.join(job)} seed={seed}: {error}")
                print(f"zdp-bench: {failed[-1]}", file=sys.stderr)
    table(options)
    return 2 if failed else 0


def _reproduce_all(options: argparse.Namespace) -> int:
    from rich.table import Table

    from zdp_bench.experiments import reproduce
    from zdp_bench.report import verdicts
    from zdp_bench.training.progress import console

    if options.profile not in reproduce.PROFILES:
        raise unknown("profile", options.profile, reproduce.PROFILES)

    def say(line: str) -> None:
        print(line, flush=True)

    closing = reproduce.carry_out(
        options.profile, options.seeds, options.results, options.overrides, say
    )
    shown = Table(
        "table", "row", "metric", "verdict", "why", title="Every cell", title_justify="left"
    )
    for verdict in closing.verdicts:
        shown.add_row(verdict.table, verdict.row, verdict.metric, verdict.verdict, verdict.why)
    console().print(shown)
    counted = ", ".join(
        f"{count} {kind}" for kind, count in verdicts.counts(closing.verdicts).items()
    )
    print(f"{len(closing.verdicts)} cells: {counted}. {verdicts.RULE}")
    print("\n".join(f"written: {path}" for path in closing.pages))
    for job, reason in closing.failed:
        print(f"zdp-bench: {job}: {reason}", file=sys.stderr)
    return 2 if closing.failed else 0


def _audit(options: argparse.Namespace) -> int:
    import dataclasses

    from zdp_bench.audit import audit
    from zdp_bench.config import configured
    from zdp_bench.report import audit as table
    from zdp_bench.training.progress import console

    config = configured(options.overrides)
    findings, title = [], f"Audit of recipe {config.recipe}, seed {config.seed}"
    with console().status("attacking ..."):
        for finding in audit(
            config, options.cases, options.confidence, options.canaries, options.steps
        ):
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

    from zdp_bench.config import configured
    from zdp_bench.experiments.validate import validate
    from zdp_bench.report import validation
    from zdp_bench.training.interrupts import probe
    from zdp_bench.training.progress import console

    config = configured(options.overrides)
    probe(config.results)  # as its run would
    report = dataclasses.asdict(validate(config))
    if options.format == "json":
        print(json.dumps(report, indent=1))
    else:
        for table in validation.as_rich(report):
            console().print(table)
    return 0


def _find_lr(options: argparse.Namespace) -> int:
    import dataclasses
    import json

    from zdp_bench.config import configured
    from zdp_bench.experiments.lr_finder import range_test
    from zdp_bench.report import lr_finder as report
    from zdp_bench.training.progress import console

    with console().status("trying learning rates ..."):
        found = range_test(
            configured(options.overrides), options.lowest, options.highest, options.steps
        )
    if options.format == "json":
        print(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        console().print(report.as_rich(dataclasses.asdict(found)))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from rich.table import Table

    from zdp_bench.bench import pages, tables
    from zdp_bench.config.ranges import require_threads
    from zdp_bench.training.progress import console

    require_threads("--threads", options.threads)
    for name in options.tables:
        if name not in tables.available():
            raise unknown("table", name, tables.available())
    tables.require_case(
        options.tables or tables.available(), options.quick, options.threads, options.case
    )
    for name in options.tables or tables.available():
        rows, paths = tables.run(
            name, options.quick, options.threads, options.results, options.case
        )
        for case in dict.fromkeys(row.case for row in rows):
            shown = Table(*pages.COLUMNS, title=case, title_justify="left")
            for row in rows:
                if row.case == case:
                    shown.add_row(*pages.cells(row).values())
            console().print(shown)
        for path in paths:
            print(f"written: {path}")
    return 0


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "federate": _federate,
    "reproduce": _reproduce,
    "validate": _validate,
    "find-lr": _find_lr,
    "audit": _audit,
    "bench": _bench,
}
