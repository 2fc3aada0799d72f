"""Jobs: one composed configuration each, carried out here or by Hydra's launchers in other processes."""

from __future__ import annotations

import dataclasses
import json
import shlex
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from zdp_bench import assets, records
from zdp_bench.config import compose, configured, parse
from zdp_bench.config.digests import enters_digest, experiment_digest
from zdp_bench.config.messages import typed_keys
from zdp_bench.config.schema import Run
from zdp_bench.errors import Busy, UserError, unknown
from zdp_bench.report.faceoff import RECIPE, FaceOff
from zdp_bench.report.tables import Filling, check_claims, recipes_of, reference
from zdp_bench.training import distributed
from zdp_bench.training.interrupts import covered_stop, refused

if TYPE_CHECKING:
    from zdp_bench.training.run import Carrying


class Job:
    """What Hydra calls with a composed configuration, in this process or a launcher's.

    What goes wrong is returned and not raised, so that one bad job of a sweep does not take the others with it. A job that
    another process is at is left to it (`Busy`), unless it is told to wait.
    """

    def __init__(self, sweep: bool = False, wait: bool = True) -> None:
        self.sweep = sweep
        self.wait = wait

    def __call__(self, config: DictConfig) -> UserError | None:
        try:
            _carry_out(config, _overrides(), hydra_files=True, wait=self.wait)
        except Exception as error:
            if stop := covered_stop(error):
                raise stop from None
            if isinstance(error, UserError):
                return error
            if isinstance(error, OSError) and (words := refused(error)):
                return words
            if not self.sweep:
                raise
            traceback.print_exc()
            return UserError(f"{_words(error)} (a bug; its traceback is above)")
        return None


def sweep(driver: Any, overrides: list[str]) -> tuple[int, list[tuple[list[str], str]]]:
    """Carry out every job of a sweep: how many there are, and the failed ones as (overrides, reason).

    Several processes may be at the same sweep: each takes the jobs no other is at, and waits for those at the end, so that what
    a killed process leaves is done as well.

    Raises:
        UserError: a launcher lost its processes, and with them the knowledge of what they did.
    """
    try:
        jobs = driver.multirun(
            config_name="config", task_function=Job(sweep=True, wait=False), overrides=overrides
        )
    except Exception as error:
        if "srun" in str(error):
            raise UserError(
                "launcher=slurm: there is no Slurm here (no `srun`). Try launcher=submitit or joblib."
            ) from None
        if type(error).__name__ not in LOST:
            raise
        raise UserError(
            f"a process of the sweep was lost ({_words(error)}). The same command does what is missing."
        ) from None
    failed = []
    for words, reason in failures(jobs):
        if isinstance(reason, Busy):
            reason = driver.run(
                config_name="config", task_function=Job(sweep=True), overrides=words
            ).return_value
        if reason is not None:
            failed.append((words, str(reason)))
    return sum(len(batch) for batch in jobs), failed


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no words').splitlines()[0][:200]}"


# What joblib and submitit raise when a process of theirs is gone; by name, for neither need be installed.
LOST = (
    "TerminatedWorkerError",
    "BrokenProcessPool",
    "FailedJobError",
    "UncompletedJobError",
    "JobPausedError",
)


def run_one(overrides: list[str], carrying: Carrying | None = None) -> None:
    """Compose and carry out one run, here or as `carrying` does it.

    Raises:
        UserError: an override is wrong or the run cannot be made.
    """
    _carry_out(compose(overrides), overrides, hydra_files=False, carrying=carrying)


