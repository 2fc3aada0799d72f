"""What a ledger's file holds, read without the package."""

from __future__ import annotations

import json
from pathlib import Path


def steps_in(ledger: Path) -> list[int]:
    """The steps that are written down, in order."""
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    return [line["step"] for line in lines if "step" in line and "state" not in line]
