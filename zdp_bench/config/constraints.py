"""Values that are of the right type and still wrong: out of range, or in contradiction to one another."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from zdp_bench.config.ranges import MOST_PREFETCHED, require_count, require_threads
from zdp_bench.config.schema import REPLACEMENTS, Run
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.privacy.accounting import MOST
from zdp_bench.registry import lookup


def check_values(run: Run) -> None:
    """Refuse a run whose values cannot be meant.

    Raises:
        UserError: names the first that cannot.
    """
    trainer = run.trainer
    schemes = ("poisson", "uniform", "shuffled")
    if trainer.sampling not in schemes:
        raise unknown("trainer.sampling", trainer.sampling, schemes)
    if trainer.sampling == "poisson":
        one = trainer.sample_rate is not None or trainer.batch_size is not None
        require(
            one,
            "trainer.sample_rate",
            None,
            "Poisson sampling needs a rate, such as 0.01, or trainer.batch_size",
        )
    one = (trainer.batch_size is None) != (trainer.sample_rate is None)
    rule = f"{trainer.sampling} sampling needs batch_size or sample_rate, and not both"
    require(one, "trainer.batch_size", trainer.batch_size, rule)
    rate = trainer.sample_rate
    require(rate is None or 0 < rate <= 1, "trainer.sample_rate", rate, "must lie in (0, 1]")
    require_count("trainer.batch_size", trainer.batch_size)
    require_count("trainer.epochs", trainer.epochs)
    most = f"with trainer.epochs={trainer.epochs} makes more than {MOST:,} steps; take a larger rate or fewer epochs"
    require(rate is None or trainer.epochs / rate <= MOST, "trainer.sample_rate", rate, most)
    micro_batch = trainer.micro_batch
    if isinstance(micro_batch, str) and micro_batch != "auto":
        raise UserError(
            f"trainer.micro_batch={micro_batch}: must be a number of records, auto or null."
        )
    require_count("trainer.micro_batch", micro_batch if isinstance(micro_batch, int) else None)
    require_count("trainer.checkpoint_epochs", trainer.checkpoint_epochs)
    require_count("privacy.range_test_steps", run.privacy.range_test_steps, least=0)
    require(0 < run.privacy.delta < 1, "privacy.delta", run.privacy.delta, "must lie in (0, 1)")
    for key in ("max_epsilon", "target_epsilon", "claimed_epsilon"):
        value = getattr(run.privacy, key)
        require(value is None or value > 0, f"privacy.{key}", value, "must be positive")
    _check_calibration(run)
    _check_federated(run)
    replacement = run.replace_batchnorm
    if replacement not in (None, *REPLACEMENTS):
        raise unknown("model.replace_batchnorm", str(replacement), [*REPLACEMENTS, "null"])
    require(run.seed >= 0, "seed", run.seed, "must be 0 or more")
    require_threads("threads", run.threads)
    private = getattr(lookup("algorithm", run.algorithm.name), "private", True)
    if private and trainer.sampling == "shuffled":
        raise UserError(
            f"trainer.sampling=shuffled with algorithm={run.algorithm.name}: shuffled batches carry no ε here. "
            "Use trainer=poisson or trainer=uniform."
        )
    every, prefetch = run.execution.checkpoint_steps, run.execution.prefetch
    require_count("execution.checkpoint_steps", every)
    require(prefetch is None or prefetch >= 0, "execution.prefetch", prefetch, "must be 0 or more")
    few = f"must be at most {MOST_PREFETCHED}: that many micro-batches are held in memory"
    require(prefetch is None or prefetch <= MOST_PREFETCHED, "execution.prefetch", prefetch, few)
    if run.precision not in (None, "tf32", "bf16"):
        raise unknown("precision", str(run.precision), ("tf32", "bf16", "null"))
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", run.device):
        raise unknown("device", run.device, ("auto", "cpu", "cuda", "cuda:0"))


def check_typed(run: Run, said: Collection[str]) -> None:
    """Refuse what a user typed and nothing would read. A recipe may say it: there, other words overrule it.

    Args:
        said: the keys that were typed.

    Raises:
        UserError: names the first such key.
    """
    for key in sorted(said):
        if (
            run.federated.nodes is None
            and key.startswith("federated.")
            and key != "federated.nodes"
        ):
            raise UserError(
                f"{key}: a central run does not read it; add federated.nodes=N, or leave it out."
            )
        if (
            run.claims.table is None
            and key in ("claims.row", "claims.variant")
            and getattr(run.claims, key[7:]) is not None
        ):
            raise UserError(
                f"{key}={getattr(run.claims, key[7:])}: of no table; add claims.table=PAPER/N, or leave it out."
            )
    for key in ("target_epsilon", "claimed_epsilon"):
        target = getattr(run.privacy, key)
        if target is not None and "algorithm.noise_multiplier" in said:
            raise UserError(
                f"algorithm.noise_multiplier={run.algorithm.options['noise_multiplier']:g}: privacy.{key}={target:g} would "
                f"replace it; leave one of them out, or say privacy.{key}=null."
            )


def _check_calibration(run: Run) -> None:
    """A noise multiplier is calibrated to one ε at most, and only where there is one."""
    asked = [
        key
        for key in ("target_epsilon", "claimed_epsilon")
        if getattr(run.privacy, key) is not None
    ]
    if len(asked) > 1:
        raise UserError(
            "privacy.target_epsilon and privacy.claimed_epsilon each set algorithm.noise_multiplier: give one of them."
        )
    if asked and "noise_multiplier" not in run.algorithm.options:
        raise UserError(
            f"privacy.{asked[0]} with algorithm={run.algorithm.name}: it has no noise_multiplier that could reach an ε. "
            "Choose a private algorithm, or leave the key out."
        )
    budget, target = run.privacy.max_epsilon, run.privacy.target_epsilon
    if budget is None:
        return
    if target is not None and target > budget:
        raise UserError(
            f"privacy.max_epsilon={budget:g} with privacy.target_epsilon={target:g}: the budget would end the run before it has "
            "the ε that its noise is for. Raise the budget, lower the target, or leave one of them out."
        )
    without = run.privacy.claimed_epsilon == math.inf or (
        not asked and not run.algorithm.options.get("noise_multiplier")
    )
    if without:
        raise UserError(
            f"privacy.max_epsilon={budget:g} with algorithm={run.algorithm.name} and no noise: ε is ∞ at the first step, so "
            "there would be none. Add noise, or leave the budget out."
        )


def _check_federated(run: Run) -> None:
    federated = run.federated
    if federated.nodes is None:
        return
    nodes, least = federated.nodes, federated.min_nodes
    require_count("federated.nodes", nodes)
    require(
        least is None or 1 <= least <= nodes,
        "federated.min_nodes",
        least,
        f"must lie between 1 and the {nodes} nodes",
    )
    require_count("federated.local_steps", federated.local_steps)
    require(
        0 < federated.local_lr < math.inf,
        "federated.local_lr",
        federated.local_lr,
        "must be positive and finite",
    )
    require(
        federated.patience > 0,
        "federated.patience",
        federated.patience,
        "must be positive: it is in seconds",
    )
    for key, value, allowed in (
        ("patients", federated.patients, ("split", "own")),
        ("backend", federated.backend, ("serial", "ray")),
    ):
        if value not in allowed:
            raise unknown(f"federated.{key}", value, allowed)
    which = f"must lie between 0 and {nodes - 1}"
    require(
        federated.node is None or 0 <= federated.node < nodes,
        "federated.node",
        federated.node,
        which,
    )
    shuffled = (
        "a node's steps are Poisson or uniform samples: use trainer=poisson or trainer=uniform"
    )
    require(run.trainer.sampling != "shuffled", "trainer.sampling", run.trainer.sampling, shuffled)


def require_central(run: Run, verb: str) -> None:
    """Refuse a federation where only central training is meant.

    Raises:
        UserError: the run has nodes.
    """
    if run.federated.nodes is not None:
        raise UserError(
            f"zdp-bench {verb} takes one training set: add federated.nodes=null. A node of a federation takes the same steps, "
            "with the same mechanism, on its own."
        )
