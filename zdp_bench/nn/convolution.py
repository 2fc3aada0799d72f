"""Complex convolutions that cost about as much as real ones.

Modules have complex `weight` and `bias` in torch's own shapes. Inside is ONE real convolution over
interleaved real and imaginary channels (`memory_format.py`), its weight expanded to
[[Wr, −Wi], [Wi, Wr]].
PyTorch's native complex convolution makes three or four real ones and several copies, and takes 6
to 8 times as long as its real twin where this takes 1 to 3.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zdp_bench.nn.memory_format import as_complex_channels, as_real_channels, channels_last

Size = int | tuple[int, ...]


class ConvArguments(NamedTuple):
    """A convolution's numbers, one for each spatial dimension, in the order of aten's arguments."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def interleaved_weight(weight: Tensor, transposed: bool) -> Tensor:
    """Expand a complex weight [O, C, *k] to the real one of interleaved channels, [2O, 2C, *k].

    It is channels-last in memory. A row of real numbers (Wr, −Wi) is W̄ as a complex number, and the
    row below it, (Wi, Wr), is i·W̄. A transposed convolution's weight is [in, out, *k], and its
    blocks are transposed with it: W and i·W.
    """
    first = weight if transposed else weight.conj()
    channels_end = first.movedim(1, -1)  # [O, *k, C]
    rows = weight.new_empty(len(weight), 2, *channels_end.shape[1:])
    rows[:, 0] = channels_end
    rows[:, 1] = rows[:, 0] * 1j
    reals = torch.view_as_real(rows)  # [O, 2, *k, C, 2]
    return reals.flatten(-2).flatten(0, 1).movedim(-1, 1)


def folded_gradient(real: Tensor, transposed: bool) -> Tensor:
    """Turn the interleaved weight's gradient, [*, 2O, 2C, k], into the complex one's, [*, O, C, k].

    k is flattened. For a real gradient M, Re G = M[re, re] + M[im, im] and
    Im G = M[im, re] − M[re, im], the first index for the output gradient and the second for the
    input: PyTorch's `.grad`, with the input conjugated. A transposed convolution's input is first.
    """
    m = real.unflatten(-2, (-1, 2)).unflatten(-4, (-1, 2))  # [*, O, (re, im), C, (re, im), k]
    of_re, of_im = m.unbind(-4)
    re_re, re_im = of_re.unbind(-2)
    im_re, im_im = of_im.unbind(-2)
    sign = -1 if transposed else 1
    return torch.complex(re_re + im_im, sign * (im_re - re_im))


class _Convolve(torch.autograd.Function):
    """Complex convolution by a real one, with a backward of its own.

    PyTorch's would copy the output gradient twice more, out of its interleaved order and back.
    """

    generate_vmap_rule = True  # so that torch.func's vmap(grad), the reference, goes through it

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arguments: ConvArguments,
    ) -> Tensor:
        real_bias = None if bias is None else torch.view_as_real(bias).flatten()
        real_weight = interleaved_weight(weight, arguments.transposed)
        channels = as_real_channels(channels_last(x))
        y = torch.convolution(channels, real_weight, real_bias, *arguments)
        # under autocast y is half precision; complex numbers stay whole
        return as_complex_channels(y.to(real_weight.dtype))

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Tensor, Tensor, Tensor | None, ConvArguments],
        output: Tensor,
    ) -> None:
        x, weight, bias, ctx.arguments = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        arguments: ConvArguments = ctx.arguments
        to_input, to_weight, to_bias, _ = ctx.needs_input_grad
        wanted = to_input, to_weight
        of_input, of_weight = _interleaved_gradients(x, g, weight, wanted, arguments)
        of_bias = None
        if to_bias and ctx.has_bias:
            of_bias = g.flatten(2).sum(dim=(0, 2))
        return of_input, of_weight, of_bias, None


