"""Generate pictures from a random process, which replace photographs where data must not be used.

There are three kinds (Baradad et al. 2021, "Learning to see by looking at noise"): outputs of
untrained generators similar to StyleGAN, with oriented filters; noise with a 1/f^a spectrum; and
overlapping shapes filled with textures of the other two kinds (dead leaves).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.data.cache import load_or_make

SIDE = 64  # pixels of a picture
BATCH_SIZE = 512  # pictures that are generated together
WIDTH = 16  # channels of a generator
MAX_PICTURES = 8192  # largest number of pictures of a seed, twice that of our recipes
FIRST_SIDE = 4  # side of a generator's first maps, in pixels
SHAPES = 24  # largest number of shapes in a picture
GENERATED, SPECTRAL = 0.4, 0.1  # fractions of all pictures; the others have shapes
VERSION = 1  # increment when the pictures of a seed change; part of the cache key
BLOCK = 256  # pictures that are written to the cache together
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in grey


def between(
    low: float,
    high: float,
    *shape: int,
    device: torch.device,
) -> Tensor:
    """Return uniform random numbers in [low, high)."""
    return low + (high - low) * torch.rand(*shape, device=device)


class Draws:
    """Draws random numbers for n pictures, one number for each."""

    def __init__(
        self,
        n: int,
        device: torch.device,
    ) -> None:
        self.n, self.device = n, device

    def uniform(self, low: float, high: float) -> Tensor:
        """Return numbers [n, 1, 1, 1]."""
        return between(low, high, self.n, 1, 1, 1, device=self.device)

    def normal(self, channels: int = 1) -> Tensor:
        """Return standard normal numbers [n, channels, 1, 1]."""
        return torch.randn(self.n, channels, 1, 1, device=self.device)


def kernels(device: torch.device) -> Tensor:
    """Return a Gaussian and its first and second derivatives, each with norm 1: [6, 1, 5, 5]."""
    x = torch.arange(-2.0, 3, device=device)
    variance = 0.81
    gaussian = torch.exp(-x.square() / (2 * variance))
    first = -x * gaussian
    second = (x.square() - variance) * gaussian
    second = second - second.mean()
    bank = torch.stack(
        [
            torch.outer(gaussian, gaussian),
            torch.outer(gaussian, first),
            torch.outer(first, gaussian),
            torch.outer(gaussian, second),
            torch.outer(second, gaussian),
            torch.outer(first, first),
        ]
    )
    norms = bank.flatten(1).norm(dim=1).view(-1, 1, 1)
    return (bank / norms).unsqueeze(1)


def coloured(x: Tensor) -> Tensor:
    """Normalise maps [n, 3, H, W] to pictures in [0, 1].

    Brightness, contrast, saturation and tint of each are random.
    """
    draws = Draws(len(x), x.device)
    x = x.float().nan_to_num(0, 9, -9)
    x = x - x.mean((2, 3), keepdim=True)
    deviation = x.std((1, 2, 3), keepdim=True)
    x = x / (deviation + 1e-4)
    grey = x.mean(1, keepdim=True)
    light = draws.uniform(0.6, 1.2)
    saturation = draws.uniform(0.0, 1.3)
    x = grey * light + (x - grey) * saturation
    contrast = 0.22 * torch.exp(0.35 * draws.normal())
    brightness = 0.13 * draws.normal()
    tint = 0.1 * draws.normal(channels=3)
    x = x * contrast + 0.47 + brightness + tint
    return x.clamp(0, 1)


class Generators:
    """Untrained generators with random oriented filters, one for each picture.

    Args:
        n: number of pictures.
        bank: filters [K, 1, 5, 5], whose dtype is that of the maps.
    """

    def __init__(self, n: int, bank: Tensor) -> None:
        self.n, self.bank, self.device = n, bank, bank.device
        draws = Draws(n, bank.device)
        # The order of these draws determines the pictures of a seed.
        self.start = self._normal(WIDTH, FIRST_SIDE, FIRST_SIDE)
        self.kept_share = draws.uniform(0.08, 1.0)
        self.slope = draws.uniform(-0.7, 0.8)
        self.is_wavy = draws.uniform(0, 1) < 0.25
        self.roughness = 0.6 * draws.uniform(0.0, 1.0) ** 3
        logarithm = 0.8 * torch.randn(n, 1, 1, len(bank), device=bank.device)
        energy = torch.exp(logarithm)
        smoothness = draws.uniform(0.3, 4.0)
        energy[..., 0] *= smoothness[..., 0]
        energy = energy / energy.norm(dim=3, keepdim=True)
        self.energy = energy.to(bank)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(self.n, *shape, device=self.device, dtype=self.bank.dtype)

    def draw(self) -> Tensor:
        """Return a picture of each generator: [n, 3, SIDE, SIDE] in [0, 1]."""
        x, side = self.start, FIRST_SIDE
        picture = x.new_zeros(self.n, 3, side, side)
        for level in range(int(math.log2(SIDE // side)) + 1):
            x = self._convolve(self._convolve(x))
            colours = self._normal(3, WIDTH) / 4
            layer = torch.bmm(colours, x.flatten(2))
            amplitude = torch.exp2(-level * self.slope).to(self.bank)
            picture = picture + layer.view_as(picture) * amplitude
            if side < SIDE:
                side *= 2
                x = F.interpolate(x, scale_factor=2, mode="bilinear")
                picture = F.interpolate(picture, scale_factor=2, mode="bilinear")
        return coloured(picture)

    def _convolve(self, x: Tensor) -> Tensor:
        """Apply a random layer and its activation to maps [n, WIDTH, side, side]."""
        n, filters = self.n, len(self.bank)
        side = x.shape[-1]
        weights = self._normal(WIDTH, WIDTH, filters) * self.energy
        uniforms = torch.rand(n, WIDTH, WIDTH, 1, device=self.device)
        weights = weights * (uniforms < self.kept_share)
        maps = x.reshape(n * WIDTH, 1, side, side)
        padded = F.pad(maps, (2, 2, 2, 2), mode="replicate")
        responses = F.conv2d(padded, self.bank)
        x = torch.bmm(
            weights.reshape(n, WIDTH, WIDTH * filters),
            responses.view(n, WIDTH * filters, side * side),
        )
        x = x.view(n, WIDTH, side, side).float()
        power = x.square().mean((1, 2, 3), keepdim=True)
        x = x / (power.sqrt() + 1e-3)
        gains, shifts = torch.randn(2, n, WIDTH, 1, 1, device=self.device)
        noise = torch.randn(n, 1, side, side, device=self.device)
        x = x + self.roughness * noise * gains + 0.8 * shifts
        waves = torch.sin(2 * x)
        ramps = F.leaky_relu(x, 0.2)
        return torch.where(self.is_wavy, waves, ramps).to(self.bank)


def spectral(n: int, device: torch.device) -> Tensor:
    """Return n pictures of noise with an anisotropic 1/f^a spectrum: [n, 3, SIDE, SIDE]."""
    draws = Draws(n, device)
    fy = torch.fft.fftfreq(SIDE, device=device).view(1, 1, -1, 1)
    fx = torch.fft.rfftfreq(SIDE, device=device).view(1, 1, 1, -1)
    angle = draws.uniform(0, math.pi)
    flatness = draws.uniform(0.2, 1)
    power = draws.uniform(0.6, 3)
    has_edges = draws.uniform(0, 1) < 0.3
    u, v = _rotate(fx, fy, angle)
    v = v * flatness
    frequency = (u.square() + v.square() + 1 / SIDE**2).sqrt()
    white = torch.randn(n, 3, SIDE, SIDE // 2 + 1, 2, device=device)
    spectrum = torch.view_as_complex(white) * frequency**-power
    x = torch.fft.irfft2(spectrum, s=(SIDE, SIDE))
    deviation = x.std((1, 2, 3), keepdim=True)
    x = x / (deviation + 1e-6)
    return coloured(torch.where(has_edges, torch.tanh(4 * x), x))


def _rotate(
    x: Tensor,
    y: Tensor,
    angle: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return coordinates in axes that are rotated by an angle in radians."""
    cos, sin = angle.cos(), angle.sin()
    return x * cos + y * sin, y * cos - x * sin


