"""zdp-bench: differentially private deep learning on medical and complex-valued data, with numbers that can be trusted."""

__version__ = "0.1.0"
