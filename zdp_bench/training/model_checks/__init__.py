"""Check, before the first private step, that per-sample clipping protects a model.

Clipping bounds the influence of an example only through its own loss. It bounds nothing if a layer
mixes samples. So a third-party model is recorded, and its operations are checked
(`gradients.program`). If they are not known to keep samples apart, each sample is processed alone.
Models that would then not train as their author intends are rejected here.

The most common such layer is BatchNorm, which `nn/surgery.py` replaces on request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import checkpoint as checkpoints

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import (
    UserError,
    first_line,
    is_for_python,
    is_out_of_memory,
    setting,
    setting_name,
)
from zdp_bench.gradients import Batch, Loss, PerExample, per_example, reference
from zdp_bench.gradients.clipping import squared_norms, trainable
from zdp_bench.gradients.losses import (
    DomainError,
    are_alike,
    preserve_random_state,
    require_outputs_alone,
    set_seed,
)
from zdp_bench.gradients.outside_state import are_equal, preserve_outside_state
from zdp_bench.gradients.parts import (
    advice_on_parts,
    describe,
    map_leaves,
    takes_parts,
    unpack,
)
from zdp_bench.gradients.program import State, copy_apart, state_of
from zdp_bench.nn.precision import float32_products, repeatable
from zdp_bench.privacy.noise import real_view
from zdp_bench.training.model_checks.examples import SAMPLES, find_source
from zdp_bench.training.model_checks.layers import Innermost, advice_on, describe_layer
from zdp_bench.training.model_checks.state import (
    require_loss_keeps_nothing,
    require_nothing_kept,
)
from zdp_bench.training.total import Total

log = logging.getLogger(__name__)

NO_GRADIENT = 1e-6  # a gradient that is rounding only, relative to the largest output
SMALL_SHARE = 1e-3  # a gradient that is rounding only, relative to that of a batch
MAX_DRAWS = 20  # random draws in which a parameter without influence must have none
SHARE_SIZES = (2, 1)  # numbers of examples in the two shares of the check; together `SAMPLES`


class Checked(NamedTuple):
    """The result of a check.

    Attributes:
        fixed_state: names of the buffers and frozen parameters that the output depends on. They are
            released with the model, and no ε covers them, so they must not come from the training
            examples.
        batch: the examples on which the model was checked.
    """

    fixed_state: list[str]
    batch: Batch


def check(
    model: nn.Module,
    algorithm: Algorithm,
    loss: Loss,
    example_batch: Batch,
    forms_shares: bool = False,
    probe: Batch | None = None,
) -> Checked:
    """Reject a model that per-sample clipping cannot protect, or that would not train as intended.

    Args:
        model: the model, in the mode and on the device of the training. It is not changed.
        algorithm: the algorithm that trains it.
        loss: the loss.
        example_batch: inputs [n, ...] and targets [n, ...] with the training set's shapes and
            dtypes. No value is read, and n may be 0.
        forms_shares: whether several examples may form one share.
        probe: public examples for the checks, needed if model or loss cannot run on random inputs.
            Default: random numbers.

    Formal guarantees:
        - No sample's output, loss or gradient depends on another sample, or on the number of
          samples: every operation that runs on a batch is known to keep samples apart. Otherwise,
          each sample is processed alone, in a copy of the model.
        - A forward pass stores nothing in the model.
        - On the checked examples, an example's share of the algorithm's sum is within its bound.

    Raises:
        UserError: one of these does not hold, or a parameter gets no gradient. The message names
            the layer.
    """
    device = next(model.parameters()).device
    example_loss = per_example(loss)
    require_no_hooks(dict(model.named_parameters()))
    _refuse_by_kind(model)
    devices = [device] if device.type == "cuda" else []
    with ExitStack() as contexts:
        for context in (preserve_random_state(devices), float32_products(), repeatable(device)):
            contexts.enter_context(context)
        set_seed(0)  # the same model passes or fails at every call
        contexts.enter_context(takes_parts(model))
        restore = contexts.enter_context(
            preserve_outside_state(model, example_loss.loss, weights=model.parameters())
        )
        source = find_source(model, loss, example_batch, probe)
        batch = source.draw(SAMPLES)
        _check_shapes(model, batch[0])
        require_nothing_kept(model, batch[0])
        restore()  # else, what these passes stored would be constants of the program
        state = state_of(model, batch[0])
        _refuse_norms(model, state)
        with _explaining_ones(state):
            _check_shapes(model, batch[0][:1])
            restore()
            _refuse_stored_terms(model, example_loss, batch)
            if state.alone:
                _require_influence_alone(model, batch[0], state)
            _check_losses(model, example_loss, batch)
        _check_gradients(model, batch[0], state)
        restore()
        _check_sums(algorithm, batch, SHARE_SIZES if forms_shares else None)
        return Checked(_find_fixed_state(model, state, batch[0]), batch)


@contextmanager
def _explaining_ones(state: State) -> Iterator[None]:
    """Say in an error why there is one example, where a model's examples run one at a time."""
    try:
        yield
    except DomainError as error:
        if not state.alone:
            raise
        raise DomainError(f"{error} Examples run one at a time, because {state.alone}.") from None


