"""Rows are mapped as torch.vmap maps them, without its warnings about speed."""

from __future__ import annotations

from collections.abc import Callable

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


@pytest.mark.parametrize("classes", [3, -1])
def test_one_hot_rows_are_those_of_torch(classes: int) -> None:
    targets = torch.tensor([[[0]], [[2]]])
    if classes < 0:  # torch cannot tell the number of classes for several rows
        with pytest.raises(RuntimeError, match="num_classes"):
            map_rows(lambda row: F.one_hot(row, classes), targets)
        return
    rows = map_rows(lambda row: F.one_hot(row, num_classes=classes), targets)
    assert rows.equal(F.one_hot(targets, classes))


OUT_OF_RANGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one_hot": lambda x, at: F.one_hot(at, 4),
    "gather": lambda x, at: x.gather(1, at[:, None]),
    "index": lambda x, at: x[:, at],
    "a table": lambda x, at: torch.arange(4.0)[at],
    "embedding": lambda x, at: F.embedding(at, torch.eye(4)),
    "scatter": lambda x, at: x.scatter(1, at[:, None], 1.0),
    "index_add": lambda x, at: x.index_add(1, at, x[:, :1]),
    "nll_loss": lambda x, at: F.nll_loss(x, at, reduction="none"),
    "cross_entropy": lambda x, at: F.cross_entropy(x, at, reduction="none"),
    "multi_margin_loss": lambda x, at: F.multi_margin_loss(x, at, reduction="none"),
}


@pytest.mark.parametrize("function", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE.keys())
@pytest.mark.parametrize("outlier", [9, -9])
def test_an_index_out_of_range_is_an_error_for_all_rows_as_for_one(
    function: Callable[[Tensor, Tensor], Tensor], outlier: int
) -> None:
    rows, indices = torch.randn(2, 1, 4), torch.tensor([[0], [outlier]])
    for run in (lambda: function(rows[1], indices[1]), lambda: map_rows(function, rows, indices)):
        with pytest.raises((RuntimeError, IndexError)):
            run()
