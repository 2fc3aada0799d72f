"""A loop of one's own takes the steps of a run, and its ε counts every one of them."""

import contextlib
import json
import logging
import math
import random
import re
import secrets
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import zdp_bench
from tests.accounting import by_dp_accounting
from tests.library.conftest import Make
from tests.library.small import CLASSES, data, defaults, epsilon_of, network, reading, train
from zdp_bench.errors import UserError
from zdp_bench.gradients.losses import set_seed
from zdp_bench.library.keys import Keys
from zdp_bench.privacy import ledger, tally
from zdp_bench.privacy.accounting import pld
from zdp_bench.privacy.noise import HedgedNoise
from zdp_bench.training import step


def softer(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("randomness", [{}, {"seed": 3}, {"secure": True}], ids=str)
def test_the_noise_has_the_stated_deviation(make: Make, randomness: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 6000), nn.Linear(6000, CLASSES))
    before = model[0].weight.detach().clone()

    def flat(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.0 * outputs.sum(dim=1)

    train(make(model, loss=flat, **randomness), most=1)
    noise = (model[0].weight.detach() - before) * 12 / 0.5
    assert noise.std() == pytest.approx(1.2 * 0.8, rel=0.02)
    assert noise.mean().abs() < 0.03


def test_epsilon_is_that_of_the_steps_so_far(make: Make) -> None:
    private = make()
    assert private.epsilon == 0.0
    assert len(train(private)) == private.steps == 10
    assert private.epsilon == pld(1.2, 0.2, 10, 1e-3)
    report = json.loads(json.dumps(private.report()))
    assert report["epsilon_tight"] == private.epsilon
    assert report["steps"] == report["ledger"]["entries"] == 10
    assert (report["randomness"], report["randomness_from"]) == (
        "keyed",
        "the operating system, at each step",
    )
    assert (report["adjacency"], report["epsilon_of"]) == ("add_or_remove_one", "example")
    assert "examples_per_owner" not in report
    assert report["fixed_state"] == []


def test_the_target_is_kept_also_where_steps_are_taken_again(make: Make, caplog: Any) -> None:
    private = make(target_epsilon=2.0, per_layer=True)
    assert private.algorithm.clipping.per_layer  # type: ignore[attr-defined]
    train(private, most=4)
    private.save()
    train(private, most=3)  # lost: the process ends here
    resumed = make(target_epsilon=2.0, per_layer=True)
    assert resumed.resume()
    assert resumed.done == 4
    assert "stopped at" not in caplog.text
    train(resumed)
    assert (
        "stopped at 7 of 10 steps, because target_epsilon is used up: 3 more steps in the"
        in caplog.text
    )
    assert resumed.report()["steps"] == 10
    assert resumed.done == 7
    assert 1.9 < resumed.epsilon <= 2.0


def test_a_step_that_failed_uses_up_the_target_in_one_sentence(make: Make) -> None:
    """The steps of a plan exhaust target_epsilon, so none is left for a repeat."""
    fails = False

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if fails:
            raise RuntimeError("out of luck")
        return F.cross_entropy(outputs, targets, reduction="none")

    private = make(target_epsilon=2.0, loss=loss)
    train(private, most=private.steps - 1)
    batch = next(private.batches())
    fails = True
    with pytest.raises(Exception, match="luck"):
        private.step(batch)
    fails = False
    with pytest.raises(UserError, match="used up, because steps that failed count too"):
        private.step(batch)
    assert private.epsilon <= 2.0


def test_a_resumed_training_goes_on_from_the_saved_state(make: Make) -> None:
    def parts() -> tuple[Any, list[torch.optim.Optimizer], Any]:
        model: Any = network()
        adam = torch.optim.Adam(model[0].parameters(), lr=0.01)
        sgd = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
        return model, [adam, sgd], torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)

    model, optimizers, schedule = parts()
    private = make(model, optimizer=optimizers)
    train(private, most=3)
    schedule.step()
    private.save(schedule)
    other, (adam, sgd), schedule = parts()
    resumed = make(other, optimizer=[adam, sgd])
    assert resumed.resume(schedule)
    assert resumed.done == 3
    assert torch.equal(other[0].weight, model[0].weight)
    assert adam.param_groups[0]["lr"] == 0.005
    assert adam.state[other[0].weight]["step"] == 3
    assert "momentum_buffer" in sgd.state[other[2].weight]
    assert resumed.epsilon == pld(1.2, 0.2, 3, 1e-3)
    assert len(train(resumed)) == 7
    with pytest.raises(UserError, match="before the first step"):
        resumed.resume()