class _ConvolvePlainly(torch.autograd.Function):
    """The same outside of torch's transforms, where `setup_context` would only cost time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y = _Convolve.forward(*inputs)
        _Convolve.setup_context(ctx, inputs, y)
        return y

    backward = _Convolve.backward


def _interleaved_gradients(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    wanted: tuple[bool, bool],
    arguments: ConvArguments,
) -> tuple[Tensor | None, Tensor | None]:
    """Of input and weight, those `wanted`, by the gradients of the real convolution."""
    if not any(wanted):
        return None, None
    x = as_real_channels(channels_last(x))
    g = as_real_channels(channels_last(g))
    real_weight = interleaved_weight(weight, arguments.transposed)
    # torch's slow kernel: of a map of one pixel no layout can be told
    if x.dtype != torch.float32 or x.is_contiguous():
        x = x.clone(memory_format=torch.contiguous_format)
        g = g.clone(memory_format=torch.contiguous_format)
        real_weight = real_weight.clone(memory_format=torch.contiguous_format)
    of_input, of_weight, _ = torch.ops.aten.convolution_backward(
        g,
        x,
        real_weight,
        None,
        *arguments,
        [*wanted, False],
    )
    if of_input is not None:
        of_input = as_complex_channels(of_input)
    if of_weight is not None:
        folded = folded_gradient(of_weight.flatten(2), arguments.transposed)
        of_weight = folded.view_as(weight)
    return of_input, of_weight


class _Convolution(nn.Module):
    """Parameters, initialisation and forward pass of the complex convolutions."""

    spatial: int  # how many dimensions follow the channels
    transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        output_padding: Size = 0,
        dtype: torch.dtype = torch.complex64,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not dtype.is_complex:
            raise ValueError(
                f"{type(self).__name__} is complex, not {dtype}: "
                "use torch.nn's layer for real weights"
            )
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{in_channels} and {out_channels} channels do not divide into {groups} groups"
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride = self._each(kernel_size), self._each(stride)
        self.padding, self.dilation = self._each(padding), self._each(dilation)
        self.output_padding = self._each(output_padding)
        first, second = out_channels, in_channels
        if self.transposed:
            first, second = in_channels, out_channels
        shape = (first, second // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        empty = torch.empty(out_channels, dtype=dtype, device=device)
        self.bias = nn.Parameter(empty) if bias else None
        self.reset_parameters()

    def _each(self, size: Size) -> tuple[int, ...]:
        return (size,) * self.spatial if isinstance(size, int) else tuple(size)

    def reset_parameters(self) -> None:
        """PyTorch's own: each part of weight and bias uniform on ±1/√fan_in."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        with torch.no_grad():
            for parameter in self.parameters(recurse=False):
                torch.view_as_real(parameter).uniform_(-bound, bound)

    def extra_repr(self) -> str:
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        return f"{sizes}, stride={self.stride}"

    def forward(self, x: Tensor) -> Tensor:
        """Complex [B, C, *] -> complex [B, O, *], channels-last in memory."""
        return self._conv_forward(x, self.weight, self.bias)

    def _conv_forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Convolve with a given weight, as torch's layers of the same name for it do."""
        inside = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        function = _Convolve if inside else _ConvolvePlainly
        return function.apply(x, weight, bias, self.arguments)

    @property
    def arguments(self) -> ConvArguments:
        """What the convolution of interleaved channels is called with."""
        sizes = self.stride, self.padding, self.dilation
        return ConvArguments(*sizes, self.transposed, self.output_padding, self.groups)


class ComplexConv1d(_Convolution):
    """Complex [B, C, L] -> [B, O, L']. Arguments as in torch.nn.Conv1d."""

    spatial = 1


class ComplexConv2d(_Convolution):
    """Complex [B, C, H, W] -> [B, O, H', W']. Arguments as in torch.nn.Conv2d."""

    spatial = 2


class ComplexConv3d(_Convolution):
    """Complex [B, C, D, H, W] -> [B, O, D', H', W']. Arguments as in torch.nn.Conv3d."""

    spatial = 3


class ComplexConvTranspose2d(_Convolution):
    """Complex [B, C, H, W] -> [B, O, H', W'].

    Arguments as in torch.nn.ConvTranspose2d; `output_padding` by name.
    """

    spatial = 2
    transposed = True
