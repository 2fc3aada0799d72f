"""The plug-ins of this extra, for `zdp_bench/registry.py`."""

ADDS = {"command": {"figure": "zdp_bench.extras.figures.command"}}