class Warmup:
    """A schedule that does not inherit from torch's, as those of timm."""

    def __init__(self) -> None:
        self.updates = 0

    def step(self) -> None:
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


def test_a_list_of_schedulers_is_saved_and_resumed(make: Make) -> None:
    def parts() -> tuple[nn.Module, list[torch.optim.Optimizer], list[Any]]:
        model: Any = network()
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        second = torch.optim.SGD(model[2].parameters(), lr=0.1)
        falling = torch.optim.lr_scheduler.StepLR(first, 1, 0.5)
        patient = torch.optim.lr_scheduler.ReduceLROnPlateau(second)
        return model, [first, second], [falling, patient, Warmup()]

    model, optimizers, schedules = parts()
    private = make(model, optimizer=optimizers)
    train(private, most=1)
    for schedule in (schedules[0], schedules[2]):
        schedule.step()
    private.save(schedules)
    other, optimizers, schedules = parts()
    resumed = make(other, optimizer=optimizers)
    with pytest.raises(UserError, match="the class of the schedule differs"):
        resumed.resume(schedules[:2])
    assert resumed.resume(tuple(schedules))
    assert [schedules[0].last_epoch, schedules[2].updates] == [1, 1]
    assert optimizers[0].param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ("checkpoint.pt", "a value of type str"),
        (Path("checkpoint.pt"), "a value of type PosixPath"),
        ({"epoch": 3}, "a value of type dict"),
        (["checkpoint.pt"], "a value of type str"),
        (nn.Linear(2, 2), "a value of type Linear"),
        (torch.optim.lr_scheduler.StepLR, "the class StepLR"),
    ],
)
def test_what_is_no_scheduler_is_refused_before_the_first_step(
    make: Make, value: Any, given: str
) -> None:
    private = make()
    for method in (private.resume, private.save):
        with pytest.raises(UserError, match=f"{given} was given, but a learning rate scheduler"):
            method(value)
    assert not private.checkpoint.exists()
    private.close()


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"noise_multiplier": 1.5}, r"noise multiplier \(1\.2, now 1\.5\)"),
        ({"max_grad_norm": 0.5}, r"clipping bound \(0\.8, now 0\.5\)"),
        (
            {"sample_rate": 0.1, "expected_batch": 6},
            r"sampling rate \(0\.2, now 0\.1\), expected batch size \(12, now 6\)",
        ),
        ({"unit": lambda index: index // 2, "max_examples": 2}, "unit"),
        ({"model": nn.Linear(4, CLASSES)}, "trained parameters"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_state_of_another_training_is_refused_with_what_differs(
    make: Make, change: dict[str, Any], differs: str
) -> None:
    private = make()
    train(private, most=1)
    private.save()
    with pytest.raises(UserError, match=rf"which differs in: {differs}\. To train for more epochs"):
        make(**change)


def test_a_batch_says_why_it_has_no_examples(make: Make) -> None:
    for batch in make().batches():
        with pytest.raises(UserError, match=r"its examples and their number are private"):
            _inputs, _targets = batch  # type: ignore[misc]
        break


# Python itself ignores a Ctrl-C that comes while it collects the generator of batches.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_at_any_line_of_a_step_spoils_nothing(
    make: Make, caplog: Any, tmp_path: Path, times: int
) -> None:
    """One waits for the step's end, a second does not; the training goes on after either."""
    for place in count(start=times, step=43):
        left = place
        named = tmp_path / f"{times}-{place}.jsonl"
        private = make(gradients="reference", epochs=1, ledger=named)

        def interrupt(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in (step.__file__, ledger.__file__, tally.__file__):
                return None
            if event == "line" and (left := left - 1) < 0:
                sys.settrace(None)
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return interrupt

        was = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                train(private, most=1)
        finally:
            sys.settrace(was)
        assert private.done == 1 or times == 2 or not private.ledger.releases
        train(private)
        assert private.done == private.steps <= private.ledger.releases <= private.steps + 1
        private.close()
        assert "changed outside" not in caplog.text
        if left >= 0:  # nothing was interrupted
            break
    assert place > 30


def test_the_stages_of_a_schedule_are_counted_exactly(make: Make, tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    stages: list[Any] = []
    taken: list[tuple[float, float, int]] = []
    for noise, bound, rate in ((1.4, 1.0, 0.2), (1.0, 0.5, 0.2), (1.0, 2.0, 0.5)):
        given: dict[str, Any] = {"noise_multiplier": noise, "max_grad_norm": bound}
        given |= {"sample_rate": rate, "ledger": tmp_path / f"{len(stages)}.jsonl"}
        stages.append(make(model, optimizer=optimizer, **given))
        taken.append((noise, rate, len(train(stages[-1]))))
    whole = stages[0].epsilon_with(*stages[1:])
    assert whole == pytest.approx(by_dp_accounting(*taken, delta=1e-3), rel=2e-3)
    assert stages[1].epsilon_with() == pytest.approx(whole)  # with the start, and what came after
    with pytest.raises(UserError, match="need the same delta and unit"):
        stages[0].epsilon_with(make(delta=1e-4, ledger=tmp_path / "other.jsonl"))
    with pytest.raises(UserError, match="pass each training once"):
        stages[0].epsilon_with(stages[0])
    with pytest.raises(UserError, match="pass trainings that make_private returned"):
        stages[0].epsilon_with(stages[1:])  # type: ignore[arg-type]
    stages[2].export(tmp_path / "card")
    exported = json.loads((tmp_path / "card" / "report.json").read_text())["privacy"]
    assert [training["ledger"] for training in exported["start"]["trainings"]] == [
        "0.jsonl",
        "1.jsonl",
    ]
    assert exported["start"]["epsilon_tight"] == pytest.approx(whole)


def test_a_model_that_has_not_taken_the_steps_of_its_ledger_is_refused(
    make: Make, tmp_path: Path
) -> None:
    """A script that is run twice would show weights without a step, and the ε of many."""
    private = make()
    train(private, most=4)
    for _ in range(2):
        again = make()
        assert not again.resume()
        for _ in range(2):
            with pytest.raises(UserError, match=r"4 steps .* no saved state in ledger\.pt"):
                train(again)
    trained = make(count_earlier=True)
    train(trained, most=2)
    trained.save()
    forgetful = make()
    with pytest.raises(UserError, match=r"6 steps .*private\.resume\(\)"):
        train(forgetful)
    assert forgetful.resume()
    assert len(train(forgetful)) == 8
    assert len(train(make(ledger=tmp_path / "another.jsonl"))) == 10


@pytest.mark.parametrize(
    "how", [{}, {"seed": 3}, {"secure": True}], ids=["plain", "seed", "secure"]
)
@pytest.mark.parametrize("rates", [{}, {"sample_rate": None, "expected_batch": None}])
def test_a_training_goes_on_for_more_epochs_with_the_epsilon_of_all(
    make: Make, tmp_path: Path, how: dict[str, Any], rates: dict[str, Any]
) -> None:
    if rates:  # with n public
        how = how | rates | {"batch_size": 24, "dataset": TensorDataset(*wide_data())}
    path = tmp_path / "ledger.jsonl"
    with make(**how, epochs=2) as private:
        train(private)
        private.save()
    first, weights = path.read_bytes(), next(private.model.parameters()).detach().clone()
    with make(**how, epochs=4) as private:
        assert private.resume()
        assert torch.equal(next(private.model.parameters()), weights)
        assert (private.done, private.steps) == (10, 20)
        train(private)
        private.save()
        assert private.epsilon == pytest.approx(epsilon_of(1.2, 20), rel=2e-3)
        assert private.report()["steps"] == private.report()["steps_taken"] == 20
        private.export(tmp_path / "model")
    assert path.read_bytes().startswith(first)  # the steps taken before are what they were
    report = json.loads((tmp_path / "model" / "report.json").read_text())["privacy"]
    assert report["epsilon_tight"] == pytest.approx(epsilon_of(1.2, 20), rel=2e-3)
    with make(**how, epochs=2) as private:  # fewer than were taken: none is left
        assert private.resume()
        assert train(private) == []
        assert private.epsilon == pytest.approx(epsilon_of(1.2, 20), rel=2e-3)


def wide_data() -> tuple[Tensor, Tensor]:
    return torch.randn(120, 4), torch.arange(120) % CLASSES


@pytest.mark.parametrize(
    "change",
    [{"noise_multiplier": 1.0}, {"sample_rate": 0.1}, {"target_epsilon": 3.0}, {"damaged": True}],
)
def test_whoever_follows_the_message_has_the_epsilon_of_all_steps(
    make: Make, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Not "move the ledger away": the weights went through its steps."""
    with make() as private:
        train(private)
        private.save()
    if change.pop("damaged", False):
        (tmp_path / "ledger.pt").write_bytes(b"damaged")
    with pytest.raises(UserError) as refused:
        make(**change)
    message = str(refused.value)
    assert "count_earlier=True" in message
    assert "epsilon_with" in message
    assert "start again" not in message
    if change:  # stages
        (tmp_path / "ledger.pt").unlink()
        with pytest.raises(UserError, match=r"belongs to another mechanism .*epsilon_with"):
            make(**change)
        return
    (tmp_path / "ledger.pt").unlink()
    with make(private.model, count_earlier=True) as again:
        train(again)
        assert again.epsilon == pytest.approx(epsilon_of(1.2, 20), rel=2e-3)


def test_without_a_named_ledger_more_epochs_go_on_in_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with make(ledger=None, epochs=1) as private:
        train(private)
        private.save()
    with make(ledger=None, epochs=2) as private:
        assert private.resume()
        train(private)
        assert private.epsilon == pytest.approx(epsilon_of(1.2, 10), rel=2e-3)


def test_steps_that_the_model_has_not_taken_count_if_it_is_asked_for(make: Make) -> None:
    train(make(), most=4)
    again = make(count_earlier=True)
    assert again.epsilon == pld(1.2, 0.2, 4, 1e-3)
    assert not again.resume()
    train(again)
    assert again.epsilon == pld(1.2, 0.2, 14, 1e-3)
    # nobody knows whether these weights took 10 steps or 14, in this process or in a later one
    assert (again.report()["steps"], again.report()["steps_taken"]) == (14, None)
    again.save()
    for count_earlier in (True, False):
        resumed = make(count_earlier=count_earlier)
        assert resumed.resume()
        assert resumed.report()["steps_taken"] is None


def test_a_seeded_training_shares_noise_with_its_own_repetition_alone(
    make: Make, tmp_path: Path
) -> None:
    ledgers = count()

    def first_key(**given: Any) -> str:
        private = make(ledger=tmp_path / f"{next(ledgers)}.jsonl", **{"seed": 3} | given)
        return private.keys.step_key(private.model, private.ledger)

    own = first_key()
    assert first_key() == own
    others: list[dict[str, Any]] = [
        {"seed": 4},
        {"dataset": data(1e-6)},
        {"loss": softer},
        {"micro_batch": 5},
        {"noise_multiplier": 1.3},
        {"sample_rate": 0.25},
        {"expected_batch": 13},
        {"gradients": "reference"},
        {"seed": None},
    ]
    for changed in others:
        assert first_key(**changed) != own, changed


def test_a_seed_repeats_a_training_until_the_loop_moves_the_weights_apart(
    make: Make, tmp_path: Path
) -> None:
    def weights(name: str, rate: float) -> list[Tensor]:
        private = make(ledger=tmp_path / f"{name}.jsonl", seed=3)
        seen = train(private, most=1)
        private.optimizer.param_groups[0]["lr"] = rate
        return seen + train(private, most=2)

    first, same, other = weights("one", 0.5), weights("same", 0.5), weights("other", 1.0)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert torch.equal(first[0], other[0])
    # at twice the rate: twice the same release at the second step, another release at the third
    torch.testing.assert_close(2 * (first[1] - first[0]), other[1] - other[0])
    apart = (other[2] - other[1]) / 1.0 - (first[2] - first[1]) / 0.5
    assert apart.std() > 0.5 * 1.2 * 0.8 / 12


def test_an_attempt_that_failed_counts_and_its_noise_is_not_used_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = make()
    batch = next(private.batches())
    key = private.keys.step_key(private.model, private.ledger)
    with monkeypatch.context() as patch:
        patch.setattr(private.optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            private.step(batch)
    assert private.keys.step_key(private.model, private.ledger) != key
    private.step(batch)
    assert (private.done, private.ledger.releases) == (1, 2)


def test_each_batch_is_trained_on_once(make: Make) -> None:
    private = make()
    batches = private.batches()
    batch = next(batches)
    private.step(batch)
    for other in (batch, None):
        with pytest.raises(UserError, match=r"takes the batch that .* yielded last"):
            private.step(other)  # type: ignore[arg-type]
    next(batches)
    with pytest.raises(UserError, match=r"step 1 was skipped"):
        next(batches)


def test_evaluation_in_between_changes_nothing_and_nothing_is_left_on_the_model(make: Make) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, CLASSES))
    private = make(model)
    train(private, most=1)
    model.eval()
    train(private, most=1)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_steps_of_an_own_loop_are_not_replayed_from_a_graph(make: Make) -> None:
    """A graph reads the memory that the weights had when it was captured."""
    private = make()
    assert private._training.captured_sums.refused


def test_frozen_parameters_stay_and_are_named(make: Make) -> None:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index]
    before = model[0].weight.clone()  # type: ignore[index]
    private = make(model)
    train(private, most=2)
    assert torch.equal(model[0].weight, before)  # type: ignore[index]
    assert private.report()["fixed_state"] == ["0.bias", "0.weight"]
    model[0].bias.requires_grad_(True)  # type: ignore[index]
    with pytest.raises(UserError, match=r"'0\.bias' was frozen, unfrozen or replaced"):
        train(private)


def test_bf16_changes_the_forward_pass_and_not_the_bound(make: Make, tmp_path: Path) -> None:
    """The length of one clipped example is C to five digits: bfloat16 has two."""
    single, gradient = [(*data()[0],)], {}
    for precision in (None, "bf16"):
        model, before = network(), network()
        given = {"dataset": single, "sample_rate": 1.0, "expected_batch": 1, "epochs": 1}
        given |= {"noise_multiplier": 0.0, "max_grad_norm": 0.1, "precision": precision}
        train(make(model, ledger=tmp_path / f"{precision}.jsonl", **given))
        pairs = zip(model.parameters(), before.parameters(), strict=True)
        moved = [(old - new).detach().flatten() / 0.5 for new, old in pairs]
        gradient[precision] = torch.cat(moved)
        assert gradient[precision].norm() == pytest.approx(0.1, rel=2e-5)
    assert not torch.equal(gradient[None], gradient["bf16"])
    torch.testing.assert_close(gradient[None], gradient["bf16"], rtol=0.0, atol=0.02 * 0.1)


@pytest.mark.parametrize(("rate", "steps"), [(0.5, 60), (1e4, 60), (1e4, 10), (math.inf, 60)])
def test_a_training_that_diverges_says_so(
    make: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    steps: int,
) -> None:
    # Noise follows from the code too, and with some of it this loss would fall.
    monkeypatch.setattr("zdp_bench.library.keys.foreign_code", lambda _: "code")
    monkeypatch.setattr("zdp_bench.library.build.execution_digest", lambda *_, **__: "machine")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), min(rate, 1e9))
    private = make(model, optimizer=optimizer, epochs=steps // 5, seed=3)
    if math.isinf(rate):
        optimizer.param_groups[0]["lr"] = math.inf  # as a schedule may have it
        with pytest.raises(UserError, match=r"^diverged at step 50"):
            train(private)
        assert private.ledger.releases == 50
    else:
        train(private)
        assert caplog.text.count("it seems: the loss on the check's examples rose") == (rate > 1)


def by_size(batch_size: int, dataset: Any = None) -> dict[str, Any]:
    """Drawn by `batch_size`, of a data set whose size is public."""
    drawn = {"batch_size": batch_size, "sample_rate": None, "expected_batch": None}
    return drawn | ({"dataset": dataset} if dataset else {})


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))


class Stream(IterableDataset):
    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(4), 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_what_is_no_module_of_torch_is_refused(make: Make) -> None:
    given = defaults(network()) | {"noise_multiplier": 1.2}
    for model in (network(), nn.Sequential(network())):
        scripted = nn.Sequential(torch.jit.script(model))
        for refused in (scripted, scripted[0]):
            with pytest.raises(UserError, match=r"the torch\.nn module that it was compiled from"):
                zdp_bench.make_private(refused, **given)


PROBES: list[Any] = [
    *(3, torch.zeros(2, 4), (torch.zeros(2, 4),), (1, 0)),
    *((torch.zeros(2, 4), torch.zeros(3)), ({"x": torch.zeros(2, 4)}, torch.tensor(1))),
]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": batch_norm()}, r"'1' \(BatchNorm1d\).*replace_batchnorm\(model, \"group\"\)"),
        ({"loss": F.cross_entropy}, r"the loss gives shape \[\].*never a mean"),
        ({"model": network().eval()}, r"call model\.train\(\) before"),
        ({"model": network().requires_grad_(False)}, "nothing to train"),
        ({"optimizer": torch.optim.SGD(network().parameters())}, r"'0\.weight' requires a grad"),
        ({"dataset": Stream()}, "type Stream was given, but a map-style Dataset"),
        ({"dataset": []}, "it has no example"),
        ({"expected_batch": None}, "sample_rate and expected_batch go together"),
        ({"algorithm": "dp_sdg"}, "Did you mean 'dp_sgd'"),
        (
            {"dataset": TensorDataset(*[torch.zeros(60)] * 3)},
            r"tuple and length 3, but a pair \(in",
        ),
        (by_size(130, [(torch.zeros(4), 0)] * 120), "batch_size=130: the dataset has only 120 to"),
        (by_size(2), "with n = 60, adding or removing one changes the sampling rate"),
        ({"batch_size": 12}, "give batch_size or sample_rate, and not both"),
        ({"target_eps": 8.0}, r"argument 'target_eps' is not known. Did you mean 'target_epsilon'"),
        ({"dataset": [(torch.zeros(9), 0)] * 20}, r"cannot take float32 inputs of shape \[3, 9\]"),
        ({"target_epsilon": 2.0, "noise_multiplier": 1.0}, "and not both"),
        ({"noise_multiplier": None}, "give noise_multiplier or target_epsilon"),
        ({"algorithm": "sgd"}, "not private"),
        ({"algorithm": "class_means"}, "does not clip gradients"),
        ({"precision": "tf32"}, "exceeds its bound"),
        ({"seed": 1, "secure": True}, "remove the seed"),
        ({"ledger": "ledger.txt"}, r"ends in \.jsonl"),
        ({"noise_multiplier": 1e-6}, r"^noise_multiplier=1e-06: must be 0, or lie in"),
        ({"max_grad_norm": math.inf}, r"^max_grad_norm=inf: must be less"),
        ({"start_steps": 2}, "nothing else: it needs a linear model, such as real_linear"),
        *(({"seed": seed}, "whole number from 0 to") for seed in (-1, 2**64, 1.5, True)),
        *(({"micro_batch": size}, "whole number from 1 to") for size in (0, 1.5, "2")),
        *(
            ({"algorithm": "band_mf", "bands": bands}, "^bands=.* whole number from 1 to")
            for bands in (0, -1, 1.5)
        ),
        *(({"max_examples": most}, "whole number from 1 to") for most in (0, -1, 1.5, "2", True)),
        *(({"epochs": count}, "number from 1 to") for count in (math.inf, math.nan, 0, "3", None)),
        *(({"delta": delta}, "^delta=.*a number") for delta in ("1e-5", [1e-5], True)),
        *(({"sample_rate": rate}, "^sample_rate=.*a number") for rate in ("0.1", {}, True)),
        ({"expected_batch": "6"}, "^expected_batch=.*a number"),
        ({"ledger": 3}, r"ends in \.jsonl"),
        ({"micro_batch": 1025}, "^micro_batch=1025: .* whole number from 1 to 1,024"),
        *(({"precision": kind}, "^precision=.*a name") for kind in (16, torch.bfloat16)),
        *(({"algorithm": name}, "^algorithm=.*a name in quotes") for name in (None, 1)),
        *(({"probe": batch}, r"^probe=.*\(inputs, targets\)") for batch in PROBES),
        ({"regulariser": 1e-4}, "^regulariser=0.0001: must be a function of the model"),
        ({"target_epsilon": "8"}, "^target_epsilon=.*a number"),
        ({"noise_multiplier": "1"}, '^noise_multiplier="1": must be a number'),
        ({"max_grad_norm": "1"}, '^max_grad_norm="1": must be a number'),
        ({"clip_quantile": "0.5"}, '^clip_quantile="0.5": must be a number'),
        *(({"per_layer": flag}, "^per_layer=.*True or False") for flag in ("no", 1, None)),
        *(({"secure": flag}, "^secure=.*True or False") for flag in ("yes", 1, None)),
        *(({"count_earlier": flag}, "^count_earlier=.*True or False") for flag in ("no", 0)),
        ({"unit": torch.tensor(3), "max_examples": 1}, "give the owner of each example"),
        ({"expected_batch": 0}, "must be above 0"),
        *(({"sample_rate": rate}, "^sample_rate=") for rate in (1.5, 0.0, math.nan, 1e-12)),
        ({"ledger": "x" * 300 + ".jsonl"}, r"cannot be written \(File name too long\)"),
        ({"ledger": "/dev/null/x.jsonl"}, r"cannot be written \(.*; choose another one"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(
    make: Make, changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        make(**changed)


def test_the_names_are_there_and_typed() -> None:
    for name in zdp_bench.__all__:
        assert getattr(zdp_bench, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'make_privat'"):
        zdp_bench.make_privat  # noqa: B018
    stub = Path(zdp_bench.__file__).with_suffix(".pyi").read_text()
    typed = set(re.findall(r" as (\w+)", stub))
    assert typed == {*zdp_bench.__all__} - {"__version__"}


def test_with_a_seed_other_sums_have_other_noise_under_the_same_key() -> None:
    """What makes the sums differ may be nothing that the key covers, such as the loss's file."""
    assert isinstance(Keys("first", seed=1, secure=False).noise("key"), HedgedNoise)


@pytest.mark.parametrize("given", [{}, {"seed": 1}], ids=["without a seed", "with a seed"])
def test_no_generator_tells_how_many_examples_were_drawn(make: Make, given: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    set_seed(0)
    expected = draw_from_all()
    set_seed(0)
    private = make(model, **given)
    private.step(next(private.batches()))
    assert draw_from_all() == expected


def draw_from_all() -> tuple[float, float, float]:
    """Draw a number from each global generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_a_closed_training_takes_no_step(make: Make) -> None:
    private = make()
    batch = next(private.batches())
    private.close()
    with pytest.raises(UserError, match="this training was closed"):
        private.step(batch)


def test_a_signal_during_a_step_that_fails_is_received(make: Make) -> None:
    class Unreadable(list[Any]):
        fails = False

        def __getitem__(self, index: Any) -> Any:
            if self.fails:
                signal.raise_signal(signal.SIGTERM)
                raise OSError("unreadable")
            return super().__getitem__(index)

    examples = Unreadable(data())
    private = make(dataset=examples, sample_rate=1.0)
    batch = next(private.batches())
    examples.fails = True
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with pytest.raises(OSError, match="unreadable"):
            private.step(batch)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


RATE, EXPECTED = 0.4, 2.0


def told_by_training(
    make: Make, folder: Path, many: int, **given: Any
) -> tuple[dict[str, Any], set[int]]:
    """All that a training on so many examples tells, and the examples that it drew."""
    given |= {"sample_rate": RATE, "expected_batch": EXPECTED, "epochs": 8}
    given |= {"dataset": [data()[index] for index in range(many)]}
    private = make(ledger=folder / f"{many}" / "ledger.jsonl", **given)
    with reading() as seen:
        train(private)
    private.save()
    private.export(folder / f"{many}" / "model")
    report = json.loads((folder / f"{many}" / "model" / "report.json").read_text())
    weights = report.pop("measured")["weights"]["digest"]
    card = (folder / f"{many}" / "model" / "README.md").read_text()
    facts = {
        "mechanism": private.algorithm.mechanism(),
        "plan": private.plan,
        "divisor": private.plan.draw("key", 0, False, private.units.count)[1],
        "run": private.journal.training_digest,
        "steps": private.steps,
        "epsilon": private.epsilon,
        "report": report,
        "card": card.replace(weights, ""),
        "ledger": (folder / f"{many}" / "model" / "ledger.jsonl").read_bytes(),
        "shown": repr(private),
    }
    return facts, {index for batch in seen for index in batch}


@pytest.mark.parametrize(
    "given", [{}, {"unit": lambda index: index // 2, "max_examples": 3}], ids=["examples", "owners"]
)
def test_neighbouring_data_sets_are_told_apart_by_the_weights_alone(
    make: Make,
    tmp_path: Path,
    given: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    # The random names in a ledger and in a report, which no example affects
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: "0" * 2 * num_bytes)
    (four, of_four), (five, of_five) = (
        told_by_training(make, tmp_path, many, **given) for many in (4, 5)
    )
    for name, fact in four.items():
        assert fact == five[name], name
    assert four["epsilon"] == pld(1.2, RATE, 20, 1e-3)
    assert (of_four, of_five) == ({*range(4)}, {*range(5)})  # all are drawn from
    own = [record for record in caplog.records if record.name.startswith("zdp_bench")]
    assert not own  # torch 2.14 logs empty lines of its own