def require_no_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Reject hooks on parameters, which run only if autograd writes their gradients."""
    for name, parameter in parameters.items():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise UserError(
                f"parameter '{name}' has a hook, which private steps do not call: remove it, or "
                "move its computation into the model."
            )


def _refuse_by_kind(model: nn.Module) -> None:
    """Reject layers that are known to be unsuitable, by their type."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.training:
            if not isinstance(module, nn.modules.instancenorm._InstanceNorm):
                raise _mixing_error(model, name)
            if module.track_running_stats:
                raise UserError(
                    f"{describe_layer(model, name)} stores training examples in 'running_mean', "
                    "which no noise covers: build it with track_running_stats=False."
                )
        if any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values()):
            raise UserError(
                f"{describe_layer(model, name)}: torch.nn.utils.weight_norm writes the weight in "
                "every forward pass, outside the trained parameters: use "
                "torch.nn.utils.parametrizations.weight_norm, or no weight norm."
            )
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UserError(
                f"{describe_layer(model, name)} has sparse gradients, which cannot be clipped by "
                "their norm: build it with sparse=False."
            )


def _mixing_error(model: nn.Module, name: str) -> UserError:
    alternative = "without make_private" if is_for_python() else "with algorithm=sgd"
    return UserError(
        f"{describe_layer(model, name)} lets one example affect another, so clipping bounds "
        f"nothing and no ε would hold: {advice_on(model.get_submodule(name))}, or train "
        f"{alternative}, which states no ε."
    )


def _refuse_norms(model: nn.Module, state: State) -> None:
    """Reject a norm over the batch, which would compute something else for one example alone.

    The layer that mixes samples may be inside the norm, so the layers around it are tried as well.
    """
    parts = state.layer.split(".") if state.alone else []
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if "Norm" in type(model.get_submodule(name)).__name__:
            raise _mixing_error(model, name)


def _check_shapes(model: nn.Module, inputs: Tensor) -> None:
    """Reject a model whose copy fails, or returns no tensor with one row of numbers per example.

    Also reject autocast and checkpoints inside the model.
    """
    twin = copy_apart(model)
    device = inputs.device.type
    is_autocast_outside = torch.is_autocast_enabled(device)

    def refuse_autocast(name: str) -> None:
        if torch.is_autocast_enabled(device) and not is_autocast_outside:
            raise UserError(
                f"{describe_layer(twin, name)} runs under torch.autocast, which would round the "
                "gradients that are clipped: remove autocast from the forward function, and set "
                f"{setting('precision', 'bf16')}, which keeps sums in float32."
            )

    innermost = Innermost(twin, refuse_autocast)
    try:
        with torch.enable_grad(), innermost, _no_checkpoints(innermost):
            output = twin(map_leaves(torch.clone, inputs))
    except UserError:
        raise
    except Exception as error:
        failure = f"{innermost.name} raises: {first_line(error)}"
        if _takes(model, inputs):
            raise _make_copy_error(f"fails where the model does not: {failure}") from None
        raise DomainError(
            f"the model cannot take {describe(inputs)}: {failure}{advice_on_parts(inputs)}"
        ) from None
    if not isinstance(output, Tensor):
        raise UserError(
            f"the model returns {type(output).__name__} instead of a tensor: put it into a module "
            "that returns one tensor whose first dimension is that of the examples, such as "
            "`output.logits`."
        )
    if output.dim() == 0 or len(output) != len(inputs):
        raise UserError(
            f"the model returns shape {list(output.shape)} for {len(inputs)} examples: the first "
            "dimension must be that of the examples."
        )
    if not output.numel():
        raise UserError(
            f"the model returns shape {list(output.shape)}, which holds no numbers: give its last "
            "layer at least one output."
        )
    if isinstance(output, FakeTensor):  # left by the recording of the model's program
        raise UserError(
            "the model stores a tensor of an earlier pass outside its modules (in a global or a "
            "closure), which clipping cannot bound: compute the output from inputs and weights "
            "only."
        )
    if output.isnan().any():
        raise DomainError(f"the model gives NaN for {describe(inputs)}.")


