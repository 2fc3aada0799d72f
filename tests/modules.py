"""A module in a line, for tests."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Made(nn.Module):
    """What a function of (self, *inputs) makes of its inputs and of what the module holds."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)
