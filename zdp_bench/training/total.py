"""The sum of a step's contributions, while it is being made."""

from __future__ import annotations

import torch
from torch import Tensor

from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import widen


class Total(dict[str, Tensor]):
    """S while examples are added to it; a block is made when it is first used.

    What is added first may become the block itself (`gradients.add_up`), which saves a large model
    two passes over its memory. In float32 the sum of n examples is rounded by up to n/2²⁴ of the
    largest, which one example more or less may shift: beyond `batches.MICRO_BATCH` it is wide.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        device: torch.device,
        is_wide: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = {block.name: block for block in mechanism.blocks}
        self.device = device
        self.is_wide = is_wide

    def __missing__(self, name: str) -> Tensor:
        block = self.blocks[name]
        dtype: torch.dtype = getattr(torch, block.dtype)
        if self.is_wide:
            dtype = torch.complex128 if dtype.is_complex else torch.float64
        self[name] = torch.zeros(block.shape, dtype=dtype, device=self.device)
        return self[name]

    def widen(self) -> None:
        """Continue in float64."""
        self.is_wide = True
        widen(self)

    def whole(self) -> dict[str, Tensor]:
        """Return every block in the mechanism's order; those nothing was added to are zero."""
        return {name: self[name] for name in self.blocks}
