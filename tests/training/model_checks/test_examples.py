"""Random examples of the checks are such as a loss can take."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules import Made
from zdp_bench.errors import UserError
from zdp_bench.gradients import Loss
from zdp_bench.gradients.parts import pack, unpack
from zdp_bench.training.model_checks.examples import find_source


@pytest.mark.parametrize(
    ("output_shape", "target_shape"),
    [
        ((5,), ()),
        ((5, 7), (7,)),
        ((10, 5), (3,)),
        ((), ()),
        ((12,), ()),  # CTC of 4 frames of 3 classes, which overwrites memory for a class above 2
    ],
)
def test_integer_targets_are_valid_for_any_number_of_classes(
    output_shape: tuple[int, ...], target_shape: tuple[int, ...]
) -> None:
    assert drawn_targets(output_shape, target_shape) == {0, 1}


def test_integer_targets_are_positive_if_the_loss_cannot_take_zero() -> None:
    def counted_from_1(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets - 1, reduction="none")

    def of_length(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum(1) / targets * targets

    assert drawn_targets((5,), (), counted_from_1) == {1}
    assert drawn_targets((5,), (), of_length) == {1}


def drawn_targets(
    output_shape: tuple[int, ...], target_shape: tuple[int, ...], loss: Loss | None = None
) -> set[int]:
    def answer(net: nn.Module, x: Tensor) -> Tensor:
        return x[:, 0].view(-1, *[1] * len(output_shape)).expand(-1, *output_shape) * net.scale

    def total(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.reshape(len(outputs), -1).sum(1)

    model = Made(answer, scale=nn.Parameter(torch.ones(())))
    empty_batch = torch.zeros(0, 2), torch.zeros(0, *target_shape, dtype=torch.long)
    _, targets = find_source(model, loss or total, empty_batch, None).draw(20)
    return set(targets.flatten().tolist())


def test_a_probe_is_arranged_like_the_dataset() -> None:
    model = Made(lambda net, a, b: (a - b) * net.scale, scale=nn.Parameter(torch.ones(())))
    example_batch = pack({"a": torch.zeros(0, 2), "b": torch.zeros(0, 2)}), torch.zeros(0)
    probe = pack({"b": torch.ones(3, 2), "a": torch.zeros(3, 2)}), torch.zeros(3)

    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.sum(1)

    inputs = unpack(find_source(model, loss, example_batch, probe).inputs)
    assert [*inputs] == ["a", "b"]
    assert not inputs["a"].any()
    other = pack({"c": torch.ones(3, 2), "a": torch.zeros(3, 2)}), torch.zeros(3)
    with pytest.raises(UserError, match=r"its inputs have the parts \['c'\], \['a'\], but"):
        find_source(model, loss, example_batch, other)
