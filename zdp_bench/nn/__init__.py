"""Complex layers, activations and normalisations with the interfaces of `torch.nn`.

They can be mixed with layers of `torch.nn`. For a complex linear layer, use
`torch.nn.Linear(..., dtype=torch.complex64)`.
"""

from zdp_bench.nn.activations import (
    Cardioid,
    ConjMish,
    CReLU,
    IGaussian,
    ModReLU,
    PerFeatureModReLU,
    PerFeatureTrainedCardioid,
    SeparableSigmoid,
    SigLog,
    SingleTrainedCardioid,
    ZReLU,
)
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.nn.convolution import (
    ComplexConv1d,
    ComplexConv2d,
    ComplexConv3d,
    ComplexConvTranspose2d,
)
from zdp_bench.nn.normalisation import ComplexGroupNorm, ComplexInstanceNorm, ComplexLayerNorm
from zdp_bench.nn.pooling import AdaptiveMagnitudeMaxPool2d, ComplexAvgPool2d, MagnitudeMaxPool2d
from zdp_bench.nn.surgery import FrozenBatchNorm, replace_batchnorm

__all__ = [
    "AdaptiveMagnitudeMaxPool2d",
    "CReLU",
    "Cardioid",
    "CirculantLinear",
    "ComplexAvgPool2d",
    "ComplexConv1d",
    "ComplexConv2d",
    "ComplexConv3d",
    "ComplexConvTranspose2d",
    "ComplexGroupNorm",
    "ComplexInstanceNorm",
    "ComplexLayerNorm",
    "ConjMish",
    "FrozenBatchNorm",
    "IGaussian",
    "MagnitudeMaxPool2d",
    "ModReLU",
    "PerFeatureModReLU",
    "PerFeatureTrainedCardioid",
    "SeparableSigmoid",
    "SigLog",
    "SingleTrainedCardioid",
    "ZReLU",
    "replace_batchnorm",
]