def with_shapes(ground: Tensor, textures: Tensor) -> Tensor:
    """Draw 1 to `SHAPES` shapes, filled with textures, on each background picture.

    Args:
        ground: the background pictures, [n, 3, SIDE, SIDE] in [0, 1].
        textures: pictures to fill the shapes with, uint8 [m, 3, SIDE, SIDE].

    Returns:
        the pictures, [n, 3, SIDE, SIDE] in [0, 1].
    """
    n, device = len(ground), ground.device
    draws = Draws(n, device)
    line = torch.linspace(-1, 1, SIDE, device=device)
    y = line.view(1, 1, -1, 1)
    x = line.view(1, 1, 1, -1)
    logarithm = draws.uniform(0, math.log(SHAPES))
    shapes = torch.exp(logarithm).ceil()
    for layer in range(SHAPES):
        # Later shapes, which lie on top, tend to be smaller.
        power = 1 + 1.5 * (layer + 1) / shapes
        radius = 0.08 + 0.85 * draws.uniform(0, 1) ** power
        dx = x - draws.uniform(-0.8, 0.8)
        dy = y - draws.uniform(-0.8, 0.8)
        u, v = _rotate(dx, dy, draws.uniform(0, math.pi))
        aspect = torch.exp(draws.uniform(-0.7, 0.7))
        u, v = u * aspect, v / aspect
        exponent = torch.exp(draws.uniform(0.2, 2.2))  # of a superellipse
        total = u.abs() ** exponent + v.abs() ** exponent
        distance = (total + 1e-6) ** (1 / exponent)
        outline = radius * _draw_outline(torch.atan2(v, u), draws)
        sharpness = torch.exp(draws.uniform(2.5, 4.5))
        inside = torch.sigmoid((outline - distance) * sharpness)
        inside = inside * (layer < shapes)
        chosen = torch.randint(len(textures), (n,), device=device)
        fill = _vary_texture(textures[chosen].float() / 255, draws)
        depth = draws.uniform(0, 0.6)
        slope = u * draws.uniform(-1, 1)
        slope = slope + v * draws.uniform(-1, 1)
        shade = 1 + depth * slope / radius
        fill = (fill * shade).clamp(0, 1)
        ground = ground + inside * (fill - ground)
    return ground


