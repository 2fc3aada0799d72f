"""Rows are mapped as torch.vmap maps them, without its warnings about speed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, vmap

from zdp_bench.gradients.mapping import map_rows


def test_rows_are_mapped_without_warnings(
    recwarn: pytest.WarningsRecorder,
    capfd: pytest.CaptureFixture[str],
) -> None:
    weight = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))

    def of_row(row: Tensor) -> Tensor:
        return F.bilinear(row.unsqueeze(0), row.unsqueeze(0), weight).squeeze(0)

    rows = map_rows(of_row, x)
    torch.testing.assert_close(rows, F.bilinear(x, x, weight))
    assert not recwarn.list
    assert "performance drop" not in capfd.readouterr().err
    with pytest.warns(UserWarning, match="performance drop"):  # the user's own mapping warns again
        vmap(of_row)(x)
