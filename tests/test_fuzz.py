"""Any configuration and any damaged file gives a result or one sentence, never a traceback.

A few examples whenever the tests are run; with `--slow`, as many as `--configurations` and
`--damaged` say, drawn from `--seed`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.conftest import write_mini_mnist
from tests.data import test_cifar10, test_fastmri
from zdp_bench.config import compose, parse
from zdp_bench.config.compose import group_options
from zdp_bench.config.plugins import every_key
from zdp_bench.config.schema import GROUPS, Run
from zdp_bench.data.cifar10 import read_pickle
from zdp_bench.errors import UserError
from zdp_bench.privacy.noise import SeededNoise, add_noise
from zdp_bench.registry import lookup, names
from zdp_bench.training.setup import Setup
from zdp_bench.training.step import descend, sum_contributions

# Where and how, and what would leave this machine.
FIXED = ("paths", "hydra", "launcher", "device", "threads", "recipe")
KEYS = [key for key, _ in every_key() if not key.startswith(FIXED)]
WORDS = """
null true 0 1 -1 2 0.5 1e-3 1e308 -inf nan abc '' ε ??? ${seed} ${no}
[] [4] [4,3] [0] [a] [[1]] {} {a:1} [1 { a,b range(1,3) 1..2
"""
STRANGE = ["", "x", ".", "a..b", "model.", "hydra.run", "@", "+", "~seed", "++model.hidden"]

keys = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from(KEYS).map(lambda key: key[:-1]),  # a letter is missing
    st.sampled_from(STRANGE),
)
values = st.one_of(
    st.sampled_from(WORDS.split()),
    st.integers(-3, 40).map(str),
    st.floats(-2, 2).map(str),
    st.text(max_size=6),
)
choices = st.sampled_from([group for group in GROUPS if group != "dataset"]).flatmap(
    lambda group: st.sampled_from([*group_options(group), "nothing"]).map(
        lambda name: f"{group}={name}"
    )
)
overrides = st.lists(
    st.one_of(
        choices,
        st.builds("{}={}".format, keys, values),
        st.sampled_from(["", "=", "seed", "~model"]),
    ),
    max_size=4,
)


def quiet() -> Any:
    """What torch and numpy warn of on their way is not looked at here."""
    return warnings.catch_warnings(action="ignore")


def a_sentence(error: UserError) -> None:
    text = str(error)
    assert text.strip()
    assert "\n" not in text.strip(), text
    assert "Traceback" not in text
    assert len(text) < 2000, text


def take_step(config: Run) -> None:
    """Take one private step on the run's own data; nothing is written."""
    setup = Setup.of(config)
    batches, divisor = setup.draw(config.seed, 0)
    total = sum_contributions(setup.algorithm, setup.mechanism, batches, setup.device)
    noisy = add_noise(total, setup.mechanism, SeededNoise(config.seed), 0)
    release = setup.algorithm.postprocess(noisy, divisor)
    descend(dict(setup.model.named_parameters()), setup.optimizer, release)


def one_configuration(words: list[str]) -> None:
    """Compose, check, and take one step of what passes for a configuration."""
    with quiet():
        try:
            config = parse(compose(["recipe=quickstart", "model.hidden=[4]", *words]))
            if config.trainer.micro_batch is not None and config.trainer.micro_batch < 8:
                return  # right, and slow
            take_step(config)
        except UserError as error:
            a_sentence(error)


def configurations(count: int, number: int) -> Callable[[], None]:
    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # an example that fails is short enough as it is
    )
    @given(overrides)
    def run(words: list[str]) -> None:
        one_configuration(words)

    return run


def test_any_configuration_is_a_clean_run_or_a_sentence() -> None:
    configurations(40, 0)()


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_thousands_of_configurations_are_clean_runs_or_sentences(
    pytestconfig: pytest.Config,
) -> None:
    configurations(pytestconfig.getoption("configurations"), pytestconfig.getoption("seed"))()


# damaged files


def cut(body: bytes, rng: random.Random) -> bytes:
    return body[: rng.randrange(len(body) + 1)]


def flipped(body: bytes, rng: random.Random) -> bytes:
    changed = bytearray(body)
    for _ in range(min(len(body), rng.choice([1, 8, 200]))):
        at = rng.randrange(min(len(body), rng.choice([64, len(body)])))
        changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def noise(body: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 100, len(body)]))


def longer(body: bytes, rng: random.Random) -> bytes:
    return body + rng.randbytes(100)


DAMAGES = (cut, flipped, noise, longer)
SMALL: dict[str, dict[str, Any]] = {
    "mnist": {"check": False},
    "phasemnist": {"check": False},
    "fastmri": test_fastmri.SMALL,
    "cifar10": {"check": False, "layout": "binary"},
    "cpsc2018_synthetic": {"count": 40},
    "chest_xray_synthetic": {"count": 60, "size": 32},
    "mitbih_synthetic": {"patients": 10, "beats": 8},
    "mri_sequences_synthetic": {"patients": 6, "size": 16},
    "msd_volumes_synthetic": {"volumes": 6, "shape": [8, 8, 8]},
    "msd_synthetic": {"volumes": 6, "size": 32, "validation_share": 0.2, "test_share": 0.2},
    "speech_commands_synthetic": {"words": ["yes", "no"], "clips_per_word": 8},
}
PICKLES = "cifar10 pickles"  # opened by the set only if their checksums are the release's
WRITE: dict[str, Callable[[Path], object]] = {  # sets that are not written when they are loaded
    "mnist": write_mini_mnist,
    "phasemnist": write_mini_mnist,
    "fastmri": test_fastmri.write_set,
    "cifar10": test_cifar10.write_binary,
    PICKLES: test_cifar10.write_python,
}


def whole_set(name: str, root: Path) -> None:
    """Read a data set to its last record."""
    if name == PICKLES:
        for path in sorted(root.glob("*/*")):
            read_pickle(path)
        return
    data = lookup("dataset", name)(**SMALL[name]).load(root)
    for part in (data.train, data.test):
        inputs, _ = part.batch(torch.arange(len(part)))
        assert len(inputs) == len(part) > 0


def damaged(name: str, root: Path, count: int, number: int = 0) -> int:
    """Read the set `count` times with one damaged file each; count the sentences."""
    rng = random.Random(f"{name}{number}")
    WRITE.get(name, lambda root: None)(root)
    whole_set(name, root)
    every = sorted(path for path in root.rglob("*") if path.is_file())
    told = 0
    for _ in range(count):
        path, damage = rng.choice(every), rng.choice(DAMAGES)
        body = path.read_bytes()
        path.write_bytes(damage(body, rng))
        try:
            with quiet():
                whole_set(name, root)
        except UserError as error:
            a_sentence(error)
            told += 1
        except Exception as error:
            raise AssertionError(
                f"--seed {number}: {path.name}, {damage.__name__}: {type(error).__name__}: {error}"
            ) from error
        finally:
            path.write_bytes(body)
    return told


FILES = [*SMALL, PICKLES]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_named(name: str, tmp_path: Path) -> None:
    assert damaged(name, tmp_path, 6) > 0, "no damage was noticed: was anything damaged?"


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("name", FILES)
def test_hundreds_of_damaged_files_are_read_or_named(
    name: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    count = -(-pytestconfig.getoption("damaged") // len(FILES))
    assert damaged(name, tmp_path, count, pytestconfig.getoption("seed")) > 0


def test_every_generated_set_in_a_real_format_is_damaged_here() -> None:
    assert {name for name in names("dataset") if name.endswith("_synthetic")} <= set(SMALL)
