"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {"command": {"search": "zdp_bench.extras.search.command"}}
