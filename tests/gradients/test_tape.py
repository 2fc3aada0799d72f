"""What the tape hands on, and what it holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.gradients.harness import loss
from zdp_bench.gradients import tape
from zdp_bench.nn.convolution import ComplexConv2d

INPUTS, TARGETS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(4)


def test_output_gradients_are_consumed_without_a_graph() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    calls, modes = tape.run_forward(model, tape.layers_of(model), loss, (INPUTS, TARGETS)), []
    calls.play_back(list(model.parameters()), lambda call, g: modes.append(torch.is_grad_enabled()))
    assert modes == [False, False]


class Skips(nn.Module):
    """Two convolutions side by side, whose gradients arrive as parts of one map."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            kind(2, 5, 3, padding=1),
            kind(5, 4, 3, padding=1),
            kind(9, 2, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        before = self.first(x)
        return self.last(torch.cat([before, self.second(before)], dim=1))


@pytest.mark.parametrize("kind", [nn.Conv2d, ComplexConv2d])
def test_output_gradients_have_the_memory_order_of_the_output(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape, "MAX_DEFERRED_BYTES", 0)
    torch.manual_seed(0)
    model = Skips(kind)
    x = torch.randn(3, 2, 6, 5, dtype=torch.complex64 if kind is ComplexConv2d else torch.float32)
    calls = tape.run_forward(
        model,
        tape.layers_of(model),
        lambda outputs, _: outputs.abs().square().flatten(1).sum(1),
        (x, x),
    )
    gradients: dict[str, Tensor] = {}
    calls.play_back(
        list(model.parameters()), lambda call, g: gradients.setdefault(call.layer.name, g)
    )
    assert gradients.keys() == {"first", "second", "last"}
    for g in gradients.values():
        assert g.movedim(1, -1).is_contiguous()  # both networks suit channels last
    layer_output = model.first(x)
    both = torch.cat([layer_output, model.second(layer_output)], dim=1).detach().requires_grad_()
    model.last(both).abs().square().sum().backward()
    torch.testing.assert_close(gradients["second"], both.grad[:, 5:])


def test_the_tape_holds_no_output_of_a_first_layer() -> None:
    """As a rule a network's largest map; measured: 7 % of a U-Net's memory."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    calls = tape.run_forward(model, tape.layers_of(model), loss, (INPUTS, TARGETS))
    assert [start.untyped_storage().nbytes() for start in calls.starts] == [0]
