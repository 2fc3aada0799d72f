"""Every mistake in a configuration is told in one sentence, with the nearest right spelling, before anything is loaded."""

from __future__ import annotations

import pytest

from zdp_bench.config import configured
from zdp_bench.errors import UserError

MISTAKES = {
    "no recipe": ([], r"recipe=NAME is missing\. Allowed: .*quickstart"),
    "recipe": (
        ["recipe=phasemnits"],
        r"recipe 'phasemnits' is not known\. Did you mean 'phasemnist'\?",
    ),
    "dataset": (
        ["recipe=quickstart", "dataset=phasmnist"],
        r"dataset 'phasmnist'.*Did you mean 'phasemnist'",
    ),
    "algorithm": (
        ["recipe=quickstart", "algorithm=zeta_dp_sdg"],
        r"algorithm 'zeta_dp_sdg'.*Did you mean 'zeta_dp_sgd'",
    ),
    "optimizer": (["recipe=quickstart", "optimizer=adm"], r"optimizer 'adm'.*Did you mean 'adam'"),
    "accountant": (
        ["recipe=quickstart", "accountant=rpd"],
        r"accountant 'rpd'.*Did you mean 'rdp'",
    ),
    "trainer": (
        ["recipe=quickstart", "trainer=poison"],
        r"trainer 'poison'.*Did you mean 'poisson'",
    ),
    "launcher": (
        ["recipe=quickstart", "launcher=jobllib"],
        r"launcher 'jobllib'.*Did you mean 'joblib'",
    ),
    "key": (
        ["recipe=quickstart", "algorithm.noise_multiplyer=1"],
        r"'algorithm\.noise_multiplyer'.*'algorithm\.noise_multiplier'",
    ),
    "top key": (["recipe=quickstart", "sed=1"], r"key 'sed'.*Did you mean 'seed'"),
    "added key": (
        ["recipe=quickstart", "+trainer.epoch=1"],
        r"key 'trainer\.epoch'.*Did you mean 'trainer\.epochs'",
    ),
    "added top key": (["recipe=quickstart", "+sede=1"], r"key 'sede'.*Did you mean 'seed'"),
    "added option": (
        ["recipe=quickstart", "+model.widths=[3]"],
        r"key 'model\.widths' is not known.*model=complex_mlp has .*hidden",
    ),
    "optimizer key": (
        ["recipe=quickstart", "+optimizer.momentun=1"],
        r"optimizer\.momentun.*Did you mean 'optimizer\.momentum'",
    ),
    "type": (
        ["recipe=quickstart", "algorithm.noise_multiplier=abc"],
        r"algorithm\.noise_multiplier=abc: must be a number",
    ),
    "int": (["recipe=quickstart", "seed=one"], r"seed=one: must be a whole number"),
    "list": (
        ["recipe=quickstart", "model.hidden=[a]"],
        r"model\.hidden=\['a'\]: must be a list, each of it a whole number",
    ),
    "choice": (
        ["recipe=quickstart", "algorithm.noise=circluar"],
        r"algorithm\.noise 'circluar'.*Did you mean 'circular'",
    ),
    "sampling": (
        ["recipe=quickstart", "trainer.sampling=poison"],
        r"trainer\.sampling 'poison'.*Did you mean 'poisson'",
    ),
    "rate": (
        ["recipe=quickstart", "trainer.sample_rate=1.5"],
        r"trainer\.sample_rate=1\.5: must lie in \(0, 1\]",
    ),
    "no rate": (
        ["recipe=quickstart", "trainer.sample_rate=null"],
        r"^trainer\.sample_rate=null: Poisson sampling needs a rate",
    ),
    "both sizes": (
        ["recipe=quickstart", "trainer=uniform"],
        r"needs batch_size or sample_rate, and not both",
    ),
    "epochs": (["recipe=quickstart", "trainer.epochs=0"], r"trainer\.epochs=0: must be at least 1"),
    "delta": (
        ["recipe=quickstart", "privacy.delta=1"],
        r"privacy\.delta=1\.0: must lie in \(0, 1\)",
    ),
    "budget": (
        ["recipe=quickstart", "privacy.max_epsilon=-1"],
        r"privacy\.max_epsilon=-1\.0: must be positive",
    ),
    "target": (
        ["recipe=quickstart", "privacy.target_epsilon=0"],
        r"privacy\.target_epsilon=0\.0: must be positive",
    ),
    "two targets": (
        ["recipe=quickstart", "privacy.target_epsilon=1", "privacy.claimed_epsilon=1"],
        r"give one of them",
    ),
    "no noise": (
        ["recipe=quickstart", "algorithm=sgd", "privacy.target_epsilon=1"],
        r"algorithm=sgd: it has no noise_multiplier",
    ),
    "seed": (["recipe=quickstart", "seed=-1"], r"seed=-1: must be 0 or more"),
    "split seed": (
        ["recipe=quickstart", "dataset.pairing_seed=-1"],
        r"dataset.pairing_seed=-1: must be 0 or more",
    ),
    "device": (["recipe=quickstart", "device=cuba"], r"device 'cuba'.*Did you mean 'cuda'"),
    "shuffled": (
        [
            "recipe=quickstart",
            "trainer.sampling=shuffled",
            "trainer.batch_size=8",
            "trainer.sample_rate=null",
        ],
        r"carry no ε",
    ),
    "epochs without end": (
        ["recipe=quickstart", f"trainer.epochs={10**23}"],
        r"trainer\.epochs=10+: must be at most 1,000,000,000",
    ),
    "steps without end": (
        ["recipe=quickstart", "trainer.sample_rate=1e-300"],
        r"sample_rate=1e-300: .* more than 1,000,000,000 s",
    ),
    "little noise": (
        ["recipe=quickstart", "algorithm.noise_multiplier=1e-300"],
        r"noise_multiplier=1e-300: must be 0, or lie in",
    ),
    "much noise": (
        ["recipe=quickstart", "algorithm.noise_multiplier=1e30"],
        r"noise_multiplier=1e\+30: must be 0, or lie in",
    ),
    "bound": (
        ["recipe=quickstart", "algorithm.max_grad_norm=1e40"],
        r"max_grad_norm=1e\+40: must lie in 1e-12 to 1e\+12",
    ),
    "threads": (
        ["recipe=quickstart", "threads=100000"],
        r"threads=100000: must be at most \d+ on this machine",
    ),
    "prefetch": (
        ["recipe=quickstart", "execution.prefetch=100000000"],
        r"execution\.prefetch=100000000: must be at most 1024",
    ),
    "another's key": (
        ["recipe=quickstart", "optimizer=adam", "optimizer.momentum=0.9"],
        r"key 'optimizer\.momentum' is not known\. optimizer=adam has amsgrad, betas",
    ),
    "another model's key": (
        ["recipe=quickstart", "model=lenet5", "model.hidden=[3]"],
        r"key 'model\.hidden' is not known\..* model=lenet5 has activation, linear",
    ),
    "torch's key": (
        ["recipe=quickstart", "optimizer=adam", "optimizer.amsgrad=true"],
        r"write \+optimizer\.amsgrad=\.\.\. to add",
    ),
    "none": (
        ["recipe=quickstart", "trainer.epochs=None"],
        r"trainer\.epochs=None: must be a whole number",
    ),
    "null": (
        ["recipe=quickstart", "privacy.max_epsilon=abc"],
        r"privacy\.max_epsilon=abc: must be a number or null",
    ),
    "yes": (
        ["recipe=quickstart", "privacy.secure=maybe"],
        r"privacy\.secure=maybe: must be true or false",
    ),
    "dot": (["recipe=quickstart", "trainer.=3"], r"'trainer\.=3' is no override: write key=value"),
    "bracket": (["recipe=quickstart", "[3"], r"'\[3' is no override: write key=value"),
    "round bracket": (["recipe=quickstart", "("], r"'\(' is no override: write key=value"),
    "empty recipe": (["recipe="], r"recipe= has no name\. Allowed: .*quickstart"),
    "plus": (
        ["recipe=quickstart", "+trainer.epochs=3"],
        r"\+trainer\.epochs: is there already; leave the \+ out",
    ),
    "several": (["recipe=quickstart", "seed=1,2"], r"seed=1,2: names several values; add -m"),
    "launcher's key": (
        ["recipe=quickstart", "hydra.launcher.n_jobs=abc"],
        r"n_jobs' is not known: it is none of this launcher's",
    ),
    "override": (["recipe=quickstart", "seed"], r"'seed' is no override: write key=value"),
    "added choice": (
        ["recipe=quickstart", "+scheduler=step_lr"],
        r"^\+scheduler=step_lr: a run has one scheduler already; leave the \+ out: scheduler=step_lr\.$",
    ),
    "nothing": (["recipe=quickstart", "=3"], r"^'=3' is no override: write key=value"),
    "nothing named": (["recipe=quickstart", "=adam"], r"^'=adam' is no override: write key=value"),
    "number": (
        ["recipe=quickstart", "algorithm=3"],
        r"^algorithm '3' is not known\. .*Allowed: .*dp_sgd",
    ),
    "no data set": (["recipe=quickstart", "dataset=null"], r"^dataset 'null' is not known\."),
    "two names": (
        ["recipe=quickstart", "algorithm=[dp_sgd,sgd]"],
        r"^algorithm=\[dp_sgd,sgd\]: a run has one algorithm; name",
    ),
    "two wrong names": (["recipe=quickstart", "algorithm=[a,b]"], r"^algorithm 'b' is not known\."),
    "mapping": (
        ["recipe=quickstart", "algorithm={a:1}"],
        r"^algorithm: name one with algorithm=NAME, or set one of its keys\.",
    ),
    "open bracket": (
        ["recipe=quickstart", "model.hidden=[1,2"],
        r"^model\.hidden=\[1,2: its value cannot be read; close every br",
    ),
    "open brace": (
        ["recipe=quickstart", "model.hidden={a:1"],
        r"^model\.hidden=\{a:1: its value cannot be read",
    ),
    "open quote": (
        ["recipe=quickstart", "claims.row='abc"],
        r"^claims\.row='abc: its value cannot be read",
    ),
    "comma": (
        ["recipe=quickstart", "model.hidden=1,"],
        r"^model\.hidden=1,: its value cannot be read",
    ),
    "equals": (
        ["recipe=quickstart", "claims.row=a=b"],
        r"^claims\.row=a=b: its value cannot be read; .* in quotes within",
    ),
    "taken out": (["recipe=quickstart", "~seed"], r"^seed has no value: set it"),
    "choice taken out": (
        ["recipe=quickstart", "~algorithm"],
        r"^algorithm\.name is missing: say which algorithm",
    ),
    "nothing to take out": (
        ["recipe=quickstart", "~sede"],
        r"^~sede: there is no such key to take out\. Did you mean 'seed'\?",
    ),
    "another value taken out": (
        ["recipe=quickstart", "~seed=7"],
        r"^~seed: takes out only .* write seed=VALUE\.",
    ),
    "another choice taken out": (
        ["recipe=quickstart", "~algorithm=sgd"],
        r"^~algorithm: takes out .* write algorithm=VALUE\.",
    ),
    "reference": (
        ["recipe=quickstart", "seed=${sed}"],
        r"^seed: \$\{sed\} names no key of the run\. Did you mean 'seed'\?",
    ),
    "range": (
        ["recipe=quickstart", "seed=range(1,3)"],
        r"^seed=range\(1,3\): names several values; add -m",
    ),
    "missing": (["recipe=quickstart", "trainer.epochs=???"], r"trainer\.epochs has no value"),
    "no name": (["recipe=quickstart", "model.name=null"], r"model\.name is missing"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str) -> None:
    overrides, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message) as caught:
        configured(overrides)
    assert "\n" not in str(caught.value)
