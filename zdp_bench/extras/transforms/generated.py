"""Pictures of a random process, which stand for pictures wherever private ones must not be read.

They are made by untrained generators in the manner of StyleGAN, whose filters are oriented
(Baradad et al. 2021, "Learning to see by looking at noise"), by spectra that fall as 1/f^a, and by
shapes that lie on one another, filled with such textures (dead leaves).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.data.cache import load_or_make

SIDE = 64  # pixels of a picture
AT_ONCE = 512
WIDTH = 16  # channels of a generator
SHAPES = 24  # at most, in a picture
PARTS = (0.4, 0.1)  # of all pictures: by generators, by spectra; the others have shapes
VERSION = 1  # changes when the pictures of a seed do
BLOCK = 256  # pictures of the cache that are made at once
LUMA = (0.299, 0.587, 0.114)  # of red, green and blue in grey


def between(low: float, high: float, *shape: int, device: torch.device) -> Tensor:
    """Return uniform numbers."""
    return low + (high - low) * torch.rand(*shape, device=device)


def kernels(device: torch.device) -> Tensor:
    """Return a Gaussian and its first and second derivatives, each of norm 1: [6, 1, 5, 5]."""
    at, variance = torch.arange(-2.0, 3, device=device), 0.81
    g = torch.exp(-at.square() / (2 * variance))
    d1, d2 = -at * g, (at.square() - variance) * g
    d2 = d2 - d2.mean()
    pairs = [(g, g), (g, d1), (d1, g), (g, d2), (d2, g), (d1, d1)]
    bank = torch.stack([torch.outer(a, b) for a, b in pairs])
    return (bank / bank.flatten(1).norm(dim=1).view(-1, 1, 1)).unsqueeze(1)


def coloured(x: Tensor) -> Tensor:
    """Give each picture of any numbers mean, contrast and saturation: [n, 3, H, W] in [0, 1]."""
    n, device = len(x), x.device
    x = x.float().nan_to_num(0, 9, -9)
    x = x - x.mean((2, 3), keepdim=True)
    x = x / (x.std((1, 2, 3), keepdim=True) + 1e-4)
    grey = x.mean(1, keepdim=True)
    light, colour = (between(*r, n, 1, 1, 1, device=device) for r in ((0.6, 1.2), (0.0, 1.3)))
    x = grey * light + (x - grey) * colour
    x = x * (0.22 * torch.exp(0.35 * torch.randn(n, 1, 1, 1, device=device)))
    x = x + 0.47 + 0.13 * torch.randn(n, 1, 1, 1, device=device)
    return (x + 0.1 * torch.randn(n, 3, 1, 1, device=device)).clamp(0, 1)


def generated(n: int, bank: Tensor) -> Tensor:
    """Return n pictures, each of a generator of its own with random oriented filters."""
    size, K = 4, len(bank)
    like: dict[str, Any] = {"device": bank.device, "dtype": bank.dtype}
    x, rgb = torch.randn(n, WIDTH, size, size, **like), torch.zeros(n, 3, size, size, **like)

    def draw(low: float, high: float) -> Tensor:
        return between(low, high, n, 1, 1, 1, device=bank.device)

    keep, slope, wavy = draw(0.08, 1.0), draw(-0.7, 0.8), draw(0, 1) < 0.25
    rough = 0.6 * draw(0.0, 1.0) ** 3
    energy = torch.exp(0.8 * torch.randn(n, 1, 1, K, device=bank.device))
    energy[..., 0] *= draw(0.3, 4.0)[..., 0]  # how smooth
    energy = (energy / energy.norm(dim=3, keepdim=True)).to(bank)
    for level in range(int(math.log2(SIDE // size)) + 1):
        for _ in range(2):
            mixed = torch.randn(n, WIDTH, WIDTH, K, **like) * energy
            mixed = mixed * (torch.rand(n, WIDTH, WIDTH, 1, device=bank.device) < keep)
            padded = F.pad(x.reshape(n * WIDTH, 1, size, size), (2, 2, 2, 2), mode="replicate")
            x = F.conv2d(padded, bank).view(n, WIDTH * K, size * size)
            x = torch.bmm(mixed.reshape(n, WIDTH, WIDTH * K), x).view(n, WIDTH, size, size).float()
            x = x / (x.square().mean((1, 2, 3), keepdim=True).sqrt() + 1e-3)
            gains, shifts = torch.randn(2, n, WIDTH, 1, 1, device=bank.device)
            x = x + rough * torch.randn(n, 1, size, size, device=bank.device) * gains + 0.8 * shifts
            x = torch.where(wavy, torch.sin(2 * x), F.leaky_relu(x, 0.2)).to(bank)
        out = torch.bmm(torch.randn(n, 3, WIDTH, **like) / 4, x.flatten(2)).view(n, 3, size, size)
        rgb = rgb + out * torch.exp2(-level * slope).to(bank)
        if size < SIDE:
            size *= 2
            x, rgb = (F.interpolate(each, scale_factor=2, mode="bilinear") for each in (x, rgb))
    return coloured(rgb)


def spectral(n: int, device: torch.device) -> Tensor:
    """Return n pictures of noise whose amplitude falls as 1/f^a, steeper in some directions."""
    fy = torch.fft.fftfreq(SIDE, device=device).view(1, 1, -1, 1)
    fx = torch.fft.rfftfreq(SIDE, device=device).view(1, 1, 1, -1)
    turn, flat, power, edged = (
        between(*r, n, 1, 1, 1, device=device) for r in ((0, math.pi), (0.2, 1), (0.6, 3), (0, 1))
    )
    u, v = fx * turn.cos() + fy * turn.sin(), (fy * turn.cos() - fx * turn.sin()) * flat
    size = (u.square() + v.square() + 1 / SIDE**2).sqrt() ** -power
    white = torch.view_as_complex(torch.randn(n, 3, SIDE, SIDE // 2 + 1, 2, device=device))
    x = torch.fft.irfft2(white * size, s=(SIDE, SIDE))
    x = x / (x.std((1, 2, 3), keepdim=True) + 1e-6)
    return coloured(torch.where(edged < 0.3, torch.tanh(4 * x), x))


def with_shapes(ground: Tensor, textures: Tensor) -> Tensor:
    """Return pictures [n, 3, H, W] with 1 to `SHAPES` shapes on a ground, filled with textures."""
    n, device = len(ground), ground.device

    def draw(low: float, high: float) -> Tensor:
        return between(low, high, n, 1, 1, device=device)

    line = torch.linspace(-1, 1, SIDE, device=device)
    y, x = line.view(1, -1, 1), line.view(1, 1, -1)
    many = torch.exp(draw(0, math.log(SHAPES))).ceil()
    for layer in range(SHAPES):
        radius = 0.08 + 0.85 * draw(0, 1) ** (1 + 1.5 * (layer + 1) / many)  # the last are small
        dx, dy, turn = x - draw(-0.8, 0.8), y - draw(-0.8, 0.8), draw(0, math.pi)
        aspect, square = torch.exp(draw(-0.7, 0.7)), torch.exp(draw(0.2, 2.2))
        u = (dx * turn.cos() + dy * turn.sin()) * aspect
        v = (dy * turn.cos() - dx * turn.sin()) / aspect
        angle = torch.atan2(v, u)
        far = (u.abs() ** square + v.abs() ** square + 1e-6) ** (1 / square)
        edge = torch.ones_like(angle)
        for k in (2, 3, 5, 7):
            waves = torch.cos(k * angle + draw(0, 2 * math.pi))
            edge = edge + torch.randn(n, 1, 1, device=device) * 0.3 / k * waves
        inside = torch.sigmoid((radius * edge - far) * torch.exp(draw(2.5, 4.5))) * (layer < many)
        fill = textures[torch.randint(len(textures), (n,), device=device)].float() / 255
        plain = fill.mean((2, 3), keepdim=True)
        fill = plain + (fill - plain) * draw(0, 1.3).clamp(max=1).unsqueeze(1)
        fill = fill + 0.15 * torch.randn(n, 3, 1, 1, device=device)
        shade = 1 + draw(0, 0.6) * (u * draw(-1, 1) + v * draw(-1, 1)) / radius
        fill = (fill * shade.unsqueeze(1)).clamp(0, 1)
        ground = ground + inside.unsqueeze(1) * (fill - ground)
    return ground


@torch.no_grad()
def pictures(n: int, device: torch.device) -> Tensor:
    """Return n pictures of all kinds, in random order: uint8 [n, 3, 64, 64]."""
    bank = kernels(device)
    bank = bank.half() if device.type == "cuda" else bank
    made = torch.empty(n, 3, SIDE, SIDE, dtype=torch.uint8, device=device)
    first, second = int(n * PARTS[0]), int(n * sum(PARTS))
    for start, stop in ((0, first), (first, second), (second, n)):
        for at in range(start, stop, AT_ONCE):
            many = min(AT_ONCE, stop - at)
            if start == 0:
                x = generated(many, bank)
            elif start == first:
                x = spectral(many, device)
            else:
                ground = made[torch.randint(second, (many,), device=device)].float() / 255
                x = with_shapes(ground, made[:second])
            made[at : at + many] = (x * 255).round().to(torch.uint8)
    return made[torch.randperm(n, device=device)]


@cache
def seeded_pictures(count: int, seed: int) -> Tensor:
    """Return pictures that follow from a seed, from the cache folder: uint8 [count, 3, 64, 64]."""

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, count, BLOCK):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed * 2**20 + start)
                yield pictures(min(BLOCK, count - start), torch.device("cpu")).numpy()

    named = f"pictures of a random process:{VERSION}:{seed}:{count}"
    digest = hashlib.sha256(named.encode()).hexdigest()
    shape = (count, 3, SIDE, SIDE)
    return torch.from_numpy(load_or_make("generated", digest, shape, np.uint8, blocks()))


def as_examples(made: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return pictures uint8 [n, 3, 64, 64] as examples of a shape: [n, (C,) H, W] in [0, 1]."""
    height, width = shape[-2:]
    x = F.adaptive_avg_pool2d(made.float(), (height, width)).round() / 255
    if len(shape) == 3 and shape[0] == 3:
        return x
    grey = (x * torch.tensor(LUMA).view(3, 1, 1)).sum(dim=1)
    return grey.reshape(-1, *shape)
