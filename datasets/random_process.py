"""Make pictures from a random process, and learn the features of `representation=random_process`.

    python datasets/random_process.py OUT.safetensors      on a GPU

The pictures are made by untrained generators in the manner of StyleGAN, whose filters are oriented
(Baradad et al. 2021, "Learning to see by looking at noise"), by spectra that fall as 1/f^a, and by
shapes that lie on one another, filled with such textures (dead leaves). The network learns by
contrast to know two views of one picture among others (Chen et al. 2020, SimCLR). Nothing is read.
The weights in the package took 9,029 steps in 380 s of a shared H100. A GPU adds in any order, so
that another run gives other bits of the same quality.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from zdp_bench.extras.transforms.random_process import Encoder, pooled

SIDE = 64  # pixels of a picture; the network sees crops of 32
AT_ONCE = 512
WIDTH = 16  # channels of a generator
SHAPES = 24  # at most, in a picture
PARTS = (0.4, 0.1)  # of all pictures: by generators, by spectra; the others have shapes
BATCH, TEMPERATURE, RATE, WARM_UP = 1024, 0.2, 0.4, 300
REFERENCE = 4096  # pictures over which features are standardised


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
    size, K, like = 4, len(bank), {"device": bank.device, "dtype": bank.dtype}
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


def viewed(x: Tensor) -> Tensor:
    """Crop, mirror, recolour pictures uint8 [B, 3, 64, 64] at random: [B, 3, 32, 32] in [0, 1]."""
    B, device = len(x), x.device

    def draw(low: float, high: float, *ones: int) -> Tensor:
        return between(low, high, B, *ones, device=device)

    dtype = torch.float16 if x.is_cuda else torch.float32
    area, aspect = draw(0.08, 1.0), torch.exp(draw(math.log(3 / 4), math.log(4 / 3)))
    w, h = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    across, down = (1 - w) * draw(-1, 1), (1 - h) * draw(-1, 1)
    zero, side = torch.zeros_like(w), torch.where(draw(0, 1) < 0.5, w, -w)
    rows = torch.stack([torch.stack([side, zero, across], 1), torch.stack([zero, h, down], 1)], 1)
    grid = F.affine_grid(rows, [B, 3, SIDE, SIDE], align_corners=False).to(dtype)
    x = F.grid_sample(x.to(dtype) / 255, grid, padding_mode="reflection", align_corners=False)
    x = F.avg_pool2d(x, 2).float()
    on = draw(0, 1, 1, 1, 1) < 0.8
    weights = torch.tensor([0.299, 0.587, 0.114], device=device).view(1, 3, 1, 1)
    x = x * (1 + on * draw(-0.4, 0.4, 1, 1, 1))
    for dims in ((2, 3), ()):  # contrast, saturation
        grey = (x * weights).sum(1, keepdim=True)
        grey = grey.mean(dims, keepdim=True) if dims else grey
        x = grey + (x - grey) * (1 + on * draw(-0.4, 0.4, 1, 1, 1))
    turn = (on * draw(-0.1, 0.1, 1, 1, 1)).view(B, 1, 1) * 2 * math.pi  # of the hue
    cross = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], device=device) / math.sqrt(3)
    spin = turn.cos() * torch.eye(3, device=device) + (1 - turn.cos()) / 3 + turn.sin() * cross
    x = torch.einsum("bij,bjhw->bihw", spin, x)
    grey = (x * weights).sum(1, keepdim=True)
    return torch.where(draw(0, 1, 1, 1, 1) < 0.2, grey, x).clamp(0, 1)


def learn(pool: Tensor, seconds: float, batch: int = BATCH) -> tuple[Encoder, int]:
    """Return a network that knows two views of one picture among others, and its steps."""
    device = pool.device
    model: nn.Module = Encoder().to(device, memory_format=torch.channels_last)
    width = model(torch.zeros(2, 3, 32, 32, device=device))[1].shape[1]
    head = nn.Sequential(
        nn.Linear(width, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128)
    ).to(device)
    every = [*model.parameters(), *head.parameters()]
    decayed = {"params": [p for p in every if p.ndim > 1], "weight_decay": 1e-4}
    others = {"params": [p for p in every if p.ndim == 1]}
    optimizer = torch.optim.SGD([decayed, others], lr=RATE, momentum=0.9, nesterov=True)
    itself = torch.eye(2 * batch, dtype=torch.bool, device=device)
    other = torch.arange(2 * batch, device=device).roll(batch)
    begin, step = time.time(), 0
    while (gone := (time.time() - begin) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * gone))
        with torch.no_grad():
            picked = pool[torch.randint(len(pool), (batch,), device=device)]
            views = viewed(picked.repeat(2, 1, 1, 1)).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16, enabled=pool.is_cuda):
            z = head(model(views)[1].mean((2, 3)))
        z = F.normalize(z.float(), dim=1)
        loss = F.cross_entropy((z @ z.T / TEMPERATURE).masked_fill(itself, -1e4), other)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model.eval(), step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=380)
    parser.add_argument("--pictures", type=int, default=700_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pool = pictures(options.pictures, device)
    torch.manual_seed(1)
    model, steps = learn(pool, options.seconds)
    weights = {k: v.half() for k, v in model.state_dict().items() if v.is_floating_point()}
    model.load_state_dict(weights, strict=False)
    few = F.avg_pool2d(pool[:REFERENCE].float(), 2).round() / 255
    with torch.no_grad():
        features = torch.cat([torch.cat(pooled(model, part), dim=1) for part in few.split(64)])
    deviations = [stage + 0.05 * stage.mean() for stage in features.std(0).split([2048, 1024])]
    weights |= {"mean": features.mean(0), "deviation": torch.cat(deviations)}
    kept = {name: tensor.half().cpu().contiguous() for name, tensor in weights.items()}
    save_file(kept, options.out, {"steps": str(steps), "pictures": str(options.pictures)})


if __name__ == "__main__":
    main()