def _takes(model: nn.Module, inputs: Tensor) -> bool:
    """Return True if the model itself, and not a copy of it, can run on the inputs."""
    try:
        with torch.enable_grad():
            model(map_leaves(torch.clone, inputs))
    except Exception:  # of any kind, from the user's code
        return False
    return True


def _make_copy_error(difference: str) -> UserError:
    """Return the error for a model whose copies, which private steps run, differ from it."""
    return UserError(
        f"a copy of the model, which private steps run, {difference} Let its forward function find "
        "what it reads in attributes of the model, not by a module or its id in a global, and let "
        "__getstate__ and __deepcopy__ copy them all."
    )


@contextmanager
def _no_checkpoints(innermost: Innermost) -> Iterator[None]:
    """Reject calls of `torch.utils.checkpoint`, reentrant or not, in the block."""

    def refuse(*_: object, **__: object) -> None:
        raise UserError(
            f"{describe_layer(innermost.model, innermost.stack[-1])}: torch.utils.checkpoint is "
            "called there, which does not support per-example gradients: switch it off "
            "(set_grad_checkpointing(False) in timm, gradient_checkpointing_disable() in "
            f"transformers), and set {setting_name('trainer.micro_batch')} to save memory."
        )

    module: Any = checkpoints
    originals = module.CheckpointFunction, module._CheckpointFrame
    module.CheckpointFunction = type("Refusing", (), {"apply": refuse})  # reentrant
    module._CheckpointFrame = refuse  # not reentrant
    try:
        yield
    finally:
        module.CheckpointFunction, module._CheckpointFrame = originals


def _check_losses(
    model: nn.Module,
    example_loss: PerExample,
    batch: Batch,
) -> None:
    """Reject a loss that needs several examples; warn if an example's loss depends on others."""
    targets = batch[1]
    output = reference.compute_outputs(model, batch[0]).detach()
    losses = require_outputs_alone(model, example_loss, output, targets)
    if isinstance(example_loss.loss, nn.Module):
        copied = output[:1].clone(), unpack(targets[:1].clone())
        require_loss_keeps_nothing(example_loss.loss, *copied)
    _require_same_losses(example_loss, output, targets)
    with torch.enable_grad():
        try:
            batch_losses = example_loss.loss(output.clone(), unpack(targets.clone()))
        except Exception:
            batch_losses = losses  # a failure does not matter: in training, it never gets a batch
        mixes = not isinstance(batch_losses, Tensor) or not are_alike(losses, batch_losses, losses)
        with torch.no_grad():  # a loss that draws random numbers differs at every call
            mixes = mixes and are_alike(losses, example_loss(output, targets), losses)
        needs_batch = mixes or _has_batch_gradient(model, example_loss.loss, batch)
        if needs_batch and not _has_gradient(example_loss, output, targets):
            raise UserError(
                "the loss of a single example has no gradient. If it compares the examples of a "
                "batch with each other, as a contrastive loss does, no example's influence can be "
                "bounded: make the pair that is compared one example, ((a, b), target), let the "
                "model take both, and use a loss that one pair has, such as its cosine distance."
            )
        leaf = output.detach().requires_grad_()
        losses = example_loss(leaf, targets)
    if not losses.requires_grad:
        raise DomainError(
            "the loss of an example does not change with the model's outputs, so that noise alone "
            "would train the model: compute it from the outputs without detach(), argmax or "
            "comparisons on the way."
        )
    if _is_flat(losses, leaf):
        log.warning(
            "the gradient of the loss is exactly 0 for each example of the check: if it is for "
            "yours too, noise alone trains the model. Check that no factor, mask, clamp or ignored "
            "target removes it"
        )
    if mixes:
        log.warning(
            "the loss of an example depends on its batch: it is computed for each example "
            "separately, so that no other can affect it. Check that this is intended"
        )


