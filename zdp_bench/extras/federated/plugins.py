"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {
    "runner": {"federated": "zdp_bench.extras.federated.simulation:run_simulated"},
}
