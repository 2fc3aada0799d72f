"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {
    "dataset": {
        "chest_xray_synthetic": "zdp_bench.extras.standins.films",
        "cpsc2018_synthetic": "zdp_bench.extras.standins.ecg",
        "kspace_from_volumes": "zdp_bench.extras.standins.kspace_from_volumes",
        "kspace_phantom": "zdp_bench.extras.standins.kspace_phantom",
        "mitbih_synthetic": "zdp_bench.extras.standins.beats",
        "mri_sequences_from_volumes": "zdp_bench.extras.standins.mri_sequences_from_volumes",
        "mri_sequences_synthetic": "zdp_bench.extras.standins.sequences",
        "msd_synthetic": "zdp_bench.extras.standins.volumes",
        "msd_volumes_synthetic": "zdp_bench.extras.standins.volumes",
        "public_kspace": "zdp_bench.extras.standins.public_kspace",
        "speech_commands_synthetic": "zdp_bench.extras.standins.speech",
        "synthetic_images": "zdp_bench.extras.standins.images",
    }
}
