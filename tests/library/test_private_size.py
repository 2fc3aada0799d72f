"""With `sample_rate` nothing that a training tells depends on how many examples there are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.library.conftest import Make
from tests.library.small import data
from zdp_bench.library.examples import Items
from zdp_bench.privacy.accounting import pld

RATE, EXPECTED = 0.4, 2.0


def told(make: Make, folder: Path, many: int, **given: Any) -> tuple[dict[str, Any], set[int]]:
    """All that a training on so many examples tells, and the examples that it drew."""
    drawn: set[int] = set()
    read = Items.batch

    def batch(self: Items, indices: Any) -> Any:
        drawn.update(map(int, indices))
        return read(self, indices)

    dataset = [data()[index] for index in range(many)]
    private = make(
        dataset=dataset,
        sample_rate=RATE,
        expected_batch=EXPECTED,
        epochs=8,
        ledger=folder / f"{many}" / "ledger.jsonl",
        **given,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Items, "batch", batch)
        for one in private.batches():
            private.step(one)
    private.save()
    private.export(folder / f"{many}" / "model")
    report = json.loads((folder / f"{many}" / "model" / "report.json").read_text())
    weights = report.pop("measured")["weights"]["digest"]
    card = (folder / f"{many}" / "model" / "README.md").read_text()
    setting = private.setting
    facts = {
        "mechanism": setting.algorithm.mechanism(),
        "plan": setting.plan,
        "divisor": setting.plan.draw("key", 0, False, setting.units)[1],
        "run": setting.run,
        "steps": private.steps,
        "epsilon": private.epsilon,
        "report": report,
        "card": card.replace(weights, ""),
        "ledger": private.ledger.path.read_bytes(),
        "shown": repr(private),
    }
    return facts, drawn


@pytest.mark.parametrize(
    "given", [{}, {"unit": lambda index: index // 2, "max_records": 3}], ids=["examples", "owners"]
)
def test_neighbouring_data_sets_are_told_apart_by_the_weights_alone(
    make: Make, tmp_path: Path, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (four, of_four), (five, of_five) = (told(make, tmp_path, many, **given) for many in (4, 5))
    for name, fact in four.items():
        assert fact == five[name], name
    assert four["epsilon"] == pld(1.2, RATE, 20, 1e-3)
    assert (of_four, of_five) == ({*range(4)}, {*range(5)})  # all are drawn from
    assert not caplog.messages


def test_by_batch_size_the_rate_says_how_many_there_are(make: Make, tmp_path: Path) -> None:
    """Why n must be public then, and large."""
    rates = []
    for many in (100, 101):
        dataset = [data()[index % 60] for index in range(many)]
        drawn = {"batch_size": 20, "sample_rate": None, "expected_batch": None}
        private = make(dataset=dataset, ledger=tmp_path / f"{many}.jsonl", **drawn)
        rates.append(private.setting.plan.sampling.sample_rate)
    assert rates == [20 / 100, 20 / 101]
