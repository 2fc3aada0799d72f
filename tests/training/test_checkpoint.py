"""A checkpoint is written whole, and a changed one is refused before it costs anything."""

import errno
import io
import time
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from zdp_bench.errors import UserError
from zdp_bench.nn.state import state_digest
from zdp_bench.privacy.tally import Position
from zdp_bench.training import checkpoint
from zdp_bench.training.checkpoint import Checkpoint

STATE = Checkpoint("run", 1, {"w": torch.ones(2)}, {}, Position(1, "d"), [])
Body = dict[str, Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "checkpoint.pt", STATE)
    return tmp_path / "checkpoint.pt"


def test_a_checkpoint_is_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(body: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(path, replace(STATE, step=2))
    loaded = checkpoint.load(path, "run")
    assert loaded is not None
    assert loaded.step == 1


def test_an_expanded_buffer_is_saved_whole_and_restored(path: Path) -> None:
    def make_model() -> nn.Module:
        model = nn.Linear(2, 1)
        model.register_buffer("positions", torch.arange(4).expand(2, 4))
        return model

    first, second = make_model(), make_model()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    state = replace(STATE, model=first.state_dict(), optimizer=optimizer.state_dict())
    checkpoint.save(path, state)
    loaded = checkpoint.load(path, "run")
    assert loaded is not None
    loaded.restore(second, torch.optim.SGD(second.parameters(), lr=0.1), None, {})
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


def deflate(path: Path) -> None:
    """A tensor of 64 MB in an archive of 64 kB."""
    body = torch.load(path, weights_only=True) | {"model": {"w": torch.zeros(1 << 24)}}
    torch.save(body, whole := io.BytesIO())
    with (
        zipfile.ZipFile(whole) as plain,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))


def flip_a_bit_of_the_weights(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[whole.index(np.ones(2, np.float32).tobytes())] ^= 1
    path.write_bytes(whole)


def save_as_long_ago(path: Path) -> None:
    body = torch.load(path, weights_only=True)
    torch.save(body, path, _use_new_zipfile_serialization=False)


def change(**values: Any) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        torch.save(torch.load(path, weights_only=True) | values, path)

    return act


@pytest.mark.parametrize(
    "damage",
    [
        deflate,
        save_as_long_ago,
        lambda path: path.write_text("a checkpoint"),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        flip_a_bit_of_the_weights,
        change(model={"w": torch.ones(2).to_sparse()}),
        change(model={"w": torch.ones(2, device="meta")}),
        change(model={"w": torch.ones(1).expand(1 << 50)}),
        change(model=[torch.ones(2)]),
        change(optimizer=3),
        change(epochs=[1]),
        change(step="1"),
        change(ledger=["a", None]),
        change(ledger=[]),
        change(ledger=["x", "y"]),
        change(ledger=["5", "d"]),
        change(ledger=[1, 2]),
        change(carried={"bound": "1"}),
        change(format=0),
        change(more=1),
    ],
)
def test_a_changed_file_is_refused(path: Path, damage: Callable[[Path], None]) -> None:
    damage(path)
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.load(path, "run")


def test_an_entry_marked_as_a_folder_is_read(path: Path) -> None:
    """Of such an entry torch reads nothing, and leaves the memory as it was."""
    whole = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entries = [entry.filename for entry in archive.infolist()]
    weights = next(name for name in entries if name.endswith("data/0"))
    name = whole.rindex(weights.encode())  # in the directory, after 46 bytes about the entry
    whole[name - 8] ^= 0x10  # external attributes: MS-DOS's bit of a folder
    path.write_bytes(whole)
    loaded = checkpoint.load(path, "run")
    assert loaded is not None
    assert torch.equal(loaded.model["w"], STATE.model["w"])


def test_a_name_of_a_folder_is_refused(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data/9/", b"\x00" * 8)
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.load(path, "run")


def test_a_clock_before_1980_loads_a_checkpoint(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert checkpoint.load(path, "run") is not None


def refuse_memory(*_: Any, **__: Any) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")


def refuse_to_read(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (refuse_memory, "memory ran out"),
        (refuse_to_read, "Input/output error"),
        (None, "symbolic links"),
    ],
)
def test_an_intact_file_that_the_system_refuses_is_not_called_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None] | None, reason: str
) -> None:
    """Starting again, which is the advice for a damaged one, would lose the run."""
    if fault:
        monkeypatch.setattr(torch, "load", fault)
    else:
        path.unlink()
        path.symlink_to(path.name)
    with pytest.raises(
        UserError, match=rf"checkpoint\.pt: cannot be loaded \(.*{reason}"
    ) as refusal:
        checkpoint.load(path, "run")
    assert "force" not in str(refusal.value)


