"""A harmonic block (Ulicny, Krylov & Dahyot 2018, arXiv:1812.03205) on complex images.

It has fixed cosines instead of a filter's pixels, and a trained weight for each. Each cosine's
response is scaled to the same power within its example: then no weight's gradient dominates the
others, and clipping and noise affect all alike.
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

EPS = 1e-12  # added to a response's mean square, so that a response of 0 stays 0


@register("model", "complex_harmonic")
class HarmonicFilter(nn.Module):
    """One complex harmonic block with a skip connection; 9×9 makes 80 complex parameters.

    It is |x + Σ wₖ·uₖ|, with uₖ the response of x to the k-th cosine over its root mean square.

    Shapes: [B, C, H, W] -> the same. An example of several slices, [B, slices, C, H, W], is
    computed slice by slice.

    The weights start at zero, so training starts from the input itself. Every cosine but the
    constant is used, of every channel: C·(size² − 1) weights per channel, and no bias. The image is
    mirrored at its edges.
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
        images, height, wide = image_shape("complex_harmonic", input_shape[-3:])
        require(size >= 3 and size % 2 == 1, "model.size", size, "must be an odd number from 3")
        rule = f"reaches beyond the mirrored edge of {height}×{wide}"
        require(min(height, wide) > size // 2, "model.size", size, rule)
        rule = f"{images} channels in, {outputs} out: it answers with what it gets"
        require(images == outputs, "model", "complex_harmonic", rule)
        self.register_buffer("cosines", cosines(size), persistent=False)
        self.mix = ComplexConv2d(images * (size**2 - 1), outputs, 1, bias=False)
        nn.init.zeros_(self.mix.weight)
        self.dtype = torch.complex64

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 5:
            return self(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        x = x.to(self.dtype)
        y: Tensor = self.mix(responses(x, self.cosines.to(x.real.dtype))) + x
        return y.abs()


def cosines(size: int) -> Tensor:
    """Return [size, size], row k the k-th vector of the orthonormal cosine transform (DCT-II)."""
    k = torch.arange(size).unsqueeze(1)
    position = torch.arange(size)
    angles = math.pi / size * (position + 0.5) * k
    vectors = torch.cos(angles) * math.sqrt(2 / size)
    vectors[0] /= math.sqrt(2)
    return vectors


def responses(x: Tensor, vectors: Tensor) -> Tensor:
    """Correlate x with every product of two of the vectors [n, n] but the first with itself.

    Each response is scaled to mean square 1. Real and imaginary part are correlated alike, rows
    first and then columns.

    Shapes: complex [B, C, H, W] -> complex [B, C·(n² − 1), H, W].
    """
    size = len(vectors)
    edge = size // 2
    parts = torch.view_as_real(x.resolve_conj()).movedim(-1, 2)  # [B, C, 2, H, W]
    padded = F.pad(parts.flatten(0, 1), (edge, edge, edge, edge), mode="reflect")
    planes = padded.flatten(0, 1).unsqueeze(1)
    columns = vectors.view(size, 1, size, 1)
    rows = vectors.view(size, 1, 1, size)
    down = F.conv2d(planes, columns)  # [B·C·2, n, H, W + 2·edge]
    both = F.conv2d(down.flatten(0, 1).unsqueeze(1), rows)  # [B·C·2·n, n, H, W]
    by_pair = both.to(parts.dtype).unflatten(0, (*x.shape[:2], 2, size))
    each = by_pair.flatten(3, 4)[:, :, :, 1:]  # [B, C, 2, n² − 1, H, W]
    squares = each.square().sum(dim=2, keepdim=True)
    power = squares.mean(dim=(-2, -1), keepdim=True)
    even = each / (power + EPS).sqrt()
    return as_complex_channels(even.movedim(2, 3).flatten(1, 3))
