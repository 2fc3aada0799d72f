"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {"command": {"bench": "zdp_bench.extras.bench.command"}}
