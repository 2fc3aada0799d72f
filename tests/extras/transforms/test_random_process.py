"""The script that makes pictures from a random process, and learns features on them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from zdp_bench.extras.transforms.random_process import Encoder, pooled

SCRIPT = Path(__file__).parents[3] / "datasets" / "random_process.py"
spec = importlib.util.spec_from_file_location("random_process_script", SCRIPT)
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.fixture(scope="module")
def pool() -> torch.Tensor:
    torch.manual_seed(0)
    made: torch.Tensor = script.pictures(10, torch.device("cpu"))
    return made


def test_pictures_follow_from_the_seed_and_differ(pool: torch.Tensor) -> None:
    torch.manual_seed(0)
    assert torch.equal(script.pictures(10, torch.device("cpu")), pool)
    assert (pool.shape, pool.dtype) == ((10, 3, 64, 64), torch.uint8)
    assert (pool.float().std((1, 2, 3)) > 1).all()
    assert len(torch.unique(pool.flatten(1), dim=0)) == 10


def test_two_views_of_a_picture_differ_and_stay_in_range(pool: torch.Tensor) -> None:
    one, other = script.viewed(pool), script.viewed(pool)
    assert one.shape == (10, 3, 32, 32)
    assert float(one.min()) >= 0
    assert float(one.max()) <= 1
    assert ((one - other).abs().mean((1, 2, 3)) > 0).all()


def test_a_step_learns_something(pool: torch.Tensor) -> None:
    torch.manual_seed(1)
    before = Encoder()
    torch.manual_seed(1)
    after, steps = script.learn(pool, 0.1, batch=4)
    assert steps >= 1
    assert not torch.equal(after.third[1].conv2.weight, before.third[1].conv2.weight)
    x = torch.rand(3, 3, 32, 32)
    assert not after.training
    for stage, mirrored in zip(pooled(after, x), pooled(after, x.flip(-1)), strict=True):
        torch.testing.assert_close(mirrored, stage, rtol=1e-4, atol=1e-4)
