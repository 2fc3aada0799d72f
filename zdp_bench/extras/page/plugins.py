"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {
    "command": {"report": "zdp_bench.extras.page.command"},
}
