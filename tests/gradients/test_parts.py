"""Inputs of several tensors are cut, checked and clipped like one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import tree_map

from zdp_bench import UserError, check_model, clipped_sum
from zdp_bench.gradients.parts import Parts, describe, pack, takes_parts, unpack
from zdp_bench.gradients.program import alone


class Two(nn.Module):
    """A linear layer over two inputs, and what a test adds to them."""

    def __init__(self, mix: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(3, 2), mix

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.linear(a + self.mix(b))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).sum(dim=1)


def batch(named: bool, examples: int = 6) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(examples, 3, generator=generator) for _ in range(2))
    return {"b": b, "a": a} if named else (a, b), torch.ones(examples, 2)


def test_it_is_packed_and_unpacked_and_described() -> None:
    inputs, targets = batch(named=True)
    packed: Any = pack(inputs)
    assert unpack(packed) is not targets
    assert unpack(packed).keys() == inputs.keys()
    assert pack(targets) is targets
    assert (len(packed), packed.nbytes) == (6, 2 * 6 * 3 * 4)
    assert describe(packed[:2]) == "float32 and float32 inputs of shape [2, 3] and [2, 3]"
    assert [len(part) for part in packed.split(4)] == [4, 2]


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("named", [False, True])
def test_the_sum_is_that_of_the_pieces_and_of_one_input(engine: Any, named: bool) -> None:
    torch.manual_seed(0)
    model = Two()
    inputs, targets = batch(named)
    whole = clipped_sum(model, loss, (inputs, targets), 0.5, engine=engine)
    pieces = [
        clipped_sum(model, loss, (part, of), 0.5, engine=engine)
        for part, of in zip(pack(inputs).split(2), targets.split(2), strict=True)
    ]
    a, b = (inputs["a"], inputs["b"]) if named else inputs
    clipped_alone = clipped_sum(
        model.linear, loss, (a + torch.tanh(b), targets), 0.5, engine="reference"
    )
    for name, value in clipped_alone.sums.items():
        torch.testing.assert_close(whole.sums[f"linear.{name}"], value)
        torch.testing.assert_close(sum(of.sums[f"linear.{name}"] for of in pieces), value)
    close = {"rtol": 1e-6, "atol": 1e-6}  # gradients are float32, norms of them float64
    torch.testing.assert_close(whole.norms, clipped_alone.norms, check_dtype=False, **close)


def multiply(model: Any, a: Tensor, b: Tensor) -> Tensor:
    return model.linear(a) * b


def multiply_nested(model: Any, pair: Any) -> Tensor:
    return model.linear(pair["a"]) * pair["b"]


def multiply_in_order(model: Any, **parts: Tensor) -> Tensor:
    first, second = parts.values()
    return model.linear(first) * second


class Named(nn.Module):
    """A model that takes named inputs only."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(2, 2).double()

    def forward(self, **parts: Any) -> Tensor:
        return self.function(self, **parts)


NAMED: dict[str, tuple[Callable[..., Tensor], Callable[[Any], Any]]] = {
    "names": (multiply, lambda parts: parts),
    "nested names": (multiply_nested, lambda parts: {"pair": parts}),
    "order": (multiply_in_order, lambda parts: parts),
}


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("name", NAMED)
def test_a_dictionary_may_have_its_keys_in_another_order_than_before(
    name: str, engine: Any
) -> None:
    torch.manual_seed(0)
    function, arrange = NAMED[name]
    model = Named(function)
    a, b = torch.randn(2, 5, 2, dtype=torch.float64)
    targets = torch.ones(5, 2, dtype=torch.float64)
    weights = dict(model.named_parameters())
    for parts in ({"a": a, "b": b}, {"b": b, "a": a}, {"a": a, "b": b}):
        inputs = arrange(parts)

        def compute_loss(weights: Any, index: int, inputs: Any = inputs) -> Tensor:
            row = tree_map(lambda leaf: leaf[index : index + 1], inputs)
            outputs = functional_call(model, weights, (), row)
            return loss(outputs, targets[index : index + 1]).sum()

        gradients = [grad(compute_loss)(weights, index) for index in range(5)]
        sums = clipped_sum(model, loss, (inputs, targets), 1e9, engine=engine).sums
        for weight in weights:
            expected = torch.stack([gradient[weight] for gradient in gradients]).sum(dim=0)
            torch.testing.assert_close(sums[weight], expected)


def test_an_entry_is_written_to_the_tensor_of_the_same_name() -> None:
    whole, part = Parts({"a": torch.zeros(2), "b": torch.zeros(2)}), torch.ones(1)
    whole[:1] = Parts({"b": 2 * part, "a": part})
    assert [leaf.tolist() for leaf in whole.leaves] == [[1, 0], [2, 0]]
    expanded = Parts({"b": torch.zeros(1), "a": torch.ones(1)}).expand_as(whole)
    assert {name: leaf.tolist() for name, leaf in expanded.tree.items()} == {
        "b": [0, 0],
        "a": [1, 1],
    }


def test_an_example_that_is_not_finite_in_one_input_adds_nothing() -> None:
    model, (inputs, targets) = Two(), batch(named=False)
    rest = tuple(part[1:] for part in inputs), targets[1:]
    inputs[1][0, 0] = torch.nan
    ours, others = (clipped_sum(model, loss, of, 0.5) for of in ((inputs, targets), rest))
    torch.testing.assert_close(ours.sums, others.sums)


@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_mixes_examples_of_its_second_input_runs_alone(named: bool) -> None:
    apart, mixing = Two(), Two(lambda b: b.mean(dim=0, keepdim=True))
    assert check_model(apart, loss, batch(named)) == check_model(mixing, loss, batch(named)) == []
    assert not alone(apart)
    assert "mean combines the examples of a batch" in alone(mixing)
    with pytest.raises(UserError, match=r"cannot take float32 and float32 inputs of shape"):
        check_model(nn.Linear(3, 2), loss, batch(named))


def test_the_model_takes_parts_only_within() -> None:
    model, (inputs, _) = Two(), batch(named=True)
    with takes_parts(model):
        assert torch.equal(model(Parts(inputs)), model(**inputs))
    with pytest.raises(TypeError):
        model(Parts(inputs))
