"""What an optimizer receives does not depend on how a gradient lies in memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zdp_bench.config import configured
from zdp_bench.config.compose import group_options
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.library.arguments import check_optimizer
from zdp_bench.training.build import build_optimizer
from zdp_bench.training.memory_layout import is_dense
from zdp_bench.training.step import descend

SHAPE = (4, 3, 2, 2)
OPTIMIZERS = group_options("optimizer")


def interleave(gradient: Tensor) -> Tensor:
    return torch.stack([gradient, gradient + 100], dim=-1)[..., 0]


def transpose(gradient: Tensor) -> Tensor:
    return gradient.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)


def negate_lazily(gradient: Tensor) -> Tensor:
    return torch.complex(gradient, -gradient).conj().imag


def expand(gradient: Tensor) -> Tensor:
    return gradient[:1, :1].expand(SHAPE)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda gradient: gradient,
    "strided": interleave,
    "transposed": transpose,
    "expanded": expand,
    "channels last": lambda gradient: gradient.contiguous(memory_format=torch.channels_last),
    "negated lazily": negate_lazily,
}


def weights_after_two_steps(
    name: str, format_: torch.memory_format, layout: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return a parameter after two steps along gradients that a layout arranges."""
    torch.manual_seed(0)
    layer = nn.Conv2d(SHAPE[1], SHAPE[0], SHAPE[2:], bias=False).to(memory_format=format_)
    optimizer = build_optimizer(
        configured(["recipe=quickstart", f"optimizer={name}", "optimizer.lr=0.1"]), layer
    )
    for _ in range(2):
        gradient = layout(torch.randn(SHAPE))
        descend(dict(layer.named_parameters()), optimizer, {"weight": gradient})
    return layer.weight.detach().contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_depends_on_a_gradients_numbers_alone(
    name: str, format_: torch.memory_format, layout: str
) -> None:
    arrange = LAYOUTS[layout]

    def copy_plainly(gradient: Tensor) -> Tensor:
        return torch.tensor(arrange(gradient).tolist())

    right = weights_after_two_steps(name, torch.contiguous_format, copy_plainly)
    torch.testing.assert_close(weights_after_two_steps(name, format_, arrange), right)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_a_fused_step_follows_a_model_whose_memory_format_changes(name: str) -> None:
    weights = []
    for fused, formats in (
        (False, [torch.contiguous_format] * 4),
        (True, [torch.contiguous_format, torch.channels_last, torch.contiguous_format] * 2),
    ):
        torch.manual_seed(0)
        layer = nn.Conv2d(SHAPE[1], SHAPE[0], SHAPE[2:], bias=False)
        momentum = {"momentum": 0.9} if name == "SGD" else {}
        kind = getattr(torch.optim, name)
        optimizer = kind(layer.parameters(), lr=0.1, fused=fused, **momentum)
        for format_ in formats[:4]:
            layer.to(memory_format=format_)
            descend(dict(layer.named_parameters()), optimizer, {"weight": torch.randn(SHAPE)})
        weights.append(layer.weight.detach().contiguous())
    torch.testing.assert_close(weights[1], weights[0])


class Sliced(nn.Module):
    """Holds a parameter that is every other column of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4)[:, ::2])


def test_a_parameter_with_gaps_in_its_memory_is_never_stepped_by_a_fused_optimizer() -> None:
    model = Sliced()
    assert not is_dense(model.weight)
    assert not build_optimizer(configured(["recipe=quickstart", "optimizer=adam"]), model).defaults[
        "fused"
    ]
    with pytest.raises(UserError, match="fused"):
        build_optimizer(
            configured(["recipe=quickstart", "optimizer=sgd", "+optimizer.fused=true"]), model
        )
    with pytest.raises(UserError, match="fused"):
        check_optimizer(model, torch.optim.Adam(model.parameters(), fused=True))


def test_every_choice_of_an_implementation_is_another_run() -> None:
    choices = ([], ["+optimizer.fused=false"], ["+optimizer.fused=true"])
    adam = [configured(["recipe=quickstart", "optimizer=adam", *choice]) for choice in choices]
    assert len({experiment_digest(run) for run in adam}) == len(choices)
    null = configured(["recipe=quickstart", "optimizer=adam", "+optimizer.fused=null"])
    assert experiment_digest(null) == experiment_digest(adam[0])
