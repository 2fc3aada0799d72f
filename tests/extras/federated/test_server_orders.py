"""What a dishonest server can order a node to do: nothing outside of its folder or its budget."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from tests.extras.federated.conftest import Make
from zdp_bench import records
from zdp_bench.config.schema import Run
from zdp_bench.data import Part, Splits
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.messages import ARRAYS, LAYOUT, VALUES, content
from zdp_bench.extras.federated.node import (
    REFUSED,
    Node,
    Site,
    _check_and_prepare,
    call_handler,
    client_app,
    open_site,
)
from zdp_bench.extras.federated.simulation import set_sender
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.composition import Spending, SpentSteps, compose_epsilon
from zdp_bench.privacy.tally import BudgetExceeded
from zdp_bench.training.deletion import delete, find_homes
from zdp_bench.training.setup import load_data
from zdp_bench.training.spending import find_spendings
from zdp_bench.training.spending_file import read_sources

OWN = ("federated.nodes=2", "federated.patients=own", "privacy.claimed_epsilon=2.0")
RUN = "f" * 64


def prepare(node: Node, run: str = RUN, rounds: int = 8) -> None:
    _check_and_prepare(node, {"run": run, "rounds": rounds, "entries": 0, "digest": ""})


def take_rounds(node: Node, most: int) -> int:
    """Take rounds until the budget ends; return how many were released."""
    weights = {name: p.detach().clone() for name, p in trainable(node.site.setup.model).items()}
    for round_ in range(most):
        try:
            node.take_round(round_, weights)
        except BudgetExceeded:
            return round_
    return most


@pytest.mark.parametrize("run", ["../../../x", "/tmp/x", "f" * 63, "F" * 64, "f" * 64 + "\n", ""])
def test_a_server_names_no_folder_outside_of_a_nodes_own(
    configured: Make, tmp_path: Path, run: str
) -> None:
    site = Site(configured(*OWN))
    with pytest.raises(UserError, match="64 hexadecimal digits"):
        prepare(site.node(0), run)
    assert not [*tmp_path.rglob("ledger.jsonl*")]
    site.close()


@pytest.mark.parametrize("rounds", [-1, 0, 1_000_001, 10**9])
def test_a_server_asks_for_no_more_rounds_than_a_run_can_have(
    configured: Make, rounds: int
) -> None:
    site = Site(configured(*OWN))
    with pytest.raises(UserError, match="rounds"):
        prepare(site.node(0), rounds=rounds)
    site.close()


def damaged_message(draw: random.Random, weights: dict[str, Tensor]) -> Message:
    """Return an order or a round with something missing, of another type, or beyond reason."""
    kind = draw.choice(["query.prepare", "train"])
    values: dict[str, Any] = {"run": RUN, "rounds": 8, "entries": 0, "digest": "", "round": 0}
    odd: list[Any] = ["", "x" * 10_000, "nan", 0, -1, 2**62, 0.5, math.nan, True, b"", [1], [""]]
    body = content(values, weights)
    for _ in range(draw.choice([1, 1, 3])):
        how = draw.randrange(5)
        record = body.config_records[VALUES]
        if how == 0:
            record.pop(draw.choice([*record]), None)
        elif how == 1:
            record[draw.choice([*values, LAYOUT])] = draw.choice(odd)
        elif how == 2:
            number = torch.tensor([math.nan, 1.0]).numpy()
            body[ARRAYS] = ArrayRecord({draw.choice(["float32", "x"]): Array(number)})
        elif how == 3 and ARRAYS in body.array_records:
            array = next(iter(body.array_records[ARRAYS].values()))
            array.data = draw.choice([array.data[:-1], b"", draw.randbytes(200), array.data * 2])
        else:
            body = RecordDict({draw.choice([VALUES, "x"]): ConfigRecord(dict(record))})
            if VALUES not in body.config_records:
                break
    return Message(body, 2, kind)


@pytest.mark.parametrize(
    "count", [200, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_a_damaged_message_of_a_server_is_refused_in_one_sentence(
    configured: Make, tmp_path: Path, count: int
) -> None:
    """Without a value, or with another type, the node ended in a KeyError or a TypeError."""
    set_sender()
    config = configured(*OWN)
    with open_site("key", Site(config)) as site:
        app = client_app(config, "key")
        context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
        parameters = trainable(site.setup.model)
        weights = {name: value.detach().clone() for name, value in parameters.items()}
        refused = 0
        for seed in range(count):
            message = damaged_message(random.Random(seed), weights)
            message.metadata.__dict__["_message_id"] = "1"
            answer = call_handler(app, message, context)
            if answer.has_error():
                refused += 1
                assert answer.error.code == REFUSED, (seed, answer.error.reason)
                assert "\n" not in str(answer.error.reason)
                assert len(str(answer.error.reason)) < 1000
    assert refused > count / 2


def refuse_other_noise(node: Node) -> None:
    prepare(node, rounds=1)  # fewer steps need less noise for the claimed ε


def refuse_unknown_steps(node: Node) -> None:
    (planned,) = node.config.results.rglob("spending.json")
    planned.unlink()
    prepare(node, "b" * 64)


def refuse_position(node: Node) -> None:
    values = {"run": RUN, "rounds": 8, "entries": 9, "digest": "0" * 64}
    _check_and_prepare(node, values)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (refuse_other_noise, "another mechanism"),
        (refuse_unknown_steps, "contains steps of an unfinished run"),
        (refuse_position, "the file was truncated"),
    ],
)
def test_a_node_that_refuses_to_prepare_takes_no_round(
    configured: Make, order: Callable[[Node], None], reason: str
) -> None:
    """It took rounds that it had counted before, with the noise or the budget of the order."""
    site = Site(configured(*OWN, "privacy.max_epsilon=1000"))
    node = site.node(0)
    prepare(node)
    assert take_rounds(node, 2) == 2
    with pytest.raises(UserError) as refusal:
        order(node)
    assert reason in str(refusal.value.__cause__ or refusal.value)
    with pytest.raises(UserError, match="has to join again"):
        take_rounds(node, 1)
    site.close()


def test_a_refused_order_to_prepare_is_not_kept_for_the_next_process(configured: Make) -> None:
    set_sender()
    config = configured(*OWN)
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    values = {"run": RUN, "rounds": 8, "entries": 0, "digest": ""}
    for rounds, is_prepared in ((8, True), (1, False), (8, True)):
        with open_site("key", Site(config)):  # a process of its own
            body = content(values | {"rounds": rounds})
            message = Message(body, 2, "query.prepare")
            message.metadata.__dict__["_message_id"] = "1"
            answer = call_handler(client_app(config, "key"), message, context)
            assert answer.has_error() != is_prepared
        assert ("prepared" in context.state) == is_prepared


def test_other_names_for_a_run_buy_a_server_no_more_releases(configured: Make) -> None:
    """Each name opened a ledger of its own, with the whole budget."""
    site = Site(configured(*OWN))
    prepare(site.node(0))
    whole = site.node(0).setup.epsilon(8)
    site.close()
    budget = f"privacy.max_epsilon={whole * 1.05}"
    site = Site(configured(*OWN, budget, results="honest"))
    prepare(site.node(0))
    assert take_rounds(site.node(0), 8) == 8
    taken = []
    for digit in "abc":
        prepare(site.node(0), digit * 64)
        taken.append(take_rounds(site.node(0), 8))
    mechanism = site.node(0).mechanism
    releases = [SpentSteps(mechanism.z, mechanism.sampling, count) for count in (8, *taken)]
    assert compose_epsilon(releases, site.config.privacy.delta) <= whole * 1.05
    assert taken[1:] == [0, 0]
    site.close()


def test_steps_of_an_unknown_run_leave_no_budget(configured: Make) -> None:
    """A ledger without its run's file counted nothing, so the site gave its budget again."""
    site = Site(configured(*OWN, "privacy.max_epsilon=1000"))
    prepare(site.node(0))
    assert take_rounds(site.node(0), 2) == 2
    site.close()
    (planned,) = site.config.results.rglob("spending.json")
    planned.unlink()
    site = Site(site.config)
    with pytest.raises(UserError, match="contains steps of an unfinished run"):
        prepare(site.node(0), "b" * 64)
    site.close()