def _overrides() -> list[str]:
    """What was typed of the job that Hydra is at."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def _carry_out(
    config: DictConfig,
    overrides: list[str],
    hydra_files: bool,
    wait: bool = True,
    carrying: Carrying | None = None,
) -> None:
    from zdp_bench.report.summary import as_rich
    from zdp_bench.training.progress import Live, Silent, console
    from zdp_bench.training.run import run
    from zdp_bench.training.tensorboard import Board

    checked = parse(config, overrides)
    check_claims(checked.claims.table, checked.claims.row)
    if checked.federated.nodes and carrying is None:
        from zdp_bench.federated.simulation import run_simulated

        carrying = run_simulated
    if distributed.rank():  # one of several ranks: the first one speaks
        run(checked, Silent(), carrying=carrying)
        return
    with Live(console()) as live:
        outcome = run(
            checked, Board(live, checked) if checked.execution.tensorboard else live, wait, carrying
        )
    if hydra_files and not outcome.found:
        _write_hydra_files(outcome.path.parent / ".hydra", config)
    console().print(as_rich(outcome.record, outcome.path, outcome.found))


def _write_hydra_files(folder: Any, config: DictConfig) -> None:
    """Hydra's own three files beside the record: the configuration, Hydra's own settings, the overrides."""
    from hydra.core.hydra_config import HydraConfig

    folder.mkdir(exist_ok=True)
    hydra = HydraConfig.get()
    OmegaConf.save(config, folder / "config.yaml")
    OmegaConf.save(
        OmegaConf.create({"hydra": OmegaConf.to_container(hydra, resolve=False)}),
        folder / "hydra.yaml",
    )
    OmegaConf.save(hydra.overrides.task, folder / "overrides.yaml")


def require_unchanged(overrides: list[str]) -> None:
    """Refuse overrides that change what a recipe computes, or where its record goes: such a run fills no table.

    Raises:
        UserError: names the first.
    """
    instead = {
        "seed": "say --seeds N",
        "paths.results": "say --results DIR",
        "recipe": "a table has its own recipes",
    }
    for key in sorted(typed_keys(overrides)):
        if key in instead:
            raise UserError(f"{key}: not in `zdp-bench reproduce`; {instead[key]}.")
        if enters_digest(key) or key.partition(".")[0] in ("claims", "force"):
            raise UserError(
                f"{key}: `zdp-bench reproduce` runs recipes as they stand, for another run fills no table. It takes "
                "only where and how: paths.data, device, threads, execution.*, trainer.micro_batch. "
                "Use `zdp-bench run` to try something else."
            )


def failures(jobs: Any) -> list[tuple[list[str], UserError]]:
    """The failed jobs of a sweep: (overrides, reason). Hydra's sweepers return one list of jobs a batch."""
    flat: Iterable[Any] = (job for batch in jobs for job in batch)
    return [
        (list(job.overrides), job.return_value)
        for job in flat
        if isinstance(job.return_value, UserError)
    ]


def fillings(table: str, results: Path) -> list[Filling]:
    """What may stand in a table: each job of its recipes as they are now, and the same on other data where that was run.

    Raises:
        UserError: no such table, or a recipe that claims a row the table has not.
    """
    rows = claims_of(table)
    return [*(row.filling for row in rows), *on_other_data(rows, results)]


@dataclass(frozen=True)
class Claim:
    """A job of a recipe, and what it is to fill."""

    filling: Filling
    composed: DictConfig
    config: Run


def claims_of(
    table: str, jobs: Callable[[str], list[tuple[str, ...]]] | None = None
) -> list[Claim]:
    """The jobs of a table's recipes as they are now.

    Args:
        jobs: those of a recipe that are wanted, where it is not all of them (`jobs_of`).

    Raises:
        UserError: no such table, or a recipe that claims a row the table has not.
    """
    known = {number.row for number in reference(table)}
    found = []
    for recipe in recipes_of(table):
        for overrides in (jobs or jobs_of)(recipe):
            composed = compose([f"recipe={recipe}", *overrides])
            own = parse(composed)
            row, variant = own.claims.row, own.claims.variant
            if row not in known:
                raise unknown(f"row of {table} in recipe '{recipe}',", str(row), sorted(known))
            found.append(
                Claim(
                    Filling(recipe, overrides, str(row), variant, experiment_digest(own)),
                    composed,
                    own,
                )
            )
    return found


