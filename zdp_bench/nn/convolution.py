"""Complex convolutions that cost about as much as real ones.

Modules have a complex `weight` and `bias` in the shapes of `torch.nn`. They compute ONE real
convolution over interleaved real and imaginary channels (`memory_format.py`), with the weight
expanded to [[Wr, −Wi], [Wi, Wr]]. PyTorch's native complex convolution computes three or four real
convolutions and several copies: it takes 6 to 8 times as long as the real convolution, where this
one takes 1 to 3 times as long.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn

from zdp_bench.nn.memory_format import as_complex_channels, as_real_channels, channels_last

Size = int | tuple[int, ...]


class ConvArguments(NamedTuple):
    """Arguments of a convolution, one value per spatial dimension, in the order of `aten`."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def interleaved_weight(weight: Tensor, transposed: bool) -> Tensor:
    """Expand a complex weight [O, C, *k] to the real weight of interleaved channels, [2O, 2C, *k].

    The result is channels-last in memory. A row (Wr, −Wi) of real numbers is the complex number W̄,
    and the row below it, (Wi, Wr), is i·W̄. The weight of a transposed convolution is
    [in, out, *k], so its blocks are transposed too: the rows are W and i·W.
    """
    first = weight if transposed else weight.conj()
    channels_end = first.movedim(1, -1)  # [O, *k, C]
    rows = weight.new_empty(len(weight), 2, *channels_end.shape[1:])
    rows[:, 0] = channels_end
    rows[:, 1] = rows[:, 0] * 1j
    reals = torch.view_as_real(rows)  # [O, 2, *k, C, 2]
    return reals.flatten(-2).flatten(0, 1).movedim(-1, 1)


def folded_gradient(real: Tensor, transposed: bool) -> Tensor:
    """Convert the gradient of the interleaved weight, [*, 2O, 2C, k], to the complex [*, O, C, k].

    The kernel's dimensions are flattened to k. For the real gradient M,
    Re G = M[re, re] + M[im, im] and Im G = M[im, re] − M[re, im]. The first index is that of the
    output gradient and the second that of the input; for a transposed convolution, it is the other
    way around. This is the convention of PyTorch's `.grad`, which conjugates the input.
    """
    m = real.unflatten(-2, (-1, 2)).unflatten(-4, (-1, 2))  # [*, O, (re, im), C, (re, im), k]
    of_re, of_im = m.unbind(-4)
    re_re, re_im = of_re.unbind(-2)
    im_re, im_im = of_im.unbind(-2)
    sign = -1 if transposed else 1
    return torch.complex(re_re + im_im, sign * (im_re - re_im))


class _Convolve(torch.autograd.Function):
    """A complex convolution by a real one.

    It has its own backward, because PyTorch's would copy the output gradient twice more: out of the
    interleaved order and back.
    """

    generate_vmap_rule = True  # for `torch.func`'s vmap(grad), which computes the reference

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
        # Under autocast, y has half precision, which complex numbers do not have.
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
    """The same function without a separate `setup_context`, which only `torch.func` needs.

    It takes less time per call.
    """

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
    """Return the gradients of input and weight, by those of the real convolution.

    Args:
        x: input.
        g: gradient of the output.
        wanted: whether to compute the gradient of the input, and that of the weight.
    """
    if not any(wanted):
        return None, None
    x = as_real_channels(channels_last(x))
    g = as_real_channels(channels_last(g))
    real_weight = interleaved_weight(weight, arguments.transposed)
    # Contiguous copies are needed for torch's slow kernel, which other types use, and for maps with
    # an ambiguous layout, such as those of one pixel.
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

    spatial: int  # number of dimensions after the channels
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
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{in_channels} and {out_channels} channels do not divide into {groups} groups"
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = self._each("kernel_size", kernel_size, 1)
        self.stride = self._each("stride", stride, 1)
        self.padding = self._each("padding", padding, 0)
        self.dilation = self._each("dilation", dilation, 1)
        self.output_padding = self._each("output_padding", output_padding, 0)
        first, second = out_channels, in_channels
        if self.transposed:
            first, second = in_channels, out_channels
        shape = (first, second // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        empty = torch.empty(out_channels, dtype=dtype, device=device)
        self.bias = nn.Parameter(empty) if bias else None
        self.reset_parameters()

    def _each(self, name: str, size: Size, smallest: int) -> tuple[int, ...]:
        """Return an argument's value for each spatial dimension, from one value or several."""
        entries = (size,) * self.spatial if isinstance(size, SupportsIndex) else size
        try:
            sizes = tuple(index(entry) for entry in entries)  # NumPy's integers, too
        except TypeError:
            sizes = ()
        if len(sizes) == 1:  # as torch's (2,)
            sizes *= self.spatial
        if len(sizes) != self.spatial or min(sizes) < smallest:
            raise ValueError(
                f"{type(self).__name__}: {name}={size!r} must be an integer of at least "
                f"{smallest}, or {self.spatial} of them"
            )
        return sizes

    def reset_parameters(self) -> None:
        """Draw each part of weight and bias uniformly from ±1/√fan_in, as in PyTorch."""
        fan_in = math.prod(self.weight.shape[1:])
        bound = 1 / math.sqrt(max(1, fan_in))
        with torch.no_grad():
            for parameter in self.parameters(recurse=False):
                torch.view_as_real(parameter).uniform_(-bound, bound)

    def extra_repr(self) -> str:
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        return f"{sizes}, stride={self.stride}"

    def forward(self, x: Tensor) -> Tensor:
        """Convolve complex [B, C, *] to complex [B, O, *], which is channels-last in memory."""
        return self._conv_forward(x, self.weight, self.bias)

    def _conv_forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Convolve with the given weight and bias, like `_conv_forward` of torch's layers."""
        inside = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        function = _Convolve if inside else _ConvolvePlainly
        return function.apply(x, weight, bias, self.arguments)

    @property
    def arguments(self) -> ConvArguments:
        """Arguments of the convolution of interleaved channels."""
        sizes = self.stride, self.padding, self.dilation
        return ConvArguments(*sizes, self.transposed, self.output_padding, self.groups)


class ComplexConv1d(_Convolution):
    """A complex 1D convolution, [B, C, L] -> [B, O, L'].

    Arguments: as in `torch.nn.Conv1d`, with padding in numbers and without `padding_mode`.
    """

    spatial = 1


class ComplexConv2d(_Convolution):
    """A complex 2D convolution, [B, C, H, W] -> [B, O, H', W'].

    Arguments: as in `torch.nn.Conv2d`, with padding in numbers and without `padding_mode`.
    """

    spatial = 2


class ComplexConv3d(_Convolution):
    """A complex 3D convolution, [B, C, D, H, W] -> [B, O, D', H', W'].

    Arguments: as in `torch.nn.Conv3d`, with padding in numbers and without `padding_mode`.
    """

    spatial = 3


class ComplexConvTranspose2d(_Convolution):
    """A complex transposed 2D convolution, [B, C, H, W] -> [B, O, H', W'].

    Arguments: see `torch.nn.ConvTranspose2d`, which has them in this order too.
    """

    spatial = 2
    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        **options: Any,
    ) -> None:
        sizes = kernel_size, stride, padding, dilation
        options["output_padding"] = output_padding
        super().__init__(in_channels, out_channels, *sizes, groups, bias, **options)
