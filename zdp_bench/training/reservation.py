"""Reserve what a run may spend before its first step, within `privacy.total_budget`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zdp_bench.errors import UserError
from zdp_bench.privacy.composition import Spending, compose_epsilon, list_spent_steps
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Data, Released
from zdp_bench.training.spending import read_spendings, spending_of
from zdp_bench.training.spending_file import Files, Plan, format_files, has_plan_of, parse_files

if TYPE_CHECKING:
    from zdp_bench.config.schema import Run
    from zdp_bench.data import Splits

log = logging.getLogger(__name__)


def reserve(
    config: Run,
    data: Splits,
    mechanism: Mechanism,
    steps: int,
    home: Path,
    start_sources: frozenset[str] = frozenset(),
    run: str | None = None,
    max_releases: int | None = None,
    begin: Callable[[Spending], None] = lambda this_run: None,
    keep_plan: bool = False,
) -> None:
    """Write what a run may spend to disk, unless `privacy.total_budget` would be exceeded.

    Only one process at a time does this in a results folder, so two runs cannot both spend the rest
    of the budget.

    Args:
        config: the run's configuration.
        data: its data set.
        mechanism: mechanism of every step.
        steps: largest number of releases that the run may make.
        home: the run's folder.
        start_sources: files that the run's starting weights were trained on.
        run: digest of the run.
        max_releases: see `Plan`.
        begin: is called first, with what the run may spend. If it raises an error, nothing is
            reserved.
        keep_plan: whether to keep what an earlier process reserved for the same run.

    Formal guarantees: a run with a total budget starts only if the tight ε of itself and all runs
    in the results folder that may share examples with it (`Spending.may_share`) is within the
    budget. `composition.compose_epsilon` computes the bound.

    Raises:
        UserError: the total budget would be exceeded, or the ε so far is not known.
    """
    from zdp_bench.training.run_folder import only_one_process

    plan = _plan_of(config, data, mechanism, steps)
    sources = " ".join(sorted(start_sources)) or None
    plan = replace(plan, start_sources=sources, run=run, max_releases=max_releases)
    with only_one_process(config.results / "runs" / ".spending"):
        this_run = spending_of(plan, home, parse_files(plan.sources))
        if config.privacy.total_budget is not None:
            _require_within(config, this_run)
        begin(this_run)
        if not (keep_plan and has_plan_of(home, run)):
            plan.write(home)


def plan_spending(
    config: Run, data: Splits, mechanism: Mechanism, steps: int, home: Path
) -> Spending:
    """Return what a run will spend if it takes all its steps.

    The arguments are those of `reserve`. Nothing is written.
    """
    plan = _plan_of(config, data, mechanism, steps)
    return spending_of(plan, home, parse_files(plan.sources))


def _plan_of(config: Run, data: Splits, mechanism: Mechanism, steps: int) -> Plan:
    """Return the content of a run's `spending.json`."""
    return Plan(
        config.recipe,
        Data(config.dataset.name, data.provenance, data.digest, title=data.title),
        Released(
            z=mechanism.z,
            sampling=mechanism.sampling,
            steps=steps,
            delta=config.privacy.delta,
            examples_per_patient=data.examples_per_patient,
            unit=data.unit,
            epsilon_of=data.unit if config.privacy.by_owner else "example",
            randomness="cryptographic" if config.privacy.secure else "seeded",
        ),
        format_files(Files(data.sources, data.source_owners)),
    )


def _require_within(config: Run, this_run: Spending) -> None:
    """Reject a run with which the tight ε on its data would exceed `privacy.total_budget`."""
    budget, delta = config.privacy.total_budget, config.privacy.delta
    assert budget is not None
    all_runs = read_spendings(config.results, except_home=this_run.home)
    sharing_runs = [run for run in all_runs if run.may_share(this_run)]
    log.warning(
        "privacy.total_budget=%g: %d earlier runs in %s may share examples with this one; runs in "
        "other folders are not counted",
        budget,
        len(sharing_runs),
        config.results,
    )
    try:
        spent = list_spent_steps([*sharing_runs, this_run], this_run.by_owner)
        epsilon_before = compose_epsilon(spent[:-1], delta)
        epsilon_after = compose_epsilon(spent, delta)
    except ValueError as error:
        raise UserError(
            f"privacy.total_budget={budget:g}: {error}, so their total ε is not known; use the "
            "earlier runs' sampling, unit and owners, or remove the total budget."
        ) from None
    if epsilon_after > budget:
        raise UserError(
            f"privacy.total_budget={budget:g}: {len(sharing_runs)} runs in {config.results} on "
            f"files of {this_run.shown} have a tight ε of {show_epsilon(epsilon_before)}, and "
            f"with this run it would be {show_epsilon(epsilon_after)} (δ {delta:g}). Add noise, "
            "take fewer steps, or stop here; `zdp-bench budget` lists the ε so far."
        )
