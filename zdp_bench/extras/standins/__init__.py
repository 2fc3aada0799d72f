"""Data sets that are generated in a release's layout: for runs without its files, and for tests."""

from __future__ import annotations

from zdp_bench.errors import UserError

LARGEST = 32 * 10**9  # bytes; stand-ins have some megabytes


def require_modest(keys: str, size: float) -> None:
    """Refuse to generate more than `LARGEST` bytes, before the work and not by a full disk.

    Args:
        keys: what makes the size, for the sentence: `dataset.count`.
        size: in bytes, estimated.
    """
    if size > LARGEST:
        raise UserError(
            f"{keys}: makes about {size / 1e9:,.0f} GB of data, and at most {LARGEST / 1e9:g} GB "
            "are generated. Take less."
        )
