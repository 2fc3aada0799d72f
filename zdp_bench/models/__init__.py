"""The networks for `model=NAME`, one family per module, and checks of their input shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from zdp_bench.errors import UserError

Width = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class WeightsFile:
    """Marks a model's option as the path of a file, whose content then enters the run's digest.

    Attributes:
        names: values that are not paths, such as "untrained".
        max_bytes: size of the largest file that is read.
    """

    names: tuple[str, ...]
    max_bytes: int


def image_shape(model: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return an example's (channels, height, width); reject examples of another shape."""
    if len(input_shape) != 3:
        raise UserError(
            f"model={model}: needs examples of shape [channels, height, width], but these are "
            f"{list(input_shape)}. Use a model that accepts them (complex_mlp, real_mlp; lenet5 "
            "and resnet20 for [height, width]) or another dataset."
        )
    channels, height, width = input_shape
    return channels, height, width
