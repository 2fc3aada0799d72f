"""Recurrent layers and packed sequences, which are recorded as operations of this package.

torch 2.11 records the last states of an LSTM with another shape than it computes. It cannot record
a packed sequence, whose layout in memory depends on the lengths in the batch. While a model is
recorded, `lstm(x, …)` therefore becomes the operation `zdp_bench::lstm`. A packed sequence contains
all rows of the padded one, [B · T, *], and its lengths, and a recurrent layer that is called on it
becomes `zdp_bench::packed_lstm`. Unpacking overwrites the rows beyond the lengths. When the program
runs, torch computes both operations. Cells are recorded as the products and gates that they consist
of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules import rnn
from torch.nn.utils import rnn as packing
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from zdp_bench.gradients.program.calls import Alone, name_of
from zdp_bench.gradients.program.table import PACKED, RECURRENT
from zdp_bench.gradients.rules import NoRule

LAYERS: tuple[Any, ...] = (nn.RNN, nn.LSTM, nn.GRU)

_library = torch.library.Library("zdp_bench", "FRAGMENT")


def _fake_recurrent(
    x: Tensor,
    states: Any,
    weights: Any,
    has_biases: bool,
    levels: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Return fake tensors with the shapes of the output and the last states."""
    last = [torch.empty_like(state) for state in _list(states)]
    width = last[0].shape[2] * (2 if bidirectional else 1)
    if batch_first:  # in memory, time comes first
        output = x.new_empty((x.shape[1], x.shape[0], width)).transpose(0, 1)
    else:
        output = x.new_empty((x.shape[0], x.shape[1], width))
    return output, *last


def _fake_packed(x: Tensor, lengths: Tensor, *arguments: Any) -> Any:
    options = (*arguments, True)
    return _fake_recurrent(x, *options)


def _define(kind: str) -> None:
    """Define a recurrent operation, and its variant for packed sequences."""
    states = "Tensor[] hx" if kind == "lstm" else "Tensor hx"
    results = "(Tensor, Tensor, Tensor)" if kind == "lstm" else "(Tensor, Tensor)"
    options = (
        "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, "
        "bool bidirectional"
    )
    plain = f"Tensor input, {states}, {options}, bool batch_first"
    packed = f"Tensor input, Tensor lengths, {states}, {options}"
    _library.define(f"{kind}({plain}) -> {results}")
    _library.define(f"packed_{kind}({packed}) -> {results}")
    torch.library.register_fake(f"zdp_bench::{kind}", _fake_recurrent, lib=_library)
    torch.library.register_fake(f"zdp_bench::packed_{kind}", _fake_packed, lib=_library)


for _kind in RECURRENT:
    _define(_kind)


def _list(states: Any) -> list[Tensor]:
    return [states] if isinstance(states, Tensor) else list(states)


# --------------------------------------------------------------------------------------- recording


@contextmanager
def recurrent_layers() -> Iterator[None]:
    """Record recurrent layers, and the packing of sequences, as operations of this package.

    A model may have imported torch's two packing functions under any name, so their code objects
    are replaced.
    """
    functions: Any = (pack_padded_sequence, pad_packed_sequence)
    codes = [function.__code__ for function in functions]
    forwards = [kind.forward for kind in LAYERS]
    plain_functions = rnn._VF
    globals_of_functions: Any = vars(packing)
    try:
        rnn._VF = _Functions()  # type: ignore[assignment]
        globals_of_functions.update(_zdp_bench_pack=_pack, _zdp_bench_unpack=_unpack)
        pack_padded_sequence.__code__ = _pack_code.__code__
        pad_packed_sequence.__code__ = _unpack_code.__code__
        for kind in LAYERS:
            kind.forward = _forward_of(kind.forward)
        yield
    finally:
        rnn._VF = plain_functions
        for function, code in zip(functions, codes, strict=True):
            function.__code__ = code
        for kind, forward in zip(LAYERS, forwards, strict=True):
            kind.forward = forward
        globals_of_functions.pop("_zdp_bench_pack", None)
        globals_of_functions.pop("_zdp_bench_unpack", None)


