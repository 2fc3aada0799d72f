"""The CNN of the speech experiments (Ziller et al. 2021, 5.3, 5.4 and A.2.3), with any activation.

A.2.3: 3×3 filters without padding, stride 1, 8-16-32-64 of them; max-pooling between the second and
the third layer, adaptive max-pooling after the last; a fully connected layer of 64 units and one
with as many as there are words, both followed by the activation. We add what it leaves open:
windows of 2×2, an adaptive map of 1×1, the same activation after every convolution, maxima by
modulus, moduli as logits.

For our own variants, `gain` multiplies the initial weights. With PyTorch's own a layer loses a
third of a signal's power, and the inverted Gaussian squares a modulus below one, so that as
published hardly anything is left after four layers. `model.start=unit_variance` is the remedy for
any activation.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.models import Width, image_shape
from zdp_bench.nn.activations import activation as make_activation
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.pooling import AdaptiveMagnitudeMaxPool2d, MagnitudeMaxPool2d
from zdp_bench.registry import register

WIDTHS = (8, 16, 32, 64)


@register("model", "speech_cnn")
class SpeechCNN(nn.Module):
    """The network of Tables 3 and 4.

    Shapes: complex spectrograms [B, C, frames, bins] -> real logits [B, outputs].

    Args:
        last_activation: put the activation after the output layer too.
        pooled: side of the adaptive map.
        gain: factor on the initial weights.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        activation: str = "igaussian",
        last_activation: bool = True,
        pooled: Width = 1,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        images, frames, bins = image_shape("speech_cnn", input_shape)
        smallest = 2 * (pooled + 4) + 4  # two convolutions take 4, pooling halves, two more take 4
        rule = f"speech_cnn needs at least {smallest}×{smallest}"
        require(min(frames, bins) >= smallest, "dataset", f"{frames}×{bins}", rule)
        layers: list[nn.Module] = []
        for depth, (wide, narrow) in enumerate(pairwise((images, *WIDTHS)), start=1):
            layers.append(ComplexConv2d(wide, narrow, 3))
            layers.append(make_activation(activation, narrow, torch.complex64))
            if depth == 2:
                layers.append(MagnitudeMaxPool2d(2))
        self.features = nn.Sequential(*layers, AdaptiveMagnitudeMaxPool2d(pooled))
        head = [
            nn.Linear(WIDTHS[-1] * pooled**2, 64, dtype=torch.complex64),
            make_activation(activation, 64, torch.complex64),
            nn.Linear(64, outputs, dtype=torch.complex64),
            make_activation(activation, outputs, torch.complex64),
        ]
        self.head = nn.Sequential(*(head if last_activation else head[:-1]))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:  # no biases
                    parameter.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1)).abs()
