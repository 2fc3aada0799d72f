"""Block-circulant fully connected layers (Ding et al. 2017, CirCNN; GReDP eqs. 17 and 18).

A d×d block has d numbers instead of d². As in GReDP's eq. 18, `weight` holds each block's FIRST
ROW, and each further row is the one above it shifted right by one,

    W[r, s] = w[(s − r) mod d],   so   (W x)[r] = Σ_m w[m] x[(r + m) mod d].

This is a correlation: in the Fourier domain it is conj(ŵ)·x̂. (The paper's ŵ·x̂ is the product with
the transposed block.) If d does not divide a width, the input is zero-padded, the output cropped.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CirculantLinear(nn.Module):
    """Real [..., in_features] -> [..., out_features]: `x @ self.dense().T + bias`, by FFTs.

    Attributes:
        weight: [p, q, d], the first rows of p×q blocks; p = ⌈out_features/d⌉, q = ⌈in_features/d⌉.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block: int,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if block < 1:
            raise ValueError(f"a circulant block has at least one row, not {block}")
        self.in_features, self.out_features, self.block = in_features, out_features, block
        block_rows = -(-out_features // block)
        block_columns = -(-in_features // block)
        self.weight = nn.Parameter(torch.empty(block_rows, block_columns, block))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        bound = 1 / math.sqrt(in_features)  # as torch.nn.Linear
        with torch.no_grad():
            for parameter in self.parameters(recurse=False):
                parameter.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Two FFTs a block row and column, and one small matrix product a frequency."""
        rows = x.reshape(-1, self.in_features)  # [N, in]
        x_hat = torch.fft.rfft(in_blocks(rows, self.block))  # [N, q, d/2+1]
        w_hat = torch.fft.rfft(self.weight).conj()  # [p, q, d/2+1]
        y_hat = torch.bmm(x_hat.permute(2, 0, 1), w_hat.permute(2, 1, 0))  # [d/2+1, N, p]
        y = torch.fft.irfft(y_hat.permute(1, 2, 0), n=self.block)  # [N, p, d]
        cropped = y.flatten(1)[:, : self.out_features]
        y = cropped.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def dense(self) -> Tensor:
        """The matrix [out_features, in_features] this layer is."""
        place = torch.arange(self.block)
        lag = (place - place.unsqueeze(1)) % self.block  # [r, s] -> (s − r) mod d
        blocks = self.weight[:, :, lag].transpose(1, 2)  # [p, d, q, d]
        whole = blocks.flatten(2).flatten(0, 1)
        return whole[: self.out_features, : self.in_features]

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.out_features}, block={self.block}"
        return f"{sizes}, bias={self.bias is not None}"


def in_blocks(x: Tensor, block: int) -> Tensor:
    """[N, n] -> [N, ⌈n/block⌉, block], padded with zeros."""
    missing = -x.shape[-1] % block
    return F.pad(x, (0, missing)).unflatten(-1, (-1, block))
