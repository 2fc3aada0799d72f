"""Block-circulant layers: the gradient of the first rows is the circular correlation of input and output gradient."""

from __future__ import annotations

from torch import Tensor, nn

from zdp_bench.gradients.correlation import Correlation
from zdp_bench.gradients.rules import NoRule, Share, contract, kept, products, rule
from zdp_bench.nn.circulant import CirculantLinear, in_blocks


@rule(CirculantLinear)
def circulant(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """One position a record, [B, n]: norms by Parseval. Several positions: their correlations are summed, and formed."""
    assert isinstance(layer, CirculantLinear)
    if x.is_complex():
        raise NoRule("a real circulant layer on complex numbers")
    if x.dim() == 2:
        of = correlation(layer, x, g)
        return {"weight": Share(of.rows, of.weighted_sum, of.squared_norms), "bias": kept(g)}
    positions = x[0].numel() // x.shape[-1]

    def rows(start: int, stop: int) -> Tensor:
        each = correlation(layer, x[start:stop].flatten(0, -2), g[start:stop].flatten(0, -2))
        formed = each.rows(0, (stop - start) * positions)
        return formed.unflatten(0, (stop - start, positions)).sum(dim=1)

    return {
        "weight": Share(
            rows,
            lambda factors: contract(rows(0, len(x)), factors),
            terms=lambda: products(g, x, positions, layer.block),
        ),
        "bias": kept(g.flatten(1, -2).sum(dim=1)),
    }


def correlation(layer: CirculantLinear, x: Tensor, g: Tensor) -> Correlation:
    """[B, n] and [B, m] as blocks: lag m of block (p, q) is the gradient of w[p, q, m]."""
    return Correlation(in_blocks(x, layer.block), in_blocks(g, layer.block), (layer.block,))
