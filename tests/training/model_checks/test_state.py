"""What a model holds beside its weights stays as it was checked, and the check leaves it so."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.conftest import Make
from tests.library.small import CLASSES, network, train
from tests.modules import Made
from tests.training.model_checks.models import Layer, check, convolutional, mlp, run_probe
from zdp_bench import UserError
from zdp_bench.training.model_checks.state import fingerprint, watch

# -------------------------------------------------------------------------- what the check leaves


def makes_a_mask() -> nn.Module:
    """A layer that makes a mask at its first call, and holds what cannot be copied."""

    def forward(net: Any, x: Tensor) -> Tensor:
        if net.mask is None:
            net.mask = torch.ones_like(x[:1])
        return x * net.mask

    return Made(forward, mask=None, lock=threading.Lock())


def test_the_check_leaves_a_model_exactly_as_it_was() -> None:
    model = mlp(makes_a_mask())
    before, held = fingerprint(model), {k: id(v) for k, v in vars(model[1]).items()}
    assert check(model) == []
    assert fingerprint(model) == before
    assert {key: id(value) for key, value in vars(model[1]).items()} == held


HIDDEN = threading.local()


def by_thread(x: Tensor) -> Tensor:
    held, HIDDEN.held = getattr(HIDDEN, "held", x), x.detach()
    return x + held.mean(dim=0)


def by_environment(x: Tensor) -> Tensor:
    held = float(os.environ.get("ZDP_TEST_HELD", "0"))
    os.environ["ZDP_TEST_HELD"] = str(float(x.detach().sum()))
    return x + held


def carries(net: Any, x: Tensor) -> Tensor:
    outputs, state = net.gru(x.unsqueeze(1), net.state)
    net.state = state.detach()
    return outputs[:, -1]


class Shortens(nn.Module):
    """Looks rows up by torch's function, which shortens them."""

    def __init__(self, _: int, width: int, max_norm: float) -> None:
        super().__init__()
        self.weight, self.most = nn.Parameter(torch.randn(4, width)), max_norm

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, max_norm=self.most)


