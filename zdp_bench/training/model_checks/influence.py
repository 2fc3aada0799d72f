"""Follow which examples each number depends on, through one forward and one backward pass.

torch reports every operation to `_Follower`, those of hooks and of a model's own backward passes
included. For each number that an example reaches, a bit mask says which examples do. What an
operation does to the masks follows from its kind, or from running it again with other numbers in
place of one example's. So values do not matter: `x.amax(0) > 65_535` depends on all examples for
any x.

Nothing can be followed through Python: `if x.max() > 3`, `x[mask]`. A model that looks at numbers
in this way is found to do so, and its examples are run one at a time (`gradients.run_alone`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.functional import one_hot
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients.clipping import trainable
from zdp_bench.gradients.cross_check import same_draws
from zdp_bench.gradients.parts import leaves_of, takes_parts
from zdp_bench.gradients.watched import Departs, Pass, Program, parts_of
from zdp_bench.training.batches import is_out_of_memory
from zdp_bench.training.model_checks.probes import Innermost, advice_on, describe_layer
from zdp_bench.training.model_checks.state import copy_apart

FIRST, OTHERS = 1, 2  # bits of the first example and of all others
BOTH = FIRST | OTHERS

# Kinds of operations, by name without a trailing underscore. Views share their masks with what they
# show (`is_view`), and what is made anew (`empty`, `zeros_like`) has none.
# Each number of the result depends on the arguments' numbers at its own place (torch tags others).
POINTWISE = {"_to_copy", "native_dropout", "native_dropout_backward", "rrelu_with_noise"}
# They overwrite their first argument, with draws or with the second argument.
FILLS = {"fill", "zero", "copy", "uniform", "normal", "bernoulli", "exponential", "random"}
FILLS |= {"geometric", "cauchy", "log_normal"}
# They are linear in each argument: one other number shows every dependence.
LINEAR = {"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "sum", "mean"}
LINEAR |= {"cat", "stack", "roll", "flip", "repeat", "select_backward", "slice_backward"}
LINEAR |= {"native_layer_norm", "native_layer_norm_backward", "constant_pad_nd"}
# Gradients of weights, in which all examples meet.
SUMS = {"embedding_dense_backward", "_embedding_bag_dense_backward", "_embedding_bag_backward"}
# Whole numbers are values to them, and no indices that must be valid.
VALUES = LINEAR | {"any", "all", "cumsum", "cumprod", "max", "min", "amax", "amin", "aminmax"}
VALUES |= {"argmax", "argmin", "sort", "argsort", "topk", "median", "mode", "kthvalue", "prod"}
VALUES |= {"triu", "tril", "slice_scatter", "select_scatter", "bucketize", "searchsorted"}
# They take an index for one dimension, or for several.
BY_DIM = {"gather", "index_select", "index_add", "index_copy", "index_fill"}
BY_DIM |= {"scatter", "scatter_add", "scatter_reduce"}
BY_PLACE = {"index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl"}
# Methods that show Python a tensor's numbers without an operation.
LOOKS = {"numpy", "__array__", "tolist", "__dlpack__", "data_ptr"}


def check_apart(model: nn.Module, inputs: Tensor, more: Tensor | None = None) -> Program | None:
    """Reject a model in which an example's output or gradient depends on others.

    Args:
        model: it stays as it is.
        inputs: two examples or more, [n, ...], whose pass is followed.
        more: another number of examples. That is no number which could be followed, so a pass of
            these has to call the same functions.

    Returns:
        What each pass must call from now on; None if the model runs no foreign code.

    Raises:
        UserError: names the layer in which examples meet.
        Departs: says why the examples must be run one at a time.
    """
    try:
        made = _follow(copy_apart(model)[0], inputs)
        if made.parts.get("") or more is None:
            return None
        other = Pass(copy_apart(model)[0], more, made.parts)
        with same_draws(), takes_parts(other.model), torch.enable_grad():
            other.run()
        return Program.of(made, other)
    except (UserError, Departs):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Departs(f"the model cannot be traced by torch ({first_line(error)})") from None


def _follow(model: nn.Module, inputs: Tensor) -> Pass:
    """Return what a pass called in which no example reaches another; see `check_apart`.

    Args:
        model: a copy, which may change.
    """
    follower, inputs = _Follower(model, len(inputs)), inputs.clone()
    for leaf in leaves_of(inputs):
        follower.mark_rows(leaf)
    trained = list(trainable(model).values())
    follower.note_moving(trained)
    exits, made = _Exits(follower), Pass(model, inputs, parts_of(model))
    with same_draws(), takes_parts(model), follower.inside:
        drawn = _python_draws()
        with follower, exits, torch.enable_grad():
            output = made.run()
        functions = _foreign_functions(output)
        if follower.mixes_rows(output) and not follower.looks:
            raise mixing_error(model, follower.met or "")
        seed = torch.randn_like(output)
        follower.mark_rows(seed)
        if output.requires_grad:
            with follower, exits:
                torch.autograd.grad(output, trained, seed, allow_unused=True)
        if drawn != _python_draws():
            follower.looks = follower.looks or "the model uses Python's or numpy's random numbers"
    if follower.looks:
        raise Departs(follower.looks)
    if follower.backward is not None:
        raise mixing_error(model, follower.backward, " in its gradient")
    if made.departs or functions:
        raise made.error(made.departs or f"has a backward pass of its own ({functions})")
    return made


def mixing_error(model: nn.Module, name: str, where: str = "") -> UserError:
    """Return the error for the layer of this name."""
    return UserError(
        f"{describe_layer(model, name)} lets one example see another{where}, so clipping bounds "
        f"nothing and no ε would hold: {advice_on(model.get_submodule(name))}, "
        "or train with algorithm=sgd, which claims none."
    )


def _foreign_functions(output: Tensor) -> str:
    """Return the name of an autograd.Function in a graph that is neither torch's nor ours."""
    seen, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            kind: Any = getattr(node, "_forward_cls", type(node))
            if not kind.__module__.startswith(("torch.", "zdp_bench.")):
                return str(kind.__name__)
        left += [of for of, _ in node.next_functions]
    return ""


