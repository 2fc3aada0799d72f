"""The sum of a step's contributions, while examples are added to it."""

from __future__ import annotations

import torch
from torch import Tensor

from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import to_float64

# Largest number of examples whose sum may be in float32. Beyond it, rounding errors could let one
# example move the sum by more than its bound; see `Total`.
MAX_FLOAT32_EXAMPLES = 1024


class Total(dict[str, Tensor]):
    """The sum S, by block, while examples are added to it. A block is created on first use.

    The first summand may become the block itself (`gradients.add_up`), which saves a large model
    two passes over its memory. In float32, the rounding error of a sum of n examples is up to n/2²⁴
    of the largest, and one example more or less may change it. So a sum of more than
    `MAX_FLOAT32_EXAMPLES` examples is in float64.

    Args:
        mechanism: defines the blocks.
        device: where the blocks are created.
        is_float64: whether blocks are float64 or complex128. Default: the mechanism's dtypes.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        device: torch.device,
        is_float64: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = {block.name: block for block in mechanism.blocks}
        self.device = device
        self.is_float64 = is_float64

    def __missing__(self, name: str) -> Tensor:
        block = self.blocks[name]
        dtype: torch.dtype = getattr(torch, block.dtype)
        if self.is_float64:
            dtype = torch.complex128 if dtype.is_complex else torch.float64
        self[name] = torch.zeros(block.shape, dtype=dtype, device=self.device)
        return self[name]

    def to_float64(self) -> None:
        """Convert all blocks to float64 or complex128, and create later ones so."""
        self.is_float64 = True
        to_float64(self)

    def all_blocks(self) -> dict[str, Tensor]:
        """Return every block, in the mechanism's order. Unused blocks are zero."""
        return {name: self[name] for name in self.blocks}
