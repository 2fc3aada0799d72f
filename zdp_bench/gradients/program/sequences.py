"""Recurrent layers, which are recorded as operations of our own: sequences and packed sequences.

torch 2.11 records the last states of an LSTM in another shape than it computes them, and a packed
sequence, whose numbers lie as the lengths in the batch have it, not at all. Cells are recorded as
the products and gates that they are.
"""

from __future__ import annotations

from collections.abc import Iterator
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

_library = torch.library.Library("zdp_bench", "FRAGMENT")
_OPTIONS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, "
    "bool bidirectional"
)


def _recurrent(x: Tensor, hx: Any, *options: Any) -> Any:
    states = list(hx) if isinstance(hx, list | tuple) else [hx]
    directions = 2 if options[5] else 1
    width = states[0].shape[2] * directions
    if options[6]:  # batch_first; in memory, time comes first
        output = x.new_empty((x.shape[1], x.shape[0], width)).transpose(0, 1)
    else:
        output = x.new_empty((*x.shape[:2], width))
    return (output, *(torch.empty_like(state) for state in states))


def _packed(x: Tensor, lengths: Tensor, hx: Any, *options: Any) -> Any:
    return _recurrent(x, hx, *options, True)


for _kind in RECURRENT:
    _states = "Tensor[] hx" if _kind == "lstm" else "Tensor hx"
    _results = "(Tensor, Tensor, Tensor)" if _kind == "lstm" else "(Tensor, Tensor)"
    _library.define(f"{_kind}(Tensor input, {_states}, {_OPTIONS}, bool batch_first) -> {_results}")
    _library.define(
        f"packed_{_kind}(Tensor input, Tensor lengths, {_states}, {_OPTIONS}) -> {_results}"
    )
    torch.library.register_fake(f"zdp_bench::{_kind}", _recurrent, lib=_library)
    torch.library.register_fake(f"zdp_bench::packed_{_kind}", _packed, lib=_library)


# --------------------------------------------------------------------------------------- to record


class _Functions:
    """torch's functions of recurrent layers, as operations with rules."""

    def __getattr__(self, name: str) -> Any:
        if name in RECURRENT:
            return getattr(torch.ops.zdp_bench, name)
        return _CELLS.get(name) or getattr(torch._VF, name)


