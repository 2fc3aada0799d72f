"""The processes of `test_distributed`: each brings its share of the examples to every step.

    RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python -m tests.distributed_driver FOLDER

Rank 0 writes FOLDER/weights.pt: each case's final weights, and whether all ranks have the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.algorithms.test_properties import CASES, examples, make
from zdp_bench.privacy.ledger import Copy, Ledger, Position
from zdp_bench.privacy.noise import SecureNoise, SeededNoise
from zdp_bench.training.distributed import Ranks, join, leave
from zdp_bench.training.step import Training, private_step

STEPS = 3
SIZES = (13, 0, 1)  # records of each step: a share may be empty, and a batch too


def trained(case: tuple, ranks: Ranks, folder: Path, secure: bool = False) -> dict[str, Tensor]:
    """The weights after a few steps of a case: rank 0 keeps the ledger in `folder`."""
    algorithm, model, kind = make(case)
    noise = SecureNoise() if secure else SeededNoise(5)
    folder.mkdir(parents=True, exist_ok=True)
    mechanism = algorithm.mechanism()
    ledger = (
        Ledger(folder / "ledger.jsonl", mechanism, noise.repeatable) if ranks.is_first else None
    )
    if ledger is None:
        ledger = Copy((), Position(0, ""), noise.repeatable)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    training = Training(algorithm, model, optimizer, noise, ledger, None, ranks)
    for step, size in zip(range(STEPS), SIZES, strict=True):
        inputs, targets = examples(size, kind, seed=step)
        mine = ranks.take_share(np.arange(size))
        private_step(
            training, step, iter([(inputs[mine], targets[mine])] if len(mine) else []), 8.0
        )
    assert ledger.releases == STEPS
    ledger.close()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def everywhere(ranks: Ranks, weights: dict[str, Tensor]) -> bool:
    """Whether every rank has rank 0's very bits."""
    theirs = ranks.broadcast(weights)
    return not ranks.max(int(not all(torch.equal(weights[name], theirs[name]) for name in weights)))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = join("cpu")
    found = []
    for number, case in enumerate(CASES):
        weights = trained(case, ranks, folder / f"case{number}")
        found.append((weights, everywhere(ranks, weights)))
    secure = [
        trained(CASES[0], ranks, folder / f"secure{number}", secure=True) for number in range(2)
    ]
    same = everywhere(ranks, secure[0])
    if ranks.is_first:
        assert any(not torch.equal(secure[0][name], secure[1][name]) for name in secure[0])
        torch.save({"cases": found, "secure": same}, folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
