"""The CNN of the speech experiments (Ziller et al. 2021, 5.3, 5.4 and A.2.3), with any activation.

Appendix A.2.3 states: 3×3 filters without padding and with stride 1, of which there are 8, 16, 32
and 64; max-pooling between the second and the third layer, and adaptive max-pooling after the last;
a fully connected layer of 64 units and one with a unit per word, both followed by the activation.
It leaves open, and we choose: pooling windows of 2×2, an adaptive map of 1×1, the same activation
after every convolution, maxima by modulus, and moduli as logits.

Variants of ours may multiply the initial weights by `gain`. With PyTorch's initialisation, a layer
loses a third of a signal's power, and the inverted Gaussian is quadratic in moduli below one. As
published, hardly anything of the signal is therefore left after four layers.
`model.start=unit_variance` is the remedy for any activation.
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

    Shapes: spectrograms, or real pictures, [B, C, frames, bins] -> real logits [B, outputs].

    Args:
        activation: registered name of the activation.
        last_activation: apply the activation after the output layer too.
        pooled: rows and columns of the adaptive map.
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
        image_channels, frames, bins = image_shape("speech_cnn", input_shape)
        smallest = 2 * (pooled + 4) + 4  # two convolutions take 4, pooling halves, two more take 4
        rule = f"speech_cnn needs at least {smallest}×{smallest}"
        require(min(frames, bins) >= smallest, "dataset", f"{frames}×{bins}", rule)
        layers: list[nn.Module] = []
        channels = pairwise((image_channels, *WIDTHS))
        for depth, (in_channels, out_channels) in enumerate(channels, start=1):
            layers.append(ComplexConv2d(in_channels, out_channels, 3))
            layers.append(make_activation(activation, out_channels, torch.complex64))
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
        maps = self.features(x.to(x.dtype.to_complex()))
        return self.head(maps.flatten(1)).abs()
