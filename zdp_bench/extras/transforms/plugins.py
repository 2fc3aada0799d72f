"""The plug-ins of this extra, for `zdp_bench/registry.py`."""

ADDS = {
    "representation": {
        name: f"zdp_bench.extras.transforms.{name}"
        for name in ("joined", "network", "patches", "random_process", "scattering", "voxels")
    }
}
