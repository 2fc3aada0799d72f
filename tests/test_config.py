"""Every mistake in a configuration is told in one sentence, with the nearest right spelling, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from zdp_bench import assets
from zdp_bench.config import check_options, compose, experiment_digest, known_keys, parse, run_digest
from zdp_bench.errors import UserError
from zdp_bench.registry import HOMES, names, register

MISTAKES = {
    "no recipe": ([], r"recipe=NAME is missing\. Allowed: .*quickstart"),
    "recipe": (["recipe=phasemnits"], r"recipe 'phasemnits' is not known\. Did you mean 'phasemnist'\?"),
    "dataset": (["recipe=quickstart", "dataset=phasmnist"], r"dataset 'phasmnist'.*Did you mean 'phasemnist'"),
    "algorithm": (["recipe=quickstart", "algorithm=zeta_dp_sdg"], r"algorithm 'zeta_dp_sdg'.*Did you mean 'zeta_dp_sgd'"),
    "optimizer": (["recipe=quickstart", "optimizer=adm"], r"optimizer 'adm'.*Did you mean 'adam'"),
    "accountant": (["recipe=quickstart", "accountant=rpd"], r"accountant 'rpd'.*Did you mean 'rdp'"),
    "trainer": (["recipe=quickstart", "trainer=poison"], r"trainer 'poison'.*Did you mean 'poisson'"),
    "launcher": (["recipe=quickstart", "launcher=jobllib"], r"launcher 'jobllib'.*Did you mean 'joblib'"),
    "key": (
        ["recipe=quickstart", "algorithm.noise_multiplyer=1"],
        r"'algorithm\.noise_multiplyer'.*'algorithm\.noise_multiplier'",
    ),
    "top key": (["recipe=quickstart", "sed=1"], r"key 'sed'.*Did you mean 'seed'"),
    "added key": (["recipe=quickstart", "+trainer.epoch=1"], r"key 'trainer\.epoch'.*Did you mean 'trainer\.epochs'"),
    "added top key": (["recipe=quickstart", "+sede=1"], r"key 'sede'.*Did you mean 'seed'"),
    "added option": (["recipe=quickstart", "+model.widths=[3]"], r"key 'model\.widths' is not known.*model\.hidden"),
    "optimizer key": (["recipe=quickstart", "+optimizer.momentun=1"], r"optimizer\.momentun.*Did you mean 'optimizer\.momentum'"),
    "type": (
        ["recipe=quickstart", "algorithm.noise_multiplier=abc"],
        r"algorithm\.noise_multiplier=abc: .*could not be converted to Float",
    ),
    "int": (["recipe=quickstart", "seed=one"], r"seed=one: .*could not be converted to Integer"),
    "list": (["recipe=quickstart", "model.hidden=[a]"], r"model\.hidden=\['a'\]: .*could not be converted to Integer"),
    "choice": (["recipe=quickstart", "algorithm.noise=circluar"], r"algorithm\.noise 'circluar'.*Did you mean 'circular'"),
    "sampling": (["recipe=quickstart", "trainer.sampling=poison"], r"trainer\.sampling 'poison'.*Did you mean 'poisson'"),
    "rate": (["recipe=quickstart", "trainer.sample_rate=1.5"], r"trainer\.sample_rate=1\.5: must lie in \(0, 1\]"),
    "no rate": (["recipe=quickstart", "trainer.sample_rate=null"], r"Poisson sampling needs a rate"),
    "both sizes": (["recipe=quickstart", "trainer=uniform"], r"needs batch_size or sample_rate, and not both"),
    "epochs": (["recipe=quickstart", "trainer.epochs=0"], r"trainer\.epochs=0: must be at least 1"),
    "delta": (["recipe=quickstart", "privacy.delta=1"], r"privacy\.delta=1\.0: must lie in \(0, 1\)"),
    "budget": (["recipe=quickstart", "privacy.max_epsilon=-1"], r"privacy\.max_epsilon=-1\.0: must be positive"),
    "target": (["recipe=quickstart", "privacy.target_epsilon=0"], r"privacy\.target_epsilon=0\.0: must be positive"),
    "two targets": (["recipe=quickstart", "privacy.target_epsilon=1", "privacy.claimed_epsilon=1"], r"give one of them"),
    "no noise": (
        ["recipe=quickstart", "algorithm=sgd", "privacy.target_epsilon=1"],
        r"algorithm=sgd: it has no noise_multiplier",
    ),
    "seed": (["recipe=quickstart", "seed=-1"], r"seed=-1: must be 0 or more"),
    "split seed": (["recipe=quickstart", "dataset.pairing_seed=-1"], r"dataset.pairing_seed=-1: must be 0 or more"),
    "device": (["recipe=quickstart", "device=cuba"], r"device 'cuba'.*Did you mean 'cuda'"),
    "shuffled": (
        ["recipe=quickstart", "trainer.sampling=shuffled", "trainer.batch_size=8", "trainer.sample_rate=null"],
        r"carry no ε",
    ),
    "override": (["recipe=quickstart", "seed"], r"'seed' is no override: write key=value"),
    "missing": (["recipe=quickstart", "trainer.epochs=???"], r"trainer\.epochs has no value"),
    "no name": (["recipe=quickstart", "model.name=null"], r"model\.name is missing"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str) -> None:
    overrides, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message) as caught:
        parse(compose(overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", assets.group(assets.RECIPES))
def test_every_recipe_is_valid_and_says_how_to_run_it(recipe: str) -> None:
    run = parse(compose([f"recipe={recipe}"]))
    assert run.recipe == recipe
    header = assets.group(assets.RECIPES)[recipe].read_text(encoding="utf-8").splitlines()[:2]
    assert header[0].startswith("# ")
    words = header[1].split()
    assert words[:3] in (["#", "zdp-bench", "run"], ["#", "zdp-bench", "reproduce"])
    assert f"recipe={recipe}" in words


@pytest.mark.parametrize("kind", sorted(set(HOMES) - {"activation", "check", "dataset", "figure", "outline"}))
def test_every_plug_in_has_its_yaml(kind: str) -> None:
    assert set(names(kind)) == set(assets.group(assets.CONF / kind))


def test_every_dataset_has_its_card() -> None:
    assert set(names("dataset")) == set(assets.group(assets.DATASETS))


def test_yaml_states_every_option_of_its_plug_in() -> None:
    """So that `key=value` works for each of them without a `+`, and a reader sees them all."""
    import inspect

    from zdp_bench.registry import lookup

    for kind in ("algorithm", "model", "task", "dataset"):
        folder = assets.DATASETS if kind == "dataset" else assets.CONF / kind
        for name, path in assets.group(folder).items():
            options = {p.name for p in inspect.signature(lookup(kind, name)).parameters.values() if p.kind is p.KEYWORD_ONLY}
            assert options <= set(assets.read_yaml(path)) - {"card"}, f"{kind} {name}"


def test_operational_keys_change_no_digest_and_others_do() -> None:
    base = parse(compose(["recipe=quickstart"]))
    same = parse(compose(["recipe=quickstart", "threads=1", "device=cpu", "force=true", "paths.results=elsewhere", "seed=5"]))
    other = parse(compose(["recipe=quickstart", "algorithm.max_grad_norm=0.9"]))
    assert experiment_digest(base) == experiment_digest(same) != experiment_digest(other)
    assert run_digest(base, "data") != run_digest(same, "data")  # the seed
    assert run_digest(base, "data") != run_digest(base, "other data")


def test_another_algorithm_takes_no_options_the_recipe_meant_for_the_first() -> None:
    run = parse(compose(["recipe=phasemnist", "algorithm=sgd", "trainer=shuffled", "trainer.sample_rate=null"]))
    assert run.algorithm.options == {}
    run = parse(compose(["recipe=phasemnist", "algorithm=dp_sgd", "model=real_mlp"]))
    assert run.algorithm.options == {"noise_multiplier": 1.1, "max_grad_norm": 1.0, "per_layer": False, "gradients": "auto"}
    with pytest.raises(UserError, match=r"'algorithm\.noise'"):  # asked for by the user, not left over
        parse(compose(["recipe=quickstart", "algorithm=dp_sgd", "model=real_mlp", "+algorithm.noise=circular"]))


def test_a_misspelt_key_inside_a_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in {
        "chosen": "defaults:\n  - override /algorithm: dp_sgd\nalgorithm: {noize: 1}\n",
        "default": "optimizer: {lrr: 0.1}\n",
        "section": "trainer: {epoch: 3}\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(body)
    monkeypatch.setattr(assets, "RECIPES", tmp_path)
    for name, message in {"chosen": r"algorithm\.noize", "default": r"optimizer\.lrr", "section": r"trainer\.epoch'"}.items():
        with pytest.raises(UserError, match=message):
            parse(compose([f"recipe={name}"]))


def test_known_keys_hold_groups_and_leaves() -> None:
    keys = known_keys(["recipe=phasemnist"])
    assert {"algorithm", "algorithm.noise", "trainer.sample_rate", "dataset.pairing_seed", "privacy.delta"} <= set(keys)


def test_options_need_immutable_defaults() -> None:
    def builder(*, widths: list[int] = [1]) -> None:  # noqa: B006
        del widths

    with pytest.raises(TypeError, match="immutable default"):
        check_options("model", builder, {})


def test_two_plug_ins_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="already registered"):

        @register("model", "complex_mlp")
        def another() -> None: ...
