"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {
    "command": {"federate": "zdp_bench.extras.federated.command"},
    "runner": {"federated": "zdp_bench.extras.federated.simulation:run_simulated"},
}