def _python_draws() -> Any:
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


@dataclass(frozen=True)
class _Probed:
    """An argument of an operation: its masks, how many values it may have, and if it may vary."""

    value: Any
    mask: Tensor | None
    size: int | None
    free: bool

    def on_cpu(self) -> _Probed:
        if isinstance(self.value, torch.device):
            return replace(self, value=torch.device("cpu"))
        if not isinstance(self.value, Tensor):
            return self
        mask = None if self.mask is None else self.mask.cpu()
        return replace(self, value=self.value.cpu(), mask=mask)


class _Unclear(Exception):  # noqa: N818 - it is caught here
    """An operation cannot be run on other numbers."""


class _Follower(TorchDispatchMode):
    """Keeps masks by memory: a view has those of what it shows, and needs no rule."""

    def __init__(self, model: nn.Module, examples: int) -> None:
        super().__init__()
        self.model, self.examples = model, examples
        self.inside = Innermost(model, self.leave)
        self.held: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}  # a mask for each byte
        # Memory of weights, draws and what follows from them: other numbers in the next step.
        self.moving: dict[int, torch.UntypedStorage] = {}
        # Of numbers computed of no example, but perhaps of how many there are.
        self.computed: dict[int, torch.UntypedStorage] = {}
        self.met: str | None = None  # the module in which examples meet first
        self.backward: str | None = None  # the first module at which their gradients do
        self.looks = ""
        self.generator = torch.Generator()

    # -------------------------------------------------------------------------------- masks

    def of(self, tensor: Any) -> Tensor | None:
        """Return a tensor's masks, of its shape; None if no example reaches its memory."""
        if not _has_memory(tensor) or _key(tensor) not in self.held:
            return None
        size = tensor.element_size()
        strides = [size * stride for stride in tensor.stride()]
        start = size * tensor.storage_offset()
        return self.held[_key(tensor)][1].as_strided(tensor.shape, strides, start)

    def mark(self, tensor: Tensor, masks: Tensor) -> None:
        if not _has_memory(tensor) or not (_key(tensor) in self.held or masks.any()):
            return
        storage, size = tensor.untyped_storage(), tensor.element_size()
        if _key(tensor) not in self.held:
            zeros = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=tensor.device)
            self.held[_key(tensor)] = storage, zeros
        strides = [size * stride for stride in tensor.stride()]
        places = (*tensor.shape, size), (*strides, 1), size * tensor.storage_offset()
        self.held[_key(tensor)][1].as_strided(*places).copy_(masks.unsqueeze(-1))
        if self.met is None and self.inside.stack and (masks == BOTH).any():
            self.met = self.inside.stack[-1]

    def mark_rows(self, batch: Tensor) -> None:
        for rows, bit in ((batch[:1], FIRST), (batch[1:], OTHERS)):
            self.mark(rows, torch.tensor(bit, dtype=torch.uint8).expand(rows.shape))

    def mixes_rows(self, batch: Any) -> bool:
        """True if the first row of a batch depends on other examples, or another on the first."""
        masks = self.of(batch)
        if masks is None or not masks.dim() or len(masks) != self.examples:
            return False
        return bool((masks[:1] & OTHERS).any() or (masks[1:] & FIRST).any())

    def note_moving(self, tensors: Sequence[Tensor]) -> None:
        self.moving |= {_key(t): t.untyped_storage() for t in tensors if _has_memory(t)}

    def is_moving(self, tensor: Any) -> bool:
        return _has_memory(tensor) and _key(tensor) in self.moving

    def note_look(self, what: str) -> None:
        stack, where = self.inside.stack, "a hook or a backward pass of the model's own"
        where = describe_layer(self.model, stack[-1]) if stack else where
        self.looks = self.looks or f"{where} {what}"

    # --------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = func.overloadpacket.__name__.removesuffix("_")
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        with no_dispatch():
            tensors = _tensors((args, kwargs))
            masks = {id(t): mask for t in tensors if (mask := self.of(t)) is not None}
            moving = is_drawn or any(map(self.is_moving, tensors))
            if (masks or moving) and _looks(func, kind, args):
                self.note_look(f"looks at numbers ({kind})")
            if masks and func.namespace not in ("aten", "prims"):
                self.note_look(f"calls an operator of its own ({func})")
            written = _written(func, args, kwargs)
            shares = not masks or func.is_view
            is_new = kind.startswith(("empty", "new_")) or kind.endswith("_like")
            pointwise = torch.Tag.pointwise in func.tags or kind in POINTWISE
            if written and masks:  # what the arguments were
                masks = {at: mask.clone() for at, mask in masks.items()}
            given = (args, kwargs)
            if written and not (shares or is_new or pointwise or kind in FILLS):
                given = _copied(args, kwargs, written)
                pairs = zip(tensors, _tensors(given), strict=True)
                masks = {id(new): masks[id(old)] for old, new in pairs if id(old) in masks}
        with nullcontext() if is_drawn else no_dispatch():
            out = func(*args, **kwargs)
        with no_dispatch():
            results = _results(written, out)
            if moving:
                self.note_moving(results)
            if not masks and tensors and not func.is_view:
                self.computed |= {_key(t): t.untyped_storage() for t in results if _has_memory(t)}
            if shares or is_new:
                return out
            if kind in FILLS:
                source = masks.get(id(args[1])) if len(args) > 1 else None
                found = [torch.tensor(0, dtype=torch.uint8) if source is None else source]
            elif kind in SUMS:
                found = [torch.tensor(BOTH, dtype=torch.uint8) for _ in results]
            elif pointwise:
                found = [_join(masks, result) for result in results]
            else:
                found = self._probe(func, kind, given, masks, results, is_drawn)
            for result, bits in zip(results, found, strict=False):
                self.mark(result, bits.to(result.device).expand(result.shape))
        return out

    def _probe(
        self,
        func: Any,
        kind: str,
        given: Any,
        masks: dict[int, Tensor],
        results: list[Tensor],
        is_drawn: bool,
    ) -> list[Tensor]:
        """Return the masks of an operation's results, found by varying its arguments.

        The operation runs on the CPU where it can: some GPU kernels add in a different order each
        time.
        """
        leaves, spec = tree_flatten(given)
        sizes = {id(t): size for t, size in _indexed(kind, given[0])}
        # An index that is computed, or that examples or draws reach, may be another one.
        others = (self.moving, self.computed)
        probed = [
            _Probed(
                leaf,
                masks.get(id(leaf)),
                sizes.get(id(leaf)),
                id(leaf) in sizes and (id(leaf) in masks or any(_key(leaf) in of for of in others)),
            )
            for leaf in leaves
        ]
        shapes = [result.shape for result in results]
        on_gpu = any(result.is_cuda for result in results)
        tries = [[leaf.on_cpu() for leaf in probed], probed] if on_gpu else [probed]
        failed = ""
        for arguments in tries:
            try:
                return self._vary(func, kind, arguments, spec, shapes, is_drawn)
            except Exception as error:
                failed = first_line(error)
        self.note_look(f"runs {kind}, which cannot be traced ({failed})")
        return [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]

    def _vary(
        self,
        func: Any,
        kind: str,
        leaves: list[_Probed],
        spec: Any,
        shapes: list[torch.Size],
        is_drawn: bool,
    ) -> list[Tensor]:
        found = [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]
        self.generator.manual_seed(0)

        def run(values: list[Any]) -> list[Tensor]:
            args, kwargs = tree_unflatten(values, spec)
            args, kwargs = _copied(args, kwargs, _written(func, args, kwargs))
            with nullcontext() if is_drawn else no_dispatch():
                outputs = _results(_written(func, args, kwargs), func(*args, **kwargs))
            if [o.shape for o in outputs] != shapes:
                raise _Unclear("its size depends on values")
            return outputs

        for shift in (0, 1) if any(leaf.free for leaf in leaves) else (0,):
            for scale in (1.0,) if kind in LINEAR else (1.0, 1e3, -1e3):
                settled = []
                for leaf in leaves:
                    if leaf.free and leaf.size:
                        settled.append((leaf.value + shift) % leaf.size)
                    elif leaf.mask is not None and leaf.value.dtype == torch.bool:
                        settled.append(torch.full_like(leaf.value, scale < 0))
                    else:
                        settled.append(self._shake(leaf.value))
                base = run(settled)
                for bit in (FIRST, OTHERS):
                    changed = []
                    for leaf, value in zip(leaves, settled, strict=True):
                        if leaf.mask is not None:
                            other = self._replace(value, kind, leaf.size, scale)
                            value = torch.where(leaf.mask & bit > 0, other, value)
                        changed.append(value)
                    for mask, a, b in zip(found, base, run(changed), strict=True):
                        differ = (a != b) & ~((a != a) & (b != b))  # NaN is as NaN
                        mask |= bit * differ.to("cpu", torch.uint8)
        return found

    def _shake(self, leaf: Any) -> Any:
        """Return numbers near these, none of which is special: no weight is 0."""
        if not _has_memory(leaf) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        return leaf + 0.1 * self._draw(leaf)

    def _replace(self, value: Tensor, kind: str, size: int | None, scale: float) -> Tensor:
        """Return other numbers; far off, above or below, if the scale is not 1."""
        if size is not None:
            return (value + 1) % max(1, size)
        if value.dtype == torch.bool:
            return ~value
        if value.is_floating_point() or value.is_complex():
            drawn = self._draw(value)
            return drawn if scale == 1 else scale * (1 + drawn.abs()).to(value.dtype)
        if value.dtype == torch.uint8 and "rnn" in kind:
            return value  # a kernel's own notes for its backward pass, which it may not miss
        if kind not in VALUES:  # it may be an index: of those that are there, each is valid
            least, most = int(value.min()), int(value.max())
            if least == most:
                raise _Unclear("all whole numbers that it takes are the same")
            return (value - least + 1) % (most - least + 1) + least
        drawn = torch.randint(1, 100, value.shape, generator=self.generator).to(value.device)
        return (value + int(scale) * drawn).to(value.dtype)

    def _draw(self, like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=self.generator, dtype=like.dtype)
        return drawn.to(like.device)

    def leave(self, name: str, leaves: bool, passed: Any) -> None:
        """Compare the masks of a module's output with those of its gradient, when that comes."""
        with torch._C.DisableTorchFunction():
            self._leave(name, leaves, passed)

    def _leave(self, name: str, leaves: bool, passed: Any) -> None:
        owns = leaves and any(True for _ in self.model.get_submodule(name).parameters(False))
        for output in _tensors(passed) if leaves else []:
            with no_dispatch():
                if self.met is None and self.mixes_rows(output):
                    self.met = name
                masks = self.of(output) if owns and output.grad_fn is not None else None
                own = None if masks is None else masks.clone()
            if own is not None and output.grad_fn is not None:
                # At the node: hooks on the tensor come before.
                compare = partial(self.compare, name, output.output_nr, own)
                output.grad_fn.register_prehook(compare)

    def compare(self, name: str, at: int, own: Tensor, gradients: tuple[Any, ...]) -> None:
        with no_dispatch():
            masks = self.of(gradients[at])
            # Where no example reaches the output, the gradients of all may meet.
            if masks is not None and (masks & ~own)[own > 0].any() and self.backward is None:
                self.backward = name


