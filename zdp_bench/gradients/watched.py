"""Compare each forward pass of foreign code with the passes that were checked.

Python may do anything in a later pass: count somewhere, read a clock or the environment, treat 300
examples otherwise than 3. So what a pass asks of torch is compared with two passes that were
checked: the same functions in the same order, of the same tensors and numbers. Sizes, and no other
numbers, may be the same multiple of the number of examples. The gradients of a pass that departs
are not used: its examples are run one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from zdp_bench.gradients.losses import places_of
from zdp_bench.gradients.parts import leaves_of

OWN = ("torch.nn.modules.", "zdp_bench.")
# With these a model computes or changes gradients by itself.
OF_GRADIENTS = {"register_hook", "register_post_accumulate_grad_hook", "grad", "backward"}
# Their whole numbers are sizes and places.
SIZED = {"view", "reshape", "expand", "unflatten", "repeat", "narrow", "split", "chunk", "unfold"}
SIZED |= {"zeros", "ones", "empty", "new_zeros", "new_ones", "new_empty", "rand", "randn", "arange"}
SIZED |= {"__getitem__", "broadcast_to", "as_strided"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Call = tuple[Any, ...]
PROGRAMS: WeakKeyDictionary[nn.Module, Program] = WeakKeyDictionary()  # which a model is held to
_HELD: WeakKeyDictionary[nn.Module, dict[int, tuple[Tensor, str]]] = WeakKeyDictionary()


class Departs(Exception):  # noqa: N818 - it is caught where a pass is made
    """A pass differs from the checked passes; states which model, and how."""


def is_own(module: nn.Module) -> bool:
    """True if a module and all within it run code of torch.nn and of this package alone."""
    return all(
        _is_ours(type(of))
        and "forward" not in vars(of)
        and all(_is_ours(hook) for hooks in HOOKS for hook in vars(of)[hooks].values())
        and all(_is_ours(held) for held in vars(of).values() if callable(held))
        for of in module.modules()
    )


def _is_ours(thing: Any) -> bool:
    module = str(getattr(thing, "__module__", None))
    return module.startswith(OWN) or (not isinstance(thing, type) and module.startswith("torch."))


def parts_of(model: nn.Module) -> dict[str, bool]:
    """Return the names of a model's parts that are ours (True), or hold parameters (False)."""
    found = {name: is_own(module) for name, module in model.named_modules()}
    holders = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    return {name: ours for name, ours in found.items() if ours or name in holders}


@dataclass(frozen=True)
class Times:
    """A size that is so many times the number of examples."""

    factor: int


@dataclass(frozen=True)
class Program:
    """What a pass of any number of examples does, call by call."""

    parts: dict[str, bool]
    calls: list[Call]
    of_sizes: dict[int, list[Call]] = field(default_factory=dict)

    @staticmethod
    def of(one: Pass, other: Pass) -> Program:
        """Return the program of two passes, of different numbers of examples."""
        sizes, calls = (one.examples, other.examples), []
        for a, b in zip_longest(one.calls, other.calls, fillvalue=()):
            sized = _name(a or b) in SIZED
            calls.append(tuple(_join(*both, sized, *sizes) for both in zip(a, b, strict=False)))
            if len(a) != len(b) or Departs in calls[-1]:
                raise one.error(
                    f"calls {_name(a or b)} otherwise with {sizes[0]} examples than with {sizes[1]}"
                )
        return Program(one.parts, calls)

    def of_size(self, examples: int) -> list[Call]:
        """Return the calls of a pass of so many examples."""
        if examples not in self.of_sizes:
            self.of_sizes[examples] = [
                tuple(_times(value, examples) for value in call) for call in self.calls
            ]
        return self.of_sizes[examples]


