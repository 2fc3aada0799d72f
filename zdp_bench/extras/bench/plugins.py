"""The plug-ins of this extra, for `zdp_bench/registry.py`."""

ADDS = {"command": {"bench": "zdp_bench.extras.bench.command"}}
