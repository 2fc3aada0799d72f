"""Any configuration gives a result or one sentence, never a traceback.

A few examples whenever the tests are run; with `--slow`, as many as `--configurations` says, drawn
from `--seed`.
"""

import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.test_large_data import take_step
from zdp_bench.config import compose, parse
from zdp_bench.config.compose import group_options
from zdp_bench.config.plugins import list_all_keys
from zdp_bench.config.schema import GROUPS
from zdp_bench.errors import UserError
from zdp_bench.training.setup import Setup

# Where and how, and what would leave this machine.
FIXED = ("paths", "hydra", "launcher", "device", "threads", "recipe")
KEYS = [key for key, _ in list_all_keys() if not key.startswith(FIXED)]
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


def one_configuration(words: list[str]) -> None:
    """Compose, check, and take one step of what passes for a configuration."""
    with warnings.catch_warnings(action="ignore"):  # of torch and numpy
        try:
            config = parse(compose(["recipe=quickstart", "model.hidden=[4]", *words]))
            if config.trainer.micro_batch is not None and config.trainer.micro_batch < 8:
                return  # right, and slow
            take_step(Setup.of(config))
        except UserError as error:
            text = str(error).strip()
            assert text
            assert len(text) < 2000, text
            assert not [word for word in ("\n", "Traceback") if word in text], text


def try_configurations(count: int, number: int) -> None:
    how = settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # an example that fails is short enough as it is
    )
    seed(number)(how(given(overrides)(one_configuration)))()


@pytest.mark.parametrize(
    "many", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(6 * 3600)])]
)
def test_any_configuration_is_a_clean_run_or_a_sentence(
    many: bool, pytestconfig: pytest.Config
) -> None:
    number, count = (pytestconfig.getoption(o) if many else 0 for o in ("seed", "configurations"))
    try_configurations(count or 12, number)
