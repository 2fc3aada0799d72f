"""Sums of clipped gradients by one program for every piece of a batch, replayed as a CUDA graph.

A step of a small network on a GPU takes as long as Python needs to launch its kernels. So the sum
over a piece is recorded once, as a CUDA graph, and replayed for each further piece. A graph has one
shape: every piece has `rows` rows, of which the first n are drawn examples. The others hold
whatever was there before, and their losses are multiplied by 0.

Nothing is read back from the GPU before the last piece of a step. Then one number is: whether all
norms were finite. If not, the caller sums the step again without a program, which leaves out the
examples whose gradients are not finite.
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
from zdp_bench.training.batches import MICRO_BATCH, MicroBatches
from zdp_bench.training.total import Total

log = logging.getLogger(__name__)

# Packages whose layers compute the same at every call; a forward function of another package may
# draw numbers in Python or count its calls, which a graph would not repeat.
PURE = {"torch", "zdp_bench"}

Shape = tuple[Any, ...]


def shape_of(batch: Batch, mechanism: Mechanism) -> Shape:
    """Return what a program depends on, beside the number of rows.

    The program keeps its mechanism, so no later one has the same identity.
    """
    inputs, targets = batch
    described = ((t.shape[1:], t.dtype, t.device) for t in (inputs, targets))
    return (*described, id(mechanism))


def rows_of(
    sampling: Sampling,
    most: int,
    ranks: int = 1,
) -> int:
    """Return how many rows a program has, from what is public of the sampling alone.

    A Poisson batch is rarely three deviations larger than expected; one that is takes two passes.
    """
    rows = sampling.expected_batch_size / ranks
    if sampling.scheme == "poisson" and sampling.sample_rate < 1:
        rows = 8 * math.ceil((rows + 3 * math.sqrt(rows)) / 8)
    return max(1, min(math.ceil(rows), most))


@dataclass
class Program:
    """The sum over one piece, as static tensors and what turns the ones into the others."""

    algorithm: Algorithm
    loss: PerExample
    mechanism: Mechanism
    total: dict[str, Tensor]  # S so far, by block; the same tensors from step to step
    inputs: Tensor  # [rows, ...]; rows beyond a piece's examples keep earlier ones
    targets: Tensor
    weights: Tensor  # [rows], 1 for an example of the piece and 0 beyond
    finite: Tensor  # whether all norms since `start` were
    graph: torch.cuda.CUDAGraph | None = None  # None runs the operations one by one

    @staticmethod
    def of(
        algorithm: Algorithm,
        loss: PerExample,
        mechanism: Mechanism,
        batch: Batch,
        rows: int,
    ) -> Program:
        """Return a program for pieces like `batch`, whose first example fills every row."""
        inputs, targets = (t[:1].expand(rows, *t.shape[1:]).contiguous() for t in batch)
        if batch[0].dim() == 4 and not batch[0].is_contiguous():
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        device = inputs.device
        sampling = mechanism.sampling
        total = Total(mechanism, device, sampling.expected_batch_size > MICRO_BATCH).whole()
        weights = torch.ones(rows, device=device)
        finite = torch.ones((), dtype=torch.bool, device=device)
        return Program(algorithm, loss, mechanism, total, inputs, targets, weights, finite)

    def run(self) -> None:
        """Add the piece in `inputs` to `total`."""
        with defer_finite(self.finite), self.loss.weighed(self.weights):
            self.algorithm.accumulate(self.total, (self.inputs, self.targets))

    def capture(self) -> None:
        """Record `run` as a CUDA graph."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries allocate their workspaces in a first run
            self.run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Another thread may pin memory meanwhile, which the default mode forbids.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.run()
        self.graph = graph

    def start(self) -> None:
        """Begin a step: S = 0."""
        torch._foreach_zero_(list(self.total.values()))
        self.finite.fill_(True)

    def add(self, batch: Batch) -> None:
        """Add the examples of a piece to S, `rows` at a time."""
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
class Programs:
    """The programs of one training, made as pieces of new shapes arrive."""

    capture: bool = True  # record them as CUDA graphs; else they run one operation at a time
    warm: bool = False  # a step was summed without one: models are checked and caches filled
    refused: str = ""  # why no program serves this training
    made: dict[Shape, Program] = field(default_factory=dict)

    def sum(
        self,
        algorithm: Algorithm,
        mechanism: Mechanism,
        model: nn.Module,
        pieces: Iterable[Batch],
        ranks: int = 1,
    ) -> dict[str, Tensor] | None:
        """Return S over all pieces; None where the caller has to sum by itself.

        The tensors are the programs' own and hold S until the next call.
        """
        most, shares = 2**31, None
        if isinstance(pieces, MicroBatches):
            most, shares = pieces.size.examples, pieces.shares
        suits = next(model.parameters()).is_cuda or not self.capture
        if self.refused or not suits or isinstance(pieces, Iterator) or shares is not None:
            return None
        if not self.warm:
            self.warm = True
            self.refused = why_not(algorithm, model)
            return None
        try:
            rows = rows_of(mechanism.sampling, most, ranks)
            return self._sum(algorithm, mechanism, pieces, rows)
        except torch.OutOfMemoryError:
            self.refused = "memory ran out"
            self.made.clear()
            return None

    def _sum(
        self,
        algorithm: Algorithm,
        mechanism: Mechanism,
        pieces: Iterable[Batch],
        rows: int,
    ) -> dict[str, Tensor] | None:
        found: Program | None = None
        for batch in pieces:
            shape = shape_of(batch, mechanism)
            if shape not in self.made:
                self.made[shape] = self._make(algorithm, mechanism, batch, rows)
            program = self.made[shape]
            if self.refused or (found is not None and program is not found):
                return None
            if found is None:
                program.start()
                found = program
            program.add(batch)
        if found is None:
            return None
        if not found.finite.item():
            self.made.clear()  # its rows may hold the example that broke it
            return None
        return dict(found.total)

    def _make(
        self,
        algorithm: Algorithm,
        mechanism: Mechanism,
        batch: Batch,
        rows: int,
    ) -> Program:
        program = Program.of(algorithm, per_example(algorithm.problem.loss), mechanism, batch, rows)
        if self.capture:
            try:
                program.capture()
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self.refused = first_line(error)
                log.info(
                    "running without a CUDA graph, because a step cannot be recorded: %s",
                    self.refused,
                )
        return program


def why_not(algorithm: Algorithm, model: nn.Module) -> str:
    """Return why a training's sums cannot be captured; "" if they can."""
    if algorithm.carried:
        return "steps follow from earlier ones"
    if reason := alone(model):
        return reason
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] not in PURE:
            return f"layer '{name}' runs code that a graph might not repeat"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"layer '{name}' mixes the rows of a batch"
    return ""
