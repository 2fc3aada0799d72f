"""The token of a step's batch in your own loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from zdp_bench.errors import UserError


@dataclass(frozen=True, eq=False)
class Batch:
    """A token for the batch of one step, whose examples `Private.step` draws.

    It gives no access to the examples or to their number, because both are private.

    Attributes:
        number: Index of the step, from 0.
    """

    number: int

    def __getitem__(self, _: Any) -> NoReturn:
        """Explain why there are no examples to index or, as in `x, y = batch`, to unpack."""
        raise UserError(
            "a batch cannot be unpacked or indexed, because its examples and their number are "
            "private: call private.step(batch), which draws them and takes the step."
        )
