"""The plug-ins of this extra, for `zdp_bench/registry.py`."""

ADDS = {
    "dataset": {
        "chest_xray_synthetic": "zdp_bench.extras.standins.pictures",
        "cpsc2018_synthetic": "zdp_bench.extras.standins.ecg",
        "ham10000_synthetic": "zdp_bench.extras.standins.pictures",
        "kspace_phantom": "zdp_bench.extras.standins.scans",
        "mri_sequences_synthetic": "zdp_bench.extras.standins.scans",
        "msd_synthetic": "zdp_bench.extras.standins.scans",
        "msd_volumes_synthetic": "zdp_bench.extras.standins.scans",
        "physionet2012_synthetic": "zdp_bench.extras.standins.stays",
        "speech_commands_synthetic": "zdp_bench.extras.standins.speech",
        "synthetic_images": "zdp_bench.extras.standins.pictures",
    }
}
