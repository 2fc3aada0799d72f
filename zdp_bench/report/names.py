"""Names that people use: 'complex MLP on PhaseMNIST', not `complex_mlp` and `phasemnist`.

What is not listed keeps its id, with spaces for underscores.
"""

from __future__ import annotations

from collections.abc import Sequence

from zdp_bench.records import Record

MODELS = {
    "alexnet": "AlexNet",
    "complex_cnn": "complex CNN",
    "complex_conv_linear": "complex convolution and linear layer",
    "complex_dfa_cnn": "complex CNN for feedback alignment",
    "complex_harmonic": "complex harmonic network",
    "complex_linear": "complex linear layer",
    "complex_mlp": "complex MLP",
    "complex_sequence_cnn": "complex sequence CNN",
    "complex_unet": "complex U-Net",
    "lenet5": "LeNet-5",
    "model3": "Model-3",
    "real_cnn": "CNN",
    "real_conv_linear": "convolution and linear layer",
    "real_dfa_cnn": "CNN for feedback alignment",
    "real_linear": "linear layer",
    "real_linear_map": "linear layer a voxel",
    "real_mlp": "MLP",
    "real_sequence_cnn": "sequence CNN",
    "real_unet": "U-Net",
    "resnet18_transfer": "ResNet-18, transferred",
    "resnet20": "ResNet-20",
    "speech_cnn": "speech CNN",
    "transposed_unet": "transposed U-Net",
    "vgg11": "VGG-11",
    "vgg11_unet": "VGG-11 U-Net",
}
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
KEYS = {
    "algorithm.noise_multiplier": "σ",
    "algorithm.max_grad_norm": "C",
    "privacy.target_epsilon": "ε",
}
UNITS = {"accuracy": "%", "psnr": "dB"}


def model(name: str) -> str:
    return _find(MODELS, name)


def data(label: str) -> str:
    """'mnist, size=16' -> 'MNIST, size=16'."""
    return _find(DATA, label)


def algorithm(label: str) -> str:
    """'dp_sgd, per_layer=True' -> 'DP-SGD, per_layer=True'."""
    return _find(ALGORITHMS, label)


def metric(name: str) -> str:
    return _find(METRICS, name)


def key(name: str) -> str:
    """'optimizer.lr' -> 'lr', 'optimizer.name' -> 'optimizer', 'algorithm.max_grad_norm' -> 'C'."""
    return KEYS.get(name, name.removesuffix(".name").rpartition(".")[2])


def short(keys: Sequence[str]) -> list[str]:
    """Return what `key` says of each, or the whole where two would be alike."""
    made = [key(name) for name in keys]
    return [of if made.count(of) == 1 else name for of, name in zip(made, keys, strict=True)]


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
