"""Figures 2 to 4 of Lee & Kifer 2020: test accuracy after every epoch, DP-DFA beside DP-BP and non-private training."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from zdp_bench.registry import register
from zdp_bench.report.figures.panels import panels


@register("figure", "dp_dfa_2020/fig2")
def convolutional_on_fashion_mnist(results: Path, data_root: Path) -> Figure:
    """Convolutional network on Fashion-MNIST, σ = 0.01, 0.03, 0.05."""
    return panels("dp_dfa_2020/fig2", results)


@register("figure", "dp_dfa_2020/fig3")
def convolutional_on_cifar10(results: Path, data_root: Path) -> Figure:
    """Convolutional network on CIFAR-10, σ = 0.01, 0.03, 0.05."""
    return panels("dp_dfa_2020/fig3", results)


@register("figure", "dp_dfa_2020/fig4")
def fully_connected(results: Path, data_root: Path) -> Figure:
    """Fully connected networks on Fashion-MNIST and CIFAR-10, σ = 0.01, 0.05."""
    return panels("dp_dfa_2020/fig4", results, columns=2)
