"""A node that dies, answers nonsense or comes late: the round follows the rule, no ε is lost."""

import io
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message, RecordDict

from tests.extras.federated.conftest import Make, Sound, carried_out, change_answers
from tests.ledgers import steps_in
from tests.training.test_run import repeatable
from zdp_bench.errors import UserError
from zdp_bench.extras.federated import server, simulation
from zdp_bench.extras.federated.messages import ARRAYS, VALUES, content, values_of
from zdp_bench.extras.federated.node import Node, RefusalError, client_app
from zdp_bench.extras.federated.roster import Roster, Standing
from zdp_bench.extras.federated.server import largest_release, valid_releases
from zdp_bench.extras.federated.simulation import set_sender
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling

NODES, BROKEN, AT = 3, 1, 2  # node 1 fails from round 2 on
LIKE = {
    "net.0.weight": torch.zeros(2, 300, dtype=torch.complex64),
    "net.0.bias": torch.zeros(2, dtype=torch.complex64),
}
BLOCKS = tuple(
    Block(name, tuple(v.shape), "complex64", 1, 1, "circular") for name, v in LIKE.items()
)
MECHANISM = Mechanism(BLOCKS, Sampling("poisson", 0.25, 5.0, 20))
LIMIT = largest_release(MECHANISM, 1)
Fault = Callable[[Message, Message], Message]


def dead(asked: Message, answer: Message) -> Message:
    raise ConnectionError("the node's machine is gone")


def one_number(value: float) -> Fault:
    """The answer, with one other number."""

    def fault(asked: Message, answer: Message) -> Message:
        numbers = answer.content[ARRAYS]["float32"].numpy().copy()
        numbers[5] = value
        answer.content[ARRAYS]["float32"] = Array(numbers)
        return answer

    return fault


def wrong_shape(asked: Message, answer: Message) -> Message:
    return Message(content(values_of(answer), {"net.0.weight": torch.zeros(2, 2)}), reply_to=asked)


def too_few_numbers(asked: Message, answer: Message) -> Message:
    answer.content[ARRAYS]["float32"] = Array(answer.content[ARRAYS]["float32"].numpy()[:-1])
    return answer


def saying(**values: object) -> Fault:
    """The answer, with other values; None leaves one out."""

    def fault(asked: Message, answer: Message) -> Message:
        for name, value in values.items():
            if value is None:
                del answer.content[VALUES][name]
            else:
                answer.content[VALUES][name] = value
        return answer

    return fault


def pickled(asked: Message, answer: Message) -> Message:
    answer.content[ARRAYS]["float32"] = Array("float32", (2,), "pickle", b"cos\nsystem\n.")
    return answer


def archived(asked: Message, answer: Message) -> Message:
    """A zip archive of exactly the expected length: numpy opens it and finds no array."""
    there, file = answer.content[ARRAYS]["float32"], io.BytesIO()
    np.savez(file, numbers=np.zeros(1, np.float32))
    zipped = file.getvalue()
    padding = bytes(len(there.data) - len(zipped))
    data = zipped[:-22] + padding + zipped[-22:]
    answer.content[ARRAYS]["float32"] = Array(there.dtype, there.shape, there.stype, data)
    return answer


def nothing(asked: Message, answer: Message) -> Message:
    return Message(RecordDict(), reply_to=asked)


