"""Every mistake in a configuration ends in one sentence, before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zdp_bench.config import configured
from zdp_bench.errors import UserError

# (overrides of the recipe quickstart, the sentence; ... stands for any words)
MISTAKES = [
    ("recipe=phasemnits", "recipe 'phasemnits' is not known. Did you mean 'phasemnist'?"),
    ("dataset=phasmnist", "dataset 'phasmnist'...Did you mean 'phasemnist'"),
    ("algorithm=zeta_dp_sdg", "algorithm 'zeta_dp_sdg'...Did you mean 'zeta_dp_sgd'"),
    ("optimizer=adm", "optimizer 'adm'...Did you mean 'adam'"),
    ("accountant=rpd", "accountant 'rpd'...Did you mean 'rdp'"),
    ("trainer=poison", "trainer 'poison'...Did you mean 'poisson'"),
    ("launcher=jobllib", "launcher 'jobllib'...Did you mean 'joblib'"),
    ("algorithm.noise_multiplyer=1", "'algorithm.noise_multiplyer'...'algorithm.noise_multiplier'"),
    ("sed=1", "key 'sed'...Did you mean 'seed'"),
    ("+trainer.epoch=1", "key 'trainer.epoch'...Did you mean 'trainer.epochs'"),
    ("+sede=1", "key 'sede'...Did you mean 'seed'"),
    ("+model.widths=[3]", "key 'model.widths' is not known...model=complex_mlp has ...hidden"),
    ("+optimizer.momentun=1", "optimizer.momentun...Did you mean 'optimizer.momentum'"),
    ("algorithm.noise_multiplier=abc", "algorithm.noise_multiplier=abc: must be a number"),
    ("seed=one", "seed=one: must be a whole number"),
    (
        "execution.loggers=tensorboard",
        "execution.loggers=tensorboard: must be a list, each of it text, such as [a,b]",
    ),
    ("model.hidden=[a]", "model.hidden=['a']: must be a list, each of it a whole number"),
    ("algorithm.noise=circluar", "algorithm.noise 'circluar'...Did you mean 'circular'"),
    ("trainer.sampling=poison", "trainer.sampling 'poison'...Did you mean 'poisson'"),
    ("trainer.sample_rate=1.5", "trainer.sample_rate=1.5: must lie in (0, 1]"),
    ("trainer.sample_rate=null", "trainer.sample_rate=null: Poisson sampling needs a rate"),
    ("trainer=uniform", "needs batch_size or sample_rate, and not both"),
    ("trainer.epochs=0", "trainer.epochs=0: must be at least 1"),
    ("privacy.delta=1", "privacy.delta=1.0: must lie above 0 and below 0.1"),
    ("privacy.max_epsilon=-1", "privacy.max_epsilon=-1.0: must be positive"),
    ("privacy.target_epsilon=0", "privacy.target_epsilon=0.0: must be positive"),
    ("privacy.target_epsilon=1 privacy.claimed_epsilon=1", "give one of them"),
    ("algorithm=sgd privacy.target_epsilon=1", "algorithm=sgd: it has no noise_multiplier"),
    ("seed=-1", "seed=-1: must be 0 or more"),
    ("dataset.pairing_seed=-1", "dataset.pairing_seed=-1: must be 0 or more"),
    ("device=cuba", "device 'cuba'...Did you mean 'cuda'"),
    ("trainer.sampling=shuffled trainer.batch_size=8 trainer.sample_rate=null", "carry no ε"),
    (
        "trainer.epochs=100000000000000000000000",
        "trainer.epochs=1...: must be at most 1,000,000,000",
    ),
    ("trainer.sample_rate=1e-300", "sample_rate=1e-300: ... more than 1,000,000,000 s"),
    ("algorithm.noise_multiplier=1e-300", "noise_multiplier=1e-300: must be 0, or lie in"),
    ("algorithm.noise_multiplier=1e30", "noise_multiplier=1e+30: must be 0, or lie in"),
    ("algorithm.max_grad_norm=1e40", "max_grad_norm=1e+40: must lie in 1e-12 to 1e+12"),
    ("threads=100000", "threads=100000: must be at most ... on this machine"),
    ("execution.prefetch=100000000", "execution.prefetch=100000000: must be at most 1024"),
    (
        "optimizer=adam optimizer.momentum=0.9",
        "key 'optimizer.momentum' is not known. optimizer=adam has amsgrad, betas",
    ),
    (
        "model=lenet5 model.hidden=[3]",
        "key 'model.hidden' is not known.... model=lenet5 has activation, complex_as",
    ),
    ("optimizer=adam optimizer.amsgrad=true", "write +optimizer.amsgrad=... to add"),
    ("trainer.epochs=None", "trainer.epochs=None: must be a whole number"),
    ("privacy.max_epsilon=abc", "privacy.max_epsilon=abc: must be a number or null"),
    ("privacy.secure=maybe", "privacy.secure=maybe: must be true or false"),
    ("trainer.=3", "'trainer.=3' is no override: write key=value"),
    ("[3", "'[3' is no override: write key=value"),
    ("(", "'(' is no override: write key=value"),
    ("recipe=", "recipe= has no name. Allowed: ...quickstart"),
    ("+trainer.epochs=3", "+trainer.epochs: is there already; leave the + out"),
    ("seed=1,2", "seed=1,2: names several values; add -m"),
    ("hydra.launcher.n_jobs=abc", "n_jobs' is not known: it is none of this launcher's"),
    ("seed", "'seed' is no override: write key=value"),
    (
        "+scheduler=step_lr",
        "+scheduler=step_lr: a run has one scheduler already; leave the + out: scheduler=step_lr.",
    ),
    ("=3", "'=3' is no override: write key=value"),
    ("=adam", "'=adam' is no override: write key=value"),
    ("algorithm=3", "algorithm '3' is not known. ...Allowed: ...dp_sgd"),
    ("dataset=null", "dataset 'null' is not known."),
    ("algorithm=[dp_sgd,sgd]", "algorithm=[dp_sgd,sgd]: a run has one algorithm; name"),
    ("algorithm=[a,b]", "algorithm 'b' is not known."),
    ("algorithm={a:1}", "algorithm: name one with algorithm=NAME, or set one of its keys."),
    ("model.hidden=[1,2", "model.hidden=[1,2: its value cannot be read; close every br"),
    ("model.hidden={a:1", "model.hidden={a:1: its value cannot be read"),
    ("claims.row='abc", "claims.row='abc: its value cannot be read"),
    ("model.hidden=1,", "model.hidden=1,: its value cannot be read"),
    ("claims.row=a=b", "claims.row=a=b: its value cannot be read; ... in quotes within"),
    ("~seed", "seed has no value: set it"),
    ("~algorithm", "algorithm.name is missing: say which algorithm"),
    ("~sede", "~sede: there is no such key to take out. Did you mean 'seed'?"),
    ("~seed=7", "~seed: takes out only ... write seed=VALUE."),
    ("~algorithm=sgd", "~algorithm: takes out ... write algorithm=VALUE."),
    ("seed=${sed}", "seed: ${sed} names no key of the run. Did you mean 'seed'?"),
    ("seed=range(1,3)", "seed=range(1,3): names several values; add -m"),
    ("trainer.epochs=???", "trainer.epochs has no value"),
    ("model.name=null", "model.name is missing"),
    ("algorithm=sgd algorithm.noise_multiplier=3", "key 'algorithm.noise_multiplier'"),
    ("recipe=phasemnist algorithm=sgd algorithm.noise=circular", "key 'algorithm.noise'"),
    ("federated.min_nodes=3", "federated.min_nodes: ...add federated.nodes=N"),
    (
        "privacy.target_epsilon=2 algorithm.noise_multiplier=3",
        "algorithm.noise_multiplier=3: privacy.target_epsilon=2 would replace it",
    ),
    (
        "privacy.target_epsilon=2 privacy.max_epsilon=1",
        "privacy.max_epsilon=1 with privacy.target_epsilon=2: the budget would end the run",
    ),
    ("algorithm=sgd privacy.max_epsilon=1", "max_epsilon=1 ...no noise"),
    (
        "algorithm.noise_multiplier=0 privacy.max_epsilon=1",
        "max_epsilon=1 with algorithm=zeta_dp_sgd and no noise",
    ),
]

# What torch would take and could not use.
TORCH = [
    (
        "optimizer=adam optimizer.betas=[0.9]",
        "optimizer.betas...must be two numbers in [0, 1), such as [0.9,0.999]",
    ),
    ("optimizer=adam optimizer.betas=[0.9,0.99,0.9]", "optimizer.betas...must be two numbers"),
    ("optimizer=adam optimizer.betas=[0.9,1]", "optimizer.betas...must be two numbers"),
    ("optimizer=adam +optimizer.capturable=true", "optimizer.capturable...is not known"),
    ("optimizer=adam +optimizer.differentiable=true", "optimizer.differentiable...is not known"),
    ("optimizer=adam +optimizer.amsgrad=3", "optimizer.amsgrad...must be true or false"),
    ("optimizer=adam optimizer.lr=inf", "optimizer.lr...must be a number, 0 or more, and finite"),
    ("optimizer=adam optimizer.lr=null", "optimizer.lr=null: must be a number"),
    ("optimizer=adam optimizer.lr=abc", "optimizer.lr...must be a number, 0 or more"),
    (
        "optimizer.lr='1e-3'",
        "optimizer.lr=1e-3: is text to YAML, which wants a point in it: 0.001",
    ),
    ("optimizer=sgd optimizer.momentum=-1", "optimizer.momentum...must be a number in [0, 1]"),
    ("optimizer=sgd optimizer.lr=nan", "optimizer.lr...must be a number"),
    ("optimizer=rmsprop optimizer.alpha=-1", "optimizer.alpha...must be a number in [0, 1)"),
    (
        "scheduler=step_lr scheduler.step_size=0",
        "scheduler.step_size...must be a whole number, 1 or more",
    ),
    (
        "scheduler=step_lr scheduler.step_size=abc",
        "scheduler.step_size...must be a whole number, 1 or more",
    ),
    (
        "scheduler=step_lr scheduler.step_size=-1",
        "scheduler.step_size...must be a whole number, 1 or more",
    ),
    (
        "scheduler=step_lr scheduler.step_size=1.5",
        "scheduler.step_size...must be a whole number, 1 or more",
    ),
    ("scheduler=step_lr scheduler.gamma=-5", "scheduler.gamma...must be a number above 0"),
    ("scheduler=step_lr scheduler.gamma=0", "scheduler.gamma...must be a number above 0"),
    ("scheduler=step_lr scheduler.gamma=inf", "scheduler.gamma...must be a number above 0"),
    ("scheduler=cosine_annealing_lr scheduler.T_max=0", "scheduler.T_max...must be a whole number"),
    (
        "scheduler=cosine_annealing_lr scheduler.T_max=-1",
        "scheduler.T_max...must be a whole number",
    ),
    (
        "scheduler=cosine_annealing_lr scheduler.T_max=2.5",
        "scheduler.T_max...must be a whole number",
    ),
    ("scheduler=exponential_lr scheduler.gamma=abc", "scheduler.gamma...must be a number above 0"),
    ("scheduler=exponential_lr scheduler.gamma=null", "scheduler.gamma...must be a number above 0"),
    ("scheduler=exponential_lr scheduler.gamma=0", "scheduler.gamma...must be a number above 0"),
    (
        "scheduler=multi_step_lr scheduler.milestones=[a]",
        "scheduler.milestones...must be a list of epochs",
    ),
    (
        "scheduler=multi_step_lr scheduler.milestones=3",
        "scheduler.milestones...must be a list of epochs",
    ),
    ("scheduler=exponential_lr +scheduler.last_epoch=3", "scheduler.last_epoch...is not known"),
    ("scheduler=reduce_on_plateau +scheduler.mode=most", "scheduler.mode...must be min or max"),
]


@pytest.mark.parametrize(("words", "sentence"), [*MISTAKES, *TORCH], ids=lambda value: value)
def test_a_mistake_ends_in_one_sentence(words: str, sentence: str) -> None:
    pattern = re.escape(sentence).replace(re.escape("..."), ".*")
    recipe = [] if words.startswith("recipe=") else ["recipe=quickstart"]
    with pytest.raises(UserError, match=pattern) as caught:
        configured([*recipe, *words.split()])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["optimizer=\nñ"], "'optimizer= ñ' is no override"),
        (["trainer.epochs=" + "9" * 400], "trainer.epochs=999999999999… (400 digits): "),
    ],
)
def test_what_is_quoted_stays_on_one_line_and_is_cut(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        configured(["recipe=quickstart", *words])
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_recipe_s_file_that_is_here_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_films.yaml").write_text("seed: 1\n")
    with pytest.raises(UserError, match=r"my_films.yaml is here: write recipe=./my_films.yaml\.$"):
        configured(["recipe=my_films"])
