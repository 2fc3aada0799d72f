"""Differentially private deep learning on medical and complex-valued data."""

__version__ = "0.1.0"
