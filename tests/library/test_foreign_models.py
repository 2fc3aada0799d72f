"""Models of other libraries, unchanged: their clipped sums are those of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import zdp_bench
from tests.library.models import HEAVY, QUICK, ComplexViT, bert, cut, loss, targets_of, vit

BOUND = 0.7

pytestmark = [
    # torch's, of LSTM and attention under vmap on a CPU
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    # transformers', of a name that peft asks for
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing"),
]


def sum_by_torch_func(model: nn.Module, inputs: Any, targets: Tensor) -> dict[str, Tensor]:
    """Σᵢ clip(gᵢ), one example after the other, in the plainest way there is."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss_of(moved: dict[str, Tensor], one: Any, target: Tensor) -> Tensor:
        args = one if isinstance(one, tuple) else () if isinstance(one, dict) else (one,)
        kwargs = one if isinstance(one, dict) else {}
        return loss(functional_call(model, moved, args, kwargs), target).sum()

    total = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for i in range(len(targets)):
        at = slice(i, i + 1)
        gradients = grad(loss_of)(parameters, cut(inputs, at), targets[at])
        norm = sum(float(g.abs().double().square().sum()) for g in gradients.values()) ** 0.5
        for name, g in gradients.items():
            total[name] += min(1.0, BOUND / norm) * g
    return total


@pytest.mark.parametrize(
    "make",
    [*QUICK, *(pytest.param(make, marks=pytest.mark.slow) for make in HEAVY)],
    ids=lambda make: make.__name__,
)
def test_the_sum_is_that_of_torch_func_and_a_private_step_is_taken(
    make: Callable[[], tuple[nn.Module, Any]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    targets = targets_of(model, inputs)
    ours = zdp_bench.clipped_sum(model, loss, (inputs, targets), BOUND).sums
    theirs = sum_by_torch_func(model, inputs, targets)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # up to the 1e-5 that clipping leaves for rounding, of the bound
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=name)

    data = [(cut(inputs, i), targets[i]) for i in range(4)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zdp_bench.make_private(
        model,
        optimizer,
        data,
        loss=loss,
        epochs=1,
        sample_rate=1.0,
        expected_batch=4,
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        delta=1e-3,
        ledger=tmp_path / "ledger.jsonl",
        algorithm="zeta_dp_sgd" if any(p.is_complex() for p in before.values()) else "dp_sgd",
    ) as private:
        for batch in private.batches():
            private.step(batch)
        assert private.done == private.steps == private.report()["steps"] == 1
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name


GROUP_NORM = "use zdp_bench.nn.ComplexGroupNorm there"


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, dtype=torch.complex64), norm
        self.last = nn.Linear(4 * 36, 3, dtype=torch.complex64)

    def forward(self, z: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(z)).flatten(1)).abs()


@pytest.mark.parametrize(
    ("library", "name", "sentence"),
    [
        ("torchcvnn.nn", "BatchNorm2d", f"stores .* 'running_mean'.*{GROUP_NORM}"),
        ("complexPyTorch.complexLayers", "ComplexBatchNorm2d", f"another.*{GROUP_NORM}"),
        ("complexPyTorch.complexLayers", "NaiveComplexBatchNorm2d", r"replace_batchnorm\(model"),
        ("torchcvnn.nn", "LayerNorm", f"norm1' .LayerNorm. lets one example .*{GROUP_NORM}"),
    ],
)
def test_norms_over_the_batch_are_refused_with_their_fix(
    library: str, name: str, sentence: str
) -> None:
    """torchcvnn 0.10 divides by the deviation of a feature over all examples of the batch."""
    torch.manual_seed(0)
    layer = getattr(pytest.importorskip(library), name)
    model = ComplexViT(name) if name == "LayerNorm" else Normed(layer(4))
    inputs = torch.randn(4, 1, 8, 8, dtype=torch.complex64)
    with pytest.raises(zdp_bench.UserError, match=sentence):
        zdp_bench.check_model(model, loss, (inputs, torch.arange(4) % 3), algorithm="zeta_dp_sgd")


@pytest.mark.parametrize("make", [vit, bert], ids=lambda make: make.__name__)
def test_checkpoints_of_libraries_are_refused_with_their_switch(make: Any) -> None:
    model, inputs = make()
    if make is vit:
        model.set_grad_checkpointing(True)
    else:
        model.model.gradient_checkpointing_enable()
    batch = inputs, targets_of(model.eval(), inputs)
    sentence = r"checkpoint is called there.*set_grad_checkpointing.*gradient_checkpointing_dis"
    with pytest.raises(zdp_bench.UserError, match=sentence):
        zdp_bench.check_model(model.train(), loss, batch)
