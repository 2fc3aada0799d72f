"""What each process of `test_ranks` does: makes the same training private, and brings its share.

Rank 0 writes FOLDER/found.pt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zdp_bench
from tests.library.small import data, defaults, loss, network, train
from zdp_bench import Private, UserError
from zdp_bench.library.examples import Items
from zdp_bench.library.keys import Keys
from zdp_bench.training.distributed import join

OWNERS = [index % 7 for index in range(60)]
CASES: dict[str, dict[str, Any]] = {
    "records": {},
    "pieces": {"micro_batch": 3},
    "owners": {"unit": OWNERS, "sample_rate": 0.4, "expected_batch": 3, "max_examples": 4},
    "secure": {"secure": True},
}
STEPS = 4


def weights_of(private: Private) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in private.model.named_parameters()}


def make(folder: Path, name: str, model: nn.Module | None = None, **changed: Any) -> Private:
    model = network() if model is None else model
    given = defaults(model) | {"noise_multiplier": 1.2, "ledger": folder / f"{name}.jsonl"}
    return zdp_bench.make_private(model, **(given | changed))


def trained(folder: Path, name: str) -> Private:
    """A case after a few steps, with keys that every number of processes has."""
    private = make(folder, name, **CASES[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keys, "of_step", lambda _, __, ledger: f"key {ledger.releases}")
        train(private, most=STEPS)
    return private


def shares_of_secure_batches(folder: Path) -> list[list[list[int]]]:
    """The examples that each process read, step by step."""
    private = make(folder, "secure_batches", secure=True)
    seen: list[list[int]] = []
    read = Items.batch

    def batch(self: Items, indices: Any) -> Any:
        seen[-1] += [int(index) for index in indices]
        return read(self, indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Items, "batch", batch)
        for one in private.batches():
            seen.append([])
            private.step(one)
    return private.ranks.gather(seen)


def uneven_steps(folder: Path) -> list[str]:
    """What the processes say where one of them leaves out a step of the other's."""
    private = make(folder, "uneven")
    train(private, most=2)
    private.done += private.ranks.rank
    try:
        train(private, most=1)
        said = ""
    except UserError as error:
        said = str(error)
    return private.ranks.gather(said)


def resumed(folder: Path) -> tuple[int, int]:
    """Save, take a step more, and go on from what was saved; other processes have no file."""
    private = make(folder, "resumed")
    train(private, most=2)
    private.save()
    train(private, most=1)
    private.close()
    private.ranks.broadcast(None)  # until rank 0 has let go of the ledger
    again = make(folder, "resumed")
    assert again.resume()
    train(again, most=1)
    return again.done, again.report()["steps"]


def noise_of_nothing(folder: Path, **changed: Any) -> Tensor:
    """The noise of a step whose gradients are zero, from weights that differ between processes."""
    torch.manual_seed(join("cpu").rank)
    model = nn.Sequential(nn.Linear(4, 6000), nn.Linear(6000, 3))
    flat = {"loss": lambda outputs, _: 0.0 * outputs.sum(dim=1)}
    private = make(folder, f"noise{len(changed)}", model, **flat, **changed)
    before = weights_of(private)["0.weight"]
    train(private, most=1)
    return (weights_of(private)["0.weight"] - before) * 12 / 0.5


def refusal(folder: Path, **changed: Any) -> list[str]:
    try:
        make(folder, f"refused{join('cpu').rank}", **changed)
        said = ""
    except UserError as error:
        said = str(error)
    return join("cpu").gather(said)


def otherwise(rank: int) -> dict[str, dict[str, Any]]:
    """What rank 1 does otherwise, by the fact that is named."""
    shuffled = [data()[(index + rank) % 60] for index in range(60)]
    plain = network()
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh() if rank else nn.ReLU(), nn.Linear(6, 3))
    return {
        "set of arguments: the bound": {"max_grad_norm": 1.0 + rank},
        "set of arguments: the rate": {"sample_rate": 0.2 + 0.1 * rank},
        "set of arguments: the randomness": {"secure": bool(rank)},
        "data set": {"dataset": shuffled},
        "list of owners": CASES["owners"] | {"unit": [(i + rank) // 9 for i in range(60)]},
        "model": {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)},
        "optimizer": {"model": plain, "optimizer": torch.optim.SGD(plain.parameters(), 1.0 + rank)},
    }


def split_models(folder: Path) -> list[str]:
    """What is said of weights that torch has split, by the step and by the sum alone."""
    mesh = init_device_mesh("cpu", (2,))
    whole, by_layer = fully_shard(network(), mesh=mesh), network()
    parallelize_module(by_layer, mesh, {"0": ColwiseParallel()})
    said = refusal(folder, model=whole) + refusal(folder, model=by_layer)
    with pytest.raises(UserError) as alone:
        zdp_bench.clipped_sum(whole, loss, data().tensors, 1.0)  # type: ignore[arg-type]
    return [*said, str(alone.value)]


def main(folder: Path) -> None:
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
    found["noise"] = noise_of_nothing(folder), noise_of_nothing(folder, secure=True)
    found["seeded"] = refusal(folder, seed=1)
    found["different"] = {k: refusal(folder, **v) for k, v in otherwise(ranks.rank).items()}
    found["shares"] = shares_of_secure_batches(folder)
    found["uneven"] = uneven_steps(folder)
    found["split"] = split_models(folder)
    if ranks.is_first:
        torch.save(found, folder / "found.pt")
