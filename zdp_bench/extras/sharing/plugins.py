"""The plug-ins of this extra, for `zdp_bench/registry.py`."""

ADDS = {
    "command": {
        "export": "zdp_bench.extras.sharing.commands.export",
        "predict": "zdp_bench.extras.sharing.commands.predict",
        "verify": "zdp_bench.extras.sharing.commands.verify",
    },
    "exporter": {"folder": "zdp_bench.extras.sharing.export:write_own"},
}
