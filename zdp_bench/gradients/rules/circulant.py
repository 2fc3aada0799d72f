"""Block-circulant layers: circular correlations of input and output gradient."""

from __future__ import annotations

from torch import Tensor, nn

from zdp_bench.gradients.correlation import Correlation
from zdp_bench.gradients.layer_gradient import LayerGradient, bound_summands, contract
from zdp_bench.gradients.rules import NoRule, rule
from zdp_bench.nn.circulant import CirculantLinear, in_blocks


@rule(CirculantLinear)
def circulant(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """[B, n]: norms by Parseval. [B, *, n]: the correlations of all positions are summed."""
    assert isinstance(layer, CirculantLinear)
    if x.is_complex():
        raise NoRule("a real circulant layer on complex numbers")
    if x.dim() == 2:
        of = correlate(layer, x, g)
        weight = LayerGradient(
            of.per_sample, of.weighted_sum, squared_norms=of.squared_norms, summands=of.summands
        )
        return {"weight": weight, "bias": LayerGradient.of(g)}
    positions = x[0].numel() // x.shape[-1]

    def per_sample(start: int, stop: int) -> Tensor:
        of = correlate(layer, x[start:stop].flatten(0, -2), g[start:stop].flatten(0, -2))
        each = of.per_sample(0, (stop - start) * positions)
        return each.unflatten(0, (stop - start, positions)).sum(dim=1)

    weight = LayerGradient(
        per_sample,
        lambda factors: contract(per_sample(0, len(x)), factors),
        summands=lambda: bound_summands(g, x, positions, layer.block),
    )
    return {"weight": weight, "bias": LayerGradient.of(g.flatten(1, -2).sum(dim=1))}


def correlate(layer: CirculantLinear, x: Tensor, g: Tensor) -> Correlation:
    """Correlate x and g by blocks: lag m of block (p, q) is the gradient of w[p, q, m]."""
    return Correlation(in_blocks(x, layer.block), in_blocks(g, layer.block), (layer.block,))
