"""A model's forward function, recorded once as a graph of torch's operations.

The number of examples is a symbol B in the graph: `x.reshape(-1, 6)` of x [B, 4, 6] has shape
[4·B, 6], and the checks read from such shapes where the examples are. The graph has no Python code,
so a value that the forward function reads, counts or stores in Python cannot influence a step.
Operations that torch would record differently from how it runs them, or for one value of B only,
are replaced (`leaves`, `sequences`, `substitutes`) or rejected.
"""

from __future__ import annotations

import builtins
import io
import linecache
import logging
import random
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from zdp_bench.errors import first_line
from zdp_bench.gradients.outside_state import preserve_outside_state
from zdp_bench.gradients.parts import Parts, leaves_by_path, takes_parts
from zdp_bench.gradients.program.calls import Alone, is_mutable, is_users, show_line
from zdp_bench.gradients.program.flatten import flatten
from zdp_bench.gradients.program.leaves import whole_leaves
from zdp_bench.gradients.program.ours import require_no_backward_hooks
from zdp_bench.gradients.program.sequences import recurrent_layers
from zdp_bench.gradients.program.substitutes import SUBSTITUTES
from zdp_bench.nn.unchanged import HOOKS, foreign_hooks

MAX_EXAMPLES = 2**24  # largest batch size
TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
SAVED_TENSORS_HOOKS = "hooks for saved tensors change gradients"
DEPENDS_ON_SIZE = "the model behaves differently for other batch sizes"
KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


@dataclass(frozen=True)
class Source:
    """What a placeholder of a program stands for."""

    kind: str  # parameter, buffer, constant or input
    # Name in the model; for a constant, its key in `Recorded.constants`; for an input, its path.
    name: str


@dataclass(frozen=True)
class Recorded:
    """A forward function as operations."""

    graph: Graph
    sources: dict[str, Source]  # by the placeholder's name, in order
    constants: dict[str, Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> set[Node]:
        """The placeholders that stand for examples."""
        names = [name for name, source in self.sources.items() if source.kind == "input"]
        return {node for node in self.graph.nodes if node.name in names}

    @cached_property
    def writes(self) -> bool:
        """True if an operation overwrites a tensor, which may be an input."""
        return any(map(is_mutable, self.graph.nodes))


def record(model: nn.Module, inputs: Tensor) -> Recorded:
    """Return the operations of a model's forward function.

    Args:
        model: the model. What its forward function stores is restored, because the tensors of a
            recording have no values.
        inputs: two or more examples; their values do not matter.

    Raises:
        Alone: torch cannot record the function for every number of examples. The model must then
            run on one example at a time.
    """
    _start_autograd()
    require_no_backward_hooks(model)
    with preserve_outside_state(model, weights=model.parameters()):
        exported = _export(model, inputs)
    _require_nothing_changed(exported)
    _require_no_hidden_parameter(model, exported)
    graph = flatten(exported.graph_module)
    return Recorded(graph, _sources(exported, inputs), dict(exported.constants))


def _start_autograd() -> None:
    """Let autograd count the devices, which it does once, in its first backward pass.

    While it records, torch reports a GPU even on a machine without one. Autograd would start a
    thread for it, and no process that is forked afterwards could take a step.
    """
    torch.zeros((), requires_grad=True).backward()


class _TreeModel(nn.Module):
    """The model as a function of one argument: a tensor, or a tuple or dictionary of tensors."""

    def __init__(self, model: nn.Module, has_parts: bool) -> None:
        super().__init__()
        self.model = model
        self.has_parts = has_parts  # the argument is a tuple or dictionary, which `Parts` carries

    def forward(self, tree: Any) -> Tensor:
        output: Tensor = self.model(Parts(tree) if self.has_parts else tree)
        return output


def _export(model: nn.Module, inputs: Tensor) -> ExportedProgram:
    """Return what torch records of the model, with the number of examples as a symbol."""
    has_parts = isinstance(inputs, Parts)
    tree: Any = inputs.tree if isinstance(inputs, Parts) else inputs
    batch = Dim("B", min=1, max=MAX_EXAMPLES)
    shapes = tree_map(lambda _: {0: batch}, tree)
    recording_contexts = (
        _silence(),
        torch.backends.opt_einsum.flags(enabled=False),
        _without_own_hooks(model),
        takes_parts(model),
        whole_leaves(model, inputs),
        recurrent_layers(),
        _symbolic_len(),
    )
    with ExitStack() as contexts:
        for context in recording_contexts:
            contexts.enter_context(context)
        watch = contexts.enter_context(_Watch(model))
        states = _python_random_states()
        try:
            function = _TreeModel(model, has_parts)
            with disable_saved_tensors_hooks(SAVED_TENSORS_HOOKS):
                exported = export(function, (tree,), dynamic_shapes=(shapes,), strict=False)
        except Exception as error:
            raise _explain(error, model, watch) from None
    if _python_random_states() != states:
        raise Alone("the model draws random numbers with Python or numpy")
    return exported


def _require_nothing_changed(exported: ExportedProgram) -> None:
    """Reject a forward function that changes the model."""
    for output in exported.graph_signature.output_specs:
        if output.kind is OutputKind.BUFFER_MUTATION:
            raise Alone(f"buffer '{_name_in_model(output.target)}' changes in each pass")
        if output.kind not in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION):
            raise Alone("the model changes its parameters in its forward function")


