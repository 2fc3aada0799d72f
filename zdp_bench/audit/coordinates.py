"""A mechanism's blocks as one real vector, and worst-case contributions in it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from zdp_bench.privacy.mechanism import Block, Mechanism


class Coordinates:
    """Maps a mechanism's blocks to one real vector and back, isometrically.

    A canary of norm C in the vector is a contribution of norm C. A complex entry is two
    coordinates. A block with hermitian noise becomes the real signal whose spectrum it is: only
    such spectra can occur.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.blocks = mechanism.blocks
        self.sizes = [math.prod(b.shape) * (2 if self._two_parts(b) else 1) for b in self.blocks]
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.size = sum(self.sizes)

    @staticmethod
    def _two_parts(block: Block) -> bool:
        return block.dtype.startswith("complex") and block.noise != "hermitian"

    def of(self, sums: dict[str, Tensor]) -> Tensor:
        """Return the vector of the blocks' tensors, [size]."""
        return torch.cat([self._of_block(block, sums[block.name]) for block in self.blocks])

    def _of_block(self, block: Block, value: Tensor) -> Tensor:
        if block.noise == "hermitian":
            return torch.fft.ifftn(value, dim=block.fft_dims, norm="ortho").real.flatten()
        return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).flatten()

    def add(self, vector: Tensor, to: dict[str, Tensor]) -> None:
        """Add a vector, [size], to the blocks' tensors."""
        for block, start, size in zip(self.blocks, self.starts, self.sizes, strict=True):
            # A copy: torch may crash on a complex view of memory that is not aligned for it.
            part = vector[start : start + size].to(to[block.name].real.dtype, copy=True)
            if block.noise == "hermitian":
                to[block.name] += torch.fft.fftn(
                    part.view(block.shape), dim=block.fft_dims, norm="ortho"
                )
            elif self._two_parts(block):
                to[block.name] += torch.view_as_complex(part.view(*block.shape, 2))
            else:
                to[block.name] += part.view(block.shape)

    def kinds(self) -> np.ndarray:
        """Number the coordinates by block and part, [size]: those of one number should get the same
        noise.
        """
        return np.concatenate(
            [
                2 * i + np.arange(size) % (2 if self._two_parts(block) else 1)
                for i, (block, size) in enumerate(zip(self.blocks, self.sizes, strict=True))
            ]
        )


def canary_supports(
    mechanism: Mechanism,
    coordinates: Coordinates,
    canaries: int,
    width: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw worst-case contributions with no coordinate in common, which makes them orthogonal.

    Each has exactly the mechanism's bound: a joint bound over all blocks together, else in every
    block that is large enough for all canaries.

    Returns:
        indices and values, each [canaries, width].
    """
    if mechanism.joint:
        groups = [(0, coordinates.size, mechanism.blocks[0].bound)]
    else:
        groups = [
            (start, size, block.bound)
            for block, start, size in zip(
                coordinates.blocks, coordinates.starts, coordinates.sizes, strict=True
            )
            if size >= canaries
        ]
    indices, values = [], []
    for start, size, bound in groups:
        wide = max(1, min(width, size // canaries))
        chosen = rng.permutation(size)[: canaries * wide].reshape(canaries, wide)
        indices.append(start + chosen)
        values.append(rng.choice([-1.0, 1.0], size=chosen.shape) * bound / math.sqrt(wide))
    return np.concatenate(indices, axis=1), np.concatenate(values, axis=1)
