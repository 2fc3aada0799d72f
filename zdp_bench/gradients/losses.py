"""The loss as the engines call it: for one example at a time.

Clipping bounds what an example does through its own loss, and nothing if that loss also depends on
other examples: on their outputs, their targets, or how many there are. No loss is trusted with a
batch, so that nobody has to find out whether it mixes one. `held_by` tells if it keeps something of
one example for the next.
"""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients.clipping import Loss, trainable
from zdp_bench.gradients.parts import describe, unpack

# ------------------------------------------------------------------------------ what a loss holds

MANY = 10_000  # entries of a container that is no longer looked into
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"} - {"__main__"}
PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, np.ndarray, CodeType)
SEQUENCES = (list, tuple, set, frozenset, deque)
CONTAINERS = (dict, *SEQUENCES)

KEPT = (*PLAIN, *CONTAINERS)
# What gives another number at each call.
DRAWS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)

Place = tuple[str, str]  # name of the module, and of what it holds


def places_of(thing: Any) -> Iterator[tuple[Place, Any]]:
    """Yield each thing held with its place; of what holds others in turn, its kind.

    A module's `training` is left out: it is set anew for every step.
    """
    seen: set[int] = set()

    def visit(module: str, name: str, value: Any) -> Iterator[tuple[Place, Any]]:
        if isinstance(value, PLAIN):
            yield (module, name), value
            return
        if id(value) in seen or isinstance(value, ModuleType):
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            if name:
                module = f"{module}.{name}" if module else name
            yield (module, ""), type(value)
            yield from _of_class(module, type(value), visit)
            own = vars(value)
            parts = own["_parameters"] | own["_buffers"] | own["_modules"]
            held = {key: part for key, part in own.items() if key not in _OF_MODULES} | parts
            for key, part in held.items():
                yield from visit(module, key, part)
        elif isinstance(value, CONTAINERS) and len(value) > MANY:
            yield (module, name), (type(value), len(value))
        elif isinstance(value, dict):
            for key, part in value.items():
                yield from visit(module, f"{name}[{key!r}]", part)
        elif isinstance(value, SEQUENCES):
            for number, part in enumerate(value):
                yield from visit(module, f"{name}[{number}]", part)
        else:
            yield (module, name), type(value)
            for key, part in _inside(value):
                yield from visit(module, f"{name}.{key}" if name else key, part)

    yield from visit("", "", thing)


def _of_class(
    module: str, kind: type, visit: Callable[[str, str, Any], Iterator[tuple[Place, Any]]]
) -> Iterator[tuple[Place, Any]]:
    """Yield the numbers that a module's class holds, and what its methods find beside it."""
    for of in kind.__mro__:  # forward may be a parent's
        if _root(of.__module__) in {*LIBRARIES, "zdp_bench"}:
            continue
        own, name = (
            _is_users(sys.modules.get(of.__module__)),
            "class" if of is kind else of.__name__,
        )
        for key, value in vars(of).items():
            if (isinstance(value, KEPT) and not key.startswith("__")) or (
                own and isinstance(value, FunctionType)
            ):
                yield from visit(module, f"{name}.{key}", value)
        forward = vars(of).get("forward")
        if not own and isinstance(forward, FunctionType):
            for key in forward.__code__.co_names:
                if isinstance(value := forward.__globals__.get(key), KEPT):
                    yield from visit(module, f"forward.{key}", value)


def _is_users(module: ModuleType | None) -> bool:
    """True for code of the user's own, which is followed into all that it calls."""
    return "site-packages" not in str(getattr(module, "__file__", ""))


_OF_MODULES = {"_parameters", "_buffers", "_modules", "training"}


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a user's object, or what a function can reach, by name."""
    if isinstance(value, MethodType):
        yield from (("__func__", value.__func__), ("__self__", value.__self__))
    elif isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, FunctionType):
        yield "code", value.__code__
        if _root(value.__module__) in LIBRARIES:
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not set yet
                continue
        yield from vars(value).items()
        yield from (("defaults", value.__defaults__), ("kwdefaults", value.__kwdefaults__))
        if _root(value.__module__) == "zdp_bench":
            return
        if not _is_users(sys.modules.get(value.__module__)):
            return
        if {"environ", "getenv"} & {*_names(value.__code__)}:
            yield "environ", dict(os.environ)
        for name in _names(value.__code__):
            named = value.__globals__.get(name)
            if isinstance(named, ModuleType):
                if _root(named.__name__) not in LIBRARIES:  # a module that keeps numbers
                    inside = {key: vars(named).get(key) for key in _names(value.__code__)}
                    yield from ((f"{name}.{key}", of) for key, of in inside.items())
            elif named is not None:
                yield name, named
    elif isinstance(value, type):
        if _root(value.__module__) not in LIBRARIES:
            yield from ((k, v) for k, v in vars(value).items() if isinstance(v, KEPT))
    elif hasattr(value, "cache_info"):  # functools.lru_cache
        yield from (("cache", value.cache_info().currsize), ("wrapped", value.__wrapped__))
    elif isinstance(value, count):
        yield "state", repr(value)
    elif isinstance(value, DRAWS):
        yield "state", list(value.__reduce__()[1:])
    elif isinstance(value, GeneratorType):
        yield "state", [value.gi_frame and value.gi_frame.f_lasti]
        yield from (value.gi_frame.f_locals if value.gi_frame else {}).items()
    elif isinstance(value, SimpleNamespace) or _root(type(value).__module__) not in LIBRARIES:
        yield from getattr(value, "__dict__", {}).items()
        for of in type(value).__mro__:
            slots = vars(of).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, key):
                    yield key, getattr(value, key)
        yield "class", type(value)


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function, and the functions within it, look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