def test_a_run_that_goes_on_keeps_its_budget(configured: Make) -> None:
    site = Site(configured(*OWN))
    prepare(site.node(0))
    budget = f"privacy.max_epsilon={site.node(0).setup.epsilon(8)}"
    site.close()
    for _ in range(2):
        site = Site(configured(*OWN, budget, results="again"))
        prepare(site.node(0))
        assert take_rounds(site.node(0), 8) == 8
        site.close()


# ------------------------------------------------------- what a site counts with data of its own


def count_spendings(config: Run) -> list[Spending]:
    spendings, unknown = find_spendings(config.results)
    assert unknown == []
    return spendings


def without_examples(data: Splits, number: int) -> Splits:
    """Return the data that a site had before it added its last `number` training examples."""
    rows = torch.arange(len(data.train) - number)
    return replace(data, train=Part(data.train, rows), digest="1" * 64)


def change_weights(node: Node) -> None:
    """Let the model that the rounds start from be another one, so that no release is repeated."""
    with torch.no_grad():
        next(iter(trainable(node.site.setup.model).values())).add_(0.01)


@pytest.mark.parametrize("secure", ["false", "true"])
def test_a_site_counts_every_release_whatever_the_server_planned(
    configured: Make, secure: str
) -> None:
    """With secure noise, it counted the server's plan alone, of which a server may take more."""
    config = configured(*OWN, f"privacy.secure={secure}")
    site = Site(config)
    prepare(site.node(0), rounds=1)
    assert take_rounds(site.node(0), 30) == 30
    site.close()
    (spending,) = count_spendings(config)
    assert spending.spent.steps == 30
    (home,) = find_homes(config.results, ["quickstart"])
    assert delete(home).spending.spent.steps == 30
    (deleted,) = count_spendings(config)
    assert (deleted.spent, deleted.sources) == (spending.spent, spending.sources)
    assert deleted.finished
    with pytest.raises(UserError, match="does not match any run"):
        find_homes(config.results, ["quickstart"])


