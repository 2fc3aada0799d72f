"""What is asked of a model before its first private step, found by running it on random numbers, never on records.

Per-sample clipping bounds what a record does through its own loss. It bounds nothing if a layer lets one sample see another, or
writes what it saw into its own state. Which layers do is not told by their names (torchcvnn's LayerNorm does, a GroupNorm does
not), so they are found by changing one sample and looking at the others.

BatchNorm is the usual offender; `batchnorm.py` replaces it, when asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients import Batch, Loss
from zdp_bench.gradients.clipping import trainable

SAMPLES = 3
# A sample that is not touched comes out of a forward pass bit for bit the same. Where a kernel may split its work otherwise (a
# sum over samples on a GPU, a batch of another size) it may round otherwise.
SAME, ROUNDED = 1e-6, 1e-4


# ------------------------------------------------------------------------------------------------------------ the check


def check(model: nn.Module, algorithm: Algorithm, loss: Loss, like: Batch, outputs: int) -> list[str]:
    """Refuse a model that per-sample clipping does not protect; say which fixed state the output depends on.

    Args:
        model: in the mode, and on the device, in which it will be trained. It is left as it was.
        algorithm: what will train it.
        loss: (outputs, targets) -> one loss per record, [B].
        like: inputs [n, ...] and targets [n, ...] of the shapes and dtypes to come; n may be 0, no value is read.
        outputs: integer targets are drawn below this.

    Returns:
        The names of buffers and frozen parameters that the output depends on. What they hold is released with the model as it
        is, outside of any ε: it must not come from the training records.

    Formal guarantees (as far as running can tell, on random inputs of three sizes):
        - changing or leaving out one sample changes no other sample's output, loss or gradient;
        - a forward pass in training leaves nothing behind that depends on the samples;
        - the algorithm's sum over a batch is the sum of its per-record contributions, each within its bound.

    Raises:
        UserError: one of these does not hold, or a parameter gets no gradient; names the layer.
    """
    device = next(model.parameters()).device
    batch = _synthetic(like[0], SAMPLES, outputs, device), _synthetic(like[1], SAMPLES, outputs, device)
    with _left_as_it_was(model, device):
        _takes(model, batch[0])
        steady = _is_deterministic(model, batch[0])
        _no_sample_sees_another(model, batch[0], steady)
        _keeps_nothing(model, batch[0])
        _one_loss_a_record(model, loss, batch)
        _every_parameter_has_a_gradient(model, batch[0])
        _contributions_add_up(model, algorithm, batch, steady)
        return _fixed_state(model, batch[0])


def _synthetic(like: Tensor, samples: int, below: int, device: torch.device) -> Tensor:
    """Random numbers [samples, *like.shape[1:]] of the dtype of `like`, on the device."""
    generator = torch.Generator().manual_seed(0)
    shape = (samples, *like.shape[1:])
    if like.dtype.is_complex or like.dtype.is_floating_point:
        return torch.randn(shape, dtype=like.dtype, generator=generator).to(device)
    high = 2 if like.dtype == torch.bool else max(1, below)
    return torch.randint(0, high, shape, generator=generator).to(device=device, dtype=like.dtype)


def _forward(model: nn.Module, inputs: Tensor, seed: int = 0) -> Tensor:
    """The output, with the same dropout masks for the same seed."""
    torch.manual_seed(seed)
    return model(inputs)


def _takes(model: nn.Module, inputs: Tensor) -> None:
    inside = _Innermost(model)
    try:
        with torch.no_grad(), inside:
            output = _forward(model, inputs)
    except Exception as error:
        asked = f"{str(inputs.dtype).removeprefix('torch.')} inputs of shape {list(inputs.shape)}"
        raise UserError(f"the model cannot take {asked}: {inside.name} says: {first_line(error)}") from None
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != len(inputs):
        shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise UserError(f"the model answers {len(inputs)} samples with {shape}: its first dimension must be that of the samples.")


def _is_deterministic(model: nn.Module, inputs: Tensor) -> bool:
    with torch.no_grad():
        return not _differs(_forward(model, inputs, seed=1), _forward(model, inputs, seed=2))


def _no_sample_sees_another(model: nn.Module, inputs: Tensor, steady: bool) -> None:
    """Change one sample, by little and by much, and leave one out: the others must come out as before."""
    last = len(inputs) - 1
    for changed, scale in ((0, 1.0), (last, 1000.0)):
        other = inputs.clone()
        other[changed] = _other(inputs, changed, scale)
        watched = last if changed == 0 else 0
        with torch.no_grad():
            if _differs(_forward(model, inputs)[watched], _forward(model, other)[watched]):
                raise _mixes(_mixing_layer(model, inputs, other, watched))
        before, after = (_gradients(model, x, watched) for x in (inputs, other))
        for name, value in before.items():
            if _differs(value, after[name], ROUNDED):
                raise _mixes(_owner(model, name), "in its gradient")
    if steady:  # with another number of samples, dropout would draw other masks
        with torch.no_grad():
            if _differs(_forward(model, inputs)[0], _forward(model, inputs[:last])[0], ROUNDED):
                raise _mixes(_mixing_layer(model, inputs, inputs[:last], 0))


def _other(inputs: Tensor, at: int, scale: float) -> Tensor:
    """Another sample to stand at `at`."""
    if inputs.dtype.is_complex or inputs.dtype.is_floating_point:
        return -scale * inputs[at] + 0.5 * scale
    return inputs[at].logical_not().to(inputs.dtype)


def _gradients(model: nn.Module, inputs: Tensor, sample: int) -> dict[str, Tensor]:
    """The gradient of one sample's output, by parameter; those that get none are left out."""
    parameters = trainable(model)
    with torch.enable_grad():
        found = torch.autograd.grad(_probe(_forward(model, inputs)[sample]), list(parameters.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def _probe(output: Tensor) -> Tensor:
    """A real number that depends on every entry of the output."""
    real = torch.view_as_real(output) if output.is_complex() else output
    weights = torch.linspace(0.5, 1.5, real.numel(), device=real.device, dtype=real.dtype).view_as(real)
    return (weights * real).sum()


def _mixes(layer: str, where: str = "") -> UserError:
    where = f" {where}" if where else ""
    advice = "set model.replace_batchnorm=group, instance or frozen" if "BatchNorm" in layer else "use a per-sample layer there"
    return UserError(
        f"{layer} lets one sample see another{where}, so clipping bounds nothing and no ε would hold: {advice}, "
        "or train with algorithm=sgd, which claims none."
    )


def _mixing_layer(model: nn.Module, inputs: Tensor, other: Tensor, sample: int) -> str:
    """The first place in the forward pass where the sample differs between two batches that both hold it."""
    tolerance = SAME if len(inputs) == len(other) else ROUNDED
    with torch.no_grad():
        for before, after in zip(_trace(model, inputs), _trace(model, other), strict=False):
            ours, theirs = _of_sample(before, sample, len(inputs)), _of_sample(after, sample, len(other))
            if ours is not None and theirs is not None and _differs(ours, theirs, tolerance):
                # A layer that is GIVEN something mixed is innocent: what called it mixed before.
                return _describe(model, before.name if before.leaving else before.name.rpartition(".")[0])
    return _describe(model, "")


@dataclass(frozen=True)
class _Passage:
    """A tensor on its way into a module, or out of it."""

    name: str
    leaving: bool
    value: Tensor


def _trace(model: nn.Module, inputs: Tensor) -> list[_Passage]:
    """Every tensor that passes into or out of a module in one forward pass, in order."""
    seen: list[_Passage] = []

    def note(name: str, leaving: bool) -> Callable[..., None]:
        def hook(module: nn.Module, entering: object, left: object = None) -> None:
            passed = left if leaving else entering
            for value in passed if isinstance(passed, tuple | list) else (passed,):
                if isinstance(value, Tensor):
                    seen.append(_Passage(name, leaving, value.detach().clone()))

        return hook

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(note(name, False)), module.register_forward_hook(note(name, True))]
    try:
        _forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _of_sample(passage: _Passage, sample: int, samples: int) -> Tensor | None:
    """What belongs to a sample; layers that fold other dimensions into the first keep the samples' order."""
    value = passage.value
    if value.dim() == 0 or len(value) == 0 or len(value) % samples:
        return None
    return value.unflatten(0, (samples, -1))[sample]


def _keeps_nothing(model: nn.Module, inputs: Tensor) -> None:
    """Two passes with different samples from the same state must leave the same state."""
    start = _state(model)
    ends = []
    with torch.no_grad():
        for samples in (inputs, _other(inputs, 0, 2.0).expand_as(inputs)):
            _forward(model, samples)
            ends.append(_state(model))
            _restore(model, start)
    for (module, key), value in ends[0].items():
        after = ends[1].get((module, key))
        if after is None or after.shape != value.shape or _differs(value, after, tolerance=0.0):
            raise UserError(
                f"{_describe(model, module)} keeps what it sees of the training records in '{key}', which nothing bounds and no "
                "noise covers: " + _advice_on_state(model, module)
            )


def _advice_on_state(model: nn.Module, module: str) -> str:
    if isinstance(model.get_submodule(module), _BatchNorm):
        return "set model.replace_batchnorm=group, instance or frozen."
    return "switch it off (track_running_stats=False for torch's norms), or use another layer there."


def _state(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Every tensor a module holds that is no parameter: buffers and plain attributes, (module, name) -> a copy."""
    return {
        (name, key): value.detach().clone()
        for name, module in model.named_modules()
        for key, value in (*module._buffers.items(), *vars(module).items())
        if isinstance(value, Tensor)
    }


def _restore(model: nn.Module, state: dict[tuple[str, str], Tensor]) -> None:
    for name, module in model.named_modules():
        for key, value in list(module._buffers.items()):
            if value is not None and (name, key) in state:
                value.detach().copy_(state[name, key])
        for key, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                if (name, key) in state:
                    setattr(module, key, state[name, key].clone())
                else:
                    delattr(module, key)


def _one_loss_a_record(model: nn.Module, loss: Loss, batch: Batch) -> None:
    inputs, targets = batch
    with torch.no_grad():
        output = _forward(model, inputs)
        try:
            losses = loss(output, targets)
        except Exception as error:
            answered, asked = list(output.shape), list(targets.shape)
            raise UserError(
                f"the task's loss cannot take outputs of shape {answered} with targets of shape {asked}: {first_line(error)}"
            ) from None
        if losses.shape != (len(inputs),):
            raise UserError(
                f"the task's loss gives shape {list(losses.shape)} for {len(inputs)} records: it must give one number a record, "
                "never a mean."
            )
        output = output.clone()
        output[0] = -output[0] + 1.0
        if _differs(losses[1:], loss(output, targets)[1:]):
            raise UserError("the task's loss of one record depends on the output for another, so clipping bounds nothing.")


def _every_parameter_has_a_gradient(model: nn.Module, inputs: Tensor) -> None:
    reached = _gradients(model, inputs, 0)
    for name in trainable(model):
        if name not in reached:
            raise UserError(
                f"parameter '{name}' has no influence on the model's output, so it would be trained by noise alone: take it out, "
                "or set requires_grad=False on it."
            )


def _contributions_add_up(model: nn.Module, algorithm: Algorithm, batch: Batch, steady: bool) -> None:
    """The sum the algorithm makes of a batch must be that of what it says each record contributes."""
    inside = _Innermost(model)
    try:
        with inside:
            torch.manual_seed(0)
            shares = algorithm.contributions(batch)
            total = {name: torch.zeros_like(share[0]) for name, share in shares.items()}
            algorithm.accumulate(total, batch)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{inside.name} has no per-sample gradient: torch.func says: {first_line(error)} Use another layer there."
        ) from None
    _within_bounds(algorithm, shares)
    if not steady:  # dropout drew different masks for the two
        return
    sizes = {name: float(share.detach().abs().max()) if share.numel() else 0.0 for name, share in shares.items()}
    # A bias in front of a norm has a gradient of rounding errors only; those are measured against all the others.
    rounding = 1e-5 * max(sizes.values(), default=0.0) + 1e-12
    for name, share in shares.items():
        whole = share.sum(dim=0)
        if float((whole - total[name]).abs().max() if whole.numel() else 0.0) > 1e-3 * sizes[name] + rounding:
            raise UserError(
                f"{_owner(model, name)}: its rule for per-sample gradients does not fit the way this model uses it; set "
                "algorithm.gradients=reference."
            )


def _within_bounds(algorithm: Algorithm, shares: dict[str, Tensor]) -> None:
    mechanism = algorithm.mechanism()
    squares = {name: share.abs().double().square().flatten(1).sum(dim=1) for name, share in shares.items()}  # each [B]
    whole = sum(squares.values())
    for block in mechanism.blocks:
        moved = whole if mechanism.joint else squares[block.name]
        if math.isfinite(block.bound) and bool((torch.as_tensor(moved).sqrt() > block.bound * (1 + 1e-4)).any()):
            raise UserError(f"a record's share of '{block.name}' exceeds its bound {block.bound:g}: no ε would hold.")


def _fixed_state(model: nn.Module, inputs: Tensor) -> list[str]:
    """Buffers and frozen parameters the output depends on, by name."""
    fixed = []
    with torch.no_grad():
        before = _forward(model, inputs)
        for name, buffer in model.named_buffers():
            if not (buffer.dtype.is_complex or buffer.dtype.is_floating_point):
                continue
            held = buffer.clone()
            buffer.mul_(1.5).add_(0.5)
            if _differs(before, _forward(model, inputs), tolerance=0.0):
                fixed.append(name)
            buffer.copy_(held)
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if frozen:
        for parameter in frozen.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            found = torch.autograd.grad(_probe(_forward(model, inputs)), list(frozen.values()), allow_unused=True)
        fixed += [name for name, gradient in zip(frozen, found, strict=True) if gradient is not None]
    return sorted(fixed)


# ------------------------------------------------------------------------------------------------------- running, and words


@contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers, attributes, gradients wanted, and torch's random state stay what they were, whatever is tried inside."""
    state = _state(model)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(wanted[name])
            _restore(model, state)


@dataclass
class _Innermost:
    """While active, knows the innermost module that is being run: the one to name when an error comes."""

    model: nn.Module
    stack: list[str] = field(default_factory=list)
    handles: list = field(default_factory=list)
    name: str = "the model"

    def __enter__(self) -> _Innermost:
        def leave(*_: object) -> None:  # a hook that returned something would put it in the output's place
            self.stack.pop()

        for name, module in self.model.named_modules():
            self.handles.append(module.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name)))
            self.handles.append(module.register_forward_hook(leave))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        if kind and self.stack:
            self.name = _describe(self.model, self.stack[-1])


def _differs(a: Tensor, b: Tensor, tolerance: float = SAME) -> bool:
    """Whether two tensors differ by more than `tolerance` of the largest entry; a NaN on one side only is a difference."""
    if a.shape != b.shape:
        return True
    if torch.equal(a, b) or a.numel() == 0:
        return False
    if not (a.dtype.is_complex or a.dtype.is_floating_point):
        return True
    scale = float(torch.nan_to_num(a.abs(), posinf=0.0).max())
    return not torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _describe(model: nn.Module, name: str) -> str:
    """ "layer 'net.1' (BatchNorm2d)", or "the model (MLP)" for what stands in its own forward."""
    kind = type(model.get_submodule(name)).__name__
    return f"layer '{name}' ({kind})" if name else f"the model ({kind})"


def _owner(model: nn.Module, parameter: str) -> str:
    """The layer a parameter belongs to; a block that is no parameter is named as it is."""
    if parameter not in dict(model.named_parameters()):
        return f"block '{parameter}'"
    return _describe(model, parameter.rpartition(".")[0])
