"""The plug-ins of this extra, for `zdp_bench/registry.py`."""

ADDS = {"command": {"search": "zdp_bench.extras.search.command"}}