def _require_no_hidden_parameter(model: nn.Module, exported: ExportedProgram) -> None:
    """Reject a constant that shares memory with a parameter, which would not be trained there."""
    names = {_memory_of(parameter): name for name, parameter in model.named_parameters()}
    for constant in exported.constants.values():
        if not isinstance(constant, Tensor):
            continue
        if constant.layout is not torch.strided:
            raise Alone(f"the model contains a tensor of layout {constant.layout}")
        if _memory_of(constant) in names:
            name = names[_memory_of(constant)]
            raise Alone(f"the model uses '{name}' without going through the module that owns it")


def _memory_of(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def _sources(exported: ExportedProgram, inputs: Tensor) -> dict[str, Source]:
    paths = iter(leaves_by_path(inputs))  # in the order of the exported program's inputs
    sources = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind not in KINDS:
            raise Alone("the model contains an object that torch cannot record")
        kind = KINDS[spec.kind]
        if kind == "input":
            name = next(paths)
        elif kind == "constant":
            name = spec.target or ""
        else:
            name = _name_in_model(spec.target)
        sources[spec.arg.name] = Source(kind, name)
    return sources


def _name_in_model(target: str | None) -> str:
    return (target or "").removeprefix("model.")


# ------------------------------------------------------------------------------ while it records


class _Watch(TorchFunctionMode):
    """Watches the functions of torch that a model calls while it is recorded.

    It rejects hooks, which a recording would leave out, calls a function's substitute if it has
    one, and notes where torch first specialised on a fixed number of examples.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.shape_env: Any = None  # torch's ShapeEnv; `replacements` are the sizes it has fixed
        self.fixed: Alone | None = None

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        name = getattr(function, "__name__", "an operation")
        if name in TENSOR_HOOKS:
            raise Alone("a hook changes gradients")
        if self.shape_env is None:
            self.shape_env = _find_shape_env(args)
        # Python code may have fixed the batch size since the last call of a function of torch.
        self._note(DEPENDS_ON_SIZE)
        result = SUBSTITUTES.get(function, function)(*args, **(kwargs or {}))
        self._note(f"torch records {name} for one batch size only")
        return result

    def _note(self, reason: str) -> None:
        """Note where the number of examples was fixed first."""
        if self.fixed is None and self.shape_env is not None and self.shape_env.replacements:
            callers = list(traceback.walk_stack(sys._getframe(2)))
            line, layer = _locate(self.model, reversed(callers))
            self.fixed = Alone(reason, None, line, layer)


def _find_shape_env(args: Any) -> Any:
    """Return torch's ShapeEnv if the first argument is a tensor of examples, else None."""
    if not args or not isinstance(args[0], Tensor):
        return None
    sizes: Any = args[0].shape
    for size in sizes:
        if isinstance(size, torch.SymInt):
            return size.node.shape_env
    return None


def _python_random_states() -> Any:
    """Return the random states of Python and NumPy, whose draws torch does not record."""
    numpy_state: Any = np.random.get_state()
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2:]


@contextmanager
def _without_own_hooks(model: nn.Module) -> Iterator[None]:
    """Remove this package's own hooks inside the context.

    They watch layers for other checks, and a recording would contain what they do.
    """
    hook_dicts = [vars(module)[kind] for module in model.modules() for kind in HOOKS]
    saved_dicts = [dict(hooks) for hooks in hook_dicts]
    for hooks in hook_dicts:
        foreign = foreign_hooks(hooks)
        for key, hook in [*hooks.items()]:
            if hook not in foreign:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, saved in zip(hook_dicts, saved_dicts, strict=True):
            hooks.clear()
            hooks.update(saved)


@contextmanager
def _symbolic_len() -> Iterator[None]:
    """Let `len(x)` return the symbol `x.shape[0]`; Python's own `len` must return an int."""
    plain_len = builtins.len

    def symbolic_len(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
        return plain_len(value)

    builtins.len = symbolic_len
    try:
        yield
    finally:
        builtins.len = plain_len


@contextmanager
def _silence() -> Iterator[None]:
    """Keep torch from printing what it cannot record; the error gives the reason in one line."""
    disabled = logging.root.manager.disable
    nowhere = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


# ------------------------------------------------------------------------------ when that fails


def _explain(
    error: Exception,
    model: nn.Module,
    watch: _Watch,
) -> Alone:
    """Return why torch could not record a forward function, with the user's line and layer."""
    reason = str(error) if isinstance(error, Alone) else _reason_of(error)
    if reason.startswith(DEPENDS_ON_SIZE) and watch.fixed is not None:
        return watch.fixed
    line, layer = _locate(model, traceback.walk_tb(error.__traceback__))
    return Alone(reason, None, line, layer)


def _reason_of(error: Exception) -> str:
    text = str(error)
    if "Constraints violated" in text or "specialized" in text:
        guard = re.search(r"satisfy the generated guard (.*)", text)
        if guard is None:
            return DEPENDS_ON_SIZE
        sizes = re.sub(r"L\[.*?\]\.size\(\)\[0\]", "B", guard[1]).strip(".")
        return f"{DEPENDS_ON_SIZE} than {sizes}"
    if "data-dependent" in text or "DataDependent" in text:
        return "Python code of the model depends on the values of a tensor"
    if text == SAVED_TENSORS_HOOKS:
        return text
    return f"torch cannot record the model ({first_line(error)})"


def _locate(
    model: nn.Module,
    stack: Iterable[tuple[Any, int]],
) -> tuple[str, str]:
    """Return the user's line that a stack ends in, and the name of the module that runs there."""
    names = {id(module): name for name, module in model.named_modules()}
    line, layer = "", ""
    for frame, number in stack:
        file = frame.f_code.co_filename
        if is_users(file):
            line = show_line(file, number, linecache.getline(file, number, frame.f_globals))
        running = id(frame.f_locals.get("self"))
        layer = names.get(running, layer)
    return line, layer
