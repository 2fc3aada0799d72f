"""A δ that promises little is asked about, and one that promises nothing is refused."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import pytest
import torch

from tests.test_cli import leave
from zdp_bench import make_private
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.privacy.delta import question, warn_of
from zdp_bench.training.setup import Setup

EPSILON = "--sigma 1 --sample-rate 0.1 --steps 10 --records 100"


def private(delta: float, ledger: Path) -> None:
    """Open a private training of 100 examples."""
    model = torch.nn.Linear(4, 2)
    examples = [(torch.randn(4), number % 2) for number in range(100)]
    make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        examples,
        loss=torch.nn.CrossEntropyLoss(reduction="none"),
        epochs=1,
        batch_size=10,
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        delta=delta,
        ledger=ledger,
    ).close()


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.5, 1.0, -1.0])
def test_no_epsilon_is_stated_at_a_delta_from_a_tenth_on(
    delta: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "must lie above 0 and below 0.1"
    for words in (
        ["run", "recipe=quickstart", f"privacy.delta={delta}"],
        ["validate", "recipe=quickstart", f"privacy.delta={delta}"],
        ["epsilon", *shlex.split(EPSILON), f"--delta={delta}"],
        ["budget", f"--results={tmp_path}", f"--delta={delta}"],
    ):
        assert says in leave(words, capsys)
    with pytest.raises(UserError, match=says):
        private(delta, tmp_path / "ledger.jsonl")


def test_a_delta_above_one_over_n_is_asked_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from zdp_bench import cli

    warn_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        private(0.01, tmp_path / "right.jsonl")
        Setup.of(configured(["recipe=quickstart"]))
        Setup.of(configured(["recipe=quickstart", "algorithm=sgd", "privacy.delta=0.01"]))
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        private(0.03, tmp_path / "wrong.jsonl")
        Setup.of(configured(["recipe=quickstart", "privacy.delta=0.01"]))
    assert caplog.messages == [question(0.03, 100), question(0.01, 1426)]
    for delta, asked in ((0.009, ""), (0.02, "above 1/100")):
        with pytest.raises(SystemExit):
            cli.main(["epsilon", *shlex.split(EPSILON), f"--delta={delta}"])
        shown = capsys.readouterr().out
        assert asked in shown
        assert ("δ = " in shown) == bool(asked)
