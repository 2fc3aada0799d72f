"""Figures 3 to 5 of Wang et al. 2024: accuracy against ε, epochs, batch size, learning rate; published and at equal ε."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from zdp_bench.registry import register
from zdp_bench.report.figures.panels import panels


@register("figure", "gredp_2024/fig3")
def against_epsilon(results: Path, data_root: Path) -> Figure:
    """DP-SGD, Spectral-DP and GReDP at four ε, a panel for each network."""
    return panels("gredp_2024/fig3", results, columns=2)


@register("figure", "gredp_2024/fig3epochs")
def against_epochs(results: Path, data_root: Path) -> Figure:
    """DP-SGD, Spectral-DP and GReDP at ε = 2, after every epoch, a panel for each network."""
    return panels("gredp_2024/fig3epochs", results, columns=2)


@register("figure", "gredp_2024/fig4")
def against_batch_size(results: Path, data_root: Path) -> Figure:
    """Accuracy against the batch size, GReDP at ε = 2."""
    return panels("gredp_2024/fig4", results)


@register("figure", "gredp_2024/fig5")
def against_learning_rate(results: Path, data_root: Path) -> Figure:
    """Accuracy against the learning rate, GReDP at ε = 2."""
    return panels("gredp_2024/fig5", results)
