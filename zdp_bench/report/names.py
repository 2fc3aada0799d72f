"""Names as tables and figures show them: an id with spaces, if nothing is listed."""

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


def words(label: str) -> str:
    """'complex_mlp' -> 'complex mlp'."""
    return label.replace("_", " ")


def algorithm(label: str) -> str:
    """'dp_sgd' -> 'DP-SGD'."""
    return ALGORITHMS.get(label, words(label))
