"""The speech network: the sizes of A.2.3, its activation everywhere, maps that are too small
refused.
"""

from __future__ import annotations

import pytest
import torch

from zdp_bench.errors import UserError
from zdp_bench.models.speech_cnn import speech_cnn
from zdp_bench.nn.activations import IGaussian
from zdp_bench.nn.convolution import ComplexConv2d


def test_it_is_the_network_of_the_appendix() -> None:
    model = speech_cnn((1, 124, 129), 10)
    convolutions = [m for m in model.modules() if isinstance(m, ComplexConv2d)]
    assert [(m.in_channels, m.out_channels, m.kernel_size, m.padding) for m in convolutions] == [
        (a, b, (3, 3), (0, 0)) for a, b in ((1, 8), (8, 16), (16, 32), (32, 64))
    ]
    two = ["ComplexConv2d", "IGaussian"] * 2
    assert [type(m).__name__ for m in model.features] == [
        *two,
        "MagnitudeMaxPool2d",
        *two,
        "AdaptiveMagnitudeMaxPool2d",
    ]
    assert sum(isinstance(m, IGaussian) for m in model.modules()) == 6
    seen = {}
    model.features[-2].register_forward_hook(lambda m, i, out: seen.update(shape=out.shape))
    logits = model(torch.randn(2, 1, 124, 129, dtype=torch.complex64))
    assert seen["shape"] == (2, 64, 56, 58)
    assert logits.shape == (2, 10)
    assert not logits.is_complex()
    assert (logits < 1).all()  # the inverted Gaussian after the output layer


def test_options_do_what_they_say() -> None:
    torch.manual_seed(0)
    plain = speech_cnn(
        (1, 40, 30), 3, activation="cardioid_per_feature", last_activation=False, pooled=2
    )
    torch.manual_seed(0)
    louder = speech_cnn(
        (1, 40, 30), 3, activation="cardioid_per_feature", last_activation=False, pooled=2, gain=2.0
    )
    assert torch.equal(louder.head[0].weight, 2 * plain.head[0].weight)
    assert torch.equal(louder.head[0].bias, plain.head[0].bias)
    assert plain.head[0].weight.shape == (64, 64 * 4)
    assert len(plain.head) == 3
    assert [a.bias.numel() for a in plain.modules() if hasattr(a, "per_feature")] == [
        8,
        16,
        32,
        64,
        64,
    ]


def test_a_map_too_small_is_refused() -> None:
    assert speech_cnn((1, 14, 14), 2)(torch.randn(1, 1, 14, 14, dtype=torch.complex64)).shape == (
        1,
        2,
    )
    with pytest.raises(UserError, match="at least 14×14"):
        speech_cnn((1, 13, 40), 2)


def test_the_width_of_the_inverted_gaussian_reaches_every_activation() -> None:
    model = speech_cnn((1, 14, 14), 2, sigma=0.4)
    assert [m.sigma for m in model.modules() if isinstance(m, IGaussian)] == [0.4] * 6
