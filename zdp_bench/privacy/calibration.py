"""Find σ for a target ε: the inverse of every accountant, kept on disk as it can take seconds.

A result is one small JSON file in `$XDG_CACHE_HOME/zdp-bench/calibration` (or `~/.cache/...`),
named by the SHA-256 of its question. It is written whole or not at all, holds its question, and is
used only if that is the question asked; otherwise σ is computed again. The folder can be deleted at
any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scipy.optimize import brentq

from zdp_bench.caches import cache_folder
from zdp_bench.privacy.accountants import Claim, claimed_epsilon
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Mechanism

ARITHMETIC = 1  # raise it when an accountant's numbers change: older results are then computed anew
TOLERANCE = 1e-4  # relative, of σ; the answer is rounded to the private side
SMALLEST, LARGEST = 2.0**-6, 2.0**14


def calibrate(target: float, accountant: str, claim: Claim) -> float:
    """Return the smallest σ (the claim's own is ignored) at which at most `target` is claimed.

    Raises:
        ValueError: no σ between 1/64 and 16384 reaches the target, or it is not positive.
    """
    question = {
        "accountant": accountant,
        "claim": dataclasses.asdict(claim) | {"noise_multiplier": None},
    }
    return solve(
        target,
        lambda sigma: claimed_epsilon(
            accountant, dataclasses.replace(claim, noise_multiplier=sigma)
        ),
        question,
    )


def calibrate_mechanism(target: float, unit: Mechanism, steps: int, delta: float) -> float:
    """Return the smallest noise multiplier whose TIGHT ε after `steps` is at most `target`.

    Args:
        unit: the mechanism at noise multiplier 1; z is proportional to the multiplier.

    Raises:
        ValueError: see `calibrate`; or some direction gets no noise.
    """
    if unit.z == 0:
        raise ValueError("some direction gets no noise, so its ε is ∞ at every noise multiplier")
    sampling = unit.sampling
    question = {
        "accountant": "tight",
        "scheme": sampling.scheme,
        "rate": sampling.sample_rate,
        "steps": steps,
        "delta": delta,
    }

    def epsilon_of(z: float) -> float:
        return tight_epsilon(Mechanism.of_z(z, sampling), steps, delta)

    # z must not come out one rounding lower
    return solve(target, epsilon_of, question) / unit.z * (1 + 1e-12)


def solve(target: float, epsilon_of: Callable[[float], float], question: dict[str, Any]) -> float:
    """Return the smallest σ with epsilon_of(σ) ≤ target, up to a relative 1e-4; ε must fall with σ.

    Args:
        question: everything `epsilon_of` depends on, as JSON values: the key of the cache.

    Formal guarantees: epsilon_of(result) ≤ target. A target of ∞ asks for no noise: σ is 0.

    Raises:
        ValueError: see `calibrate`.
    """
    if target == math.inf:
        return 0.0
    asked = question | {
        "target": target,
        "arithmetic": ARITHMETIC,
        "dp-accounting": version("dp-accounting"),
    }
    text = json.dumps(asked, sort_keys=True)
    if (folder := cache_folder("calibration")) is None:
        return _search(target, epsilon_of)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    if (found := _read(path, text)) is not None:
        return found
    sigma = _search(target, epsilon_of)
    _write(path, {"asked": text, "sigma": sigma})
    return sigma


def _search(target: float, epsilon_of: Callable[[float], float]) -> float:
    if not target > 0:
        raise ValueError(f"a target ε must be positive, not {target:g}")
    low = high = 1.0  # invariant once found: ε(low) > target ≥ ε(high)
    while epsilon_of(high) > target:
        low, high = high, high * 2
        if high > LARGEST:
            raise ValueError(f"no noise multiplier up to {LARGEST:,.0f} reaches ε = {target:g}")
    while low == high or epsilon_of(low) <= target:
        low /= 2
        if low < SMALLEST:
            raise ValueError(
                f"ε = {target:g} is reached even by a noise multiplier of {SMALLEST:g}: there is "
                "nothing to calibrate"
            )

    def distance(log_sigma: float) -> float:
        epsilon = epsilon_of(math.exp(log_sigma))
        return math.log(min(max(epsilon, 1e-12), 1e12) / target)

    root = math.exp(brentq(distance, math.log(low), math.log(high), xtol=TOLERANCE / 4))
    while epsilon_of(root) > target:
        root *= 1 + TOLERANCE / 2
    return root


def _read(path: Path, asked: str) -> float | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        sigma = float(stored["sigma"])
        return sigma if stored["asked"] == asked and 0 < sigma < math.inf else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write the file whole. A folder that cannot be written only makes the next call slow."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
