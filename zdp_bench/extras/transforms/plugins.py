"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {
    "representation": {
        name: f"zdp_bench.extras.transforms.{name}"
        for name in ("joined", "network", "patches", "random_process", "scattering", "voxels")
    }
}