class Held(NamedTuple):
    """What an object holds at one moment, for a comparison that reads no tensor's numbers."""

    things: dict[Place, tuple[Any, int]]

    def differs_from(self, later: Held) -> str:
        """Return the name of something that was replaced or changed in between, or ''."""
        for place in self.things.keys() | later.things.keys():
            was, now = (held.things.get(place, (Held, 0)) for held in (self, later))
            plain = not isinstance(now[0], Tensor | np.ndarray) and type(was[0]) is type(now[0])
            if was[1] != now[1] or not (was[0] is now[0] or (plain and was[0] == now[0])):
                return place[1] or place[0]
        return ""


def held_by(thing: Any) -> Held:
    """Return what an object holds now, and how often torch counted a change of each tensor."""

    def version(value: Any) -> int:
        if isinstance(value, np.ndarray):
            return hash(value.tobytes())
        return value._version if isinstance(value, Tensor) else 0

    return Held({place: (value, version(value)) for place, value in places_of(thing)})


# --------------------------------------------------------------------------------------- the loss


KEEPS = (
    "the loss keeps state from one example to the next, which clipping cannot bound: compute it "
    "from outputs and targets only."
)


class DomainError(UserError):
    """The loss or the model fails on its inputs."""


# Types of a cross-entropy's options that run no code of their own.
OPTIONS = {Tensor, nn.Parameter, int, float, str, bool, type(None)}


class _Rows:
    """A placeholder for the outputs or targets of one example, which reveals nothing of them.

    It serves a cross-entropy without reduction alone, which keeps rows apart: torch computes that
    of all rows at once, in a twentieth of vmap's time.
    """

    __slots__ = ("held",)
    __class__: Any = property(lambda _: Tensor)  # for `isinstance`

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> _Rows:
        # A class of its own among the options would be handed the rows.
        if func is not cross_entropy or {type(x) for x in kwargs.values()} - OPTIONS:
            raise TypeError
        outputs, targets = (one.take() for one in args)
        losses = cls(func(outputs, targets, **kwargs))
        if losses.held.shape != (len(outputs),):  # a mean, or several for each row
            raise TypeError
        return losses

    def take(self) -> Tensor:
        held = self.held
        del self.held  # of no use to a loss that keeps it
        return held

    def _refuse(self, *_: object) -> Any:
        raise TypeError

    __getattr__ = __eq__ = __ne__ = __hash__ = __bool__ = __reduce_ex__ = _refuse


def draw_seeds(many: int) -> list[int]:
    """Return a seed for each of so many examples, whose own random numbers follow from it."""
    seeds: list[int] = torch.randint(2**62, (many,)).tolist()
    return seeds