class _Functions:
    """A replacement for `torch._VF`, whose recurrent functions are operations with rules."""

    def __getattr__(self, name: str) -> Any:
        if name in RECURRENT:
            return getattr(torch.ops.zdp_bench, name)
        return CELLS.get(name) or getattr(torch._VF, name)


def _lstm_cell(
    x: Tensor,
    states: Any,
    x_weight: Tensor,
    h_weight: Tensor,
    x_bias: Any = None,
    h_bias: Any = None,
) -> tuple[Tensor, Tensor]:
    h, c = states
    gates = F.linear(x, x_weight, x_bias) + F.linear(h, h_weight, h_bias)
    i, f, g, o = gates.chunk(4, dim=1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(
    x: Tensor,
    h: Tensor,
    x_weight: Tensor,
    h_weight: Tensor,
    x_bias: Any = None,
    h_bias: Any = None,
) -> Tensor:
    r_x, z_x, n_x = F.linear(x, x_weight, x_bias).chunk(3, dim=1)
    r_h, z_h, n_h = F.linear(h, h_weight, h_bias).chunk(3, dim=1)
    r = (r_x + r_h).sigmoid()
    z = (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    return n + z * (h - n)


CELLS = {"lstm_cell": _lstm_cell, "gru_cell": _gru_cell}


class _Lengths:
    """The lengths of a batch's sequences, as the `batch_sizes` of a packed sequence."""

    device = torch.device("cpu")

    def __init__(self, lengths: Tensor, longest: int) -> None:
        self.lengths = lengths
        self.longest = longest  # T

    def pad(self, rows: Tensor) -> Tensor:
        """Return rows [B · T, ...] as sequences [B, T, ...]."""
        return rows.unflatten(0, (self.lengths.shape[0], self.longest))


# The code of torch's two functions while a model is recorded. Globals are those of their module.


def _pack_code(input, lengths, batch_first=False, enforce_sorted=True):  # type: ignore[no-untyped-def]
    return _zdp_bench_pack(input, lengths, batch_first)  # noqa: F821


def _unpack_code(sequence, batch_first=False, padding_value=0.0, total_length=None):  # type: ignore[no-untyped-def]
    return _zdp_bench_unpack(sequence, batch_first, padding_value, total_length)  # noqa: F821


def _pack(x: Tensor, lengths: Any, batch_first: bool) -> PackedSequence:
    """Return a packed sequence that contains the rows of the padded one, [B · T, ...]."""
    if not isinstance(lengths, Tensor):
        raise Alone("pack_padded_sequence takes its lengths from Python numbers: pass a tensor")
    sequences = x if batch_first else x.transpose(0, 1)
    batch_sizes: Any = _Lengths(lengths, sequences.shape[1])
    return PackedSequence(sequences.flatten(0, 1), batch_sizes, None, None)


def _unpack(
    packed: Any,
    batch_first: bool,
    padding: float,
    length: int | None,
) -> Any:
    """Return the padded sequence that a packed one contains, and its lengths."""
    if length is None:
        raise Alone(
            "pad_packed_sequence pads to the longest sequence of the batch: pass "
            "total_length=x.shape[1] to process examples together"
        )
    lengths = packed.batch_sizes.lengths
    if length != packed.batch_sizes.longest:
        raise Alone("pad_packed_sequence pads to another length")
    sequences = packed.batch_sizes.pad(packed.data)
    times = torch.arange(length, device=sequences.device)
    is_padding = times >= lengths.to(sequences.device).unsqueeze(1)  # [B, T]
    while is_padding.dim() < sequences.dim():
        is_padding = is_padding.unsqueeze(-1)
    padded = sequences.masked_fill(is_padding, padding)
    return padded if batch_first else padded.transpose(0, 1), lengths


def _forward_of(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recurrent layer's forward function, extended to record packed sequences."""

    def forward(
        layer: nn.RNNBase,
        x: Any,
        hx: Any = None,
    ) -> Any:
        if isinstance(x, PackedSequence) and isinstance(x.batch_sizes, _Lengths):
            return _record_packed(layer, x, hx)
        return plain(layer, x, hx)

    return forward


def _record_packed(
    layer: nn.RNNBase,
    packed: Any,
    states: Any,
) -> Any:
    """Record a recurrent layer on a packed sequence, and return its output and last states."""
    sequences, lengths = packed.batch_sizes.pad(packed.data), packed.batch_sizes.lengths
    if layer.proj_size:
        raise Alone("a recurrent layer with a projection is called on packed sequences")
    kind = layer.mode.lower()
    if states is None:
        levels = layer.num_layers * (1 + layer.bidirectional)
        zeros = sequences.new_zeros(levels, sequences.shape[0], layer.hidden_size)
        states = (zeros, zeros) if kind == "lstm" else zeros
    layer._update_flat_weights()
    run = getattr(torch.ops.zdp_bench, f"packed_{kind}")
    output, *last = run(
        sequences,
        lengths,
        states,
        layer._flat_weights,
        layer.bias,
        layer.num_layers,
        layer.dropout,
        layer.training,
        layer.bidirectional,
    )
    result = PackedSequence(output.flatten(0, 1), packed.batch_sizes, None, None)
    return result, tuple(last) if kind == "lstm" else last[0]


# ----------------------------------------------------------------------------------------- running


def is_recurrent(node: Node) -> bool:
    """Return True for a recurrent operation of this package."""
    is_of_package = getattr(node.target, "namespace", "") == "zdp_bench"
    return is_of_package and name_of(node) in (*RECURRENT, *PACKED)


def run_plain(node: Node) -> None:
    """Replace a recorded operation by torch's own."""
    name = name_of(node)
    if name in RECURRENT:
        node.target = getattr(torch._VF, name)
    else:
        node.target = _run_packed
        node.args = (name.removeprefix("packed_"), *node.args)


def _run_packed(
    kind: str,
    x: Tensor,
    lengths: Tensor,
    states: Any,
    *options: Any,
) -> Any:
    packed: Any = pack(x, lengths)
    sorted_states: Any = [state.index_select(1, packed.sorted_indices) for state in _list(states)]
    if kind != "lstm":
        (sorted_states,) = sorted_states
    run = getattr(torch._VF, kind)
    data, *last = run(packed.data, packed.batch_sizes, sorted_states, *options)
    last = [state.index_select(1, packed.unsorted_indices) for state in last]
    output = unpack(PackedSequence(data, *packed[1:]), x.shape[1])
    return output, *last


def pack(x: Tensor, lengths: Tensor) -> PackedSequence:
    """Return sequences [B, T, *] as a packed sequence with these lengths."""
    return pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)


def unpack(packed: PackedSequence, length: int) -> Tensor:
    """Return the sequences of a packed one, [B, length, *], padded with zeros."""
    return pad_packed_sequence(packed, batch_first=True, total_length=length)[0]


def make_layer(
    kind: str,
    inputs: int,
    weights: list[nn.Parameter],
    bias: bool,
    levels: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> nn.RNNBase:
    """Return the recurrent layer that is equivalent to an operation, with the operation's weights.

    Args:
        kind: lstm, gru, rnn_tanh or rnn_relu.
        inputs: number of features of the sequences.
        weights: weights as `torch.lstm` takes them. Other arguments are its options.

    Raises:
        NoRule: the layer has a projection.
    """
    weights_of_level = 4 if bias else 2
    if len(weights) != levels * (1 + bidirectional) * weights_of_level:
        raise NoRule("a recurrent layer with a projection")
    types: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU}
    more: dict[str, Any] = {}
    if kind not in types:
        more["nonlinearity"] = kind.removeprefix("rnn_")
    layer: nn.RNNBase = types.get(kind, nn.RNN)(
        inputs,
        weights[1].shape[1],
        levels,
        bias=bias,
        dropout=dropout,
        bidirectional=bidirectional,
        batch_first=batch_first,
        device="meta",
        **more,
    )
    layer.train(training)
    names = [name for level in layer._all_weights for name in level]
    layer._parameters.update(zip(names, weights, strict=True))
    return layer