@pytest.mark.parametrize("secure", ["false", "true"])
def test_a_site_keeps_its_budget_if_a_run_takes_its_rounds_again(
    configured: Make, secure: str
) -> None:
    """With secure noise, all but the planned rounds of the first run were free."""
    noise = ("algorithm.noise_multiplier=4", "privacy.claimed_epsilon=null")
    words = (*OWN, *noise, f"privacy.secure={secure}")
    site = Site(configured(*words))
    prepare(site.node(0))
    budget = site.node(0).setup.epsilon(24)
    site.close()
    taken = []
    for run, rounds in (("a", 8), ("a", 8), ("b", 8), ("c", 100)):
        site = Site(configured(*words, f"privacy.max_epsilon={budget!r}", results="again"))
        node = site.node(0)
        prepare(node, run * 64, rounds)
        if taken:
            change_weights(node)
        taken.append(take_rounds(node, rounds))
        site.close()
    releases = SpentSteps(node.mechanism.z, node.mechanism.sampling, sum(taken))
    assert compose_epsilon([releases], node.config.privacy.delta) <= budget
    assert sum(taken) == 24


def test_a_site_that_adds_patients_counts_what_it_released_of_the_others(configured: Make) -> None:
    """The same run began another ledger, with the whole budget again."""
    noise = ("algorithm.noise_multiplier=4", "privacy.claimed_epsilon=null")
    config = configured(*OWN, *noise)
    data = load_data(config)
    site = Site(config, data)
    prepare(site.node(0))
    budget = f"privacy.max_epsilon={site.node(0).setup.epsilon(20)!r}"
    site.close()
    config = configured(*OWN, *noise, budget, results="again")
    taken = []
    for own_data in (without_examples(data, 10), data, without_examples(data, 10)):
        site = Site(config, own_data)
        prepare(site.node(0), rounds=12)
        change_weights(site.node(0))
        taken.append(take_rounds(site.node(0), 12))
        site.close()
    assert taken[0] == 12
    assert 0 < taken[1] < 10
    assert taken[2] <= 12
    before, after = count_spendings(config)
    assert before.sources == after.sources == data.sources
    assert before.data != after.data


