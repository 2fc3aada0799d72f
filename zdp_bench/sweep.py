"""Jobs: one composed configuration each, carried out here or by Hydra's launchers in other processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from zdp_bench.config import compose, experiment_digest, parse
from zdp_bench.errors import UserError


class Job:
    """What Hydra calls with a composed configuration, in this process or a launcher's.

    A user's mistake is returned and not raised, so that one bad job of a sweep does not take the others with it.
    """

    def __call__(self, config: DictConfig) -> UserError | None:
        try:
            _carry_out(config, hydra_files=True)
        except UserError as error:
            return error
        return None


def run_one(overrides: list[str]) -> None:
    """Compose and carry out one run.

    Raises:
        UserError: an override is wrong or the run cannot be made.
    """
    _carry_out(compose(overrides), hydra_files=False)


def _carry_out(config: DictConfig, hydra_files: bool) -> None:
    from zdp_bench.experiment import run
    from zdp_bench.report.summary import as_rich
    from zdp_bench.terminal import Live, console

    checked = parse(config)
    with Live(console()) as live:
        outcome = run(checked, live)
    if hydra_files and not outcome.found:
        _write_hydra_files(outcome.path.parent / ".hydra", config)
    console().print(as_rich(outcome.record, outcome.path, outcome.found))


def _write_hydra_files(folder: Any, config: DictConfig) -> None:
    """Hydra's own three files beside the record: the configuration, Hydra's own settings, the overrides."""
    from hydra.core.hydra_config import HydraConfig

    folder.mkdir(exist_ok=True)
    hydra = HydraConfig.get()
    OmegaConf.save(config, folder / "config.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": OmegaConf.to_container(hydra, resolve=False)}), folder / "hydra.yaml")
    OmegaConf.save(hydra.overrides.task, folder / "overrides.yaml")


def failures(jobs: Any) -> list[tuple[list[str], str]]:
    """The failed jobs of a sweep: (overrides, reason). Hydra's sweepers return one list of jobs a batch."""
    flat: Iterable[Any] = (job for batch in jobs for job in batch)
    return [(list(job.overrides), str(job.return_value)) for job in flat if isinstance(job.return_value, UserError)]


def expected_digests(table: str) -> dict[str, str]:
    """recipe -> the digest its runs must have to stand in the table: the recipe as it is now, nothing overridden."""
    from zdp_bench.report import tables

    return {recipe: experiment_digest(parse(compose([f"recipe={recipe}"]))) for recipe in tables.recipes_of(table)}
