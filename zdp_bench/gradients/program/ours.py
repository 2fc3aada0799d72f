"""What is this package's own in a model, and what the user added: hooks, forward and backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from zdp_bench.gradients.program.autograd import graph_nodes
from zdp_bench.gradients.program.calls import Alone

BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", *BACKWARD_HOOKS)


def is_ours(module: nn.Module) -> bool:
    """True if a module is of this package, and all within it of this package or torch's.

    None of them may have a hook, or a forward function in place of its class's.
    """
    is_of_package = type(module).__module__.startswith("zdp_bench.")
    return is_of_package and all(map(_is_unchanged, module.modules()))


def _is_unchanged(module: nn.Module) -> bool:
    held = vars(module)
    package = type(module).__module__.partition(".")[0]
    if package not in ("zdp_bench", "torch"):
        return False
    if "forward" in held and not _is_of_package(held["forward"]):
        return False
    return not any(foreign_hooks(held[kind]) for kind in HOOKS)


def foreign_hooks(hooks: dict[Any, Any]) -> list[Any]:
    """Return the hooks of a module that are none of this package's."""
    foreign = []
    for hook in hooks.values():
        function = getattr(hook, "func", hook)  # of a partial
        if not _is_of_package(function):
            foreign.append(hook)
    return foreign


def _is_of_package(function: Any) -> bool:
    return str(function.__module__).startswith("zdp_bench.")


def require_no_backward_hooks(model: nn.Module) -> None:
    """Reject hooks on gradients, which a recording would leave out.

    Raises:
        Alone: names the layer that has one.
    """
    for name, module in model.named_modules():
        if any(foreign_hooks(vars(module)[kind]) for kind in BACKWARD_HOOKS):
            raise Alone(f"layer '{name}' has backward hooks")


def require_torch_backward(output: Tensor) -> None:
    """Reject an output that was computed by an `autograd.Function` of the user's.

    Raises:
        Alone: names it.
    """
    for node in graph_nodes(output):
        if not isinstance(node, BackwardCFunction):
            continue
        kind: Any = getattr(node, "_forward_cls", type(node))
        if not kind.__module__.startswith(("torch.", "zdp_bench.")):
            raise Alone(f"the model has a backward pass of its own ({kind.__name__})")
