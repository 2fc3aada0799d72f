"""Which modules are this package's own, and which hooks and functions a user has added."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from zdp_bench.gradients.program.autograd import graph_nodes
from zdp_bench.gradients.program.calls import Alone

BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", *BACKWARD_HOOKS)


def is_ours(module: nn.Module) -> bool:
    """Return True for an unmodified module of this package.

    All modules in it must be of this package or torch. None of them may have a hook, or a forward
    function that replaces that of its class.
    """
    is_of_package = type(module).__module__.startswith("zdp_bench.")
    return is_of_package and all(map(is_unchanged, module.modules()))


def is_unchanged(module: nn.Module) -> bool:
    """Return True for a module of this package or torch, without hooks or another forward."""
    attributes = vars(module)
    package = type(module).__module__.partition(".")[0]
    if package not in ("zdp_bench", "torch"):
        return False
    if "forward" in attributes and not _is_of_package(attributes["forward"]):
        return False
    return not any(foreign_hooks(attributes[kind]) for kind in HOOKS)


def foreign_hooks(hooks: dict[Any, Any]) -> list[Any]:
    """Return the hooks that are not this package's own."""
    foreign = []
    for hook in hooks.values():
        function = getattr(hook, "func", hook)  # unwraps a `functools.partial`
        if not _is_of_package(function):
            foreign.append(hook)
    return foreign


def _is_of_package(function: Any) -> bool:
    return str(function.__module__).startswith("zdp_bench.")


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
