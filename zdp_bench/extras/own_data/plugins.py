"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {"dataset": {"folder": "zdp_bench.extras.own_data.folder"}}
