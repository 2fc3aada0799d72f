"""Block-circulant layers are the dense matrices they say they are."""

from __future__ import annotations

import pytest
import torch

from zdp_bench.nn.circulant import CirculantLinear


@pytest.mark.parametrize(
    ("inputs", "outputs", "block"),
    [(16, 8, 8), (12, 6, 3), (10, 7, 4), (5, 3, 8), (6, 6, 1), (9, 10, 5)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_by_fft_is_the_dense_matrix(
    inputs: int, outputs: int, block: int, bias: bool
) -> None:
    torch.manual_seed(0)
    layer = CirculantLinear(inputs, outputs, block, bias).double()
    x = torch.randn(2, 3, inputs, dtype=torch.float64)
    expected = x @ layer.dense().T + (layer.bias if layer.bias is not None else 0.0)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-13)


def test_a_row_is_the_one_above_it_shifted_right() -> None:
    layer = CirculantLinear(4, 4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(4.0).view(1, 1, 4))
    rows = [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]  # GReDP, eq. 18
    torch.testing.assert_close(layer.dense(), torch.tensor(rows, dtype=torch.float32))


def test_a_block_is_d_numbers() -> None:
    layer = CirculantLinear(256, 120, 8, bias=False)
    assert layer.weight.shape == (15, 32, 8)
    assert sum(p.numel() for p in layer.parameters()) == 256 * 120 // 8


def test_a_block_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        CirculantLinear(4, 4, 0)
