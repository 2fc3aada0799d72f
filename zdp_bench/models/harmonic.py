"""A harmonic block (Ulicny, Krylov & Dahyot 2018, arXiv:1812.03205) on complex images.

A filter is a weighted sum of fixed cosines with trained weights. The response to each cosine is
scaled to the same power within its example. No weight's gradient then dominates the others, so that
clipping and noise affect all of them equally.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.models import image_shape
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.memory_format import as_complex_channels
from zdp_bench.registry import register

EPS = 1e-12  # added to the mean square of a response, so that a response of 0 stays 0


@register("model", "complex_harmonic")
class HarmonicFilter(nn.Module):
    """One complex harmonic block with a skip connection; size 9 gives 80 complex parameters.

    It returns |x + Σ wₖ·uₖ|, where uₖ is the response of x to the k-th cosine, divided by its root
    mean square.

    Shapes: [B, C, H, W] -> the same shape. Examples with several slices, [B, slices, C, H, W], are
    processed slice by slice.

    The weights start at zero, so that training starts from the input itself. All cosines but the
    constant one are used, of all channels: C·(size² − 1) weights per output channel, without bias.
    The image is mirrored at its edges.

    Args:
        size: rows and columns of a filter, an odd number from 3.
    """

    cosines: Tensor

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        size: int = 9,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape("complex_harmonic", input_shape[-3:])
        require(size >= 3 and size % 2 == 1, "model.size", size, "must be an odd number from 3")
        rule = f"reaches beyond the mirrored edge of {height}×{width}"
        require(min(height, width) > size // 2, "model.size", size, rule)
        rule = f"{channels} channels in, {outputs} out: both must be equal"
        require(channels == outputs, "model", "complex_harmonic", rule)
        self.register_buffer("cosines", cosines(size), persistent=False)
        self.mix = ComplexConv2d(channels * (size**2 - 1), outputs, 1, bias=False)
        nn.init.zeros_(self.mix.weight)
        self.dtype = torch.complex64

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 5:
            return self(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        x = x.to(self.dtype)
        y: Tensor = self.mix(responses(x, self.cosines.to(x.real.dtype))) + x
        return y.abs()


def cosines(size: int) -> Tensor:
    """Return the vectors of the orthonormal cosine transform (DCT-II) as rows, [size, size]."""
    k = torch.arange(size).unsqueeze(1)
    position = torch.arange(size)
    angles = math.pi / size * (position + 0.5) * k
    vectors = torch.cos(angles) * math.sqrt(2 / size)
    vectors[0] /= math.sqrt(2)
    return vectors


def responses(x: Tensor, vectors: Tensor) -> Tensor:
    """Correlate x with all products of two of the vectors [n, n], except the constant one.

    Each response is scaled to mean square 1. Real and imaginary part are correlated separately,
    first along columns and then along rows.

    Shapes: complex [B, C, H, W] -> complex [B, C·(n² − 1), H, W].
    """
    size = len(vectors)
    edge = size // 2
    parts = torch.view_as_real(x.resolve_conj()).movedim(-1, 2)  # [B, C, 2, H, W]
    padded = F.pad(parts.flatten(0, 1), (edge, edge, edge, edge), mode="reflect")
    planes = padded.flatten(0, 1).unsqueeze(1)
    columns = vectors.view(size, 1, size, 1)
    rows = vectors.view(size, 1, 1, size)
    along_columns = F.conv2d(planes, columns)  # [B·C·2, n, H, W + 2·edge]
    planes = along_columns.flatten(0, 1).unsqueeze(1)
    products = F.conv2d(planes, rows).to(parts.dtype)  # [B·C·2·n, n, H, W]
    by_product = products.unflatten(0, (*x.shape[:2], 2, size)).flatten(3, 4)
    without_constant = by_product[:, :, :, 1:]  # [B, C, 2, n² − 1, H, W]
    squares = without_constant.square().sum(dim=2, keepdim=True)
    power = squares.mean(dim=(-2, -1), keepdim=True)
    scaled = without_constant / (power + EPS).sqrt()
    return as_complex_channels(scaled.movedim(2, 3).flatten(1, 3))
