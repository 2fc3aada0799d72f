"""A mechanism's blocks as one real vector, and worst-case contributions in it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from zdp_bench.privacy.mechanism import Block, Mechanism


class Coordinates:
    """A mechanism's blocks as one real vector, isometrically: a canary of norm C there is a contribution of norm C.

    A complex entry is two coordinates. A block with hermitian noise is taken back to the real signal whose spectrum it is: only
    such spectra can occur in it.
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
        """The blocks' tensors -> [size]."""
        return torch.cat([self._of_block(block, sums[block.name]) for block in self.blocks])

    def _of_block(self, block: Block, value: Tensor) -> Tensor:
        if block.noise == "hermitian":
            return torch.fft.ifftn(value, dim=block.fft_dims, norm="ortho").real.flatten()
        return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).flatten()

    def add(self, vector: Tensor, to: dict[str, Tensor]) -> None:
        """[size] -> added to the blocks' tensors."""
        for block, start, size in zip(self.blocks, self.starts, self.sizes, strict=True):
            # a copy of its own: torch may crash on a complex view of memory that is not aligned for complex numbers
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
        """[size] numbers: coordinates that should get the same noise, by block and by part, have the same one."""
        numbers = []
        for i, (block, size) in enumerate(zip(self.blocks, self.sizes, strict=True)):
            numbers.append(
                2 * i
                + (np.arange(size) % 2 if self._two_parts(block) else np.zeros(size, dtype=int))
            )
        return np.concatenate(numbers)


def canary_supports(
    mechanism: Mechanism,
    coordinates: Coordinates,
    canaries: int,
    width: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Worst-case contributions with no coordinate in common, hence orthogonal: indices and values, each [canaries, width].

    Each has exactly the mechanism's bound: under a joint bound over all blocks together, else in every block that has room for
    all canaries.
    """
    groups = (
        [(0, coordinates.size, mechanism.blocks[0].bound)]
        if mechanism.joint
        else [
            (start, size, block.bound)
            for block, start, size in zip(
                coordinates.blocks, coordinates.starts, coordinates.sizes, strict=True
            )
            if size >= canaries
        ]
    )
    indices, values = [], []
    for start, size, bound in groups:
        wide = max(1, min(width, size // canaries))
        chosen = rng.permutation(size)[: canaries * wide].reshape(canaries, wide)
        indices.append(start + chosen)
        values.append(rng.choice([-1.0, 1.0], size=chosen.shape) * bound / math.sqrt(wide))
    return np.concatenate(indices, axis=1), np.concatenate(values, axis=1)
