"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {"command": {"audit": "zdp_bench.extras.audit.command"}}
