"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {"command": {"figure": "zdp_bench.extras.figures.command"}}
