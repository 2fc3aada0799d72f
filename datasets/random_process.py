"""Make pictures from a random process, and learn the features of `representation=random_process`.

    python datasets/random_process.py OUT.safetensors      on a GPU

`zdp_bench/extras/transforms/generated.py` makes the pictures. The network learns by contrast to
know two views of one picture among others (Chen et al. 2020, SimCLR). Nothing is read.
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

from zdp_bench.extras.transforms.generated import SIDE, between, pictures
from zdp_bench.extras.transforms.random_process import Encoder, pooled

BATCH, TEMPERATURE, RATE, WARM_UP = 1024, 0.2, 0.4, 300
REFERENCE = 4096  # pictures over which features are standardised


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
