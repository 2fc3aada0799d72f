"""The rule of torch's recurrent layers, RNN, LSTM and GRU.

torch's own implementation does not expose the gradients of the gates. A recurrent layer is
therefore replayed step by step: G = x W_ihᵀ + b_ih, [B, T, gates], is recorded on the tape, and
each step adds h W_hhᵀ + b_hh for the previous state h. All per-sample gradients follow from x, the
previous states and the gradient of G, as in a linear layer whose positions are the time steps.
After the end of a packed sequence, its state no longer changes and its gradient is zero.
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
# Records the input of a direction's rule, once the replay has computed it.
EnterInputs = Callable[[Tensor], None]
# Records G of one direction on a tape: (direction, its trained parameters, G) -> G as recorded, and
# the function to call with the rule's input.
Enter = Callable[[nn.Module, Parameters, Tensor], tuple[Tensor, EnterInputs]]


class Direction(nn.Module):
    """One level of a recurrent layer in one direction, which the tape records as a layer.

    Args:
        layer: the recurrent layer.
        level: index of the level, as in the names of the layer's parameters.
        is_reversed: whether the direction runs from the last time step to the first.
    """

    def __init__(
        self,
        layer: nn.RNNBase,
        level: int,
        is_reversed: bool,
    ) -> None:
        super().__init__()
        self.suffix = f"l{level}_reverse" if is_reversed else f"l{level}"
        self.is_reversed = is_reversed
        self.hidden_size = layer.hidden_size
        self.is_gru = isinstance(layer, nn.GRU)


@rule(Direction, nn.RNN, nn.LSTM, nn.GRU)
def recurrent(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of one direction of a recurrent layer.

    The rule is also registered for the layers themselves, so that they count as layers with a rule.

    Args:
        layer: the `Direction`.
        x: inputs, previous states and, for a GRU, reset gates, concatenated: [B, T, *], or
            [B, S, T, *] for S sequences per example.
        g: gradient of G, [B, T, gates] or [B, S, T, gates].
    """
    assert isinstance(layer, Direction)
    x = x.flatten(1, -2)
    g = g.flatten(1, -2)
    state_g = g  # gradient of h W_hhᵀ + b_hh
    if layer.is_gru:  # the reset gate multiplies the state's part of the last gate
        x, resets = _split_last(x, layer.hidden_size)
        first_gates, last_gate = _split_last(g, layer.hidden_size)
        state_g = torch.cat([first_gates, last_gate * resets], dim=-1)
    inputs, states = _split_last(x, layer.hidden_size)
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
    """Return the same as `layer(x, hx)`, and record its gates on a tape.

    Args:
        layer: an RNN, an LSTM or a GRU.
        examples: number of examples B.
        enter: function that records the gates of one direction.
        x: one sequence per example, padded or packed, as the layer accepts them.
        hx: first states, as the layer accepts them. Default: zeros.

    Raises:
        NoRule: the layer is not called on one sequence per example, or has a projection.
    """
    packed = x if isinstance(x, PackedSequence) else None
    mask = lengths = None
    if packed is not None:
        x, lengths = pad_packed_sequence(packed, batch_first=True)
        is_running = torch.arange(x.shape[1]) < lengths.unsqueeze(1)  # [B, T]
        mask = is_running.unsqueeze(2).to(x.device)
    elif isinstance(x, Tensor) and x.dim() == 3 and not layer.batch_first:
        x = x.transpose(0, 1)
    is_batch = isinstance(x, Tensor) and x.dim() == 3 and len(x) == examples
    if not is_batch or layer.proj_size:
        raise NoRule("a recurrent layer that is not called on one sequence per example")
    first_states: tuple[Tensor, ...] = ()
    if hx is not None:
        first_states = hx if isinstance(hx, tuple) else (hx,)
    last_states: list[list[Tensor]] = []  # of each direction
    for level in range(layer.num_layers):
        outputs = []
        for is_reversed in (False, True) if layer.bidirectional else (False,):
            start = [state[len(last_states)] for state in first_states]
            direction = Direction(layer, level, is_reversed)
            output, end = _scan(layer, direction, enter, x, start, mask)
            outputs.append(output)
            last_states.append(end)
        # Time comes first in memory, as in torch's own outputs, because a model may take views that
        # depend on it.
        states = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        x = states.transpose(0, 1)
        if level + 1 < layer.num_layers:
            x = F.dropout(x, layer.dropout, layer.training)
    if packed is not None and lengths is not None:
        x = _pack_as(packed, x, lengths)
    elif not layer.batch_first:
        x = x.transpose(0, 1)
    last = tuple(map(torch.stack, zip(*last_states, strict=True)))
    return x, last if isinstance(layer, nn.LSTM) else last[0]


def _pack_as(
    packed: PackedSequence,
    x: Tensor,
    lengths: Tensor,
) -> PackedSequence:
    """Pack x [B, T, *] in the order of the packed sequence that the layer was called on."""
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
    """Run one direction over all time steps, and record its gates on a tape.

    Args:
        layer: the recurrent layer.
        direction: the direction to run.
        enter: function that records the gates.
        x: inputs of this level, [B, T, *].
        start: first state h and, for an LSTM, cell c, [B, H] each. Default: zeros, if empty.
        mask: True while a sequence has not ended, [B, T, 1]; None if all have the same length.

    Returns:
        The states h of all time steps, [T, B, H], and the last state: h and, for an LSTM, c.
    """
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
    tensors_in_state = 2 if isinstance(layer, nn.LSTM) else 1
    state = start or [zeros] * tensors_in_state
    steps = list(enumerate(gates.unbind(dim=1)))
    if direction.is_reversed:
        steps.reverse()
    previous_states = [zeros] * len(steps)
    resets = [zeros] * len(steps)
    outputs = [zeros] * len(steps)
    for t, gate in steps:
        previous_states[t] = state[0].detach()
        from_state = F.linear(state[0], state_weight, state_bias)
        new_state, reset = _next_state(layer, gate, from_state, state)
        if reset is not None:
            resets[t] = reset
        if mask is None:
            state = new_state
            outputs[t] = state[0]
        else:
            is_running = mask[:, t]  # [B, 1]
            pairs = zip(new_state, state, strict=True)
            state = [torch.where(is_running, new, old) for new, old in pairs]
            outputs[t] = state[0] * is_running
    inputs = [x.detach(), torch.stack(previous_states, dim=1)]
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
    """Run one time step.

    Args:
        layer: an RNN, an LSTM or a GRU.
        gate: the input's part of the gates, [B, gates].
        from_state: the previous state's part of the gates, [B, gates].
        state: previous state h and, for an LSTM, cell c, [B, H] each.

    Returns:
        The next state, and the reset gate of a GRU; None for other layers.
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