def _draw_outline(angle: Tensor, draws: Draws) -> Tensor:
    """Return the distance of a shape's wavy outline from its centre at each angle, 1 on average."""
    outline = torch.ones_like(angle)
    for k in (2, 3, 5, 7):
        phase = draws.uniform(0, 2 * math.pi)
        waves = torch.cos(k * angle + phase)
        outline = outline + draws.normal() * 0.3 / k * waves
    return outline


def _vary_texture(texture: Tensor, draws: Draws) -> Tensor:
    """Change the contrast and tint of textures [n, 3, H, W] at random."""
    plain = texture.mean((2, 3), keepdim=True)
    contrast = draws.uniform(0, 1.3).clamp(max=1)
    tint = 0.15 * draws.normal(channels=3)
    return plain + (texture - plain) * contrast + tint


@torch.no_grad()
def pictures(n: int, device: torch.device) -> Tensor:
    """Return n pictures of all three kinds in random order: uint8 [n, 3, 64, 64]."""
    bank = kernels(device)
    if device.type == "cuda":
        bank = bank.half()
    whole = torch.empty(n, 3, SIDE, SIDE, dtype=torch.uint8, device=device)
    first, second = int(n * GENERATED), int(n * (GENERATED + SPECTRAL))
    if not second:  # too few pictures for textures, which shapes need
        first = second = n
    for part in _split(whole[:first]):
        part[:] = _as_bytes(Generators(len(part), bank).draw())
    for part in _split(whole[first:second]):
        part[:] = _as_bytes(spectral(len(part), device))
    textures = whole[:second]
    for part in _split(whole[second:]):
        chosen = torch.randint(second, (len(part),), device=device)
        ground = textures[chosen].float() / 255
        part[:] = _as_bytes(with_shapes(ground, textures))
    return whole[torch.randperm(n, device=device)]


def _split(whole: Tensor) -> Sequence[Tensor]:
    return whole.split(BATCH_SIZE) if len(whole) else ()


def _as_bytes(x: Tensor) -> Tensor:
    return (x * 255).round().to(torch.uint8)


@cache
def seeded_pictures(count: int, seed: int) -> Tensor:
    """Return the pictures of a seed: uint8 [count, 3, 64, 64].

    They are memory-mapped from the user's cache folder, and generated at the first call.
    """

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, count, BLOCK):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed * 2**20 + start)
                yield pictures(min(BLOCK, count - start), torch.device("cpu")).numpy()

    name = f"pictures of a random process:{VERSION}:{seed}:{count}"
    digest = hashlib.sha256(name.encode()).hexdigest()
    shape = (count, 3, SIDE, SIDE)
    return torch.from_numpy(load_or_make("generated", digest, shape, np.uint8, blocks()))


def as_examples(whole: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Resize pictures, uint8 [n, 3, 64, 64], to examples of a shape: [n, (C,) H, W] in [0, 1]."""
    height, width = shape[-2:]
    x = F.adaptive_avg_pool2d(whole.float(), (height, width))
    x = x.round() / 255
    if len(shape) == 3 and shape[0] == 3:
        return x
    luma = torch.tensor(LUMA).view(3, 1, 1)
    grey = (x * luma).sum(dim=1)
    return grey.reshape(-1, *shape)
