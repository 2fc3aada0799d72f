"""Check values that are valid on their own, but may contradict one another."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError, require, setting
from zdp_bench.privacy.statement import require_delta
from zdp_bench.registry import find_module, lookup, names

if TYPE_CHECKING:
    from zdp_bench.algorithms import Algorithm

OWNERS = "names_owners"  # attribute of data sets; a plug-in of another package may lack it
EPSILONS = ("privacy.target_epsilon", "privacy.claimed_epsilon")  # either sets the noise


def check_values(run: Run) -> None:
    """Reject a run whose values contradict one another."""
    require_delta("privacy.delta", run.privacy.delta)
    _check_sampling(run)
    _check_gradients(run)
    _check_calibration(run)
    _check_unit(run)
    for name in run.execution.callbacks or ():
        lookup("callback", name)
    if run.federated.nodes is not None:
        find_module("runner", "federated").check(run)


def _check_sampling(run: Run) -> None:
    trainer = run.trainer
    rate, size = trainer.sample_rate, trainer.batch_size
    if rate is not None and size is not None:
        raise UserError(
            f"trainer.batch_size={size} with trainer.sample_rate={rate:g}: {trainer.sampling} "
            "sampling needs only one of them; set the other one to null."
        )
    is_given = rate is not None or size is not None
    rule = "Poisson sampling needs a rate, such as 0.01, or trainer.batch_size"
    require(is_given or trainer.sampling != "poisson", "trainer.sample_rate", None, rule)
    rule = f"{trainer.sampling} sampling needs a size, such as 64, or trainer.sample_rate"
    require(is_given, "trainer.batch_size", None, rule)
    if "noise_multiplier" in run.algorithm.options and trainer.sampling == "shuffled":
        raise UserError(
            f"trainer.sampling=shuffled with algorithm={run.algorithm.name}: shuffled batches "
            "have no ε. Use trainer=poisson or trainer=uniform."
        )


def _check_gradients(run: Run) -> None:
    """Reject options for per-example gradients if the algorithm sums something else."""
    if run.weight_standardisation and run.start:
        raise UserError(
            f"model.start={run.start} with model.weight_standardisation=true: standardised "
            "weights have no scale to set. Use only one of them."
        )
    algorithm = _type_of(run.algorithm.name)
    if algorithm.releases_once:
        _check_one_release(run)
    if run.weight_standardisation and not algorithm.sums_gradients:
        raise UserError(
            f"model.weight_standardisation=true with algorithm={run.algorithm.name}: it needs an "
            f"algorithm that sums whole gradients: {' or '.join(_names_with('sums_gradients'))}."
        )


def _check_one_release(run: Run) -> None:
    """Reject settings with more than one step, or with a step that leaves out examples."""
    trainer = run.trainer
    is_whole = trainer.sampling == "poisson" and trainer.sample_rate == 1 and trainer.epochs == 1
    if not is_whole or trainer.ema or run.federated.nodes is not None:
        raise UserError(
            f"algorithm={run.algorithm.name}: has one step, of all examples. Set trainer=poisson "
            "trainer.sample_rate=1 trainer.epochs=1 trainer.ema=null federated.nodes=null."
        )


def _check_calibration(run: Run) -> None:
    """Reject two values of ε that would set the noise, and a budget that the noise exceeds."""
    keys = ("target_epsilon", "claimed_epsilon")
    targets = [key for key in keys if getattr(run.privacy, key) is not None]
    if len(targets) > 1:
        raise UserError(
            "privacy.target_epsilon and privacy.claimed_epsilon both set "
            "algorithm.noise_multiplier: give only one of them."
        )
    if targets and "noise_multiplier" not in run.algorithm.options:
        raise UserError(
            f"privacy.{targets[0]} with algorithm={run.algorithm.name}: it has no "
            "noise_multiplier; choose a private algorithm."
        )
    budget, target = run.privacy.max_epsilon, run.privacy.target_epsilon
    is_noiseless = not targets and not run.algorithm.options.get("noise_multiplier")
    is_noiseless |= run.privacy.claimed_epsilon == math.inf
    if budget is not None and (is_noiseless or (target or 0) > budget):
        advice = "add noise" if is_noiseless else "lower privacy.target_epsilon"
        raise UserError(
            f"privacy.max_epsilon={budget:g} with algorithm={run.algorithm.name}: the noise gives "
            f"a larger ε, so the budget would stop the run early; raise it, or {advice}."
        )


def _check_unit(run: Run) -> None:
    """Reject a unit that the data set or the algorithm does not support."""
    max_examples, views = run.privacy.max_examples, run.trainer.augmentations
    rule = "applies to privacy.unit=patient only; add that, or remove it"
    applies = max_examples is None or run.privacy.by_owner
    require(applies, "privacy.max_examples", max_examples, rule)
    if run.privacy.by_owner and not getattr(lookup("dataset", run.dataset.name), OWNERS, True):
        raise UserError(
            "privacy.unit=patient: this data set does not state who owns which example "
            f"({run.dataset.name}), so only ε per example is known. Remove the key."
        )
    if not run.forms_shares:
        return
    cause = "privacy.unit=patient" if run.privacy.by_owner else f"trainer.augmentations={views}"
    require_takes_shares(cause, run.algorithm.name)


def require_takes_shares(cause: str, algorithm: str, is_own_loop: bool = False) -> None:
    """Reject an algorithm that cannot clip several examples as one share.

    Args:
        cause: the setting that requires it, for the error.
        algorithm: name of the algorithm.
        is_own_loop: whether the user's own loop runs it. No algorithm with a single release can.
    """
    if not _type_of(algorithm).takes_shares:
        others = _names_with("takes_shares")
        if is_own_loop:
            others = [name for name in others if not _type_of(name).releases_once]
        raise UserError(
            f"{cause} with {setting('algorithm', algorithm)}: it cannot clip several examples "
            f"together. Use {' or '.join(others)}, or remove the key."
        )


def _type_of(algorithm: str) -> type[Algorithm]:
    from zdp_bench.algorithms import algorithm_type  # imported here, because it imports torch

    return algorithm_type(algorithm)


def _names_with(trait: str) -> list[str]:
    """Return the algorithms whose class has a true attribute `trait`."""
    return [name for name in names("algorithm") if getattr(_type_of(name), trait)]


def check_typed(run: Run, typed: Collection[str]) -> None:
    """Reject keys that the user typed, but that the run would not read. A recipe may set them."""
    for key in sorted(typed):
        section, _, name = key.partition(".")
        if section == "federated" and name not in ("", "nodes") and run.federated.nodes is None:
            raise UserError(
                f"{key}: applies to federated runs only; add federated.nodes=N, or remove it."
            )
    if "federated.local_lr" in typed and run.federated.local_steps == 1:
        raise UserError(
            "federated.local_lr: changes nothing if a node takes one step in a round; add "
            "federated.local_steps=N, or remove it."
        )
    for key in ("claims.row", "claims.variant"):
        if key in typed and run.claims.table is None:
            raise UserError(
                f"{key}: claims no table; add claims.table=PAPER/N, or label the run with name=."
            )
    for key in ("target_epsilon", "claimed_epsilon"):
        epsilon = getattr(run.privacy, key)
        if epsilon is not None and "algorithm.noise_multiplier" in typed:
            noise = run.algorithm.options["noise_multiplier"]
            raise UserError(
                f"algorithm.noise_multiplier={noise:g}: privacy.{key}={epsilon:g} would replace "
                f"it; remove one of them, or set privacy.{key}=null."
            )


def require_no_federation(run: Run, verb: str) -> None:
    """Reject a federation for a command that supports only central training."""
    if run.federated.nodes is not None:
        raise UserError(
            f"zdp-bench {verb} uses one training set: add federated.nodes=null. A federated node "
            "takes the same steps with the same mechanism."
        )
