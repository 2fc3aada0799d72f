"""Names and units as tables and figures show them: an id with spaces, if nothing is listed."""

from __future__ import annotations

ALGORITHMS = {
    "sgd": "non-private",
    "dp_sgd": "DP-SGD",
    "band_mf": "banded MF",
    "zeta_dp_sgd": "ζ-DP-SGD",
    "spectral_dp": "Spectral-DP",
    "gredp": "GReDP",
    "dp_dfa": "DP-DFA",
}
METRICS = {"roc_auc": "ROC AUC", "ssim": "SSIM", "psnr": "PSNR", "nmse": "NMSE", "dice": "Dice"}
UNITS = {"accuracy": "%", "psnr": "dB"}


def words(label: str) -> str:
    """'complex_mlp' -> 'complex mlp'."""
    return label.replace("_", " ")


def algorithm(label: str) -> str:
    """'dp_sgd' -> 'DP-SGD'."""
    return ALGORITHMS.get(label, words(label))


def metric(name: str) -> str:
    """'roc_auc' -> 'ROC AUC'."""
    return METRICS.get(name, words(name))


def unit(metric: str) -> str:
    """'%' for accuracy, 'dB' for PSNR, else nothing."""
    return UNITS.get(metric, "")


def scale(metric: str) -> float:
    """Return the factor from a recorded metric to its unit."""
    return 100.0 if unit(metric) == "%" else 1.0


def axis(name: str) -> str:
    """'test accuracy, %': the label of an axis that shows a metric."""
    after = f", {unit(name)}" if unit(name) else ""
    return f"test {metric(name)}{after}"