UNFIT = "node 1: its answer does not fit the model: "
UNLIKE_LAYOUT = f"{UNFIT}its numbers do not match its layout"
FAULTS: dict[str, tuple[Fault, str]] = {
    "nan": (one_number(float("nan")), "node 1: its answer is not finite"),
    "large": (one_number(1.01 * LIMIT), "node 1: its answer has a norm of "),
    "shape": (wrong_shape, f"{UNFIT}'net.0.weight float32 [2, 2]' where 'net.0.weight"),
    "few": (too_few_numbers, UNLIKE_LAYOUT),
    "late": (saying(round=AT - 1), "node 1: its answer is for round 1, not for round 2"),
    "pickle": (pickled, UNLIKE_LAYOUT),
    "zip": (archived, "node 1: its answer "),
    "nothing": (nothing, "node 1: its answer has no entries"),
    "no layout": (saying(layout=None), f"{UNFIT}'' where 'net"),
    "huge": (saying(entries=2**60), "node 1: its answer has entries=1152921504606846976, which is"),
    "many runs": (saying(entries=10**6), "node 1: its answer has entries=1000000, more than 100 "),
    "true": (saying(round=True), "node 1: its answer has round of type bool"),
    "line": (
        saying(digest="a\nb"),
        "node 1: its answer has a digest that is not a short printable string",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_breaks_the_rule_is_dropped_and_named(
    configured: Make, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    known = {number: asdict(Standing(20, 1)) for number in range(NODES)}
    config = configured(f"federated.nodes={NODES}")
    roster = Roster(None, config, {}, None, known)  # type: ignore[arg-type]
    roster.prepare("run", 8, {})
    set_sender()
    asked = {number: Message(content({}), number + 2, "train") for number in range(NODES)}
    values = {"entries": 3, "digest": "d", "round": AT}
    answers = {number: Message(content(values, LIKE), reply_to=m) for number, m in asked.items()}
    break_it, sentence = FAULTS[fault]
    answers[BROKEN] = break_it(asked[BROKEN], answers[BROKEN])
    releases, reasons = valid_releases(roster, answers, AT, LIKE, dict.fromkeys(known, LIMIT))
    assert list(releases) == [0, 2]
    assert list(reasons) == [BROKEN]
    assert f"node {BROKEN}: {reasons[BROKEN]}".startswith(sentence)
    (line,) = caplog.messages
    assert line.startswith(sentence)
    assert [roster.standings[number].entries for number in range(NODES)] == [3, 0, 3]


@pytest.mark.parametrize("joint", [True, False])
def test_no_honest_release_is_too_large(joint: bool) -> None:
    """All examples at their bound in one direction, and the largest noise that is likely."""
    for std in (0.0, 3.0):
        blocks = (Block(f"{n}", (n,), "float32", 2.0, std, "real") for n in (1, 4, 10_000))
        mechanism = Mechanism(tuple(blocks), Sampling("poisson", 0.1, 10.0, 100), joint)
        shares = 100 * 2.0 * (1 if joint else math.sqrt(3))
        noise = max(float((torch.randn(10_005) * std).norm()) for _ in range(100))
        assert 5 * (shares + noise) / 10 < largest_release(mechanism, 5) < 50 * (shares + noise)
    free = Mechanism((Block("w", (1,), "float32", math.inf, 0, "none"),), MECHANISM.sampling)
    assert largest_release(free, 1) == server.MAX_NORM


def fail(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Let node 1 train and write its ledger as it should, and then its answers go wrong."""

    def break_it(asked: Message, answer: Message) -> Message:
        is_train = asked.metadata.message_type == "train"
        return fault(asked, answer) if is_train and values_of(asked)["round"] >= AT else answer

    change_answers(monkeypatch, break_it, BROKEN)


def test_with_enough_nodes_a_round_finishes_and_the_broken_nodes_steps_count(
    configured: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, dead)
    config = configured(f"federated.nodes={NODES}", "federated.min_nodes=2")
    record = carried_out(config)
    # Asked at the end, the node says what it has spent.
    expected = {"answers": [8, AT, 8], "steps": [8, 8, 8], "unconfirmed": [0, 0, 0]}
    for key, values in expected.items():
        assert [node[key] for node in record["privacy"]["nodes"]] == values
    (ledger,) = config.results.glob("runs/*/*/nodes/01/ledger.jsonl")
    assert len(steps_in(ledger)) == 8


@pytest.mark.parametrize("is_enough", [True, False])
def test_a_node_that_refuses_to_prepare_as_a_run_begins_anew_is_counted_or_one_sentence(
    configured: Make, monkeypatch: pytest.MonkeyPatch, is_enough: bool
) -> None:
    words = (f"federated.nodes={NODES}", f"federated.min_nodes={2 if is_enough else 3}")
    words += ("federated.patience=1", "trainer.epochs=1")
    first = carried_out(configured(*words))
    prepare = Node.prepare

    def refuse(node: Node, *arguments: Any) -> Any:
        if node.number == BROKEN:
            raise RefusalError("no")
        return prepare(node, *arguments)

    monkeypatch.setattr(Node, "prepare", refuse)
    if is_enough:
        forced = carried_out(configured(*words, "force=true"))
        assert [node["answers"] for node in forced["privacy"]["nodes"]] == [4, 0, 4]
        steps = [node["steps"] for node in forced["privacy"]["nodes"]]
        assert steps[0] == steps[BROKEN] == steps[2] > 4
    else:
        with pytest.raises(UserError, match=r"too few nodes answered.*node 1: no"):
            carried_out(configured(*words, "force=true"))
        assert carried_out(configured(*words)) == first


def test_with_too_few_a_run_fails_in_one_sentence_and_goes_on_later_from_its_ledgers(
    configured: Make, sound: Sound, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, config = sound(f"federated.nodes={NODES}"), configured(f"federated.nodes={NODES}")
    break_it, sentence = FAULTS["nan"]
    fail(monkeypatch, break_it)
    with pytest.raises(UserError) as caught:
        carried_out(config)
    assert sentence in str(caught.value)
    assert "too few nodes answered" in str(caught.value)
    assert "federated.min_nodes requires 3 of 3" in str(caught.value)
    assert str(caught.value).endswith("; the same command, without any force=true, continues.")
    monkeypatch.setattr(simulation, "client_app", client_app)
    (ledger,) = config.results.glob("runs/*/*/nodes/02/ledger.jsonl")
    moved = ledger.rename(ledger.with_name("elsewhere"))
    with pytest.raises(UserError, match="node 2: its ledger cannot be used"):
        carried_out(config)
    moved.rename(ledger)
    record = carried_out(config)
    assert repeatable(record) == repeatable(whole)
    assert record["measured"]["resumed_at_step"] == AT
