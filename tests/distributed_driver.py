"""What each process of `test_distributed` does: it brings its share of the examples to every step.

Rank 0 writes FOLDER/weights.pt: each case's final weights, and whether all ranks have the same; and
what ranks said that were to carry out different runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms.test_properties import CASES, examples, make
from zdp_bench.config import compose, parse
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.privacy.ledger import Copy, Ledger, Position
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.noise import SecureNoise, SeededNoise
from zdp_bench.training import run as module
from zdp_bench.training.distributed import Ranks, join
from zdp_bench.training.progress import Watcher
from zdp_bench.training.setup import Setup, load_data
from zdp_bench.training.step import Training, private_step

FEW = list({(name, kind): (name, options, kind) for name, options, kind in CASES}.values())
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


QUICK = ["recipe=quickstart", "trainer.epochs=1", "model.hidden=[4]", "accountant=gdp_clt"]
# what rank 1 does otherwise, by the fact that is named
OTHERWISE: dict[str, Callable[[pytest.MonkeyPatch], list[str]]] = {
    "configuration: the bound": lambda _: ["algorithm.max_grad_norm=2"],
    "configuration: the rate": lambda _: ["trainer.sample_rate=0.2"],
    "configuration: the seed": lambda _: ["seed=5"],
    "configuration: how often is saved": lambda _: ["execution.checkpoint_steps=3"],
    "data set": lambda patch: patch.setattr(module, "load_data", other_data) or [],
    "code": lambda patch: patch.setattr(module, "code_digest", lambda _: "other") or [],
    "mechanism": lambda patch: patch.setattr(Setup, "mechanism", OTHER) or [],
    "nothing": lambda _: ["paths.data=/elsewhere", "trainer.micro_batch=64"],
}
OTHER = Mechanism.of_z(1.0, Sampling("poisson", 0.5, 1.0, 2))


def other_data(config: Run) -> Splits:
    return replace(load_data(config), digest="other")


def refused(ranks: Ranks, folder: Path) -> dict[str, list[str]]:
    """What each rank says to a run of which rank 1 does something otherwise."""
    found = {}
    for name, change in OTHERWISE.items():
        with pytest.MonkeyPatch.context() as patch:
            changed = change(patch) if ranks.rank == 1 else []
            words = [*QUICK, f"paths.results={folder / 'own_runs'}", *changed]
            try:
                module.run(parse(compose(words)), Watcher())
                said = ""
            except UserError as error:
                said = str(error)
        found[name] = ranks.gather(said)
    return found


def train_cases(folder: Path) -> None:
    ranks = join("cpu")
    found = []
    for number, case in enumerate(FEW):
        weights = trained(case, ranks, folder / f"case{number}")
        found.append((weights, everywhere(ranks, weights)))
    secure = [
        trained(CASES[0], ranks, folder / f"secure{number}", secure=True) for number in range(2)
    ]
    same = everywhere(ranks, secure[0])
    sentences = refused(ranks, folder)
    if ranks.is_first:
        assert any(not torch.equal(secure[0][name], secure[1][name]) for name in secure[0])
        torch.save({"cases": found, "secure": same, "refused": sentences}, folder / "weights.pt")
