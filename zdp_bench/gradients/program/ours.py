"""Which modules are this package's own, and which backward passes a user has added."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from zdp_bench.gradients.program.autograd import graph_nodes
from zdp_bench.gradients.program.calls import Alone
from zdp_bench.nn.unchanged import BACKWARD_HOOKS, foreign_hooks, is_unchanged

PACKAGES = ("zdp_bench", "torch")


def is_ours(module: nn.Module) -> bool:
    """Return True for an unmodified module of this package.

    All modules in it must be of this package or torch. None of them may have a hook, or a forward
    function that replaces that of its class.
    """
    if not type(module).__module__.startswith("zdp_bench."):
        return False
    for layer in module.modules():
        package = type(layer).__module__.partition(".")[0]
        if package not in PACKAGES or not is_unchanged(layer):
            return False
    return True


def require_no_backward_hooks(model: nn.Module) -> None:
    """Reject backward hooks, which a recording would not contain.

    Raises:
        Alone: a layer has such a hook.
    """
    for name, module in model.named_modules():
        if any(foreign_hooks(vars(module)[kind]) for kind in BACKWARD_HOOKS):
            raise Alone(f"layer '{name}' has backward hooks")


def require_torch_backward(output: Tensor) -> None:
    """Reject an output that was computed by a user's `autograd.Function`.

    Raises:
        Alone: it was; the error contains the name of the function.
    """
    for node in graph_nodes(output):
        if not isinstance(node, BackwardCFunction):
            continue
        kind: Any = getattr(node, "_forward_cls", type(node))
        if not kind.__module__.startswith(("torch.", "zdp_bench.")):
            raise Alone(f"the model has a custom backward pass ({kind.__name__})")