class Renormalises(Shortens):
    """As networks for EEG do, in every pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, self.most)
        return F.embedding(x, self.weight)


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag, Shortens, Renormalises])
def test_a_layer_that_shortens_its_rows_is_refused_however_long_they_are(
    kind: Callable[..., nn.Module], max_norm: float
) -> None:
    torch.manual_seed(0)
    layer = kind(4, 8, max_norm=max_norm)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(4))
    model(torch.zeros(1, 3, dtype=torch.int64))
    before = copy.deepcopy(layer.weight)
    with pytest.raises(UserError, match=r"layer '0' \(.*\) changes its 'weight'.*max_norm"):
        check(model, torch.zeros(0, 3, dtype=torch.int64))
    assert torch.equal(layer.weight, before)


# ------------------------------------------------------------------------- what is found at once


def averages(net: Any, x: Tensor) -> Tensor:
    net.average = 0.9 * net.average + 0.1 * x.detach().mean(dim=0)
    return x


def in_a_tensor() -> nn.Module:
    layer = Made(averages)
    layer.average = torch.zeros(8)  # not in a buffer
    return layer


def counts(net: Any, x: Tensor) -> Tensor:
    net.examples = len(x)
    return x


def caches(net: Any, x: Tensor) -> Tensor:
    net.seen["last"][0] = x.detach()
    return x


def hooked(kind: str) -> nn.Module:
    model, kept = mlp(nn.ReLU()), []
    getattr(model[1], f"register_{kind}_hook")(lambda *given: kept.append(given[-1]))
    return model


@pytest.mark.parametrize(
    ("make_model", "sentence"),
    [
        (lambda: mlp(in_a_tensor()), r"layer '1' \(Made\) stores.*'average'"),
        (lambda: mlp(Made(averages, average=torch.zeros(8))), r"\(Made\) stores.*'average'"),
        (lambda: mlp(Made(counts)), r"layer '1' \(Made\) stores.*'examples'"),
        (lambda: mlp(Made(caches, seen={"last": [None]})), r"stores.*'seen\['last'\]\[0\]'"),
        (lambda: hooked("forward"), r"layer '1' \(ReLU\) stores.*'_forward_hooks.*kept"),
        (lambda: hooked("forward_pre"), r"layer '1' \(ReLU\) stores.*'_forward_pre_hooks.*kept"),
        (
            lambda: convolutional(nn.InstanceNorm2d(8, track_running_stats=True)),
            r"layer '1\.0' \(InstanceNorm2d\) stores.*'running_mean'.*track_running_stats=False",
        ),
        (
            lambda: mlp(Made(carries, gru=nn.GRU(8, 8, batch_first=True), state=None)),
            r"layer '1' \(Made\) stores training examples in 'state'",
        ),
        (lambda: mlp(Layer(by_environment)), "stores training examples in 'function.environ"),
        (lambda: mlp(Layer(by_thread)), "answers otherwise after other examples went through it"),
    ],
)
def test_what_keeps_examples_is_found_wherever_it_keeps_them(
    make_model: Callable[[], nn.Module], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZDP_TEST_HELD", "0")
    model = make_model()
    with pytest.raises(UserError, match=sentence):
        check(model)
    assert not torch.as_tensor(getattr(model[1], "average", 0)).any()  # and put back


# ---------------------------------------------------------------------------- what changes later


def keeps_late(passes: int) -> nn.Module:
    """A layer that keeps the mean of a batch from some pass on, which it counts out of sight."""

    def forward(net: Any, x: Tensor) -> Tensor:
        HIDDEN.calls += 1
        if HIDDEN.calls >= passes:
            net.average = x.detach().mean(dim=0)
        return x

    HIDDEN.calls = 0
    return Made(forward, average=torch.zeros(6))


def put_batch_norm(model: Any) -> None:
    model[1] = nn.BatchNorm1d(6, affine=False)


def add_hook(model: Any) -> None:
    kept: list[Tensor] = []
    model[1].register_forward_hook(lambda _, __, output: kept.append(output.detach()))


def wrap_forward(model: Any) -> None:
    forward = model[1].forward
    model[1].forward = lambda x: forward(x - x.mean(dim=0))


def write_buffer(model: Any) -> None:
    model[1].register_buffer("average", torch.zeros(3))


def set_attribute(model: Any) -> None:
    model[0].slope = 3.0


CHANGES = {
    "batch norm": (put_batch_norm, r"layer '1' \(BatchNorm1d\)"),
    "hook": (add_hook, r"'_forward_hooks\[\d+\].*' of layer '1' \(Tanh\)"),
    "forward": (wrap_forward, r"'forward.*' of layer '1' \(Tanh\)"),
    "buffer": (write_buffer, r"'average' of layer '1' \(Tanh\)"),
    "attribute": (set_attribute, r"'slope' of layer '0' \(Linear\)"),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_model_changed_after_the_check_is_not_exported(
    kind: str, steps: int, make: Make, tmp_path: Path
) -> None:
    change, what = CHANGES[kind]
    model = network()
    private = make(model)
    if steps:
        train(private, most=steps)
    change(model)
    with pytest.raises(UserError, match=what + " changed since the model was checked"):
        private.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=what):
        train(private)
    assert steps or private.ledger.releases == 0


class WritesIfLarge(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if (x > 4000).any():
            with torch.no_grad():
                self.weight.add_(1.0)
        return super().forward(x)


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("by", ["the model", "the loss", "a loss that fails then"])
def test_a_weight_written_while_gradients_are_computed_ends_a_loop_for_good(
    by: str, engine: str, make: Make, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layer = WritesIfLarge(4, CLASSES) if by == "the model" else nn.Linear(4, CLASSES)

    def writes(outputs: Tensor, targets: Tensor) -> Tensor:
        if "loss" in by and outputs.abs().max() > 500:
            layer.weight.data = layer.weight.data + 1.0
            if "fails" in by:
                raise KeyError
        return F.cross_entropy(outputs, targets, reduction="none")

    rare = [(torch.randn(4) if index else torch.full((4,), 5e3), 0) for index in range(9)]
    given = {"dataset": rare, "loss": writes, "sample_rate": 1.0, "gradients": engine}
    private = make(nn.Sequential(layer), **given)
    train_it, export = partial(train, private), partial(private.export, tmp_path / "out")
    for act in (train_it, train_it, private.save, export):
        with pytest.raises(UserError, match=r"'0\.weight' was changed by the model or the loss"):
            act()
    assert private.ledger.releases == 1
    assert not (tmp_path / "out").exists()
    assert not private.checkpoint.exists()


def test_a_buffer_that_is_written_late_ends_a_loop(make: Make) -> None:
    torch.manual_seed(0)
    late = nn.Sequential(nn.Linear(4, 6), keeps_late(60), nn.Linear(6, CLASSES))
    private = make(late, epochs=15)
    with pytest.raises(UserError, match="'average' changed in a pass"):
        train(private)


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_what_is_made_at_the_first_call_ends_nothing(
    make: Make, tmp_path: Path, engine: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), makes_a_mask(), nn.Dropout(0.1), nn.Linear(6, CLASSES))
    private = make(model, epochs=1, gradients=engine)
    train(private)
    model.eval()
    private.export(tmp_path / "out")
    assert model(torch.zeros(2, 4)).isfinite().all()


def test_a_buffer_that_is_written_late_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late_model(_: tuple[int, ...], outputs: int) -> nn.Module:
        pixels = Layer(lambda z: z.abs().flatten(1)[:, :4])
        return nn.Sequential(pixels, nn.Linear(4, 6), keeps_late(30), nn.Linear(6, outputs))

    words = ["trainer.epochs=6", "trainer.sample_rate=0.25"]
    with pytest.raises(UserError, match="'average' changed in a pass"):
        run_probe(monkeypatch, late_model, tmp_path, *words)
    assert not list(tmp_path.rglob("record.json"))


def test_what_a_guard_sees_survives_copies_and_modes() -> None:
    model = mlp(nn.LSTMCell(8, 8), Layer(lambda pair: pair[0]))
    guard = watch(model, torch.randn(3, 5))
    model.eval()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    guard.require_unchanged()
