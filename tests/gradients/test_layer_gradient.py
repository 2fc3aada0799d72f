"""The gradients of single layers: of some examples, weighted and summed, in any memory order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zdp_bench.gradients.layer_gradient import LayerGradient, add_calls, apply_factors, contract
from zdp_bench.gradients.rules import NoRule, linear


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: x,
        lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
        lambda x: x.transpose(1, 3),
        lambda x: x.flatten(1),
        lambda x: x.conj(),
    ],
    ids=["contiguous", "channels last", "transposed", "flat", "lazily conjugated"],
)
def test_a_weighted_sum_is_contiguous_in_whatever_order_the_gradients_are(
    arrange: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    gradients = arrange(torch.randn(3, 4, 2, 5, dtype=dtype))
    factors = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    ones = [1] * (gradients.dim() - 1)
    expected = gradients.resolve_conj() * factors.view(-1, *ones)
    torch.testing.assert_close(apply_factors(gradients, factors), expected)
    total = contract(gradients, factors)
    torch.testing.assert_close(total, expected.sum(dim=0))
    assert total.is_contiguous()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 2), (4, 3)),
        (nn.Linear(3, 2, dtype=torch.complex64), (4, 3)),
        (nn.Linear(3, 2), (4, 5, 6, 3)),
        (nn.Linear(3, 2, dtype=torch.complex64), (4, 5, 3)),
        (nn.Embedding(7, 2, padding_idx=1), (4, 5)),
    ],
    ids=str,
)
def test_gradients_of_some_examples_are_rows_of_those_of_all(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    is_index = isinstance(layer, nn.Embedding)
    inputs = torch.randn(shape, dtype=layer.weight.dtype)
    x = torch.randint(0, 7, shape) if is_index else inputs
    g = torch.randn_like(layer(x))
    rule = linear.embedding if is_index else linear.linear
    names, parameters = zip(*layer.named_parameters(), strict=True)
    losses = [(layer(x[i : i + 1]) * g[i : i + 1].conj()).real.sum() for i in range(4)]
    rows = zip(*(torch.autograd.grad(each, parameters) for each in losses), strict=True)
    for name, expected in zip(names, map(torch.stack, rows), strict=True):
        gradient = rule(layer, x, g)[name]
        for start, stop in ((0, 4), (1, 3)):
            gradients, squares = gradient.form(start, stop)
            torch.testing.assert_close(gradients.resolve_conj(), expected[start:stop])
            lengths = expected[start:stop].flatten(1).norm(dim=1).double()
            torch.testing.assert_close(squares.sqrt(), lengths, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    "option", [{"scale_grad_by_freq": True}, {"sparse": True}, {"max_norm": 1.0}], ids=str
)
def test_an_embedding_whose_gradient_is_another_has_no_rule(option: dict[str, Any]) -> None:
    with pytest.raises(NoRule, match="an embedding with"):
        linear.embedding(
            nn.Embedding(7, 2, **option), torch.zeros(1, 3).long(), torch.ones(1, 3, 2)
        )


def test_a_single_call_is_measured_as_its_rule_says() -> None:
    """Of several calls, norms do not follow from those of each."""
    call = LayerGradient.from_gradients(torch.ones(2, 3))
    assert add_calls([call]) is call
    both = add_calls([call, call])
    assert both.squared_norms is None
    assert both.form(0, 2)[1].tolist() == pytest.approx([12.0, 12.0])