def _refuse_stored_terms(model: nn.Module, loss: PerExample, batch: Batch) -> None:
    """Reject a loss that reads what the model's forward function stores, as private steps do not.

    Its result right after a forward pass must be the same once what the pass stored is undone.
    """
    inputs, targets = [map_leaves(lambda leaf: leaf[:1].clone(), part) for part in batch]

    def compute_loss(output: Tensor) -> Tensor | None:
        try:
            return loss.compute_seeded(output.clone(), targets, 0).detach()
        except Exception:  # of any kind, from the user's code
            return None

    with preserve_outside_state(model, loss.loss, weights=model.parameters()) as restore:
        output = _run_beside_copy(model, inputs)
        loss_value = compute_loss(output)
        restore()
        restored_loss = compute_loss(output)
    if loss_value is None:  # it fails for another reason
        return
    if restored_loss is None or not are_alike(loss_value, restored_loss, loss_value):
        raise UserError(
            "the loss reads something that the model's forward function stores, such as an "
            "auxiliary loss. Private steps store nothing: let the model return it as a part of its "
            "output, such as torch.cat([logits, auxiliary[:, None]], dim=1), and read it from "
            "there."
        )


def _run_beside_copy(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a model's output; reject a model whose copies, which private steps run, differ."""
    outputs = []
    for module in (copy_apart(model), model):
        set_seed(0)
        try:
            with torch.enable_grad():
                outputs.append(module(map_leaves(torch.clone, inputs)).detach())
        except RuntimeError as error:  # such as an attribute that was made in inference mode
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"the model fails where a copy of it does not: torch raises: {first_line(error)}"
            ) from None
    output_of_copy, output = outputs
    if not are_alike(output_of_copy, output, output):
        raise _make_copy_error("returns another output than the model.")
    return output


def _require_same_losses(
    example_loss: PerExample,
    output: Tensor,
    targets: Tensor,
) -> None:
    """Reject a loss that fails or differs when it is called again with the same random draws."""
    losses = []
    for _ in range(2):
        set_seed(0)
        try:
            losses.append(example_loss(output, targets).detach())
        except UserError:  # for example, because an earlier call has changed its state
            raise example_loss.make_state_error() from None
    first, second = losses
    if not are_alike(first, second, first):
        raise example_loss.make_state_error()


def _has_gradient(
    example_loss: Loss,
    output: Tensor,
    targets: Tensor,
) -> bool:
    """Return True if the loss of single examples has a gradient with respect to the outputs."""
    output = output.detach().requires_grad_()
    losses = example_loss(output, targets)
    if not losses.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(losses.sum(), output)
    scale = float(output.detach().abs().max())
    return bool((gradient.abs() * scale > 1e-5).any())


def _has_batch_gradient(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
) -> bool:
    """Return True if the loss has a gradient where model and loss get all examples at once.

    Private steps never call them so. The outputs may be similarities between all examples, [B, B],
    of which an example alone has [1, 1].
    """
    inputs, targets = [map_leaves(torch.clone, part) for part in batch]
    try:
        output = copy_apart(model)(inputs)
        return _has_gradient(lambda outputs, _: loss(outputs, unpack(targets)), output, targets)
    except Exception:  # of any kind, from the user's code
        return False


def _is_flat(losses: Tensor, output: Tensor) -> bool:
    """Return True if all gradients of losses with respect to the outputs are exactly 0."""
    try:
        (gradient,) = torch.autograd.grad(losses.sum(), output)
    except RuntimeError:  # `_check_sums` explains it
        return False
    return not gradient.any()


