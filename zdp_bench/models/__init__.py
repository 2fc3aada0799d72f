"""The networks by name for `model=NAME`, a family a file; and checks of the shapes they take."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge

from zdp_bench.errors import UserError

Width = Annotated[int, Ge(1)]


def image_shape(model: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width) of examples that must have all three."""
    if len(input_shape) != 3:
        raise UserError(
            f"model={model}: needs examples of shape [channels, height, width], but these are "
            f"{list(input_shape)}. Use a model that accepts them (complex_mlp, real_mlp; lenet5 "
            "and resnet20 for [height, width]) or another dataset."
        )
    channels, height, width = input_shape
    return channels, height, width
