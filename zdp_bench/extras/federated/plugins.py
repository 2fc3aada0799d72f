"""The plug-ins of this extra, for `zdp_bench/registry.py`."""

ADDS = {
    "runner": {"federated": "zdp_bench.extras.federated.runner"},
}
