"""Captured sums for micro-batches of one shape equal eager sums, for every algorithm."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.algorithms.device_driver import prepare
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch
from zdp_bench.gradients.parts import Parts
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SeededNoise
from zdp_bench.registry import names
from zdp_bench.training.batches import MicroBatches, Size
from zdp_bench.training.captured import CapturedSums, rows_of, why_not
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.step import Training, private_step, sum_shares

CPU = torch.device("cpu")


@contextmanager
def prepared(
    folder: Path, model: str = "real_cnn", algorithm: str = "dp_sgd", device: str = "cpu"
) -> Iterator[tuple[Training, Batch]]:
    """What a step takes, with captured sums, and a batch for it."""
    training, batch = prepare(model, algorithm, folder, device)
    with closing(training.ledger):
        yield replace(training, captured_sums=CapturedSums(capture=device != "cpu")), batch


def pieces(batch: Batch, count: int, size: int = 1000) -> MicroBatches:
    return MicroBatches(
        count, lambda cut: (batch[0][:count][cut], batch[1][:count][cut]), Size(size)
    )


def plain(training: Training, batch: Batch, count: int) -> dict[str, Tensor]:
    algorithm = training.algorithm
    sums = sum_shares(algorithm, algorithm.mechanism(), pieces(batch, count), CPU)
    return {name: value.clone() for name, value in sums.items()}


def captured(training: Training, batch: Batch, count: int, rows: int) -> dict[str, Tensor] | None:
    mechanism, cut = training.mechanism(), pieces(batch, count, rows)
    return training.captured_sums.sum(training.algorithm, mechanism, training.model, cut)


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("model", ["complex_mlp", "real_cnn", "lenet5", "complex_dfa_cnn"])
@pytest.mark.parametrize("algorithm", names("algorithm"))
def test_a_captured_sum_equals_the_eager_sum(
    model: str, algorithm: str, device: str, tmp_path: Path
) -> None:
    with ExitStack() as inside:
        try:
            training, batch = inside.enter_context(prepared(tmp_path, model, algorithm, device))
        except UserError:
            pytest.skip("the algorithm refuses the model")
        assert captured(training, batch, 8, 6) is None  # the first step runs without one
        captured(training, batch, 8, 6)  # on a GPU, records one
        if training.captured_sums.refused:
            pytest.skip(training.captured_sums.refused)
        for count in (8, 3, 6, 1):  # two passes; rows of an earlier piece are left; full; one
            sums, expected = captured(training, batch, count, 6), plain(training, batch, count)
            assert sums is not None, training.captured_sums.refused
            largest = max(float(value.abs().max()) for value in expected.values())
            rtol = 1e-4 if device == "cpu" else 1e-3
            torch.testing.assert_close(sums, expected, rtol=rtol, atol=0.1 * rtol * largest)
        (own,) = training.captured_sums.by_shape.values()
        assert (own.graph is not None) == (device == "cuda")


def test_rows_beyond_a_piece_change_no_bit_of_its_sum(tmp_path: Path) -> None:
    with prepared(tmp_path) as (training, batch):
        captured(training, batch, 3, 6)
        first = captured(training, batch, 3, 6)
        assert first is not None
        kept = {name: value.clone() for name, value in first.items()}
        captured(training, (batch[0].flip(0) * 7, batch[1].flip(0)), 6, 6)
        again = captured(training, batch, 3, 6)
        assert again is not None
        assert all(torch.equal(again[name], kept[name]) for name in kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_without_a_finite_gradient_adds_nothing(bad: float, tmp_path: Path) -> None:
    with prepared(tmp_path) as (training, batch):
        broken = batch[0].clone()
        broken[1].fill_(bad)
        captured(training, batch, 3, 6)
        assert captured(training, batch, 3, 6) is not None
        assert captured(training, (broken, batch[1]), 3, 6) is None  # the caller sums by itself
        assert captured(training, batch, 3, 6) is not None  # and no row is left of it


def test_steps_with_captured_sums_train_as_steps_without(tmp_path: Path) -> None:
    weights = []
    for capture in (False, True):  # on a CPU, True captures nothing
        training, batch = prepare("real_cnn", "dp_sgd", tmp_path / str(capture), "cpu")
        torch.manual_seed(0)
        for parameter in training.model.parameters():
            nn.init.normal_(parameter.data, std=0.1)
        training = replace(training, captured_sums=CapturedSums(capture), noise=SeededNoise(3))
        with closing(training.ledger):
            for step in range(4):
                private_step(training, step, pieces(batch, 5 + step % 3), 6.0)
        weights.append([parameter.detach() for parameter in training.model.parameters()])
    assert bool(training.captured_sums.by_shape) is False
    for weight, other in zip(*weights, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)


def test_steps_with_a_noise_source_each_share_one_captured_sum(tmp_path: Path) -> None:
    """Each captured another one, and all of them stayed in memory."""
    training, batch = prepare("real_cnn", "dp_sgd", tmp_path, "cpu")
    training = replace(training, captured_sums=CapturedSums(capture=False))
    with closing(training.ledger):
        for step in range(4):
            private_step(replace(training, noise=SeededNoise(step)), step, pieces(batch, 5), 6.0)
    assert len(training.captured_sums.by_shape) == 1


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("other_count", [0, 8])
@pytest.mark.parametrize("count", [1, 1024, 1030])
def test_the_number_of_examples_alone_decides_whether_a_sum_is_wide(
    count: int, other_count: int, capture: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks add up their sums, which must be of one dtype, whether captured or eager.

    Eight examples are expected: neither that number nor the path counts.
    """
    dtypes = list[torch.dtype]()

    class TwoRanks(Ranks):
        def max(self, number: int) -> int:
            return max(number, other_count)

        def all_reduce(self, total: dict[str, Tensor]) -> dict[str, Tensor]:
            dtypes.extend({value.dtype for value in total.values()})
            return total

    ranks = TwoRanks(size=2 if other_count else 1)
    with prepared(tmp_path, "complex_mlp", "zeta_dp_sgd") as (training, batch):
        sums = CapturedSums(capture)  # on a CPU, True captures nothing
        training = replace(training, captured_sums=sums, ranks=ranks)
        many = tuple(part[:1].expand(1030, *part.shape[1:]).contiguous() for part in batch)
        for step, micro_batches in enumerate(
            [pieces(many, count, 500), pieces(many, count, 500), [batch] * -(-count // 8)]
        ):
            private_step(training, step, micro_batches, 8.0)
        assert bool(sums.by_shape) != capture
    max_count = max(count, other_count) * ranks.size
    assert len(dtypes) == 3
    assert {dtype.to_real() for dtype in dtypes} == {
        torch.float64 if max_count > 1024 else torch.float32
    }


def test_deterministic_steps_are_all_summed_eagerly(tmp_path: Path) -> None:
    """A process sums its first step eagerly. One that resumes would repeat a captured sum eagerly,
    with other roundings under the same noise, and the step would count once."""
    was = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        with prepared(tmp_path) as (training, batch):
            assert [captured(training, batch, 8, 6) for _ in range(3)] == [None] * 3
    finally:
        torch.set_deterministic_debug_mode(was)


class Foreign(nn.Linear):
    """Code of another package, as far as its module's name says."""


def test_what_a_graph_might_not_repeat_is_left_out(tmp_path: Path) -> None:
    with prepared(tmp_path) as (training, _):
        assert why_not(training.algorithm, training.model) == ""
        foreign = nn.Sequential(Foreign(2, 2))
        assert "layer '0' runs code" in why_not(training.algorithm, foreign)
        assert "mixes" in why_not(training.algorithm, nn.Sequential(nn.BatchNorm1d(2)))
        plugin = copy(training.algorithm)
        plugin.__class__ = type("Plugin", (type(plugin),), {})  # of this module
        assert "another package" in why_not(plugin, training.model)
        training.algorithm.carried = {"bound": 1.0}  # type: ignore[attr-defined]
        assert "earlier" in why_not(training.algorithm, training.model)


def test_a_batch_in_several_parts_is_summed_eagerly(tmp_path: Path) -> None:
    with prepared(tmp_path) as (training, (inputs, targets)):
        sums = CapturedSums(capture=False, is_warm=True)
        in_parts = [(inputs, Parts((targets, targets)))]
        assert sums.sum(training.algorithm, training.mechanism(), training.model, in_parts) is None
        assert sums.refused == "inputs or targets have several parts"


@pytest.mark.parametrize(
    ("scheme", "most", "ranks", "rows"),
    [
        ("poisson", 2048, 1, 568),
        ("poisson", 256, 1, 256),
        ("poisson", 2048, 2, 304),
        ("uniform", 2048, 1, 500),
    ],
)
def test_rows_follow_from_the_sampling(scheme: Any, most: int, ranks: int, rows: int) -> None:
    assert rows_of(Sampling(scheme, 0.01, 500.0, 50_000), most, ranks) == rows
