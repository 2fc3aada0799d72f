"""Complex convolutions that cost about as much as real ones.

Outside: modules with complex `weight` and `bias`, in torch's own shapes. Inside: ONE real convolution over interleaved real and
imaginary channels (`layout.py`), its weight expanded to [[Wr, −Wi], [Wi, Wr]]. PyTorch's native complex convolution makes
three or four real ones and several copies: 6 to 8 times its real twin where this is 1 to 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.nn.layout import as_complex_channels, as_real_channels, channels_last

Size = int | tuple[int, ...]


def interleaved_weight(weight: Tensor, transposed: bool = False) -> Tensor:
    """Complex [O, C, *k] -> real [2O, 2C, *k], whose convolution of interleaved channels is the complex convolution.

    A transposed convolution's weight is [in, out, *k], and its blocks are transposed with it.
    """
    real, imaginary = weight.real, weight.imag
    off = (imaginary, -imaginary) if transposed else (-imaginary, imaginary)
    rows = torch.stack([torch.stack([real, off[0]], dim=2), torch.stack([off[1], real], dim=2)], dim=1)  # [O, 2, C, 2, *k]
    return rows.flatten(2, 3).flatten(0, 1)


class _Convolution(nn.Module):
    """What the complex convolutions share: parameters, initialisation, and the passage to reals and back."""

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
            raise ValueError(f"{type(self).__name__} is complex, not {dtype}: use torch.nn's layer for real weights")
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"{in_channels} and {out_channels} channels do not divide into {groups} groups")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride = self._each(kernel_size), self._each(stride)
        self.padding, self.dilation = self._each(padding), self._each(dilation)
        self.output_padding = self._each(output_padding)
        first, second = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        shape = (first, second // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_channels, dtype=dtype, device=device)) if bias else None
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
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"

    def forward(self, x: Tensor) -> Tensor:
        """Complex [B, C, *] -> complex [B, O, *], channels-last in memory."""
        bias = None if self.bias is None else torch.view_as_real(self.bias).flatten()
        weight = interleaved_weight(self.weight, self.transposed)
        flat = self.spatial == 1  # one dimension goes as two: only those have a channels-last layout
        if flat:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        y = self._real(as_real_channels(channels_last(x)), channels_last(weight), bias)
        y = as_complex_channels(y.to(weight.dtype))  # under autocast y is half precision; complex numbers stay whole
        return y.squeeze(2) if flat else y

    def _real(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        lift = (lambda size, fill: (fill, *size)) if self.spatial == 1 else (lambda size, fill: size)
        stride, padding, dilation = lift(self.stride, 1), lift(self.padding, 0), lift(self.dilation, 1)
        convolve: Any
        if self.transposed:
            convolve = F.conv_transpose3d if self.spatial == 3 else F.conv_transpose2d
            return convolve(x, weight, bias, stride, padding, lift(self.output_padding, 0), self.groups, dilation)
        convolve = F.conv3d if self.spatial == 3 else F.conv2d
        return convolve(x, weight, bias, stride, padding, dilation, self.groups)


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
    """Complex [B, C, H, W] -> [B, O, H', W']. Arguments as in torch.nn.ConvTranspose2d; `output_padding` by name."""

    spatial = 2
    transposed = True