def on_other_data(rows: list[Claim], results: Path) -> list[Filling]:
    """The same jobs with another data set than the recipe's own, wherever there are records of that."""
    found = []
    done = records.read_all(results)
    for row in rows:
        others = [r["config"]["dataset"] for r in done if r["recipe"] == row.filling.recipe]
        others = [dataset for dataset in others if dataset != row.config.resolved["dataset"]]
        for digest, on in _on_other_data(row.composed, others).items():
            found.append(dataclasses.replace(row.filling, digest=digest, on=on))
    return found


def _on_other_data(composed: DictConfig, datasets: list[dict[str, Any]]) -> dict[str, str]:
    """Digest -> label of a recipe with each of `datasets` in the place of its own."""
    labels = {}
    for dataset in datasets:
        moved = composed.copy()
        OmegaConf.set_struct(moved, False)
        moved.dataset = dataset
        try:
            digest = experiment_digest(parse(moved))
        except UserError:
            continue  # a data set of an older version, with options that are no more
        card = assets.group(assets.DATASETS).get(dataset["name"])
        defaults = assets.read_yaml(card) if card else {}
        changed = {key: value for key, value in dataset.items() if value != defaults.get(key)}
        options = ", ".join(f"{key}={value}" for key, value in changed.items())
        labels[digest] = dataset["name"] + (f", {options}" if options else "")
    return labels


def jobs_of(recipe: str) -> list[tuple[str, ...]]:
    """The overrides of each job of a recipe's own sweep, `hydra.sweeper.params`, but for the seed; one empty job without."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    sweeper = (assets.read_yaml(assets.group(assets.RECIPES)[recipe]).get("hydra") or {}).get(
        "sweeper"
    ) or {}
    params = {key: value for key, value in (sweeper.get("params") or {}).items() if key != "seed"}
    axes = OverridesParser.create().parse_overrides(
        [f"{key}={value}" for key, value in params.items()]
    )
    choices = [
        [f"{axis.key_or_group}={value}" for value in axis.sweep_string_iterator()]
        if axis.is_sweep_override()
        else [axis.input_line]
        for axis in axes
    ]
    return [tuple(str(word) for word in job) for job in product(*choices)]


def faceoff_command(faceoff: FaceOff) -> str:
    """The command that makes a face-off's table: its recipe's sweep, and all that its runs were told beside it."""
    runs = [run for cell in faceoff.runs.values() for run in cell]
    had: dict[str, Any] = runs[0]["config"]
    recipe = f"recipe={RECIPE}"
    own = configured([recipe]).resolved
    words = [
        f"{kind}={had[kind]['name']}"
        for kind in ("dataset", "model", "task", "optimizer", "scheduler", "accountant")
        if had[kind]["name"] != own[kind]["name"]
    ]
    own = configured([recipe, *words]).resolved
    for section, options in had.items():
        if isinstance(options, dict) and section not in ("algorithm", "claims"):
            usual = own.get(section, {}) | {"target_epsilon": options.get("target_epsilon")}
            changed = {key: value for key, value in options.items() if value != usual.get(key)}
            words += [
                f"{section}.{key}={v if isinstance(v, str) else json.dumps(v)}"
                for key, v in changed.items()
            ]
    params = assets.read_yaml(assets.group(assets.RECIPES)[RECIPE])["hydra"]["sweeper"]["params"]
    seeds = sorted({run["seed"] for run in runs})
    swept = {
        "privacy.target_epsilon": [f"{e:g}" for e in faceoff.epsilons],
        "seed": [str(seed) for seed in seeds],
    }
    words += [
        f"{key}={','.join(values)}"
        for key, values in swept.items()
        if ",".join(values) != params[key]
    ]
    return shlex.join(["zdp-bench", "run", "-m", recipe, *words])
