"""U-Net (Ronneberger et al. 2015), complex or real, without norms: widths doubling from `width`, 2×2 pooling, 2×2 transposed
convolutions, a skip connection at every level. fastMRI's form averages where the original takes the maximum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.nn.activations import activation as make_activation
from zdp_bench.nn.convolution import ComplexConv2d, ComplexConvTranspose2d
from zdp_bench.nn.pooling import ComplexAvgPool2d
from zdp_bench.registry import register


class UNet(nn.Module):
    """Shapes: [B, C, H, W] -> [B, outputs, H, W]; complex weights answer with |z|. H and W divide by 2^depth."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        width: int,
        depth: int,
        activation: str,
        dtype: torch.dtype,
        pool: type[nn.Module] = nn.AvgPool2d,
    ) -> None:
        super().__init__()
        images, height, wide = input_shape
        require(height % 2**depth == 0 == wide % 2**depth, "model.depth", depth, f"{height}×{wide} does not divide by 2^depth")
        conv, transposed = (ComplexConv2d, ComplexConvTranspose2d) if dtype.is_complex else (nn.Conv2d, nn.ConvTranspose2d)

        def block(inside: int, out: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for channels in (inside, out):
                layers += [conv(channels, out, 3, padding=1, dtype=dtype), make_activation(activation, out)]
            return nn.Sequential(*layers)

        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(block(a, b) for a, b in zip([images, *widths[:-1]], widths, strict=True))
        self.pool = ComplexAvgPool2d(2) if dtype.is_complex else pool(2)
        self.up = nn.ModuleList(transposed(2 * w, w, 2, 2, dtype=dtype) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(block(2 * w, w) for w in reversed(widths[:-1]))
        self.last = conv(width, outputs, 1, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.dtype)
        skipped: list[Tensor] = []
        for level, block in enumerate(self.down):
            y = block(self.pool(y) if level else y)
            skipped.append(y)
        skipped.pop()
        for up, join in zip(self.up, self.join, strict=True):
            y = join(torch.cat([up(y), skipped.pop()], dim=1))
        y = self.last(y)
        return y.abs() if y.is_complex() else y


@register("model", "complex_unet")
def complex_unet(
    input_shape: tuple[int, ...], outputs: int, *, width: int = 32, depth: int = 4, activation: str = "crelu"
) -> UNet:
    """A complex U-Net; 32 channels and depth 4 make 7.8 million complex parameters."""
    return UNet(input_shape, outputs, width, depth, activation, torch.complex64)


@register("model", "real_unet")
def real_unet(input_shape: tuple[int, ...], outputs: int, *, width: int = 32, depth: int = 4, activation: str = "relu") -> UNet:
    """The same U-Net with real weights."""
    return UNet(input_shape, outputs, width, depth, activation, torch.float32)


@register("model", "transposed_unet")
def transposed_unet(input_shape: tuple[int, ...], outputs: int, *, width: int = 64, depth: int = 4) -> UNet:
    """The original U-Net, convolutions padded: Ziller et al. 2021 (deepee) show transposed convolutions with it."""
    return UNet(input_shape, outputs, width, depth, "relu", torch.float32, nn.MaxPool2d)
