"""No copy of a training repeats its noise, or takes steps that nobody counts."""

import copy
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ledgers import in_a_fork, steps_in
from tests.library.conftest import Make
from tests.library.small import begin, loss, network, refusal, train
from zdp_bench import UserError
from zdp_bench.errors import Busy


@pytest.mark.parametrize(
    ("randomness", "before"), [({}, 0), ({}, 2), ({"seed": 3}, 2), ({"secure": True}, 2)], ids=str
)
def test_a_fork_takes_no_step(
    make: Make, tmp_path: Path, randomness: dict[str, Any], before: int
) -> None:
    private = make(**randomness)
    if before:
        train(private, most=before)
    weights = private.model[0].weight.clone()  # type: ignore[index]
    written = (tmp_path / "ledger.jsonl").read_bytes()

    def act() -> str:
        message = refusal(lambda: train(private, most=1))
        same = torch.equal(private.model[0].weight, weights)  # type: ignore[index]
        return f"{message} {'unmoved' if same else 'moved'}"

    message = in_a_fork(act)
    assert "is a copy (fork) of the one that opened the ledger" in message
    assert message.endswith(" unmoved")
    assert (tmp_path / "ledger.jsonl").read_bytes() == written
    assert len(train(private)) == 10 - before  # the first process goes on


def test_the_end_of_a_fork_does_not_let_go_of_the_ledger(make: Make) -> None:
    private = make()
    in_a_fork(lambda: private.close() or "closed")
    with pytest.raises(Busy, match=r"another run uses this ledger; close\(\) it"):
        begin(network(), private.ledger.path)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_training_is_not_sent_to_another_process(make: Make, method: str) -> None:
    private = make()
    process = multiprocessing.get_context(method).Process(target=print, args=(private,))
    with pytest.raises(UserError, match="make_private"):
        process.start()
    with pytest.raises(UserError, match="cannot be copied"):
        copy.deepcopy(private)


def test_without_a_seed_no_two_keys_follow_from_the_same_memory(make: Make, tmp_path: Path) -> None:
    """A copy of the whole machine has all that the process knows, and its ledger too."""
    for name, randomness in (("once", {}), ("always", {"secure": True})):
        private = make(ledger=tmp_path / f"{name}.jsonl", **randomness)
        keys, model = private.keys, private.model
        assert len({keys.step_key(model, private.ledger) for _ in range(3)}) == 3


def test_threads_take_their_steps_one_after_the_other(make: Make, tmp_path: Path) -> None:
    """Two with one batch, and two trainings of one model, whose gradients would mix."""
    lock, model = Lock(), network()  # a step undoes what a loss stores, but not for a lock

    def slow(outputs: Tensor, targets: Tensor) -> Tensor:
        assert lock.acquire(blocking=False), "two steps at a time"
        time.sleep(0.02)
        lock.release()
        return loss(outputs, targets)

    def two(*acts: Callable[[], object]) -> list[str]:
        messages: list[str] = []
        threads = [Thread(target=lambda act=act: messages.append(refusal(act))) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(messages)

    private = make(model, loss=slow)
    batch = next(private.batches())
    messages = two(*(lambda: private.step(batch) for _ in range(2)))
    assert messages[0] == ""
    assert "the batch that private.batches() yielded last" in messages[1]
    assert (private.done, steps_in(tmp_path / "ledger.jsonl")) == (1, [0])
    with begin(model, tmp_path / "other.jsonl", loss=slow) as other:
        assert two(lambda: train(private, most=3), lambda: train(other, most=3)) == ["", ""]
