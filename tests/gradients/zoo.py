"""Every registered model, small, as one `Case`."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torchvision.models import resnet18

from tests.gradients.harness import Case, Kind
from zdp_bench.registry import lookup


def resnet18_weights() -> str:
    """A file of weights, as random as a new network's."""
    torch.manual_seed(0)
    path = Path(tempfile.mkdtemp()) / "resnet18.pth"
    with torch.device("cpu"):  # whatever device a test builds on
        torch.save(resnet18().state_dict(), path)
    atexit.register(shutil.rmtree, path.parent)
    return str(path)


DFA: dict[str, object] = {"channels": [4, 5], "hidden": [6, 7]}
VGG: dict[str, object] = {"norm": "group", "groups": 2, "width": 8}
# Each model of the zoo, small: input shape, outputs, options (functions are called first), kind.
ZOO: dict[str, tuple[tuple[int, ...], int, dict[str, object], Kind]] = {
    "complex_mlp": ((1, 5, 5), 3, {"hidden": [8, 6]}, "complex"),
    "real_mlp": ((1, 5, 5), 3, {"hidden": [8, 6]}, "real"),
    "complex_conv_linear": ((3, 6, 7), 2, {"channels": 4}, "complex"),
    "real_conv_linear": ((3, 6, 7), 2, {"channels": 4}, "real"),
    "complex_cnn": ((2, 9, 8), 3, {"channels": [4, 6]}, "complex"),
    "real_cnn": ((2, 9, 8), 3, {"channels": [4, 6]}, "real"),
    "complex_unet": ((2, 8, 12), 2, {"width": 4, "depth": 2}, "complex"),
    "real_unet": ((2, 8, 12), 2, {"width": 4, "depth": 2}, "real"),
    "complex_harmonic": ((2, 6, 7), 2, {"size": 5}, "complex"),
    "resnet18_transfer": ((3, 32, 32), 2, {"weights": resnet18_weights}, "real"),
    "lenet5": ((20, 16), 3, {"linear": "circulant"}, "real"),
    "model3": ((1, 8, 9), 3, {"linear": "circulant"}, "real"),
    "alexnet": ((1, 32, 32), 2, {}, "real"),
    "resnet20": ((1, 8, 8), 3, {"groups": 4}, "real"),
    "complex_dfa_cnn": ((2, 16, 17), 3, DFA, "complex"),
    "real_dfa_cnn": ((16, 17), 3, DFA | {"fc_activation": "sigmoid"}, "real"),
    "transposed_unet": ((2, 8, 12), 2, {"width": 4, "depth": 2}, "real"),
    "vgg11": ((3, 32, 32), 3, VGG | {"pool": 2, "hidden": 6}, "real"),
    "vgg11_unet": ((1, 32, 32), 2, VGG, "real"),
    "complex_sequence_cnn": ((1, 8, 9), 4, {}, "complex"),
    "real_sequence_cnn": ((1, 8, 9), 4, {}, "complex"),
    "real_linear": ((3, 4), 3, {}, "real"),
    "complex_linear": ((3, 4), 3, {}, "complex"),
    "real_linear_map": ((3, 4, 5, 6), 2, {"degree": 1, "bias_degree": 2}, "real"),
    "speech_cnn": ((1, 14, 16), 3, {"activation": "igaussian"}, "complex"),
}


def model_case(name: str, **more: object) -> Case:
    shape, outputs, options, kind = ZOO[name]
    words = "".join(f", {key}={value}" for key, value in more.items())

    def build() -> nn.Module:
        ready = {key: value() if callable(value) else value for key, value in options.items()}
        return lookup("model", name)(shape, outputs, **{**ready, **more})

    return Case(f"model {name}{words}", build, shape, kind)


MODELS: list[Case] = [
    *(model_case(name) for name in ZOO),
    model_case("complex_unet", normalisation="group", depth=1),
    replace(model_case("real_unet", re_im=True, depth=1), kind="complex"),
]
