"""Sum clipped gradients by replaying one CUDA graph for every micro-batch.

On a GPU, a step of a small network takes as long as Python needs to launch its kernels. So the sum
over one micro-batch is captured once as a CUDA graph and replayed for each further micro-batch. A
graph has fixed shapes: its batch has `rows` rows, of which the first n hold the drawn examples. The
other rows hold earlier examples, whose losses are multiplied by 0.

Within a step, nothing is read back from the GPU until its last micro-batch has been added. Then a
single boolean is read: whether all norms were finite. If not, the caller sums the step again
eagerly, which leaves out the examples whose gradients are not finite.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import first_line
from zdp_bench.gradients import Batch, PerExample, per_example
from zdp_bench.gradients.clipping import defer_finite
from zdp_bench.gradients.program import alone
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.training.batches import MicroBatches
from zdp_bench.training.total import Total

log = logging.getLogger(__name__)

# Packages whose layers compute the same at every call. A forward function of another package may
# draw numbers in Python or count its calls, which a replayed graph would not repeat.
PURE_PACKAGES = {"torch", "zdp_bench"}

Shape = tuple[Any, ...]


def shape_of(
    batch: Batch,
    mechanism: Mechanism,
    is_float64: bool,
) -> Shape:
    """Return the key of a captured sum: shapes, dtypes, devices, mechanism and `is_float64`."""
    inputs, targets = batch
    inputs_key = (inputs.shape[1:], inputs.dtype, inputs.device)
    targets_key = (targets.shape[1:], targets.dtype, targets.device)
    return inputs_key, targets_key, mechanism, is_float64


def rows_of(
    sampling: Sampling,
    max_rows: int,
    ranks: int = 1,
) -> int:
    """Return the number of rows of a captured sum.

    It depends only on what is public about the sampling. A Poisson batch rarely exceeds its
    expected size by three standard deviations. One that does takes two passes.

    Args:
        sampling: how a step draws its examples.
        max_rows: the size of a micro-batch.
        ranks: number of processes that share a batch.
    """
    rows = sampling.expected_batch_size / ranks
    if sampling.scheme == "poisson" and sampling.sample_rate < 1:
        rows = 8 * math.ceil((rows + 3 * math.sqrt(rows)) / 8)
    return max(1, min(math.ceil(rows), max_rows))


@dataclass
class CapturedSum:
    """The sum over one micro-batch: its static tensors and the operations between them.

    Attributes:
        total: S so far, by block. The tensors are the same from step to step.
        inputs: [rows, ...]. Rows after the examples of a micro-batch keep earlier examples.
        targets: [rows, ...].
        weights: [rows], 1 for an example of the micro-batch and 0 after them.
        finite: scalar, whether all norms since `start` were finite.
        graph: the captured operations. If it is None, they run one by one.
    """

    algorithm: Algorithm
    loss: PerExample
    mechanism: Mechanism
    total: dict[str, Tensor]
    inputs: Tensor
    targets: Tensor
    weights: Tensor
    finite: Tensor
    graph: torch.cuda.CUDAGraph | None = None

    @staticmethod
    def of(
        algorithm: Algorithm,
        loss: PerExample,
        mechanism: Mechanism,
        batch: Batch,
        rows: int,
        is_float64: bool,
    ) -> CapturedSum:
        """Return a sum for micro-batches like `batch`, whose first example fills every row.

        Args:
            algorithm: sums the contributions.
            loss: the algorithm's loss, whose weights leave out rows.
            mechanism: defines the blocks.
            batch: a micro-batch with at least one example.
            rows: number of rows.
            is_float64: see `Total`.
        """
        inputs, targets = (part[:1].expand(rows, *part.shape[1:]).contiguous() for part in batch)
        if batch[0].dim() == 4 and not batch[0].is_contiguous():
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        device = inputs.device
        total = Total(mechanism, device, is_float64).all_blocks()
        weights = torch.ones(rows, device=device)
        finite = torch.ones((), dtype=torch.bool, device=device)
        return CapturedSum(algorithm, loss, mechanism, total, inputs, targets, weights, finite)

    def run(self) -> None:
        """Add the examples in `inputs` to `total`."""
        with defer_finite(self.finite), self.loss.weighted(self.weights):
            self.algorithm.accumulate(self.total, (self.inputs, self.targets))

    def capture(self) -> None:
        """Capture `run` as a CUDA graph."""
        warmup_stream = torch.cuda.Stream()
        warmup_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup_stream):  # libraries allocate their workspaces in a first run
            self.run()
        torch.cuda.current_stream().wait_stream(warmup_stream)
        graph = torch.cuda.CUDAGraph()
        # The default mode fails if another thread pins memory meanwhile, as prefetching does.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.run()
        self.graph = graph

    def start(self) -> None:
        """Begin a step: S = 0."""
        torch._foreach_zero_(list(self.total.values()))
        self.finite.fill_(True)

    def add(self, batch: Batch) -> None:
        """Add the examples of a micro-batch to S, at most `rows` at a time."""
        rows = len(self.weights)
        for inputs, targets in zip(batch[0].split(rows), batch[1].split(rows), strict=True):
            count = len(inputs)
            self.inputs[:count].copy_(inputs)
            self.targets[:count].copy_(targets)
            self.weights[:count].fill_(1)
            self.weights[count:].fill_(0)
            if self.graph is None:
                self.run()
            else:
                self.graph.replay()


@dataclass
class CapturedSums:
    """The captured sums of a training, one for each shape of micro-batches.

    Attributes:
        capture: whether to capture CUDA graphs. Otherwise, the operations run one by one.
        is_warm: whether a step was summed eagerly, which checks the model and fills caches.
        refused: why this training cannot use captured sums, or "".
        by_shape: the captured sums, by `shape_of` their micro-batches.
    """

    capture: bool = True
    is_warm: bool = False
    refused: str = ""
    by_shape: dict[Shape, CapturedSum] = field(default_factory=dict)

    def sum(
        self,
        algorithm: Algorithm,
        mechanism: Mechanism,
        model: nn.Module,
        micro_batches: Iterable[Batch],
        is_float64: bool = False,
        ranks: int = 1,
    ) -> dict[str, Tensor] | None:
        """Return S over all micro-batches, or None if the caller must sum eagerly.

        The returned tensors are reused: they hold S only until the next call. With deterministic
        algorithms, every step is summed eagerly. A process sums some steps eagerly, such as its
        first, and a graph rounds differently: a step that is repeated after a kill would not have
        the same bits.

        Args:
            algorithm: sums the contributions.
            mechanism: the algorithm's mechanism, which defines the blocks.
            model: the model that is trained.
            micro_batches: the examples of the step.
            is_float64: see `Total`. Default: false.
            ranks: number of processes that share the batch. Default: 1.
        """
        max_rows, share_sizes = 2**31, None
        if isinstance(micro_batches, MicroBatches):
            max_rows, share_sizes = micro_batches.size.examples, micro_batches.share_sizes
        suits = next(model.parameters()).is_cuda or not self.capture
        if torch.are_deterministic_algorithms_enabled():
            return None
        if self.refused or not suits or share_sizes is not None:
            return None
        if isinstance(micro_batches, Iterator):  # could not be read again for an eager sum
            return None
        if not self.is_warm:
            self.is_warm = True
            self.refused = why_not(algorithm, model)
            return None
        try:
            rows = rows_of(mechanism.sampling, max_rows, ranks)
            return self._sum(algorithm, mechanism, micro_batches, rows, is_float64)
        except torch.OutOfMemoryError:
            self.refused = "memory ran out"
            self.by_shape.clear()
            return None

    def _sum(
        self,
        algorithm: Algorithm,
        mechanism: Mechanism,
        micro_batches: Iterable[Batch],
        rows: int,
        is_float64: bool,
    ) -> dict[str, Tensor] | None:
        first: CapturedSum | None = None
        for batch in micro_batches:
            if not all(isinstance(part, Tensor) for part in batch):
                self.refused = "inputs or targets have several parts"
                return None
            shape = shape_of(batch, mechanism, is_float64)
            if shape not in self.by_shape:
                self.by_shape[shape] = self._make(algorithm, mechanism, batch, rows, is_float64)
            captured = self.by_shape[shape]
            if self.refused or (first is not None and captured is not first):
                return None
            if first is None:
                captured.start()
                first = captured
            captured.add(batch)
        if first is None:
            return None
        if not first.finite.item():
            self.by_shape.clear()  # a row may hold the example whose gradient is not finite
            return None
        return dict(first.total)

    def _make(
        self,
        algorithm: Algorithm,
        mechanism: Mechanism,
        batch: Batch,
        rows: int,
        is_float64: bool,
    ) -> CapturedSum:
        loss = per_example(algorithm.problem.loss)
        captured = CapturedSum.of(algorithm, loss, mechanism, batch, rows, is_float64)
        if self.capture:
            try:
                captured.capture()
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self.refused = first_line(error)
                log.info(
                    "running without a CUDA graph, because a step cannot be captured: %s",
                    self.refused,
                )
        return captured


def why_not(algorithm: Algorithm, model: nn.Module) -> str:
    """Return why the sums of a training cannot be captured, or "" if they can."""
    if _package_of(algorithm) != "zdp_bench":
        # It may sum something else than gradients of the weighted loss, over all rows.
        return "an algorithm of another package may count rows whose weight is 0"
    if algorithm.carried:
        return "steps follow from earlier ones"
    if reason := alone(model):
        return reason
    for name, module in model.named_modules():
        if _package_of(module) not in PURE_PACKAGES:
            return f"layer '{name}' runs code that a graph might not repeat"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"layer '{name}' mixes the rows of a batch"
    return ""


def _package_of(value: object) -> str:
    """Return the name of the top-level package that defines the type of a value."""
    return type(value).__module__.partition(".")[0]
