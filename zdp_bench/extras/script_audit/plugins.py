"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {
    "function": {
        "audit_script": "zdp_bench.extras.script_audit.script:audit_script",
        "audit_step": "zdp_bench.extras.script_audit.foreign:step",
    }
}
