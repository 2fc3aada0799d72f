"""Join representations, each projected on the principal axes of generated pictures.

With noise, a linear layer trains best if no direction of its features is much larger than the
others. Means, standard deviations and axes are computed from generated pictures (`generated.py`).
The transform is therefore a public function of one example, independent of the data set.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Interval
from pydantic import AfterValidator
from torch import Tensor, nn

from zdp_bench.config.compose import defaults
from zdp_bench.config.plugins import check_plugin, plugin_keys
from zdp_bench.config.types import SEED, check_value
from zdp_bench.data.cache import load_or_make
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.extras.transforms.generated import (
    MAX_PICTURES,
    VERSION,
    as_examples,
    seeded_pictures,
)
from zdp_bench.extras.transforms.normalisation import require_pictures
from zdp_bench.registry import lookup, register
from zdp_bench.representations import NO_FILE, Representation, build, fit_weights

NORM = 10.0  # of an example's features, over all parts
MAX_DEVIATION = 6.0  # features are clamped at this many standard deviations from the mean
REGULARISATION = 1e-4  # times the largest variance, added to each variance
POWER = -1 / 4  # scaling by a power of the variance: 0 keeps the scale of an axis, -1/2 whitens
EPS = 1e-6
BATCH_SIZE = 64  # generated pictures that are transformed together
MAX_PARTS = 4
MAX_NUMBERS = 2**30  # of the features of all generated pictures, 4 GiB in float32
PARTS = "representation.parts"
PART_KEYS = ("name", "weight")  # keys of a part that are not options of its representation
WEIGHT = Annotated[float, Interval(gt=0, le=1e6)]


def check_parts(parts: list[str | dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return each part as a mapping with its name, weight and options that differ from the default.

    The weight of a single part has no effect, so it is set to 1.

    Raises:
        UserError: there are no parts, or a part is unknown, has invalid options or reads a file.
    """
    if not parts:
        raise UserError(
            "representation.parts is empty: list representations, such as [scattering, patches] or "
            "[{name: scattering, mirror: true, weight: 0.4}]."
        )
    if len(parts) > MAX_PARTS:
        raise UserError(f"{PARTS}: has {len(parts)} representations; join at most {MAX_PARTS}.")
    checked = [_check_part(part) for part in parts]
    if len(checked) == 1:
        checked[0]["weight"] = 1.0
    return checked


def _check_part(part: str | dict[str, Any]) -> dict[str, Any]:
    options = {"name": part} if isinstance(part, str) else dict(part)
    weight = check_value(f"{PARTS}.weight", WEIGHT, options.pop("weight", 1.0))
    name = options.get("name")
    if not isinstance(name, str):
        raise UserError(
            "representation.parts: a part has no name; write it as scattering or "
            "{name: scattering, weight: 0.4}."
        )
    if name == "joined":
        raise UserError("representation.parts: joined cannot be a part of itself.")
    keys = [f"{PARTS}.{key}" for key in (*PART_KEYS, *plugin_keys("representation", name))]
    for key in options:
        if f"{PARTS}.{key}" not in keys:
            raise unknown("key", f"{PARTS}.{key}", keys)
    plugin = check_plugin("representation", options)
    if plugin.options.get("weights", NO_FILE[0]) not in NO_FILE:
        raise UserError(
            f"representation.parts: {plugin.name} takes weights={', '.join(NO_FILE)} here, not a "
            "file."
        )
    default = defaults(lookup("representation", plugin.name))
    changed = {key: value for key, value in plugin.options.items() if value != default[key]}
    return {"name": plugin.name, "weight": weight, **changed}


Parts = Annotated[list[str | dict[str, Any]] | None, AfterValidator(check_parts)]


def standardised(
    features: Tensor,
    mean: Tensor,
    deviation: Tensor,
) -> Tensor:
    """Return features [n, C, ...] as standardised and clamped rows, [n, features]."""
    x = (features - mean) / (deviation + EPS)
    return x.clamp(-MAX_DEVIATION, MAX_DEVIATION).flatten(1)