class Moments(NamedTuple):
    mean: torch.Tensor
    count: int


def test_a_named_tuple_in_a_state_is_saved_and_loaded(path: Path) -> None:
    state = {"state": {0: Moments(torch.ones(2), 3), 1: torch.Size([2, 3])}}
    checkpoint.save(path, replace(STATE, optimizer=state))
    loaded = checkpoint.load(path, "run")
    assert loaded is not None
    (mean, count), size = loaded.optimizer["state"].values()
    assert torch.equal(mean, torch.ones(2))
    assert (count, size) == (3, torch.Size([2, 3]))


@pytest.mark.parametrize(
    "make",
    [
        lambda number: np.array([1.0, number]),
        lambda number: np.append(np.zeros(2000), [number, *np.zeros(2000)]),
        lambda number: np.array([torch.tensor([number], dtype=torch.float64), None], object),
        lambda number: deque([torch.tensor([number], dtype=torch.float64)]),
        lambda number: torch.diag(torch.tensor([number], dtype=torch.float64)).to_sparse(),
        lambda number: torch.diag(torch.tensor([number], dtype=torch.float64)).to_sparse_csr(),
        lambda number: torch.diag(torch.tensor([number], dtype=torch.float64)).to_sparse_csc(),
        lambda number: torch.nested.nested_tensor([torch.tensor([number], dtype=torch.float64)]),
        lambda number: torch.tensor([1j * number], dtype=torch.complex128).conj().imag,
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support", "ignore:.*nested tensors")
def test_the_digest_of_a_state_covers_every_bit(make: Callable[[float], Any]) -> None:
    digests = {state_digest({"x": make(number)}) for number in (1.0, 1.0 + 1e-12)}
    assert len(digests) == 2
    assert state_digest({"x": make(1.0)}) in digests


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_the_digest_of_a_state_covers_quantized_numbers_and_shapes_of_sparse_ones() -> None:
    states = [
        torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        torch.quantize_per_tensor(2 * torch.ones(2), 0.5, 0, torch.qint8),
        torch.quantize_per_tensor(2 * torch.ones(2), 1.0, 0, torch.qint8),
        torch.zeros(2).to_sparse(),
        torch.zeros(3).to_sparse(),
        torch.zeros(1).to(torch.float8_e4m3fn),
    ]
    assert len({state_digest({"x": state}) for state in states}) == len(states)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.model.pop("weight"),
        lambda state: state.model.update(bias=torch.ones(7)),
        lambda state: state.optimizer.pop("param_groups"),
        lambda state: state.optimizer["param_groups"].clear(),
        lambda state: state.optimizer["param_groups"][0].pop("lr"),
        lambda state: state.optimizer["param_groups"][0].update(momentum="0"),
        lambda state: state.optimizer.update(state=[]),
        lambda state: state.scheduler.pop("last_epoch"),
        lambda state: state.scheduler.update(_step_count=[1]),
        lambda state: state.carried.clear(),
    ],
)
def test_a_state_of_other_parts_is_refused(spoil: Callable[[Checkpoint], Any]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, 9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    states = model.state_dict(), optimizer.state_dict()
    state = Checkpoint("run", 1, *states, Position(1, "d"), [], schedule.state_dict())
    state.carried["bound"] = 1.0
    state.restore(model, optimizer, schedule, {"bound": 2.0})
    spoil(state)
    with pytest.raises(checkpoint.Misfit):
        state.restore(model, optimizer, schedule, {"bound": 2.0})
