"""Several processes that train together come to what one comes to, and draw the noise once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.ledgers import end_of
from tests.library.conftest import Make
from tests.library.ranks_driver import CASES, STEPS, main, trained, weights_of
from tests.training.test_distributed import together


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What two processes found, and the folder they wrote into."""
    folder = tmp_path_factory.mktemp("ranks")
    for done in together(2, lambda: main(folder), at=folder):
        assert done.returncode == 0, done.stderr[-3000:]
    return folder, torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("name", [name for name in CASES if name != "secure"])
def test_two_processes_come_to_what_one_comes_to(
    name: str, joint: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, found = joint
    weights, epsilon = found[name]
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
    for sentence in joint[1]["seeded"]:
        assert "2 train together; leave it out" in sentence
    for name, said in joint[1]["different"].items():
        for sentence in said:
            assert f"rank 1 has another {name.partition(':')[0]} than rank 0" in sentence, name


def test_processes_that_are_not_at_the_same_step_say_so(joint: tuple[Path, Any]) -> None:
    for sentence in joint[1]["uneven"]:
        assert "rank 1 has another step than rank 0" in sentence


def test_a_model_that_is_split_among_processes_is_refused(joint: tuple[Path, Any]) -> None:
    for sentence in joint[1]["split"]:
        assert "split among processes" in sentence


def test_the_wrapper_of_torch_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDataParallel, "__init__", torch.nn.Module.__init__)
    from zdp_bench.errors import UserError

    wrapped = DistributedDataParallel()  # type: ignore[call-arg]
    wrapped.register_parameter("weight", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(UserError, match="give the module itself"):
        make(wrapped)
