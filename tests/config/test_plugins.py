"""A plug-in's options: which are its own, which are refused, which were meant for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from zdp_bench import assets
from zdp_bench.config import compose, configured, parse
from zdp_bench.config.plugins import check_options, every_key
from zdp_bench.errors import UserError


def test_another_algorithm_takes_no_options_the_recipe_meant_for_the_first() -> None:
    run = parse(
        compose(
            ["recipe=phasemnist", "algorithm=sgd", "trainer=shuffled", "trainer.sample_rate=null"]
        )
    )
    assert run.algorithm.options == {}
    run = parse(compose(["recipe=phasemnist", "algorithm=dp_sgd", "model=real_mlp"]))
    assert run.algorithm.options == {
        "noise_multiplier": 1.1,
        "max_grad_norm": 1.0,
        "per_layer": False,
        "gradients": "auto",
    }
    with pytest.raises(
        UserError, match=r"'algorithm\.noise'"
    ):  # asked for by the user, not left over
        parse(
            compose(
                [
                    "recipe=quickstart",
                    "algorithm=dp_sgd",
                    "model=real_mlp",
                    "+algorithm.noise=circular",
                ]
            )
        )


def test_a_misspelt_key_inside_a_recipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in {
        "chosen": "defaults:\n  - override /algorithm: dp_sgd\nalgorithm: {noize: 1}\n",
        "default": "optimizer: {lrr: 0.1}\n",
        "section": "trainer: {epoch: 3}\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(body)
    monkeypatch.setattr(assets, "RECIPES", tmp_path)
    for name, message in {
        "chosen": r"algorithm\.noize",
        "default": r"optimizer\.lrr",
        "section": r"trainer\.epoch'",
    }.items():
        with pytest.raises(UserError, match=message):
            parse(compose([f"recipe={name}"]))


def test_options_need_immutable_defaults() -> None:
    def builder(*, widths: list[int] = [1]) -> None:  # noqa: B006
        del widths

    with pytest.raises(TypeError, match="immutable default"):
        check_options("model", builder, {})


def test_a_recipe_may_be_overruled() -> None:
    """Keys that only the recipe sets are no mistake: the user chose another algorithm."""
    run = configured(["recipe=mri_sequence_fl_reduced", "federated.nodes=null"])
    assert run.federated.nodes is None
    run = configured(["recipe=quickstart", "algorithm=sgd", "federated.nodes=null"])
    assert run.algorithm.options == {}


def test_every_key_is_listed_once_with_its_default() -> None:
    listed = every_key()
    keys = dict(listed)
    assert len(keys) == len(listed)
    assert keys["seed"] == "0"
    assert keys["optimizer.momentum"] == "rmsprop 0.0, sgd 0.0"
    assert keys["scheduler.gamma"] == "exponential_lr 0.95, multi_step_lr 0.1, step_lr 0.1"
    assert {
        "dataset.pairing_seed",
        "model.hidden",
        "privacy.max_epsilon",
        "federated.node",
        "trainer.epochs",
    } <= set(keys)