@pytest.mark.parametrize("secure", ["false", "true"])
def test_what_a_site_released_with_an_older_version_counts(configured: Make, secure: str) -> None:
    """All its nodes had one `spending.json`, in the run's folder."""
    config = configured(*OWN, f"privacy.secure={secure}")
    data = load_data(config)
    for own_data in (without_examples(data, 10), data):
        site = Site(config, own_data)
        prepare(site.node(0), rounds=1)
        assert take_rounds(site.node(0), 20) == 20  # of the same weights
        site.close()
    run_home = records.folder(config.results, config.recipe, RUN)
    for path in run_home.glob("nodes/*/spending.json"):
        path.rename(run_home / "spending.json")
    (spending,) = count_spendings(config)
    assert spending.spent.steps == 40
    site = Site(config, data)  # goes on with this version
    prepare(site.node(0), rounds=1)
    site.close()
    assert sum(spending.spent.steps for spending in count_spendings(config)) >= 20 + 21


def test_a_process_of_each_message_reserves_no_more_than_one_process(configured: Make) -> None:
    """A SuperNode starts a process for each message."""
    set_sender()
    config = configured(*OWN)
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})

    def answer(kind: str, values: dict[str, Any], weights: dict[str, Tensor]) -> None:
        with open_site("key", Site(config)) as site:
            parameters = trainable(site.setup.model)
            weights = weights or {name: value.detach() for name, value in parameters.items()}
            body = content(values, weights if kind == "train" else None)
            message = Message(body, 2, kind)
            message.metadata.__dict__["_message_id"] = "1"
            reply = call_handler(client_app(config, "key"), message, context)
            assert not reply.has_error(), reply.error.reason

    answer("query.prepare", {"run": RUN, "rounds": 8, "entries": 0, "digest": ""}, {})
    for round_ in range(3):
        answer("train", {"round": round_}, {})
    (spending,) = count_spendings(config)
    assert spending.spent.steps == 8


def test_a_process_prepares_a_node_again_only_for_a_message_that_needs_its_ledger(
    configured: Make,
) -> None:
    set_sender()
    config = configured(*OWN)
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    values = {"run": RUN, "rounds": 8, "entries": 0, "digest": ""}
    has_ledger = {}
    for kind, body in (("prepare", values), ("join", {}), ("report", {})):
        with open_site("key", Site(config)) as site:  # a process of its own
            message = Message(content(body), 2, f"query.{kind}")
            message.metadata.__dict__["_message_id"] = "1"
            assert not call_handler(client_app(config, "key"), message, context).has_error()
            has_ledger[kind] = site.node(0).ledger is not None
    assert has_ledger == {"prepare": True, "join": False, "report": True}


def test_where_the_server_runs_too_its_record_counts_its_nodes(
    configured: Make, sound: Callable[..., records.Document]
) -> None:
    config = configured(*OWN)
    site = Site(config)
    for number in (0, 1):
        prepare(site.node(number))
        assert take_rounds(site.node(number), 8) == 8
    site.close()
    run_home = records.folder(config.results, config.recipe, RUN)
    # the server's ledger, while its run is not finished
    (run_home / "rounds.jsonl").write_bytes(next(run_home.rglob("ledger.jsonl")).read_bytes())
    nodes = count_spendings(config)
    assert [spending.spent.steps for spending in nodes] == [8, 8]
    document = sound("federated.nodes=2") | {"run": RUN}
    records.write(run_home / "record.json", document)
    (whole,) = count_spendings(config)
    assert whole.finished
    assert whole.sources == nodes[0].sources
    assert whole.spent.steps == max(node["steps"] for node in document["privacy"]["nodes"])
    delete(run_home)
    (deleted,) = count_spendings(config)
    assert (deleted.spent, deleted.sources) == (whole.spent, whole.sources)


def test_the_files_of_a_run_are_unknown_if_those_of_a_node_are(configured: Make) -> None:
    config = configured(*OWN)
    site = Site(config)
    for number in (0, 1):
        prepare(site.node(number))
    site.close()
    run_home = records.folder(config.results, config.recipe, RUN)
    assert read_sources(run_home) == site.data.sources
    path = next(run_home.glob("nodes/*/spending.json"))
    plan = json.loads(path.read_text()) | {"sources": None}
    path.write_text(json.dumps(plan))
    assert read_sources(run_home) is None
