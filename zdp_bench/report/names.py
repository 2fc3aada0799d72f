"""Names as tables and figures show them. An unlisted identifier is shown with spaces."""

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
    """Return an identifier with spaces: 'complex mlp' for 'complex_mlp'."""
    return label.replace("_", " ")


def variant(label: str) -> str:
    """Return the name of a variant: 'DP-SGD' for the algorithm 'dp_sgd', otherwise its words."""
    return ALGORITHMS.get(label, words(label))
