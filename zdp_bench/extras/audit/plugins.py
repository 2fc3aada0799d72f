"""The plug-ins of this extra, for `zdp_bench/registry.py`."""

ADDS = {"command": {"audit": "zdp_bench.extras.audit.command"}}
