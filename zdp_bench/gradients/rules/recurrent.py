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

Parameters = dict[str, nn.Parameter]
# Enters the gates of one direction on a tape; returns them, and what to call with their inputs.
EnterInputs = Callable[[Tensor], None]
Enter = Callable[[nn.Module, Parameters, Tensor], tuple[Tensor, EnterInputs]]


class Direction(nn.Module):
    """One level of a recurrent layer in one direction, as a tape and its rule see it."""

    def __init__(
        self,
        layer: nn.RNNBase,
        level: int,
        backward: bool,
    ) -> None:
        super().__init__()
        self.suffix = f"l{level}_reverse" if backward else f"l{level}"
        self.is_reversed = backward
        self.hidden = layer.hidden_size
        self.is_gru = isinstance(layer, nn.GRU)


@rule(Direction, nn.RNN, nn.LSTM, nn.GRU)
def recurrent(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """x [B, T, *]: inputs, states before and, of a GRU, reset gates; g of the gates' inputs.

    [B, S, T, *] are several sequences of each example.
    """
    assert isinstance(layer, Direction)
    x = x.flatten(1, -2)
    g = g.flatten(1, -2)
    state_g = g
    if layer.is_gru:  # its last gate sees the state through the reset gate
        x, resets = _split_last(x, layer.hidden)
        first_gates, last_gate = _split_last(g, layer.hidden)
        state_g = torch.cat([first_gates, last_gate * resets], dim=-1)
    inputs, states = _split_last(x, layer.hidden)
    return {
        f"weight_ih_{layer.suffix}": over_positions(inputs, g),
        f"weight_hh_{layer.suffix}": over_positions(states, state_g),
        f"bias_ih_{layer.suffix}": LayerGradient.from_gradients(g.sum(dim=1)),
        f"bias_hh_{layer.suffix}": LayerGradient.from_gradients(state_g.sum(dim=1)),
    }


def _split_last(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Split [..., n] into [..., n - size] and [..., size]."""
    first, last = x.split([x.shape[-1] - size, size], dim=-1)
    return first, last


def replay(
    layer: nn.RNNBase,
    examples: int,
    enter: Enter,
    x: Any,
    hx: Any = None,
) -> Any:
    """Return what `layer(x, hx)` does, with its gates entered on a tape."""
    packed = x if isinstance(x, PackedSequence) else None
    mask = lengths = None
    if packed is not None:
        x, lengths = pad_packed_sequence(packed, batch_first=True)
        goes_on = torch.arange(x.shape[1]) < lengths.unsqueeze(1)  # [B, T]
        mask = goes_on.unsqueeze(2).to(x.device)
    elif isinstance(x, Tensor) and x.dim() == 3 and not layer.batch_first:
        x = x.transpose(0, 1)
    is_batch = isinstance(x, Tensor) and x.dim() == 3
    if not is_batch or len(x) != examples or layer.proj_size:
        raise NoRule("a recurrent layer that is not called on one sequence per example")
    first_states: tuple[Tensor, ...] = hx if isinstance(hx, tuple) else (hx,)
    if hx is None:
        first_states = ()
    ends: list[list[Tensor]] = []
    for level in range(layer.num_layers):
        outputs = []
        for backward in range(1 + layer.bidirectional):
            start = [state[len(ends)] for state in first_states]
            direction = Direction(layer, level, bool(backward))
            output, end = _scan(layer, direction, enter, x, start, mask)
            outputs.append(output)
            ends.append(end)
        # In memory, time comes first, as in torch's own outputs: a model may view them so.
        states = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        x = states.transpose(0, 1)
        if level + 1 < layer.num_layers:
            x = F.dropout(x, layer.dropout, layer.training)
    if packed is not None and lengths is not None:
        x = _pack_as(packed, x, lengths)
    elif not layer.batch_first:
        x = x.transpose(0, 1)
    last = tuple(map(torch.stack, zip(*ends, strict=True)))
    return x, last if isinstance(layer, nn.LSTM) else last[0]


def _pack_as(
    packed: PackedSequence,
    x: Tensor,
    lengths: Tensor,
) -> PackedSequence:
    """Pack x [B, T, *] as the sequence that the layer was called on."""
    order = packed.sorted_indices
    if order is not None:
        x = x.index_select(0, order)
        lengths = lengths[order.cpu()]
    data = pack_padded_sequence(x, lengths, batch_first=True).data
    return PackedSequence(data, *packed[1:])


def _scan(
    layer: nn.RNNBase,
    direction: Direction,
    enter: Enter,
    x: Tensor,
    start: list[Tensor],
    mask: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the states [T, B, H] of one direction, and its last ones."""
    names = [f"weight_ih_{direction.suffix}", f"weight_hh_{direction.suffix}"]
    if layer.bias:
        names += [f"bias_ih_{direction.suffix}", f"bias_hh_{direction.suffix}"]
    parameters = [getattr(layer, name) for name in names]
    named = zip(names, parameters, strict=True)
    trained = {name: parameter for name, parameter in named if parameter.requires_grad}
    input_weight, state_weight, *biases = [parameter.detach() for parameter in parameters]
    input_bias, state_bias = biases or (None, None)
    from_input = F.linear(x, input_weight, input_bias)
    gates, enter_inputs = enter(direction, trained, from_input)
    zeros = gates.new_zeros(len(x), layer.hidden_size)
    states = 2 if isinstance(layer, nn.LSTM) else 1
    state = start or [zeros] * states
    steps = list(enumerate(gates.unbind(dim=1)))
    if direction.is_reversed:
        steps.reverse()
    before = [zeros] * len(steps)
    resets = [zeros] * len(steps)
    outputs = [zeros] * len(steps)
    for t, gate in steps:
        before[t] = state[0].detach()
        from_state = F.linear(state[0], state_weight, state_bias)
        new_state, reset = _next_state(layer, gate, from_state, state)
        if reset is not None:
            resets[t] = reset
        if mask is None:
            state = new_state
            outputs[t] = state[0]
        else:
            goes_on = mask[:, t]  # [B, 1]
            pairs = zip(new_state, state, strict=True)
            state = [torch.where(goes_on, new, old) for new, old in pairs]
            outputs[t] = state[0] * goes_on
    inputs = [x.detach(), torch.stack(before, dim=1)]
    if direction.is_gru:
        inputs.append(torch.stack(resets, dim=1))
    enter_inputs(torch.cat(inputs, dim=-1))
    return torch.stack(outputs), state


def _next_state(
    layer: nn.RNNBase,
    gate: Tensor,
    from_state: Tensor,
    state: list[Tensor],
) -> tuple[list[Tensor], Tensor | None]:
    """Return the next state, of an LSTM with its cell, and a GRU's reset gate.

    Args:
        layer: an RNN, an LSTM or a GRU.
        gate: what the gates get from the input, [B, gates].
        from_state: what they get from the state, [B, gates].
        state: h, and of an LSTM c, [B, H] each.
    """
    h = state[0]
    if isinstance(layer, nn.LSTM):
        i, f, n, o = (gate + from_state).chunk(4, dim=1)
        c = state[1]
        c = f.sigmoid() * c + i.sigmoid() * n.tanh()
        h = o.sigmoid() * c.tanh()
        return [h, c], None
    if isinstance(layer, nn.GRU):
        r_and_z, n = _split_last(gate, layer.hidden_size)
        r_and_z_of_state, n_of_state = _split_last(from_state, layer.hidden_size)
        r, z = (r_and_z + r_and_z_of_state).sigmoid().chunk(2, dim=1)
        n = (n + r * n_of_state).tanh()
        return [n + z * (h - n)], r.detach()
    assert isinstance(layer, nn.RNN)
    total = gate + from_state
    new_h = total.tanh() if layer.nonlinearity == "tanh" else total.relu()
    return [new_h], None
