"""The networks by name for `model=NAME`, a family a file; and checks of the shapes they take."""

from __future__ import annotations

from collections.abc import Iterable

from zdp_bench.errors import UserError, require


def image_shape(model: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width) of examples that must have all three.

    Raises:
        UserError: they do not.
    """
    if len(input_shape) != 3:
        raise UserError(
            f"model={model}: needs examples of shape [channels, height, width], but these are "
            f"{list(input_shape)}. Use a model that accepts them (complex_mlp, real_mlp; lenet5 "
            "and resnet20 for [height, width]) or "
            "another dataset."
        )
    channels, height, width = input_shape
    return channels, height, width


def at_least_one(key: str, value: int | Iterable[int]) -> None:
    """Reject a width below 1, or one of several.

    Raises:
        UserError: names the key.
    """
    widths = [value] if isinstance(value, int) else list(value)
    require(all(width >= 1 for width in widths), key, value, "must be at least 1")
