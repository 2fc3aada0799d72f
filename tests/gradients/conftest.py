"""Says at the end how many layer × check cases the harness went through."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ran = {
        word: [r for r in terminalreporter.stats.get(word, []) if "test_harness" in r.nodeid]
        for word in ("passed", "failed")
    }
    if any(ran.values()):
        terminalreporter.write_line(
            f"gradient harness: {len(ran['passed'])} layer × check cases passed, {len(ran['failed'])} failed"
        )
