"""The sides of a comparison: different implementations of one training step of one model.

Every side builds its own model from the same seed, and takes a complete step: forward, backward,
clipping, noise, update. Our private sides run `training.step.private_step`, without a ledger
because other frameworks have none.

The sides named 'whole loop' contain everything that a user's loop does: they collate examples from
a dataset (`Examples`), and include a library's accounting and ledger. They draw all examples at
each step, so that all steps have the same batch size.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.zeta_dp_sgd import ZetaDPSGD
from zdp_bench.extras.bench.workload import BOUND, Criterion, Step, Workload, flat
from zdp_bench.gradients import Batch, Engine, PerExample
from zdp_bench.gradients.clipping import trainable
from zdp_bench.library import clipped_sum, make_private
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SeededNoise, real_view
from zdp_bench.privacy.tally import Tally
from zdp_bench.training.step import Training, private_step
from zdp_bench.training.total import Total

# -------------------------------------------------------------------------------------- non-private


class Examples(Dataset[tuple[Tensor, Tensor]]):
    """A batch as a dataset of its own, which every loop reads and collates by example.

    zdp-bench reads a `TensorDataset` at once, which is faster than most datasets allow.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch[1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch
        return inputs[index], targets[index]


def batches_of(
    workload: Workload,
    last: bool,
    collate: bool,
) -> Iterator[Batch]:
    """Return an endless iterator over the same batch.

    Args:
        workload: gives the examples.
        last: whether images are in channels-last memory format.
        collate: whether to collate the batch from a dataset at each step, as a user's loop does.
    """
    examples = workload.examples(last)
    if not collate:
        return repeat(examples)
    all_indices = repeat(list(range(workload.batch)))
    return iter(DataLoader(Examples(examples), batch_sampler=all_indices))


def non_private(
    workload: Workload,
    last: bool = True,
    whole: bool = False,
) -> Step:
    """Return the non-private step: forward, backward, update.

    Args:
        workload: the model and its examples.
        last: whether images are in channels-last memory format. Default: True.
        whole: whether the step collates its batch, as a user's whole loop does. Default: False.
    """
    model = workload.build()
    optimizer = workload.optimizer_of(model.parameters())
    batches = batches_of(workload, last, collate=whole)

    def backward() -> None:
        inputs, targets = next(batches)
        workload.loss_of(model(inputs), targets).mean().backward()

    def summed() -> Tensor:
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        return flat(gradients) * workload.batch

    return _step(optimizer, backward, summed)


def _step(
    optimizer: Any,
    backward: Callable[[], None],
    summed: Callable[[], Tensor],
) -> Step:
    """Return a side from its parts.

    Args:
        optimizer: takes the update.
        backward: computes the gradients of a batch.
        summed: returns the sum of the examples' gradients after `backward`.
    """

    def run() -> None:
        backward()
        optimizer.step()
        # Between its turns, a side keeps only its weights in memory.
        optimizer.zero_grad(set_to_none=True)

    def answer() -> Tensor:
        backward()
        total = summed()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Step(run, answer)


# ------------------------------------------------------------------------------------------ private


MAX_STEPS = 10**6  # more than are ever timed


def private(
    workload: Workload,
    engine: Engine,
    last: bool = True,
) -> Step:
    """Return our private step with DP-SGD."""
    model = workload.build()
    inputs, targets = workload.examples(last)
    sampling = Sampling("uniform", 0.01, workload.batch, 100 * workload.batch)
    loss = PerExample(workload.loss_of, proved=True)  # as in a run, where a task gives the loss
    algorithm = ZetaDPSGD(
        Problem(model, loss, sampling, like=inputs[:0]),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        gradients=engine,
    )
    optimizer = workload.optimizer_of(trainable(model).values())
    ledger = Tally(True)  # counts releases without a file
    training = Training(algorithm, model, optimizer, SeededNoise(0), ledger)
    steps = count()

    def run() -> None:
        # A new step number gives new noise. With the same noise, the weights would diverge.
        private_step(training, next(steps), [(inputs, targets)], workload.batch)

    def answer() -> Tensor:
        total = Total(algorithm.mechanism(), inputs.device)
        algorithm.accumulate(total, (inputs, targets))
        return flat(total)

    return Step(run, answer)


def loop(workload: Workload) -> Step:
    """Return a private step without a library, which processes one example after the other."""
    model = workload.build()
    inputs, targets = workload.examples(last=False)
    parameters = dict(model.named_parameters())
    optimizer = workload.optimizer_of(model.parameters())

    total: dict[str, Tensor] = {}

    def backward() -> None:
        for name, parameter in parameters.items():
            total[name] = torch.zeros_like(parameter, requires_grad=False)
        for x, y in zip(inputs.split(1), targets.split(1), strict=True):
            loss = workload.loss_of(model(x), y).sum()
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            norm = flat(dict(zip(parameters, gradients, strict=True))).norm()
            for value, gradient in zip(total.values(), gradients, strict=True):
                value += gradient * (BOUND / norm).clamp(max=1)
        for name, value in total.items():
            noisy = value.clone()
            real = real_view(noisy)
            real += BOUND * torch.randn_like(real)
            parameters[name].grad = noisy / workload.batch

    return _step(optimizer, backward, lambda: flat(total))


def opacus(
    workload: Workload,
    mode: Literal["hooks", "functorch", "ghost"],
    whole: bool = False,
) -> Step:
    """Return a private step of Opacus's `PrivacyEngine`, with Opacus's LSTM instead of PyTorch's.

    It is for real networks only, because Opacus's complex gradients are wrong: a conjugate is
    missing, and ghost norms are too small.

    Args:
        workload: the model and its examples.
        mode: how Opacus computes gradients or norms.
        whole: draw batches from Opacus's own loader, instead of using the same batch every time.
    """
    # Opacus's own hooks cause this warning at the first layer.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(workload.build())
    dataset = Examples(workload.examples(last=False))
    private: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=workload.optimizer_of(model.parameters()),
        criterion=Criterion(workload),
        data_loader=DataLoader(dataset, batch_size=workload.batch),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        grad_sample_mode=mode,
    )
    module, optimizer, loader = private[0], private[1], private[-1]
    loader.batch_sampler.steps = MAX_STEPS  # one iterator for all steps
    batches = batches_of(workload, last=False, collate=False)
    if whole:
        batches = iter(loader)

    def backward() -> None:
        inputs, targets = next(batches)
        if mode == "ghost":
            criterion = private[2]
            criterion(module(inputs), targets).backward()
        else:
            workload.loss_of(module(inputs), targets).mean().backward()

    def summed() -> Tensor:
        attribute = "grad"
        if mode != "ghost":
            optimizer.clip_and_accumulate()
            attribute = "summed_grad"
        parameters = module._module.named_parameters()
        return flat({name: getattr(parameter, attribute) for name, parameter in parameters})

    return _step(optimizer, backward, summed)


