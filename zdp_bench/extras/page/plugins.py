"""The plug-ins of this extra, for `zdp_bench/registry.py`."""

ADDS = {
    "command": {"report": "zdp_bench.extras.page.command"},
}
