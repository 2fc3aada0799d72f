"""What changes a digest, and what does not."""

from __future__ import annotations

from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest, run_digest


def test_operational_keys_change_no_digest_and_others_do() -> None:
    base = parse(compose(["recipe=quickstart"]))
    same = parse(
        compose(
            [
                "recipe=quickstart",
                "threads=1",
                "device=cpu",
                "force=true",
                "paths.results=elsewhere",
                "seed=5",
            ]
        )
    )
    other = parse(compose(["recipe=quickstart", "algorithm.max_grad_norm=0.9"]))
    assert experiment_digest(base) == experiment_digest(same) != experiment_digest(other)
    assert run_digest(base, "data") != run_digest(same, "data")  # the seed
    assert run_digest(base, "data") != run_digest(base, "other data")