def library_loop(workload: Workload) -> Step:
    """Return a step of a loop with `make_private`, with its ledger."""
    model, examples = workload.build(), workload.examples(last=False)
    folder = Path(tempfile.mkdtemp())
    private = make_private(
        model,
        workload.optimizer_of(model.parameters()),
        Examples(examples),
        loss=workload.loss_of,
        epochs=MAX_STEPS,
        sample_rate=1.0,
        expected_batch=workload.batch,
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        delta=1e-5,
        algorithm="zeta_dp_sgd" if workload.is_complex else "dp_sgd",
        ledger=folder / "ledger.jsonl",
    )
    finalize(private, shutil.rmtree, folder, ignore_errors=True)
    batches = private.batches()

    def run() -> None:
        private.step(next(batches))

    def answer() -> Tensor:
        return flat(clipped_sum(model, workload.loss_of, examples, BOUND).sums)

    return Step(run, answer)


# ------------------------------------------------------------------------------------------- sides


def _warm(workload: Workload) -> Step:
    """Run a tiny private step, so that the memory of libraries is not counted as the step's."""
    model = "complex_mlp" if workload.is_complex else "real_mlp"
    tiny = Workload(model, (4,), 2, 2, "classes", {"hidden": [3]})
    step = private(tiny, "fast")
    step.run()
    return step


# The name of a side in the tables -> its constructor. Sides with the same name up to the comma
# compute the same result.
SIDES: dict[str, Callable[[Workload], Step]] = {
    "warm": _warm,
    "non-private": non_private,
    "non-private, channels first": lambda w: non_private(w, last=False),
    "private, fast": lambda w: private(w, "fast"),
    "private, vmap": lambda w: private(w, "reference", last=False),
    "private, loop over examples": loop,
    "private, Opacus hooks": lambda w: opacus(w, "hooks"),
    "private, Opacus functorch": lambda w: opacus(w, "functorch"),
    "private, Opacus ghost": lambda w: opacus(w, "ghost"),
    "non-private, whole loop": lambda w: non_private(w, last=False, whole=True),
    "private, zdp-bench's whole loop": library_loop,
    "private, Opacus's whole loop, hooks": lambda w: opacus(w, "hooks", whole=True),
    "private, Opacus's whole loop, ghost": lambda w: opacus(w, "ghost", whole=True),
}
