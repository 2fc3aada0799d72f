"""The check of a model of your own before its first private step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config.plugins import check_plugin
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, Loss, PerExample, per_example
from zdp_bench.gradients.losses import DomainError
from zdp_bench.gradients.parts import describe, leaves_of, map_leaves, pack, takes_parts
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup
from zdp_bench.training import model_checks
from zdp_bench.training.model_checks.probes import INTEGERS, SAMPLES, draw_synthetic, forward
from zdp_bench.training.model_checks.state import Guard, copy_apart, differing, watch


def check_model(
    model: nn.Module,
    loss: Loss,
    batch: tuple[Any, Any],
    *,
    algorithm: str = "dp_sgd",
    examples: int = SAMPLES,
    public: bool = False,
    **options: Any,
) -> list[str]:
    """Refuse a model that per-example clipping does not protect; see `training.model_checks.check`.

    Args:
        loss: (outputs, targets) -> one loss per example, [B]; never a mean.
        batch: (inputs, targets) of the shapes and dtypes to come, [B, ...]. A model of several
            inputs has them in a tuple or, by name, in a dictionary.
        examples: how many a step will process at once.
        public: check on the batch's examples. Else no value of them is read, and the check draws
            random numbers.
        options: of the algorithm, as in the configuration: `per_layer=True`.

    Returns:
        The names of buffers and frozen parameters that the output depends on: they are public.

    Raises:
        UserError: names the layer that breaks a guarantee, and the mend.
    """
    given = {"name": algorithm, "noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    own = check_plugin("algorithm", given).options
    packed, of_one = (pack(batch[0]), pack(batch[1])), per_example(loss)
    empty = map_leaves(lambda leaf: leaf[:0], packed[0])
    with says_python():
        like = find_examples(model, of_one, packed, packed if public else None)
        problem = Problem(model, of_one, Sampling("poisson", 1.0, examples, examples), like=empty)
        return check(model, lookup("algorithm", algorithm)(problem, **own), of_one, like, examples)


# What a recipe says, and `make_private` calls otherwise.
_BATCHNORM = re.compile(r"set model\.replace_batchnorm=.*?\(in Python: (.*?\))\)")
_VALUE = re.compile(
    r"\b(?:(?:algorithm|trainer|privacy)\.([a-z_]+)|(algorithm|precision))=([a-z_0-9]+)\b"
)
_KEY = re.compile(r"\b(?:algorithm|trainer|privacy)\.([a-z_]+)\b")


def require_gradients(caller: str) -> None:
    """Refuse a call where torch keeps no graph."""
    if not torch.is_grad_enabled():
        raise UserError(
            f"{caller} takes gradients: call it outside of torch.no_grad() and "
            "torch.inference_mode()."
        )


def require_whole(model: nn.Module) -> None:
    """Refuse a model that torch has split among processes."""
    parts = (*model.modules(), *model.parameters())
    kinds = {kind.__name__ for part in parts for kind in type(part).__mro__}
    if kinds & {"DTensor", "FullyShardedDataParallel"}:
        raise UserError(
            "model: its weights are split among processes (FSDP, or tensor parallel), and no "
            "process has an example's whole gradient to clip: give the whole model to each."
        )


@contextmanager
def says_python() -> Iterator[None]:
    """Have what is refused within said in a caller's words: `gradients="reference"`."""
    try:
        yield
    except UserError as error:
        said = _BATCHNORM.sub(r"call \1", str(error))
        said = _VALUE.sub(lambda found: f'{found[1] or found[2]}="{found[3]}"', said)
        said = _KEY.sub(r"\1", said).replace("=null", "=None").replace('="true"', "=True")
        raise type(error)(said) from None


def check(
    model: nn.Module,
    algorithm: Algorithm,
    loss: Loss,
    like: Batch,
    examples: int,
    forms_shares: bool = False,
) -> list[str]:
    """Return what `model_checks.check` does, for inputs that may be `Parts`."""
    with takes_parts(model):
        outputs = count_outputs(model, like)
        try:
            return model_checks.check(model, algorithm, loss, like, outputs, examples, forms_shares)
        except DomainError as error:
            if len(like[0]) and len(like[1]):  # a probe
                raise
            raise UserError(
                f"{error} If that is because the check runs on random numbers, give "
                "probe=(inputs, targets): two or more examples that are public, or made up."
            ) from None


