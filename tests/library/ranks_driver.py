"""The processes of `test_ranks`: each makes the same training private, and brings its share.

    RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python -m tests.library.ranks_driver FOLDER

Rank 0 writes FOLDER/found.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zdp_bench
from tests.library.small import defaults, network, train
from zdp_bench import Private, UserError
from zdp_bench.library import build
from zdp_bench.library.keys import Keys
from zdp_bench.training.distributed import join, leave

OWNERS = [index % 7 for index in range(60)]
CASES: dict[str, dict[str, Any]] = {
    "records": {},
    "pieces": {"micro_batch": 3},
    "owners": {"unit": OWNERS, "batch_size": 3, "max_records": 4},
    "secure": {"secure": True},
}
STEPS = 4


def weights_of(private: Private) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in private.setting.model.named_parameters()}


def make(folder: Path, name: str, model: nn.Module | None = None, **changed: Any) -> Private:
    model = network() if model is None else model
    given = defaults(model) | {"noise_multiplier": 1.2, "ledger": folder / f"{name}.jsonl"}
    return zdp_bench.make_private(model, **(given | changed))


def trained(folder: Path, name: str) -> Private:
    """A case after a few steps, with a key that every number of processes has."""
    keys, build.make_keys = build.make_keys, lambda *_: Keys("key", None, name == "secure")
    try:
        private = make(folder, name, **CASES[name])
    finally:
        build.make_keys = keys
    train(private, most=STEPS)
    return private


def resumed(folder: Path) -> tuple[int, int]:
    """Save, take a step more, and go on from what was saved; other processes have no file."""
    private = make(folder, "resumed")
    train(private, most=2)
    private.save()
    train(private, most=1)
    private.close()
    private.setting.ranks.broadcast(None)  # until rank 0 has let go of the ledger
    again = make(folder, "resumed")
    assert again.resume()
    train(again, most=1)
    return again.done, again.report()["steps"]


def noise_of_nothing(folder: Path) -> Tensor:
    """The noise of a step whose gradients are zero, from weights that differ between processes."""
    torch.manual_seed(join("cpu").rank)
    model = nn.Sequential(nn.Linear(4, 6000), nn.Linear(6000, 3))
    private = make(folder, "noise", model, loss=lambda outputs, _: 0.0 * outputs.sum(dim=1))
    before = weights_of(private)["0.weight"]
    train(private, most=1)
    return (weights_of(private)["0.weight"] - before) * 12 / 0.5


def refusal(folder: Path, **changed: Any) -> str:
    try:
        make(folder, "refused", **changed)
    except UserError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = join("cpu")
    found: dict[str, Any] = {"same": True}
    for name in CASES:
        private = trained(folder, name)
        weights = weights_of(private)
        theirs, of_first = ranks.broadcast((weights, private.report()))
        found["same"] &= not ranks.max(
            not all(torch.equal(weights[key], theirs[key]) for key in weights)
            or private.report() != of_first
        )
        found[name] = weights, private.epsilon
    found["resumed"] = resumed(folder)
    found["noise"] = noise_of_nothing(folder)
    found["seeded"] = refusal(folder, seed=1)
    found["different"] = refusal(folder, batch_size=12 + ranks.rank)
    if ranks.is_first:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
