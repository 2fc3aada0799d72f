"""By operation, too, the clipped sum of a program is that of each example alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.gradients.harness import loss
from tests.modules import Made
from zdp_bench.gradients import fast
from zdp_bench.gradients.program import Program, make

BOUND = 0.05
Build = Callable[[], nn.Module]


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def made(function: Callable[..., Tensor], **shapes: Any) -> Build:
    def build() -> nn.Module:
        held = {
            name: parameter(*shape) if isinstance(shape, tuple) else shape()
            for name, shape in shapes.items()
        }
        return Made(function, **held)

    return build


def frames(net: Any, x: Tensor) -> Tensor:
    """[B, 4, 6]: each example is four maps [3, 2]."""
    maps = F.group_norm(net.conv(x.reshape(-1, 1, 3, 2)), 2, net.scale, net.shift)
    return F.prelu(maps, net.slope).reshape(x.shape[0], -1)


def attention(net: Any, x: Tensor) -> Tensor:
    scores = x @ x.mT + net.table[:4, :4]
    return F.scaled_dot_product_attention(x, x, x, attn_mask=scores + net.bias)


def adapter(net: Any, x: Tensor) -> Tensor:
    return F.linear(x, net.weight.detach()) + x @ net.down @ net.up


def tokens(net: Any, x: Tensor) -> Tensor:
    first = net.token.expand(x.shape[0], -1, -1)
    return torch.cat([first, x], 1) + net.positions


def positions_in_place(net: Any, x: Tensor) -> Tensor:
    x = x * 1.5
    x += net.table
    y = x + net.s
    x.sub_(net.s)
    return torch.cat([x.exp(), y.tanh()], 1)


def written(net: Any, x: Tensor) -> Tensor:
    output = x.new_zeros(x.shape[0], 4, 3)
    output[:] = x @ net.w
    return output


def recurrent(make_layer: Callable[[], nn.RNNBase]) -> Build:
    def function(net: Any, x: Tensor) -> Tensor:
        output, state = net.layer(x if net.layer.batch_first else x.transpose(0, 1))
        last = state[0] if isinstance(state, tuple) else state
        output = output if net.layer.batch_first else output.transpose(0, 1)
        return output.sum(1) + last.sum(0).repeat(1, output.shape[2] // last.shape[2])

    return lambda: Made(function, layer=make_layer().double())


def cells(net: Any, x: Tensor) -> Tensor:
    h = c = x.new_zeros(x.shape[0], 3)
    for t in range(x.shape[1]):
        h, c = net.lstm(x[:, t], (h @ net.u, c))
    return h


def gru_cells(net: Any, x: Tensor) -> Tensor:
    h = torch.zeros(x.size(0), 3, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = net.cell(x[:, t], h)
    return h


def pieces(net: Any, x: Tensor) -> Tensor:
    """[B, 4, 6]: each example is four sequences [3, 2]."""
    examples, count, length = x.shape
    states, _ = net.gru(x.reshape(examples * count, length // 2, 2))
    return states[:, -1].view(examples, -1)


def packed(net: Any, x: Tensor) -> Tensor:
    """What a recurrent layer makes of sequences of different lengths."""
    lengths = 1 + (x[:, :, 0] > 0).sum(1).clamp(max=3).cpu()
    first = net.layer.batch_first
    rows = x if first else x.transpose(0, 1)
    of = pack_padded_sequence(rows, lengths, batch_first=first, enforce_sorted=False)
    states, last = net.layer(of)
    padded, _ = pad_packed_sequence(states, batch_first=True, total_length=4)
    last = last[0] if isinstance(last, tuple) else last
    return torch.cat([padded.tanh().flatten(1), last.transpose(0, 1).flatten(1)], 1)


def packed_rows(net: Any, x: Tensor) -> Tensor:
    """What a linear layer and a softmax make of the rows of packed sequences."""
    lengths = 1 + (x[:, :, 0] > 0).sum(1).clamp(max=3).cpu()
    of = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    rows = net.layer(of.data).softmax(dim=1)
    rows_of_sequences = PackedSequence(rows, *of[1:])
    return pad_packed_sequence(rows_of_sequences, True, padding_value=0.5, total_length=4)[0].exp()


FAST: dict[str, Build] = {
    "linear of rows": made(lambda net, x: F.linear(x[:, 0], net.w, net.b), w=(3, 6), b=(3,)),
    "linear of positions": made(lambda net, x: F.linear(x, net.w, net.b), w=(3, 6), b=(3,)),
    "linear, flattened": made(
        lambda net, x: F.linear(x.reshape(-1, 6), net.w, net.b).view(-1, 4, 3), w=(3, 6), b=(3,)
    ),
    "linear, time first and flattened": made(
        lambda net, x: (
            F.linear(x.transpose(0, 1).reshape(-1, 6), net.w).view(4, -1, 3).transpose(0, 1)
        ),
        w=(3, 6),
    ),
    "a product": made(lambda net, x: x @ net.w, w=(6, 3)),
    "a product with a transposed weight": made(lambda net, x: x @ net.w.T, w=(3, 6)),
    "two parts of one weight": made(
        lambda net, x: F.linear(x, net.w[:3]) * F.linear(x, net.w[3:]), w=(6, 6)
    ),
    "a weight used twice": made(
        lambda net, x: F.linear(F.linear(x, net.w).tanh(), net.w), w=(6, 6)
    ),
    "a normalised weight": lambda: nn.Sequential(weight_norm(nn.Linear(6, 3).double())),
    "a convolution": made(lambda net, x: F.conv1d(x, net.w, net.b, padding=1), w=(3, 4, 3), b=(3,)),
    "a convolution, same": made(lambda net, x: F.conv1d(x, net.w, padding="same"), w=(3, 4, 3)),
    "a transposed convolution": made(
        lambda net, x: F.conv_transpose1d(x, net.w, stride=2), w=(4, 3, 2)
    ),
    "maps of frames": made(
        frames,
        conv=lambda: nn.Conv2d(1, 4, 2).double(),
        scale=(4,),
        shift=(4,),
        slope=(4,),
    ),
    "layer norm": made(lambda net, x: F.layer_norm(x, (6,), net.w, net.b), w=(6,), b=(6,)),
    "layer norm, time first": made(
        lambda net, x: F.layer_norm(x.transpose(0, 1), (6,), net.w).transpose(0, 1), w=(6,)
    ),
    "rms norm": made(lambda net, x: F.rms_norm(x, (6,), net.w), w=(6,)),
    "instance norm": made(lambda net, x: F.instance_norm(x, weight=net.w), w=(4,)),
    "batch norm in evaluation": made(
        lambda net, x: F.batch_norm(x, x.new_ones(4), x.new_ones(4), net.w, net.b),
        w=(4,),
        b=(4,),
    ),
    "scale and shift": made(lambda net, x: net.s * x + net.b, s=(6,), b=(4, 1)),
    "a difference and a quotient": made(lambda net, x: (net.s - x) / net.b.exp(), s=(6,), b=(1,)),
    "one number": made(lambda net, x: x.tanh() * net.s, s=()),
    "in place behind a norm": made(
        lambda net, x: F.leaky_relu_(F.dropout(F.instance_norm(x * net.s, weight=net.w), 0.0)),
        w=(4,),
        s=(6,),
    ),
    "in place": made(positions_in_place, table=(4, 6), s=(6,)),
    "a weight in place of a view": made(
        lambda net, x: (1.5 * x).mT.sub_(net.w[:, None]).mT.exp(), w=(6,)
    ),
    "in place of the input": made(lambda net, x: x.mul_(2) @ net.w, w=(6, 3)),
    "written to what was empty": made(written, w=(6, 3)),
    "a gate": made(lambda net, x: torch.where(x > 0, x * net.s, net.b), s=(6,), b=(6,)),
    "tokens and positions": made(tokens, token=(1, 1, 6), positions=(1, 5, 6)),
    "an adapter": made(adapter, weight=(6, 6), down=(6, 2), up=(2, 6)),
    "attention with a table": made(attention, table=(5, 5), bias=(1,)),
    "an einsum": made(lambda net, x: torch.einsum("bti,ij->btj", x, net.w), w=(6, 3)),
    "a bilinear product": made(lambda net, x: F.bilinear(x, x.tanh(), net.w), w=(2, 6, 6)),
    "an LSTM": recurrent(lambda: nn.LSTM(6, 3, batch_first=True)),
    "a GRU, time first": recurrent(lambda: nn.GRU(6, 3)),
    "an RNN both ways": recurrent(lambda: nn.RNN(6, 3, 2, bidirectional=True, batch_first=True)),
    "a cell": made(
        lambda net, x: torch.gru_cell(x[:, 0], x[:, 1, :3], net.w, net.u), w=(9, 6), u=(9, 3)
    ),
    "a packed LSTM": lambda: Made(packed, layer=nn.LSTM(6, 3, batch_first=True).double()),
    "a packed GRU both ways": lambda: Made(
        packed, layer=nn.GRU(6, 3, 2, bidirectional=True).double()
    ),
    "a packed RNN": lambda: Made(packed, layer=nn.RNN(6, 3, bias=False).double()),
    "rows of packed sequences": made(packed_rows, layer=lambda: nn.Linear(6, 3).double()),
    "cells of a loop": lambda: Made(cells, lstm=nn.LSTMCell(6, 3).double(), u=parameter(3, 3)),
    "a cell of torch": lambda: Made(gru_cells, cell=nn.GRUCell(6, 3).double()),
    "a GRU over pieces of each example": made(
        pieces, gru=lambda: nn.GRU(2, 3, batch_first=True, bidirectional=True).double()
    ),
    "copies behind each other": made(
        lambda net, x: torch.cat([net.w.repeat(x.shape[0], 2, 1), x], 1), w=(1, 2, 6)
    ),
    "copies of heads": made(
        lambda net, x: (x.reshape(-1, 6) * net.w.repeat(x.shape[0], 1)).view(x.shape), w=(4, 6)
    ),
    "copies by tile": made(lambda net, x: net.w.tile(x.shape[0], 2, 1) * x, w=(1, 2, 6)),
    "its type, its shape and its size": made(
        lambda net, x: (
            x.type_as(net.w) * net.w + net.w.new_zeros(x.shape[0], 4, 6) + torch.zeros_like(net.w)
        ),
        w=(6,),
    ),
    "a number at a mask": made(lambda net, x: x.masked_fill(x > 0, net.w), w=()),
    "a threshold": made(lambda net, x: (x > net.w) * x * net.s, w=(6,), s=(6,)),
    "a sum of embeddings": made(
        lambda net, x: net.bag((x[:, 0] > 0).long()), bag=lambda: nn.EmbeddingBag(3, 4).double()
    ),
    "a sum of embeddings without padding": made(
        lambda net, x: F.embedding_bag((x[:, 0] > 0).long(), net.w, padding_idx=-1, mode="sum"),
        w=(2, 4),
    ),
    "an einsum of three": made(
        lambda net, x: torch.einsum("bti,ij,jk->btk", x, net.w, net.s), w=(6, 3), s=(3, 2)
    ),
    "distances to prototypes": made(lambda net, x: torch.cdist(x[:, 0], net.w), w=(30, 6)),
}
SLOW: dict[str, Build] = {
    "copies, several for each example": made(
        lambda net, x: (x.reshape(-1, 6) * net.w.expand(4 * x.shape[0], 6)).view(x.shape), w=(6,)
    ),
    "an LSTM with a projection": recurrent(lambda: nn.LSTM(6, 4, proj_size=3, batch_first=True)),
}


def one_by_one(model: nn.Module, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(p, requires_grad=False) for name, p in model.named_parameters()}
    for row, target in zip(x.split(1), targets.split(1), strict=True):
        example_loss = loss(model(row.clone()), target).sum()
        gradients = torch.autograd.grad(example_loss, [*model.parameters()], allow_unused=True)
        gradients_or_zeros = [torch.zeros(1) if g is None else g for g in gradients]
        norm = torch.stack([g.square().sum().double() for g in gradients_or_zeros]).sum().sqrt()
        for value, g in zip(total.values(), gradients_or_zeros, strict=True):
            value += g * (BOUND * (1 - 1e-5) / norm).clamp(max=1)
    return total


@cache
def program_of(build: Build) -> tuple[nn.Module, Program, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = build().train()
    x, targets = torch.randn(5, 4, 6, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    return model, make(model, x), (x, targets)


@pytest.mark.parametrize("name", FAST)
def test_a_programs_sum_is_that_of_each_example_alone(name: str) -> None:
    model, program, (x, targets) = program_of(FAST[name])
    assert not program.reason
    for count in (5, 1):
        batch = x[:count], targets[:count]
        sums = fast.clipped_sum(model, loss, batch, BOUND, program=program).sums
        torch.testing.assert_close(sums, one_by_one(model, *batch), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", FAST)
def test_shares_of_several_examples_are_clipped_as_one(name: str) -> None:
    model, program, (x, targets) = program_of(FAST[name])
    given = {"program": program, "shares": (2, 3)}
    clipped = fast.clipped_sum(model, loss, (x, targets), BOUND, **given)  # type: ignore[arg-type]
    right = {key: torch.zeros_like(p, requires_grad=False) for key, p in model.named_parameters()}
    for part in (slice(0, 2), slice(2, 5)):
        mean = loss(model(x[part].clone()), targets[part]).mean()
        gradients = torch.autograd.grad(mean, [*model.parameters()], allow_unused=True)
        rows = [torch.zeros(1) if g is None else g for g in gradients]
        norm = torch.stack([g.square().sum().double() for g in rows]).sum().sqrt()
        for value, g in zip(right.values(), rows, strict=True):
            value += g * (BOUND * (1 - 1e-5) / norm).clamp(max=1)
    torch.testing.assert_close(clipped.sums, right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", FAST)
def test_hostile_scales_stay_within_the_bound(name: str) -> None:
    torch.manual_seed(0)
    model = FAST[name]().float().train()
    x, targets = torch.randn(4, 4, 6), torch.randn(4)
    program = make(model, x)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1000
    scales = torch.tensor([1e-2, 1.0, 30.0, 1e3]).view(-1, 1, 1)
    for example in zip((x * scales).split(1), targets.split(1), strict=True):
        sums = fast.clipped_sum(model, loss, example, BOUND, program=program).sums
        norm = torch.stack([value.double().square().sum() for value in sums.values()]).sum().sqrt()
        assert float(norm) <= BOUND


@pytest.mark.parametrize("name", SLOW)
def test_what_has_no_rule_says_so(name: str) -> None:
    model, program, batch = program_of(SLOW[name])
    with pytest.raises(ValueError, match=r"projection|several rows"):
        fast.clipped_sum(model, loss, batch, BOUND, program=program)