def seed_torch(seed: int) -> None:
    """Seed torch's random numbers of every device."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the same numbers; torch would note the whole stack for every device there may be
        torch.default_generator.manual_seed(seed)


def set_seed(seed: int) -> None:
    """Seed torch's, Python's and numpy's random numbers."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def kept_draws(devices: list[torch.device] | None = None) -> Iterator[None]:
    """Leave random states as they were: Python's, numpy's, torch's (None: of every device)."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class PerExample:
    """A loss (outputs, targets) -> [B] that computes each example's from this example alone.

    Args:
        loss: (outputs, targets) -> one loss per example. It gets stand-ins that only torch's
            cross-entropy takes or, if it does anything else, batches of one: by torch.func's vmap
            or, where that cannot map it, one after another. Targets that `pack` packed are
            unpacked for it.
        proved: True gives it the whole batch. Only for a loss that provably keeps examples apart.

    Formal guarantees (unless `proved`): nothing of another example reaches an example's loss, not
    by way of the loss's own state either, as far as `held_by` sees it: from its second call on it
    may not change any.
    """

    def __init__(self, loss: Callable[..., Any], proved: bool = False) -> None:
        self.loss, self.proved = loss, proved
        self.weights: Tensor | None = None  # [B], while `weighed`
        self.loops = False  # True from when vmap fails on
        self._only_rows = True  # False from when stand-ins fail on
        self._called = False
        self._first: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def weighed(self, weights: Tensor) -> Iterator[None]:
        """Multiply the losses by weights [B] inside: 0 leaves an example out of every gradient."""
        self.weights = weights
        try:
            yield
        finally:
            self.weights = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per example, [B], times its weight."""
        losses = self.each(outputs, targets)
        return losses if self.weights is None else losses * self.weights

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per example, [B]."""
        if self.proved or len(outputs) == 0:
            whole: Tensor = self.loss(outputs, unpack(targets))
            return whole
        if self._first is None:
            self._first = outputs[:1].detach().clone(), targets[:1].clone()
        while not self.loops:
            try:
                if self._only_rows:
                    given = _Rows(outputs), _Rows(targets)
                    losses = self._call(*given)
                    if type(losses) is not _Rows or losses is given[0] or losses is given[1]:
                        raise TypeError
                    return losses.take()
                rows = outputs.unsqueeze(1), targets.unsqueeze(1)  # batches of one
                return vmap(self.of_one, randomness="different")(*rows).squeeze(1)
            except Exception as error:
                if isinstance(error, UserError) or "memory" in str(error):
                    raise
                self.loops, self._only_rows = not self._only_rows, False
        batches = zip(outputs.split(1), targets.split(1), draw_seeds(len(outputs)), strict=True)
        devices = [outputs.device] if outputs.device.type == "cuda" else []
        try:
            with kept_draws(devices):
                before = self._answer()
                losses = torch.cat([self._seeded(*one) for one in batches])
                after = self._answer()
        except Exception as error:
            if isinstance(error, UserError) or "memory" in str(error):
                raise
            if "escaped from inside" in str(error):  # a tensor of vmap's, kept since its pass
                raise UserError(KEEPS) from None
            asked = describe(targets[:1]).replace("inputs", "targets")
            raise DomainError(
                f"the loss cannot take outputs of shape {[1, *outputs.shape[1:]]} with {asked}: "
                f"{first_line(error)} It is computed for each example separately, so that no "
                "other can affect it."
            ) from None
        # Of a loss that vmap maps, Python sees no number; this one could keep what it sees where
        # `held_by` does not look, in a file or a generator: it then answers otherwise than before.
        if not torch.equal(before, after):
            raise UserError(KEEPS)
        return losses

    def _answer(self) -> Tensor:
        """Return the losses of two artificial outputs at the first target that it was ever given.

        That is a check's. Where a loss takes no random outputs (of probabilities, say), of the
        first ones, also turned around.
        """
        assert self._first is not None
        first, target = self._first

        def answer(*given: Tensor) -> Tensor:
            return torch.cat([self._seeded(numbers, target, 0) for numbers in given]).nan_to_num()

        with torch.no_grad():
            set_seed(0)
            drawn = torch.randn(first.shape, dtype=first.dtype).to(first.device)
            try:
                return answer(drawn, 30.0 * drawn)
            except UserError:
                raise
            except Exception:
                return answer(first, first.flip(-1))

    def _seeded(self, outputs: Tensor, targets: Tensor, seed: int) -> Tensor:
        set_seed(seed)
        return self.of_one(outputs, targets)

    def of_one(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss [1] of a batch of one."""
        losses = self._call(outputs, unpack(targets))
        if not isinstance(losses, Tensor) or losses.shape != (1,) or losses.is_complex():
            is_tensor = isinstance(losses, Tensor)
            gives = f"shape {list(losses.shape)}" if is_tensor else type(losses).__name__
            raise UserError(
                f"the loss gives {gives} for 1 example: it must return one real number per "
                "example, never a mean."
            )
        return losses

    def _call(self, *given: Any) -> Any:
        before = held_by(self.loss)
        losses = self.loss(*given)
        after = held_by(self.loss)
        if self._called and (changed := before.differs_from(after)):
            raise UserError(
                f"the loss changes '{changed}' when it is called, so one example would affect the "
                "next, which clipping cannot bound: compute it from outputs and targets only."
            )
        self._called = True
        return losses


def per_example(loss: Loss) -> PerExample:
    """Return a loss that computes each example's alone; one that does already, as it is."""
    return loss if isinstance(loss, PerExample) else PerExample(loss)


def require_outputs_alone(
    model: nn.Module, loss: PerExample, outputs: Tensor, targets: Tensor
) -> Tensor:
    """Return the losses; reject those that depend on parameters other than by the outputs."""
    with torch.enable_grad():
        losses = loss(outputs.detach(), targets)
    if not losses.requires_grad:
        return losses
    parameters = trainable(model)
    found = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    reached = [name for name, g in zip(parameters, found, strict=True) if g is not None]
    if not reached:
        raise UserError(
            "the loss has parameters of its own, which would not be trained: make them part of the "
            "model, which then returns what the loss compares."
        )
    raise UserError(
        f"the loss depends on parameter '{reached[0]}' beside the model's outputs, and that "
        "gradient would be dropped: no example's clipping sees it. What no training example "
        "reaches, such as a penalty on weights, give to make_private as "
        "regulariser=lambda model: ...; let the model return whatever else the loss needs."
    )