def _join(a: Any, b: Any, sized: bool, of_a: int, of_b: int) -> Any:
    """Return what two passes have in common, or a size that grows; otherwise `Departs`."""
    if type(a) is type(b) is torch.Size and len(a) == len(b):
        sizes = tuple(_join(*both, True, of_a, of_b) for both in zip(a, b, strict=True))
        return Departs if Departs in sizes else sizes
    if type(a) is type(b) and a == b:
        return a
    if sized and type(a) is type(b) is int and a % of_a == 0 and a // of_a * of_b == b:
        return Times(a // of_a)
    return Departs


def _times(value: Any, examples: int) -> Any:
    if type(value) is tuple:
        return tuple(_times(size, examples) for size in value)
    return value.factor * examples if type(value) is Times else value


def _name(call: Call) -> str:
    return str(getattr(call[0], "__name__", call[0]))


class Pass(TorchFunctionMode):
    """One forward pass, as its calls of torch and of the model's parts that are ours."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        parts: dict[str, bool],
        program: Program | None = None,
    ) -> None:
        super().__init__()
        self.model, self.inputs, self.parts, self.examples = model, inputs, parts, len(inputs)
        # the function, or the part's name, what it was given, and the sizes of what it gave
        self.calls: list[Call] = []
        self.expected = None if program is None else program.of_size(self.examples)
        self.departs = ""  # what was called otherwise, first
        self.names: dict[int, str] = {}  # of tensors, by identity
        self.made = 0
        self.inside = False  # a part that is ours
        self._give_names(leaves_of(inputs), [])

    def run(self) -> Tensor:
        """Return the model's output."""
        parts = [(name, self.model.get_submodule(name), ours) for name, ours in self.parts.items()]
        before = [vars(part).get("forward") for _, part, _ in parts]
        for name, part, ours in parts:
            vars(part)["forward"] = self._noted(name, part.forward, ours)
        try:
            with self:
                output = self.model(self.inputs)
        finally:
            for (_, part, _), forward in zip(parts, before, strict=True):
                vars(part).pop("forward", None)
                if forward is not None:
                    vars(part)["forward"] = forward
        self._note("its output", (output,), {}, None)
        if self.expected is not None and len(self.calls) < len(self.expected):
            self.depart(f"leaves out {_name(self.expected[len(self.calls)])}")
        if self.departs and self.expected is not None:
            raise self.error(self.departs)
        return output

    def error(self, what: str) -> Departs:
        return Departs(f"the model ({type(self.model).__name__}) {what}")

    def depart(self, what: str) -> None:
        self.departs = self.departs or what

    def _noted(self, name: str, forward: Callable[..., Any], ours: bool) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return forward(*args, **kwargs)
            self.inside = ours
            try:
                with torch._C.DisableTorchFunction() if ours else nullcontext():
                    outputs = forward(*args, **kwargs)
            finally:
                self.inside = False
            with torch._C.DisableTorchFunction():
                self._note(name, args, kwargs, outputs)
            return outputs

        return noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        outputs = func(*args, **kwargs)
        if name in OF_GRADIENTS or isinstance(outputs, Node):
            self.depart("computes or changes gradients in its forward pass")
        elif isinstance(outputs, Tensor) or (
            name != "__get__" and (outputs is None or isinstance(outputs, tuple | list))
        ):
            self._note(func, args, kwargs, outputs)
        return outputs

    def _note(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        call = [func, torch.is_grad_enabled()]
        self._read(args, call)
        self._read(kwargs, call)
        self._give_names(outputs, call)
        at, found = len(self.calls), tuple(call)
        self.calls.append(found)
        if self.expected is not None and (at >= len(self.expected) or self.expected[at] != found):
            self.depart(f"calls {_name(found)} otherwise than when it was checked")

    def _read(self, value: Any, call: list[Any]) -> None:
        """Add what a function was given to its call."""
        if isinstance(value, Tensor):
            call.append(self.names.get(id(value)) or self._find(value))
        elif isinstance(value, tuple | list):
            call.append(f"{len(value)}:")
            for part in value:
                self._read(part, call)
        elif isinstance(value, dict):
            for key, part in value.items():
                call.append(key)
                self._read(part, call)
        elif isinstance(value, slice):
            call += ["slice", value.start, value.stop, value.step]
        elif isinstance(value, np.ndarray):
            call += [value.dtype.str, *value.shape, value.tobytes()]
        else:
            call.append(value)

    def _find(self, tensor: Tensor) -> str:
        """Return the place of a tensor that the model holds."""
        if id(tensor) not in _HELD.get(self.model, {}):
            every = ((value, ".".join(place)) for place, value in places_of(self.model))
            held = {id(value): (value, name) for value, name in every if isinstance(value, Tensor)}
            _HELD[self.model] = held
        held = _HELD[self.model]
        if id(tensor) not in held:
            self.depart("uses a tensor that is not its own, nor made by torch in this pass")
            return "?"
        return held[id(tensor)][1]

    def _give_names(self, outputs: Any, call: list[Any]) -> None:
        if isinstance(outputs, Tensor):
            self.made += 1
            self.names[id(outputs)] = f"#{self.made}"
            call.append(outputs.shape)
        elif isinstance(outputs, tuple | list):
            for part in outputs:
                self._give_names(part, call)