def axes_of(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the scaled principal axes of rows [n, features].

    An axis along which the rows have variance λ is scaled by (λ / λ₁ + REGULARISATION)^POWER, where
    λ₁ is the largest variance. The sign of an axis makes its largest entry positive, so that it is
    reproducible.

    Args:
        rows: the rows, with n less than the number of features.
        count: the number of axes, those with the largest variances.

    Returns:
        mean [features], axes [count, features].
    """
    mean = rows.mean(dim=0)
    centred = rows - mean
    # With fewer rows than features, this matrix is smaller than the covariance, and has the same
    # positive eigenvalues.
    products = centred @ centred.T / len(rows)
    variances, directions = torch.linalg.eigh(products.double())
    variances = variances.flip(0)[:count].float()
    directions = directions.flip(1)[:, :count].float()
    axes = F.normalize(directions.T @ centred, dim=1)
    place = axes.abs().argmax(dim=1, keepdim=True)
    largest = axes.gather(1, place)
    scales = (variances / variances[0] + REGULARISATION) ** POWER
    return mean, axes * largest.sign() * scales.unsqueeze(1)


class Part(nn.Module):
    """A representation projected on its public axes, with norm 1.

    Shapes: [B, *shape] -> [B, count].

    Args:
        representation: the representation to project.
        count: number of principal axes.
        pictures: number of generated pictures, from which the axes are computed.
        seed: seed of the generated pictures.
    """

    mean: Tensor
    deviation: Tensor
    centre: Tensor
    axes: Tensor

    def __init__(
        self, representation: Representation, count: int, pictures: int, seed: int
    ) -> None:
        super().__init__()
        self.features = representation.module
        self._apply_to = representation
        self._fitting = pictures, seed
        features = math.prod(representation.gives)
        max_count = min(features, pictures - 1)
        if count > max_count:
            raise UserError(
                f"representation.axes={count}: {pictures} generated pictures have at most "
                f"{max_count} axes in the {features} features of {representation.name}. Lower "
                "representation.axes."
            )
        numbers = pictures * features
        rule = (
            f"the {features:,} features of {representation.name} take {numbers:,} numbers, more "
            f"than {MAX_NUMBERS:,}; lower it, or take smaller examples"
        )
        require(numbers <= MAX_NUMBERS, "representation.pictures", pictures, rule)
        channels = representation.gives[0]
        per_channel = (1, channels, *[1] * (len(representation.gives) - 1))
        self.register_buffer("mean", torch.zeros(per_channel))
        self.register_buffer("deviation", torch.zeros(per_channel))
        self.register_buffer("centre", torch.zeros(features))
        self.register_buffer("axes", torch.zeros(count, features))

    def fit(self) -> None:
        """Compute statistics and axes on generated pictures, or read them from the cache."""
        fit_weights(self.features)
        representation = self._apply_to
        pictures, seed = self._fitting
        count, features = self.axes.shape

        def blocks() -> Iterator[np.ndarray]:
            yield _fit(representation, count, pictures, seed).numpy()

        name = f"{representation.digest}:{VERSION}:{Joined.version}:{count}:{pictures}:{seed}"
        digest = hashlib.sha256(name.encode()).hexdigest()
        shape = (count + 3, features)
        rows = torch.from_numpy(load_or_make("axes", digest, shape, np.float32, blocks()))
        mean, deviation = rows[:2, : self.mean.numel()].clone()
        self.mean = mean.reshape(self.mean.shape)
        self.deviation = deviation.reshape(self.deviation.shape)
        self.centre = rows[2]
        self.axes = rows[3:]

    def forward(self, x: Tensor) -> Tensor:
        rows = standardised(self._apply_to(x), self.mean, self.deviation)
        projections = (rows - self.centre) @ self.axes.T
        return F.normalize(projections, dim=1)


def _fit(
    representation: Representation,
    count: int,
    pictures: int,
    seed: int,
) -> Tensor:
    """Compute the statistics of a representation on generated pictures.

    Returns:
        as rows, [count + 3, features]: the mean and the standard deviation of each channel (padded
        with zeros), the mean of the standardised features, and the axes.
    """
    features = torch.cat(
        [
            representation(as_examples(part, representation.takes))
            for part in seeded_pictures(pictures, seed).split(BATCH_SIZE)
        ]
    )
    others = [axis for axis in range(features.dim()) if axis != 1]
    mean = features.mean(dim=others, keepdim=True)
    variance = (features - mean).square().mean(dim=others, keepdim=True)
    deviation = variance.sqrt()
    centre, axes = axes_of(standardised(features, mean, deviation), count)
    channels = torch.stack([mean.flatten(), deviation.flatten()])
    padded = F.pad(channels, (0, len(centre) - mean.numel()))
    return torch.cat([padded, centre.unsqueeze(0), axes])


@register("representation", "joined")
class Joined(nn.Module):
    """Concatenated representations of pictures, each projected on public axes.

    Shapes: pictures float [B, (C,) H, W] with pixels in [0, 1] -> [B, parts · axes], with norm 10.

    Each part is standardised by the mean and standard deviation of its channels over generated
    pictures, clamped to ±6, projected on their principal axes, and half-whitened. Its norm is then
    scaled to √(weight / sum of all weights).

    Args:
        input_shape: shape of an example.
        parts: representations, as names or as mappings with name, weight and options.
        axes: number of principal axes of each part.
        pictures: number of generated pictures, from which the axes are computed.
        seed: seed of the generated pictures.
    """

    version = 1
    takes_unit_pixels = True
    at_once = 128  # examples on a CPU: with fewer, reading the axes from memory takes longest

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        parts: Parts = None,
        axes: Annotated[int, Interval(ge=1, le=MAX_PICTURES)] = 1024,
        pictures: Annotated[int, Interval(ge=2, le=MAX_PICTURES)] = 4096,
        seed: Annotated[int, SEED] = 0,
    ) -> None:
        super().__init__()
        require_pictures("joined", input_shape)
        checked = check_parts(parts)
        self.parts = nn.ModuleList()
        # With several parts: (factor, the representation that joins this part alone).
        self.joins = list[tuple[float, Representation]]()
        described = list[dict[str, Any]]()
        if len(checked) == 1:
            options = {key: value for key, value in checked[0].items() if key not in PART_KEYS}
            name = checked[0]["name"]
            representation = build(name, options, input_shape, torch.float32, fit=False)
            self.parts.append(Part(representation, axes, pictures, seed))
            described.append(representation.described())
        else:
            total = sum(part["weight"] for part in checked)
            for part in checked:
                options = {
                    "parts": check_parts([part]),
                    "axes": axes,
                    "pictures": pictures,
                    "seed": seed,
                }
                representation = build("joined", options, input_shape, torch.float32, fit=False)
                self.parts.append(representation.module)
                self.joins.append((math.sqrt(part["weight"] / total), representation))
                described += representation.facts["parts"]
        self.facts = {"parts": described}

    def fit(self) -> None:
        """Compute the axes of each part."""
        for part in self.parts:
            fit_weights(part)

    def forward(self, x: Tensor) -> Tensor:
        if not self.joins:
            return NORM * self.parts[0](x)
        return torch.cat([factor * part(x) for factor, part in self.joins], dim=1)
