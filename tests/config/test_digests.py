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


def test_a_key_that_is_off_by_default_changes_no_older_digest() -> None:
    def digest(*words: str) -> str:
        return experiment_digest(parse(compose(["recipe=speech", *words])))

    off = ("model.start=null", "model.sigma=null", "dataset.standardise=null")
    on = ("model.start=unit_variance", "model.sigma=0.4", "dataset.standardise=clip")
    # of the records made before there were these keys
    assert digest().startswith("96b3770a9a66fda4")
    assert {digest(*off)} == {digest()}
    assert len({digest(word) for word in on} | {digest()}) == 4


def test_keys_for_scans_and_recordings_leave_the_digest_of_pictures() -> None:
    words = ["recipe=quickstart", "dataset=folder", "dataset.path=./films", "dataset.size=32"]
    digest = experiment_digest(parse(compose([*words, "model=lenet5", "algorithm=dp_sgd"])))
    assert digest.startswith("f1c47081fc9c091f")  # before there were these keys