def _lstm_cell(
    x: Tensor, states: Any, of_x: Tensor, of_h: Tensor, b_x: Any = None, b_h: Any = None
) -> tuple[Tensor, Tensor]:
    h, c = states
    gates = F.linear(x, of_x, b_x) + F.linear(h, of_h, b_h)
    i, f, g, o = gates.chunk(4, dim=1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(
    x: Tensor, h: Tensor, of_x: Tensor, of_h: Tensor, b_x: Any = None, b_h: Any = None
) -> Tensor:
    r_x, z_x, n_x = F.linear(x, of_x, b_x).chunk(3, dim=1)
    r_h, z_h, n_h = F.linear(h, of_h, b_h).chunk(3, dim=1)
    z, n = (z_x + z_h).sigmoid(), (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return n + z * (h - n)


_CELLS = {"lstm_cell": _lstm_cell, "gru_cell": _gru_cell}


class _Lengths:
    """The lengths of a batch's sequences, in the place of a packed sequence's own numbers."""

    device = torch.device("cpu")

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths


def _pack(x: Tensor, lengths: Any, batch_first: bool) -> PackedSequence:
    """Return a packed sequence that holds the padded one, [B, T, ...]."""
    if not isinstance(lengths, Tensor):
        raise Alone("pack_padded_sequence takes its lengths from Python")
    rows = x if batch_first else x.transpose(0, 1)
    return PackedSequence(rows, _Lengths(lengths), None, None)  # type: ignore[arg-type]


def _unpack(packed: Any, batch_first: bool, padding: float, length: int | None) -> Any:
    if length is None:
        raise Alone(
            "pad_packed_sequence pads to the longest of a batch: with total_length=x.shape[1], "
            "examples would be processed together"
        )
    rows, lengths = packed.data, packed.batch_sizes.lengths
    if padding != 0.0 or length != rows.shape[1]:
        raise Alone("pad_packed_sequence pads in another way than the sequence was")
    return rows if batch_first else rows.transpose(0, 1), lengths


def _take_packed(layer: nn.RNNBase, packed: PackedSequence, hx: Any) -> Any:
    """Return what a recurrent layer makes of a packed sequence."""
    rows, lengths = packed.data, packed.batch_sizes.lengths  # type: ignore[attr-defined]
    if layer.proj_size:
        raise Alone("a recurrent layer with a projection takes packed sequences")
    kind = layer.mode.lower()
    if hx is None:
        levels = layer.num_layers * (1 + layer.bidirectional)
        zeros = rows.new_zeros(levels, rows.shape[0], layer.hidden_size)
        hx = (zeros, zeros) if kind == "lstm" else zeros
    layer._update_flat_weights()
    run = getattr(torch.ops.zdp_bench, f"packed_{kind}")
    options = layer.bias, layer.num_layers, layer.dropout, layer.training, layer.bidirectional
    output, *states = run(rows, lengths, hx, layer._flat_weights, *options)
    result = PackedSequence(output, packed.batch_sizes, None, None)
    return result, tuple(states) if kind == "lstm" else states[0]


def _forward_of(kind: type[nn.RNNBase]) -> Any:
    plain = kind.forward

    def forward(layer: nn.RNNBase, x: Any, hx: Any = None) -> Any:
        if isinstance(x, PackedSequence) and isinstance(x.batch_sizes, _Lengths):
            return _take_packed(layer, x, hx)
        return plain(layer, x, hx)

    return forward


def _pack_code(input, lengths, batch_first=False, enforce_sorted=True):  # type: ignore[no-untyped-def]
    return _zdp_bench_pack(input, lengths, batch_first)  # noqa: F821


def _pad_code(sequence, batch_first=False, padding_value=0.0, total_length=None):  # type: ignore[no-untyped-def]
    return _zdp_bench_unpack(sequence, batch_first, padding_value, total_length)  # noqa: F821


@contextmanager
def recurrent_layers() -> Iterator[None]:
    """Have recurrent layers, and the packing of sequences, recorded as our operations.

    A model holds torch's two packing functions by any name, so it is their code that is exchanged.
    """
    functions: Any = (pack_padded_sequence, pad_packed_sequence)
    kinds: Any = (nn.RNN, nn.LSTM, nn.GRU)
    held = rnn._VF, [of.__code__ for of in functions], [kind.forward for kind in kinds]
    names: Any = vars(packing)
    try:
        rnn._VF = _Functions()  # type: ignore[assignment]
        names.update(_zdp_bench_pack=_pack, _zdp_bench_unpack=_unpack)
        for function, code in zip(functions, (_pack_code, _pad_code), strict=True):
            function.__code__ = code.__code__
        for kind in kinds:
            kind.forward = _forward_of(kind)
        yield
    finally:
        rnn._VF, codes, forwards = held
        for function, code in zip(functions, codes, strict=True):
            function.__code__ = code
        for kind, forward in zip(kinds, forwards, strict=True):
            kind.forward = forward
        for name in ("_zdp_bench_pack", "_zdp_bench_unpack"):
            names.pop(name, None)


# ------------------------------------------------------------------------------------------ to run


def is_recurrent(node: Node) -> bool:
    """True for one of these operations."""
    of_ours = getattr(node.target, "namespace", "") == "zdp_bench"
    return of_ours and name_of(node) in (*RECURRENT, *PACKED)


def run_plain(node: Node) -> None:
    """Have a recorded operation run by torch."""
    name = name_of(node)
    if name in RECURRENT:
        node.target = getattr(torch._VF, name)
    else:
        node.target, node.args = _run_packed, (name.removeprefix("packed_"), *node.args)


def _run_packed(kind: str, x: Tensor, lengths: Tensor, hx: Any, *options: Any) -> Any:
    packed: Any = pack(x, lengths)
    states = [state.index_select(1, packed.sorted_indices) for state in _each(hx)]
    given = states if kind == "lstm" else states[0]
    data, *ends = getattr(torch._VF, kind)(packed.data, packed.batch_sizes, given, *options)
    ends = [end.index_select(1, packed.unsorted_indices) for end in ends]
    return unpack(PackedSequence(data, *packed[1:]), x.shape[1]), *ends


def _each(hx: Any) -> list[Tensor]:
    return [hx] if isinstance(hx, Tensor) else list(hx)


def pack(x: Tensor, lengths: Tensor) -> PackedSequence:
    """Return sequences [B, T, *] without what lies beyond their lengths."""
    return pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)


def unpack(packed: PackedSequence, length: int) -> Tensor:
    """Return sequences [B, length, *], with zeros beyond their lengths."""
    return pad_packed_sequence(packed, batch_first=True, total_length=length)[0]
