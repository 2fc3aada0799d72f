"""Names that people use: 'DP-SGD on PhaseMNIST', not `dp_sgd` and `phasemnist`.

What is not listed keeps its id, with spaces for underscores.
"""

from __future__ import annotations

from zdp_bench.records import Record

DATA = {
    "chest_xray": "chest X-ray",
    "chest_xray_synthetic": "blobs as chest X-ray",
    "cifar10": "CIFAR-10",
    "cpsc2018": "CPSC 2018 ECG",
    "cpsc2018_synthetic": "synthetic CPSC 2018 ECG",
    "fashion_mnist": "Fashion-MNIST",
    "fastmri": "fastMRI knee",
    "folder": "own data",
    "kspace_from_volumes": "MRI from volumes",
    "kspace_phantom": "MRI phantoms",
    "mnist": "MNIST",
    "mri_sequences": "MRI sequences",
    "mri_sequences_from_volumes": "MRI sequences from volumes",
    "mri_sequences_synthetic": "blobs as MRI sequences",
    "msd": "Medical Segmentation Decathlon",
    "msd_synthetic": "synthetic Segmentation Decathlon",
    "msd_volumes": "Decathlon volumes",
    "msd_volumes_synthetic": "synthetic Decathlon volumes",
    "phase_digits": "phase digits",
    "phasemnist": "PhaseMNIST",
    "public_kspace": "k-space of public pictures",
    "roahd": "ECG of 100 people (roahd)",
    "speech_commands": "Speech Commands",
    "speech_commands_synthetic": "synthetic Speech Commands",
    "synthetic_images": "generated pictures",
}
ALGORITHMS = {
    "sgd": "non-private",
    "dp_sgd": "DP-SGD",
    "band_mf": "banded MF",
    "zeta_dp_sgd": "ζ-DP-SGD",
    "spectral_dp": "Spectral-DP",
    "gredp": "GReDP",
    "dp_dfa": "DP-DFA",
}
METRICS = {
    "accuracy": "accuracy",
    "roc_auc": "ROC AUC",
    "ssim": "SSIM",
    "psnr": "PSNR",
    "nmse": "NMSE",
    "dice": "Dice",
    "loss": "loss",
}
UNITS = {"accuracy": "%", "psnr": "dB"}


def model(name: str) -> str:
    """'complex_mlp' -> 'complex mlp'."""
    return name.replace("_", " ")


def data(label: str) -> str:
    """'mnist, size=16' -> 'MNIST, size=16'."""
    return _find(DATA, label)


def algorithm(label: str) -> str:
    """'dp_sgd, per_layer=True' -> 'DP-SGD, per_layer=True'."""
    return _find(ALGORITHMS, label)


def metric(name: str) -> str:
    return _find(METRICS, name)


def unit(metric: str) -> str:
    """'%' for accuracy, 'dB' for PSNR, else nothing."""
    return UNITS.get(metric, "")


def scale(metric: str) -> float:
    """Turns a recorded metric into its unit."""
    return 100.0 if unit(metric) == "%" else 1.0


def axis(metric: str) -> str:
    """'test accuracy, %': the label of an axis that shows a metric."""
    after = f", {unit(metric)}" if unit(metric) else ""
    return f"test {_find(METRICS, metric)}{after}"


def run(record: Record) -> str:
    """'complex MLP on PhaseMNIST'."""
    network = record["config"].get("model", {}).get("name")
    on = data(record["data"]["name"])
    return f"{model(network)} on {on}" if network else on


def _find(names: dict[str, str], label: str) -> str:
    name, comma, options = label.partition(", ")
    return f"{names.get(name, name.replace('_', ' '))}{comma}{options}"
