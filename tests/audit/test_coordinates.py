"""Blocks as one real vector: an isometry of every kind of block, and canaries of exactly the
bound.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from zdp_bench.audit.coordinates import Coordinates, canary_supports
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling

EVERY_KIND = (
    Block("real", (3, 2), "float64", 1.0, 1.0, "real"),
    Block("circular", (4,), "complex128", 1.0, 1.0, "circular"),
    Block("correlated", (2, 2), "complex128", 1.0, 1.0, "correlated", rho=0.5),
    Block("hermitian", (2, 3, 4), "complex128", 1.0, 1.0, "hermitian", fft_dims=(1, 2)),
    Block("half", (5,), "complex128", 1.0, 1.0, "real_on_complex"),
    Block("scalar", (), "float64", 1.0, 1.0, "real"),
)
POISSON = Sampling("poisson", 0.25, 25.0, 100)


def zeros(mechanism: Mechanism) -> dict[str, Tensor]:
    return {b.name: torch.zeros(b.shape, dtype=getattr(torch, b.dtype)) for b in mechanism.blocks}


def test_coordinates_are_an_isometry_of_every_kind_of_block() -> None:
    mechanism = Mechanism(EVERY_KIND, POISSON)
    coordinates = Coordinates(mechanism)
    assert coordinates.size == 6 + 8 + 8 + 24 + 10 + 1 == len(coordinates.kinds())
    vector = torch.randn(coordinates.size, dtype=torch.float64)
    blocks = zeros(mechanism)
    coordinates.add(vector, to=blocks)
    torch.testing.assert_close(coordinates.of(blocks), vector, rtol=1e-12, atol=1e-12)
    length = math.sqrt(sum(float(value.abs().square().sum()) for value in blocks.values()))
    assert length == pytest.approx(float(vector.norm()))
    signal = torch.fft.ifftn(blocks["hermitian"], dim=(1, 2), norm="ortho")
    assert float(signal.imag.abs().max()) < 1e-12


@pytest.mark.parametrize("joint", [True, False])
def test_canaries_have_exactly_the_bound_and_are_orthogonal(joint: bool) -> None:
    bounds = (2.0, 2.0) if joint else (2.0, 3.0)
    blocks = (
        Block("a", (40,), "float64", bounds[0], 1.0, "real"),
        Block("b", (30,), "complex128", bounds[1], 1.0, "circular"),
        *(() if joint else (Block("small", (3,), "float64", 9.0, 1.0, "real"),)),
    )
    mechanism = Mechanism(blocks, POISSON, joint=joint)
    coordinates = Coordinates(mechanism)
    indices, values = canary_supports(mechanism, coordinates, 10, 4, np.random.default_rng(0))
    dense = np.zeros((10, coordinates.size))
    for row, index, value in zip(dense, indices, values, strict=True):
        row[index] = value
    assert np.allclose(dense @ dense.T, np.diag(np.diag(dense @ dense.T)))
    for row in dense:
        total = zeros(mechanism)
        coordinates.add(torch.from_numpy(row), to=total)
        norms = [float(total[block.name].abs().square().sum()) ** 0.5 for block in blocks]
        if joint:
            assert math.hypot(*norms) == pytest.approx(2.0)
        else:
            assert norms == pytest.approx([2.0, 3.0, 0.0])  # no room for ten in the smallest
