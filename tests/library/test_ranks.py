"""Several processes that train together come to what one comes to, and draw the noise once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import zdp_bench
from tests.ledgers import end_of
from tests.library.conftest import Make
from tests.library.small import begin, data, loss, network, reading, refusal, train
from tests.training.test_distributed import together
from zdp_bench import Private, UserError
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

# ----------------------------------------------------------------------- what each process does


def started(folder: Path, name: str, model: nn.Module | None = None, **changed: Any) -> Private:
    return begin(network() if model is None else model, folder / f"{name}.jsonl", **changed)


def weights_of(private: Private) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in private.model.named_parameters()}


def trained(folder: Path, name: str) -> Private:
    """A case after a few steps, with keys that every number of processes has."""
    private = started(folder, name, **CASES[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keys, "step_key", lambda _, __, ledger: f"key {ledger.releases}")
        train(private, most=STEPS)
    return private


def shares_of_secure_batches(folder: Path) -> list[list[list[int]]]:
    """The examples that each process read, step by step."""
    private = started(folder, "secure_batches", secure=True)
    steps = []
    with reading() as seen:
        for batch in private.batches():
            seen.clear()
            private.step(batch)
            steps.append([index for read in seen for index in read])
    return private.ranks.gather(steps)


def uneven_steps(folder: Path) -> list[str]:
    """What the processes say where one of them leaves out a step of the other's."""
    private = started(folder, "uneven")
    train(private, most=2)
    private.done += private.ranks.rank
    return private.ranks.gather(refusal(lambda: train(private, most=1)))


def resumed(folder: Path) -> tuple[int, int]:
    """Save, take a step more, and go on from what was saved; other processes have no file."""
    private = started(folder, "resumed")
    train(private, most=2)
    private.save()
    train(private, most=1)
    private.close()
    private.ranks.broadcast(None)  # until rank 0 has let go of the ledger
    again = started(folder, "resumed")
    assert again.resume()
    train(again, most=1)
    return again.done, again.report()["steps"]


def noise_of_nothing(folder: Path, **changed: Any) -> Tensor:
    """The noise of a step whose gradients are zero, from weights that differ between processes."""
    torch.manual_seed(join("cpu").rank)
    model = nn.Sequential(nn.Linear(4, 6000), nn.Linear(6000, 3))
    flat = {"loss": lambda outputs, _: 0.0 * outputs.sum(dim=1)}
    private = started(folder, f"noise{len(changed)}", model, **flat, **changed)
    before = weights_of(private)["0.weight"]
    train(private, most=1)
    return (weights_of(private)["0.weight"] - before) * 12 / 0.5


def refused(folder: Path, **changed: Any) -> list[str]:
    """What each process is told to these arguments."""
    ranks = join("cpu")
    return ranks.gather(refusal(lambda: started(folder, f"refused{ranks.rank}", **changed)))


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
    messages = refused(folder, model=whole) + refused(folder, model=by_layer)
    alone = refusal(lambda: zdp_bench.clipped_sum(whole, loss, data().tensors, 1.0))  # type: ignore[arg-type]
    return [*messages, alone]


def find(folder: Path) -> None:
    """Do all of it; rank 0 writes FOLDER/found.pt."""
    ranks = join("cpu")
    results: dict[str, Any] = {"same": True}
    for name in CASES:
        private = trained(folder, name)
        weights = weights_of(private)
        theirs, of_first = ranks.broadcast((weights, private.report()))
        results["same"] &= not ranks.max(
            not all(torch.equal(weights[key], theirs[key]) for key in weights)
            or private.report() != of_first
        )
        results[name] = weights, private.epsilon
    results["resumed"] = resumed(folder)
    results["noise"] = noise_of_nothing(folder), noise_of_nothing(folder, secure=True)
    results["seeded"] = refused(folder, seed=1)
    results["different"] = {k: refused(folder, **v) for k, v in otherwise(ranks.rank).items()}
    results["shares"] = shares_of_secure_batches(folder)
    results["uneven"] = uneven_steps(folder)
    results["split"] = split_models(folder)
    if ranks.is_first:
        torch.save(results, folder / "found.pt")


# ------------------------------------------------------------------------------ what is found


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What two processes found, and the folder they wrote into."""
    folder = tmp_path_factory.mktemp("ranks")
    for done in together(2, lambda: find(folder), at=folder):
        assert done.returncode == 0, done.stderr[-3000:]
    return folder, torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("name", [name for name in CASES if name != "secure"])
def test_two_processes_come_to_what_one_comes_to(
    name: str, joint: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, results = joint
    weights, epsilon = results[name]
    with trained(tmp_path, name) as alone:
        assert epsilon == alone.epsilon
        for key, value in weights_of(alone).items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)
    ledgers = [end_of(place / f"{name}.jsonl") for place in (folder, tmp_path)]
    assert ledgers[0] == ledgers[1]
    assert ledgers[0][0] == list(range(STEPS))


def test_every_process_has_the_same_weights_and_report(joint: tuple[Path, Any]) -> None:
    assert joint[1]["same"]


def test_the_noise_is_that_of_one_process(joint: tuple[Path, Any]) -> None:
    """Also where the processes began with other weights: they take rank 0's."""
    for noise in joint[1]["noise"]:  # without and with `secure`
        assert noise.std() == pytest.approx(1.2 * 0.8, rel=0.02)


def test_a_secure_batch_is_one_batch_of_which_each_process_reads_its_share(
    joint: tuple[Path, Any],
) -> None:
    """Drawn by each for itself, it would hold an example at twice the rate."""
    for first, second in zip(*joint[1]["shares"], strict=True):
        batch = sorted([*first, *second])
        assert len(batch) == len({*batch})
        assert (first, second) == (batch[::2], batch[1::2])


def test_a_saved_training_goes_on_in_all_processes(joint: tuple[Path, Any]) -> None:
    assert joint[1]["resumed"] == (3, 4)  # the step that was lost counts


def test_what_several_processes_cannot_do_is_refused(joint: tuple[Path, Any]) -> None:
    results = joint[1]
    refused = [(message, "2 train together: remove it") for message in results["seeded"]]
    refused += [(message, "rank 1 has another step than rank 0") for message in results["uneven"]]
    refused += [(message, "sharded across processes") for message in results["split"]]
    for name, of_each in results["different"].items():
        named = f"rank 1 has another {name.partition(':')[0]} than rank 0"
        refused += [(message, named) for message in of_each]
    assert len(refused) == 2 + 2 + 5 + 14
    assert not [(message, sentence) for message, sentence in refused if sentence not in message]


def test_the_wrapper_of_torch_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDataParallel, "__init__", torch.nn.Module.__init__)
    wrapped = DistributedDataParallel()  # type: ignore[call-arg]
    wrapped.register_parameter("weight", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(UserError, match="give the module itself"):
        make(wrapped)