def find_examples(model: nn.Module, loss: Loss, like: Batch, probe: Batch | None) -> Batch:
    """Return what the check runs on: the probe, or no example where random numbers do.

    Where the model or the loss cannot take these, numbers in [0, 1) and lengths of 1 are tried, as
    examples.

    Args:
        like: of the shapes and dtypes to come; no value is read.

    Raises:
        UserError: the probe is not of these shapes and dtypes, or its examples are all the same.
    """
    device = next(model.parameters()).device
    inputs, targets = (map_leaves(lambda leaf: leaf[:0].to(device), part) for part in like)
    if probe is not None:
        given = [map_leaves(lambda leaf: leaf.to(device), part) for part in probe]
        for name, own, asked in zip(("inputs", "targets"), given, (inputs, targets), strict=True):
            if _kinds(own) != _kinds(asked):
                found, needed = (
                    describe(map_leaves(lambda leaf: leaf.new_empty(leaf.shape[1:]), part))
                    for part in (own, asked)
                )
                said = f"probe: {found} are given, where the dataset has {needed} an example: "
                raise UserError(
                    said.replace("inputs", name) + "give one batch of such as the dataset has."
                )
        if not _vary(given[0]):
            raise UserError("probe: give two or more examples whose inputs differ, in one batch.")
        return given[0], given[1]

    def tame(leaf: Tensor) -> Tensor:
        shape = (SAMPLES, *leaf.shape[1:])
        if leaf.dtype.is_floating_point:
            return torch.rand(shape, dtype=leaf.dtype).to(device)
        if leaf.dim() == 1 and not leaf.dtype.is_complex:
            return leaf.new_ones(shape)
        return draw_synthetic(leaf, shape[0], INTEGERS, device)

    twin, _ = copy_apart(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), takes_parts(twin):
        torch.manual_seed(0)
        try:
            output = forward(twin, synthetic(twin, (inputs, targets))[0])
        except Exception:
            tame_inputs = map_leaves(tame, inputs)
            try:
                output, taken = forward(twin, tame_inputs), _vary(tame_inputs)
            except Exception:
                taken = False
            if not taken:
                return inputs, targets  # the check says which layer fails, on random numbers
            inputs = tame_inputs
        for examples in (targets, map_leaves(tame, targets)):
            try:
                PerExample(per_example(loss).loss)(output, synthetic(twin, (inputs, examples))[1])
                return inputs, examples
            except Exception:
                continue
    return inputs, targets


def _kinds(part: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape[1:], leaf.dtype) for leaf in leaves_of(part)]


def _vary(part: Tensor) -> bool:
    """True if the examples are not all the same: else nothing would show that one sees another."""
    return any(not torch.equal(leaf, leaf.roll(1, 0)) for leaf in leaves_of(part))


def count_outputs(model: nn.Module, like: Batch) -> int:
    """Return how many classes a model that `takes_parts` may tell apart.

    Integer targets of the check are drawn below it. Classes are the last dimension where targets
    have all others, [B, T] for [B, T, classes], and else dimension 1.
    """
    device = next(model.parameters()).device
    twin, _ = copy_apart(model)
    with torch.no_grad():
        try:
            outputs: Any = forward(twin, draw_synthetic(like[0], 1, INTEGERS, device))
        except Exception:  # whatever the model raises, the check says so with the layer's name
            return INTEGERS
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return INTEGERS
    shapes = {leaf.shape[1:] for leaf in leaves_of(like[1])}
    return max(INTEGERS, outputs.shape[-1 if outputs.shape[1:-1] in shapes else 1])


def guard(model: nn.Module, like: Batch) -> Guard:
    """Return the guard of a model that was checked, for inputs that may be `Parts`.

    What a model makes at its first call (a mask), it makes here: made while torch.func maps it,
    that would be no tensor any more afterwards.
    """
    inputs, public = synthetic(model, like)[0], len(like[0]) > 0
    found = watch(model, inputs, public)
    if any(found.start.get(place) is None for place in differing(found.start, found.moved)):
        with torch.no_grad():
            forward(model, inputs)
        found = watch(model, inputs, public)
    return found


def synthetic(model: nn.Module, like: Batch) -> Batch:
    """Return the examples that the check looks at, for a model that `takes_parts`."""
    device = next(model.parameters()).device
    below = INTEGERS, count_outputs(model, like)
    inputs, targets = (
        draw_synthetic(part, SAMPLES, most, device) for part, most in zip(like, below, strict=True)
    )
    return inputs, targets