class _Exits(TorchFunctionMode):
    """Notes where numbers leave torch without an operation."""

    def __init__(self, follower: _Follower) -> None:
        super().__init__()
        self.follower = follower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is one_hot and (*args[1:], *kwargs.values(), -1)[0] > 0:
            looks, found = self.follower.looks, func(*args, **kwargs)
            self.follower.looks = looks  # it looks whether the numbers are valid, at nothing else
            return found
        if getattr(func, "__name__", "") in LOOKS:
            with no_dispatch():
                if self.follower.of(args[0]) is not None or self.follower.is_moving(args[0]):
                    self.follower.note_look(f"looks at numbers ({func.__name__})")
        return func(*args, **kwargs)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _has_memory(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _looks(func: Any, kind: str, args: Any) -> bool:
    """True if an operation's answer to Python, or the size of its result, depends on values."""
    if kind in BY_PLACE:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})


def _indexed(kind: str, args: Any) -> list[tuple[Tensor, int]]:
    """Return the arguments that are indices, with how many values each may have."""
    if kind in ("embedding", "_embedding_bag", "_embedding_bag_forward_only"):
        return [(args[1], len(args[0]))]
    if kind in BY_DIM:
        return [(args[2], args[0].shape[args[1]] if args[0].dim() else 1)]
    if kind in BY_PLACE:
        return [(i, args[0].shape[dim]) for dim, i in enumerate(args[1]) if i is not None]
    return []


def _join(masks: dict[int, Tensor], result: Tensor) -> Tensor:
    whole = torch.zeros(result.shape, dtype=torch.uint8, device=result.device)
    for mask in masks.values():
        whole |= mask.to(whole.device)
    return whole


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes."""
    found: list[Tensor] = []
    if func._schema.is_mutable:
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += _tensors(args[at] if at < len(args) else kwargs.get(argument.name))
    return found


def _copied(args: Any, kwargs: Any, written: list[Tensor]) -> Any:
    """Return the arguments with copies of those that are written."""
    leaves, spec = tree_flatten((args, kwargs))
    own = {id(tensor) for tensor in written}
    return tree_unflatten([leaf.clone() if id(leaf) in own else leaf for leaf in leaves], spec)


def _results(written: list[Tensor], out: Any) -> list[Tensor]:
    """Return all tensors that an operation has written or made."""
    return [*written, *(t for t in _tensors(out) if not any(t is w for w in written))]