def _check_gradients(model: nn.Module, inputs: Tensor, state: State) -> None:
    """Reject a parameter, or a model of which all parameters, cannot change the output."""
    trained = trainable(model)
    with torch.enable_grad():
        output = reference.compute_outputs(model, inputs)
        gradients = _differentiate(output, trained)
    largest = max(map(_largest, gradients), default=0.0)
    if largest <= NO_GRADIENT * float(output.detach().abs().max()):
        raise UserError(
            "the output for an example does not change with any parameter, so that noise alone "
            "would train the model: compute the output from the parameters, without detach(), "
            "argmax or comparisons on the way."
        )
    if state.alone:  # Python code may skip layers for some examples
        return
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is None and trained[name].numel():
            raise UserError(
                f"parameter '{name}' has no influence on the model's output, so it would be "
                "trained on noise alone: remove it, or set requires_grad=False."
            )


def _require_influence_alone(model: nn.Module, inputs: Tensor, state: State) -> None:
    """Reject a parameter that changes the outputs of a batch, but not that of a single example.

    For example, `softmax(dim=0)` is constant for a single example.
    """
    trained = trainable(model)
    run_alone = partial(reference.compute_outputs, model)
    names = list(trained)
    for seed in range(MAX_DRAWS):  # random layers may hide a parameter's influence in some draws
        twin = copy_apart(model)
        in_batch = _measure_gradients(twin, trainable(twin), inputs, seed)
        alone = _measure_gradients(run_alone, trained, inputs, seed)
        names = [name for name in names if alone[name] < SMALL_SHARE * in_batch[name]]
        if not names:
            return
    for name in names:
        layer_name = name.rpartition(".")[0]
        if not getattr(model.get_submodule(layer_name), "batch_first", True):
            raise UserError(
                f"{describe_layer(model, layer_name)} has batch_first=False, so it takes the "
                "examples of a batch for the steps of one sequence, and noise alone would train "
                f"'{name}': build it with batch_first=True, or transpose its inputs and outputs."
            )
    raise UserError(
        f"parameter '{names[0]}' changes the outputs of a batch, but not the output for a single "
        "example. Noise alone would train it, because examples run one at a time: "
        f"{state.alone}. Compute along the dimensions of one example there, not along the batch."
    )


def _measure_gradients(
    run: Callable[[Tensor], Tensor],
    parameters: Mapping[str, nn.Parameter],
    inputs: Tensor,
    seed: int,
) -> dict[str, float]:
    """Return the largest magnitude in each parameter's gradient of a function's output."""
    set_seed(seed)
    with torch.enable_grad():
        output = run(map_leaves(torch.clone, inputs))
        gradients = _differentiate(output, parameters)
    return dict(zip(parameters, map(_largest, gradients), strict=True))


def _differentiate(
    output: Tensor,
    parameters: Mapping[str, nn.Parameter],
) -> Sequence[Tensor | None]:
    """Return the gradients of a combination of all entries of an output."""
    try:
        return torch.autograd.grad(_combine(output), [*parameters.values()], allow_unused=True)
    except RuntimeError as error:
        raise UserError(f"the model has no gradient: torch raises: {first_line(error)}") from None


def _largest(gradient: Tensor | None) -> float:
    """Return the largest magnitude in a gradient; 0 for None."""
    if gradient is None or not gradient.numel():
        return 0.0
    return float(gradient.abs().max())


def _combine(output: Tensor) -> Tensor:
    """Return a real number that depends on every entry of the output."""
    real = real_view(output)
    weights = torch.linspace(0.5, 1.5, real.numel(), device=real.device, dtype=real.dtype)
    return (weights.view_as(real) * real).sum()


