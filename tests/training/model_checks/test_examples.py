"""Random examples of the checks are such as a loss can take."""

import pytest
import torch
from torch import Tensor, nn

from tests.modules import Made
from zdp_bench.errors import UserError
from zdp_bench.gradients.parts import pack, unpack
from zdp_bench.training.model_checks.examples import find_source


@pytest.mark.parametrize(
    ("output_shape", "target_shape", "classes"),
    [
        ((5,), (), 5),
        ((5, 7), (7,), 5),
        ((7, 5), (7,), 5),
        ((10, 5), (3,), 5),  # CTC, which overwrites memory if a target is not a class
        ((5, 10), (3,), 5),
        ((7, 3), (3,), 3),  # as many labels as classes
        ((3, 7), (3,), 3),
        ((), (), 2),
    ],
)
def test_integer_targets_are_drawn_below_the_number_of_classes(
    output_shape: tuple[int, ...], target_shape: tuple[int, ...], classes: int
) -> None:
    def answer(net: nn.Module, x: Tensor) -> Tensor:
        return x[:, 0].view(-1, *[1] * len(output_shape)).expand(-1, *output_shape) * net.scale

    model = Made(answer, scale=nn.Parameter(torch.ones(())))
    like = torch.zeros(0, 2), torch.zeros(0, *target_shape, dtype=torch.long)
    source = find_source(
        model, lambda outputs, _: outputs.reshape(len(outputs), -1).sum(1), like, None
    )
    assert source.classes == classes
    assert int(source.draw(20)[1].max()) < classes


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
