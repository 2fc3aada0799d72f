"""torch's recurrent layers, RNN, LSTM and GRU: time steps are positions, as in a linear layer.

torch's own pass keeps no gradient of the gates. So on a tape the layer is replayed step by step:
the inputs of its gates are G = x W_ihᵀ + b_ih, [B, T, gates], plus what comes of the state before.
From x, these states and the gradient of G follow all per-sample gradients. Where a packed sequence
has ended, its state stays as it is, and its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from zdp_bench.gradients.layer_gradient import LayerGradient
from zdp_bench.gradients.rules import NoRule, rule
from zdp_bench.gradients.rules.linear import over_positions

# Enters the gates of one direction on a tape; returns them, and what to call with their inputs.
Enter = Callable[[nn.Module, dict[str, nn.Parameter], Tensor], tuple[Tensor, Callable[..., None]]]


class Direction(nn.Module):
    """One level of a recurrent layer in one direction, as a tape and its rule see it."""

    def __init__(self, layer: nn.RNNBase, level: int, backward: bool) -> None:
        super().__init__()
        self.suffix = f"l{level}_reverse" if backward else f"l{level}"
        self.hidden, self.is_gru = layer.hidden_size, isinstance(layer, nn.GRU)


@rule(Direction, nn.RNN, nn.LSTM, nn.GRU)
def recurrent(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """x [B, T, *]: inputs, states before and, of a GRU, reset gates; g of the gates' inputs.

    [B, S, T, *] are several sequences of each example.
    """
    assert isinstance(layer, Direction)
    x, g = x.flatten(1, -2), g.flatten(1, -2)
    own, hidden = layer.suffix, layer.hidden
    width = x.shape[-1] - hidden * (2 if layer.is_gru else 1)
    inputs, states, resets = x.split([width, hidden, x.shape[-1] - width - hidden], dim=-1)
    of_states = g
    if layer.is_gru:  # its last gate sees the state through the reset gate
        of_states = torch.cat([g[..., : 2 * hidden], g[..., 2 * hidden :] * resets], dim=-1)
    return {
        f"weight_ih_{own}": over_positions(inputs, g),
        f"weight_hh_{own}": over_positions(states, of_states),
        f"bias_ih_{own}": LayerGradient.of(g.sum(dim=1)),
        f"bias_hh_{own}": LayerGradient.of(of_states.sum(dim=1)),
    }


def replay(layer: nn.RNNBase, examples: int, enter: Enter, x: Any, hx: Any = None) -> Any:
    """Return what `layer(x, hx)` does, with its gates entered on a tape."""
    packed = x if isinstance(x, PackedSequence) else None
    mask = lengths = None
    if packed is not None:
        x, lengths = pad_packed_sequence(packed, batch_first=True)
        mask = (torch.arange(x.shape[1]) < lengths.unsqueeze(1)).unsqueeze(2).to(x.device)
    elif isinstance(x, Tensor) and x.dim() == 3 and not layer.batch_first:
        x = x.transpose(0, 1)
    if not isinstance(x, Tensor) or x.dim() != 3 or len(x) != examples or layer.proj_size:
        raise NoRule("a recurrent layer that is not called on one sequence per example")
    first = hx if isinstance(hx, tuple) else (hx, None)
    ends: list[list[Tensor]] = []
    for level in range(layer.num_layers):
        parts = []
        for backward in range(1 + layer.bidirectional):
            number = len(ends)
            start = [None if given is None else given[number] for given in first]
            direction = Direction(layer, level, bool(backward))
            part, end = _scan(layer, direction, enter, x, start, mask)
            parts.append(part)
            ends.append(end)
        # In memory, time comes first, as in torch's own outputs: a model may view them so.
        x = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).transpose(0, 1)
        if level + 1 < layer.num_layers:
            x = F.dropout(x, layer.dropout, layer.training)
    last = [torch.stack(each) for each in zip(*ends, strict=True)]
    output: Any = x
    if packed is not None and lengths is not None:
        order = packed.sorted_indices
        if order is not None:
            x, lengths = x.index_select(0, order), lengths[order.cpu()]
        data = pack_padded_sequence(x, lengths, batch_first=True).data
        output = PackedSequence(data, *packed[1:])
    elif not layer.batch_first:
        output = x.transpose(0, 1)
    return output, tuple(last) if isinstance(layer, nn.LSTM) else last[0]


def _scan(
    layer: nn.RNNBase,
    direction: Direction,
    enter: Enter,
    x: Tensor,
    start: list[Tensor | None],
    mask: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the states [T, B, H] of one direction, and its last ones."""
    names = [f"{kind}_{direction.suffix}" for kind in ("weight_ih", "weight_hh")]
    names += [f"bias_{kind}_{direction.suffix}" for kind in ("ih", "hh") if layer.bias]
    own = {name: getattr(layer, name) for name in names}
    of_input, of_state, *biases = (parameter.detach() for parameter in own.values())
    trained = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
    bias, state_bias = biases or (None, None)
    gates, enter_inputs = enter(direction, trained, F.linear(x, of_input, bias))
    zeros = gates.new_zeros(len(x), layer.hidden_size)
    h, c = (zeros if given is None else given for given in (*start, None)[:2])
    steps = list(enumerate(gates.unbind(dim=1)))
    before, resets, outputs = ([zeros] * len(steps) for _ in range(3))
    for t, gate in reversed(steps) if direction.suffix.endswith("reverse") else steps:
        before[t] = h.detach()
        from_state, new_c = F.linear(h, of_state, state_bias), c
        if isinstance(layer, nn.LSTM):
            i, f, n, o = (gate + from_state).chunk(4, dim=1)
            new_c = f.sigmoid() * c + i.sigmoid() * n.tanh()
            new_h = o.sigmoid() * new_c.tanh()
        elif isinstance(layer, nn.GRU):
            size = [2 * layer.hidden_size, layer.hidden_size]
            (both, n), (both_of_state, n_of_state) = gate.split(size, 1), from_state.split(size, 1)
            r, z = (both + both_of_state).sigmoid().chunk(2, dim=1)
            resets[t] = r.detach()
            n = (n + r * n_of_state).tanh()
            new_h = n + z * (h - n)
        else:
            assert isinstance(layer, nn.RNN)
            new_h = gate + from_state
            new_h = new_h.tanh() if layer.nonlinearity == "tanh" else new_h.relu()
        if mask is None:
            h, c = new_h, new_c
        else:
            h, c = torch.where(mask[:, t], new_h, h), torch.where(mask[:, t], new_c, c)
        outputs[t] = h if mask is None else h * mask[:, t]
    kept = [x.detach(), torch.stack(before, dim=1)]
    if isinstance(layer, nn.GRU):
        kept.append(torch.stack(resets, dim=1))
    enter_inputs(torch.cat(kept, dim=-1))
    return torch.stack(outputs), [h, c] if isinstance(layer, nn.LSTM) else [h]