def _check_sums(
    algorithm: Algorithm,
    batch: Batch,
    shares: tuple[int, ...] | None,
) -> None:
    """Reject an algorithm that cannot sum the model's gradients, or that exceeds its bounds.

    Args:
        algorithm: the algorithm.
        batch: the examples of the check.
        shares: number of examples in each share; None if each example is a share.
    """
    model = algorithm.problem.model
    innermost, mechanism = Innermost(model), algorithm.mechanism()
    # An algorithm whose examples never form shares need not take this argument.
    batch_arguments: list[Any] = [] if shares is None else [shares]
    example_arguments: list[Any] = [] if shares is None else [(1,)]

    def accumulate(examples: Batch, arguments: list[Any]) -> dict[str, Tensor]:
        total = Total(mechanism, examples[0].device)
        set_seed(0)
        algorithm.accumulate(total, examples, *arguments)
        return total.all_blocks()

    try:
        with innermost:
            batch_total = accumulate(batch, batch_arguments)
            examples = zip(batch[0].split(1), batch[1].split(1), strict=True)
            example_totals = [accumulate(example, example_arguments) for example in examples]
            # What an example leaves behind may affect a later one, but not an earlier one.
            accumulate(_reverse(batch), batch_arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{innermost.name} has no per-example gradient: torch raises: {first_line(error)} Use "
            "another layer there."
        ) from None
    for total in example_totals:
        squares = {name: squared_norms(share.unsqueeze(0)) for name, share in total.items()}
        for block in mechanism.blocks:
            square = sum(squares.values()) if mechanism.joint else squares[block.name]
            # 1e-4 allows for rounding errors.
            is_beyond = torch.as_tensor(square).sqrt() > block.bound * (1 + 1e-4)
            if math.isfinite(block.bound) and bool(is_beyond.any()):
                raise UserError(
                    f"an example's contribution to '{block.name}' exceeds its bound "
                    f"{block.bound:g}, so no ε would hold."
                )
    if not type(algorithm).__module__.startswith("zdp_bench."):
        _check_foreign(algorithm, batch, batch_arguments, batch_total)


def _reverse(batch: Batch) -> Batch:
    """Return the examples of a batch in reverse order."""
    inputs, targets = [map_leaves(lambda leaf: leaf.flip(0), part) for part in batch]
    return inputs, targets


def _check_foreign(
    algorithm: Algorithm,
    batch: Batch,
    arguments: list[Any],
    total: dict[str, Tensor],
) -> None:
    """Reject a third-party algorithm whose sum differs from the sum of its `contributions`.

    Blocks whose contributions are drawn at random are not compared.

    Args:
        algorithm: the algorithm.
        batch: the examples of the check.
        arguments: further arguments of `contributions`: the sizes of the shares, if any.
        total: the algorithm's sum over the batch, by block.
    """
    set_seed(0)
    contributions = algorithm.contributions(batch, *arguments)
    set_seed(0)
    repeated = algorithm.contributions(batch, *arguments)
    for name, rows in contributions.items():
        is_random = not are_equal(rows, repeated[name])
        if is_random or total[name].numel() == 0:
            continue
        scale = float(rows.detach().abs().max())
        error = float((rows.sum(dim=0) - total[name]).abs().max())
        if error > 1e-2 * scale + 1e-12:
            raise UserError(
                f"{type(algorithm).__name__}.accumulate does not add the sum of what its "
                f"contributions() returns for '{name}'. It must add no noise: zdp-bench draws it "
                "itself."
            )


def _find_fixed_state(
    model: nn.Module,
    state: State,
    inputs: Tensor,
) -> list[str]:
    """Return the names of buffers and frozen parameters on which the output depends."""
    buffers = {
        name
        for name, buffer in model.named_buffers()
        if buffer.dtype.is_complex or buffer.dtype.is_floating_point
    }
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if state.program is not None:
        return sorted((buffers | frozen) & state.program.names_used(model))
    if state.alone:
        return sorted(buffers | frozen)
    # Without a program, try each tensor: the output changes if it depends on it.
    changes_output = partial(_changes_output, copy_apart(model), inputs)
    return sorted(name for name in buffers | frozen if changes_output(name))


@torch.no_grad()
def _changes_output(
    model: nn.Module,
    inputs: Tensor,
    name: str,
) -> bool:
    """Return True if the output changes when the tensor with this name is changed."""
    layer, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(layer), attribute)
    original = tensor.clone()
    set_seed(0)
    output = model(inputs)
    tensor.mul_(1.5).add_(0.5)
    set_seed(0)
    changed_output = model(inputs)
    tensor.copy_(original)
    return not torch.equal(output, changed_output)
