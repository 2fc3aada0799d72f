"""`trainer.ema`: what is averaged, what is evaluated and saved, and that a killed run keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gradients.zoo import ZOO
from tests.training.test_run import Silent, carry_out, configured, repeatable
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.registry import lookup
from zdp_bench.training import evaluation, run
from zdp_bench.training.checkpoint import load, state_digest
from zdp_bench.training.run import average_weights


def test_the_average_moves_slowly_only_after_a_warm_up() -> None:
    """Weights 1, 2, …: the decay is 2/11, 3/12, … until it passes 0.3."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.complex64)
    average = average_weights(model, 0.3)
    expected = 1 + 1j
    for step, decay in enumerate([0.0, 2 / 11, 3 / 12, 0.3, 0.3]):
        weight = (step + 1) * (1 + 1j)
        nn.init.constant_(model.weight, weight)
        average.update_parameters(model)
        expected = decay * expected + (1 - decay) * weight
        assert torch.allclose(average.module.weight, torch.tensor(expected))


def test_the_average_of_all_steps_is_evaluated_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Tensor]] = []
    after: list[dict[str, Tensor]] = []
    step, predict = run.private_step, evaluation.predict

    def copy(model: nn.Module) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    def stepped(training: Any, *rest: Any) -> None:
        step(training, *rest)
        after.append(copy(training.model))

    def predicted(model: nn.Module, *rest: Any) -> Any:
        seen.append(copy(model))
        return predict(model, *rest)

    monkeypatch.setattr(run, "private_step", stepped)
    monkeypatch.setattr(evaluation, "predict", predicted)
    outcome = carry_out(tmp_path, "trainer.ema=0.5")
    average = after[0]
    for t, weights in enumerate(after[1:], start=1):
        decay = min(0.5, (1 + t) / (10 + t))
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in weights}
    saved = load(outcome.path.parent / "checkpoint.pt", outcome.record["run"])
    assert saved is not None
    for name, value in average.items():
        assert torch.allclose(saved.model[name], value, atol=1e-6)
        assert not torch.allclose(after[-1][name], value, atol=1e-6)
        assert torch.equal(saved.last[name], after[-1][name])
        assert all(torch.equal(found[name], saved.model[name]) for found in seen[-2:])
    assert outcome.record["measured"]["weights"]["digest"] == state_digest(saved.model)
    assert outcome.record["model"]["weights"] == "averaged, decay 0.5"


def test_the_average_costs_no_epsilon_and_leaves_the_steps_as_they_are(tmp_path: Path) -> None:
    plain, averaged = (
        carry_out(tmp_path / name, *more).record
        for name, more in (("plain", []), ("averaged", ["trainer.ema=0.9"]))
    )
    assert averaged["privacy"]["epsilon_tight"] == plain["privacy"]["epsilon_tight"]
    assert averaged["metrics"] != plain["metrics"]
    assert "weights" not in plain["model"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_run_goes_on_with_its_average(tmp_path: Path) -> None:
    overrides = ["trainer.ema=0.95", "scheduler=warmup_cosine"]
    whole = carry_out(tmp_path / "whole", *overrides).record

    class KilledError(Exception): ...

    class Killer(Silent):
        def stepped(self, step: int) -> None:
            if step == 15:
                raise KilledError

    with pytest.raises(KilledError):
        run.run(configured(tmp_path / "cut", *overrides), Killer())
    again = carry_out(tmp_path / "cut", *overrides).record
    assert again["measured"]["resumed_at_step"] == 10
    assert repeatable(again) == repeatable(whole)
    assert again["measured"]["weights"] == whole["measured"]["weights"]


@pytest.mark.parametrize("name", ["complex_unet", "lenet5", "resnet20", "complex_dfa_cnn"])
def test_any_network_can_be_averaged(name: str) -> None:
    shape, outputs, options, _ = ZOO[name]
    model = lookup("model", name)(shape, outputs, **options)
    average = average_weights(model, 0.9)
    average.update_parameters(model)
    first = {name: value.clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1)
    for buffer in model.buffers():
        buffer.add_(1)
    average.update_parameters(model)
    for name, value in average.module.named_parameters():
        torch.testing.assert_close(value, first[name] + 1 - 2 / 11)  # the decay of step 1
    for found, buffer in zip(average.module.buffers(), model.buffers(), strict=True):
        assert torch.equal(found, buffer)


def test_off_leaves_the_digest_and_on_changes_it(tmp_path: Path) -> None:
    plain = configured(tmp_path)
    trainer = {k: v for k, v in plain.resolved["trainer"].items() if k not in ("ema", "lr_batch")}
    before = type(plain)(**{**vars(plain), "resolved": plain.resolved | {"trainer": trainer}})
    assert experiment_digest(before) == experiment_digest(plain)
    for override in ("trainer.ema=0.9", "trainer.lr_batch=256"):
        assert experiment_digest(configured(tmp_path, override)) != experiment_digest(plain)


@pytest.mark.parametrize("decay", ["1", "0", "-0.5", "2"])
def test_other_decays_are_refused(decay: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"trainer\.ema={decay}.*must lie in \(0, 1\)"):
        configured(tmp_path, f"trainer.ema={decay}")
