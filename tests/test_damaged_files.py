"""Damaged files of every kind: what reads them returns what it may, or says in one sentence what is
wrong.

A few whenever the tests are run; with `--slow`, as many of each kind as `--damaged` says, drawn
from `--seed`. Folders of results and exports have tests of their own.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from tests.conftest import write_mini_mnist
from tests.damage import (
    edit_json,
    edit_lines,
    edit_text,
    name_error,
    replace_file,
    replace_ledger,
    spoil_bytes,
    spoil_head,
    within,
)
from tests.data.helpers import dataset, write_cifar10
from tests.extras.own_data.own_data import KINDS, folder, write_masks
from tests.library.small import network
from tests.privacy.ledger_runs import MECHANISM, SAMPLING
from zdp_bench.config import configured
from zdp_bench.data.cache import load_or_make
from zdp_bench.errors import UserError
from zdp_bench.extras.own_data import readers
from zdp_bench.extras.own_data.readers import Form
from zdp_bench.library import starts
from zdp_bench.library.starts import Earlier
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.ledger_lines import MIN_STEP_LINE
from zdp_bench.privacy.memory import call_cached
from zdp_bench.privacy.tally import Position, count_releases
from zdp_bench.training import checkpoint
from zdp_bench.training.checkpoint import Checkpoint
from zdp_bench.training.run_folder import open_ledger

SECONDS = 60  # for one file; the ε of a billion steps takes 25
Damage = Callable[[Path, random.Random], None]
BYTES: list[Damage] = [spoil_bytes, spoil_bytes, spoil_head, spoil_head, replace_file]
TEXT: list[Damage] = [*[edit_text] * 4, spoil_bytes, replace_file]
JSON: list[Damage] = [*[edit_json] * 4, spoil_bytes, replace_file]
LINES: list[Damage] = [*[edit_lines] * 4, spoil_bytes, replace_ledger]


@dataclass(frozen=True)
class Subject:
    """Files, and what reads them.

    Attributes:
        write: writes sound files into an empty folder.
        damages: what is done to one of the files.
        read: reads a folder.
        files: pattern of the files that are damaged.
        holds: whether what was read of damaged files may be, given what was read of sound ones.
    """

    write: Callable[[Path], object]
    damages: list[Damage]
    read: Callable[[Path], Any]
    files: str = "*"
    holds: Callable[[Any, Any], bool] = field(default=lambda sound, found: True)


def equal(sound: Any, found: Any) -> bool:
    return bool(sound == found)


# ---------------------------------------------------------------------------- ledgers and trainings

STEPS = 40
LEDGER = "ledger.jsonl"


def write_ledger(place: Path) -> None:
    ledger = Ledger(place / LEDGER, MECHANISM, True)
    ledger.choose_generation("code", 0, "state")
    for step in range(STEPS):
        ledger.append(step)
        if step % 10 == 9:
            ledger.record_start("code", step + 1, f"state {step}")
    ledger.close()
    position = ledger.position
    (place / "position.json").write_text(json.dumps([position.releases, position.digest]))


def continue_ledger(place: Path) -> int:
    """Return how many steps count once a training goes on from its checkpoint."""
    position = Position(*json.loads((place / "position.json").read_text()))
    start = "code", STEPS, f"state {STEPS - 1}"
    ledger = open_ledger(place / LEDGER, MECHANISM, True, position, start)
    ledger.append(STEPS)
    ledger.close()
    return ledger.releases


def begin_beside_ledger(place: Path) -> tuple[int, int]:
    """Return how many steps count in a training that begins again, and the ledger's bytes."""
    path = place / LEDGER
    size = path.lstat().st_size
    path.rename(path.with_name(f"{LEDGER}.1"))
    counted = count_releases([path.with_name(f"{LEDGER}.1")])
    ledger = open_ledger(path, MECHANISM, True, None, ("other code", 0, "state"))
    ledger.append(0)
    ledger.close()
    assert ledger.releases == counted + 1
    return counted, size


def loses_only_cut_steps(sound: tuple[int, int], found: tuple[int, int]) -> bool:
    """True if a ledger counts all its steps, but for those whose bytes are gone."""
    lost = max(0, sound[1] - found[1])
    return found[0] >= sound[0] - lost / MIN_STEP_LINE - 1


def write_checkpoint(place: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = model.state_dict(), optimizer.state_dict()
    saved = Checkpoint("a" * 64, 3, *state, Position(3, "b" * 64), [{"step": 3, "loss": 0.5}])
    checkpoint.save(place / "checkpoint.pt", saved)


def read_checkpoint(place: Path) -> str:
    """Return a digest of the state that a run would continue from."""
    saved = checkpoint.load(place / "checkpoint.pt", "a" * 64)
    if saved is None:  # a broken link is none, and the run begins again
        raise UserError("no checkpoint")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        saved.restore(model, optimizer, None, {})
    except checkpoint.Misfit as error:
        raise UserError(str(error)) from None
    return checkpoint.state_digest({"step": saved.step, **vars(saved)}, model.state_dict())


def write_start(place: Path) -> None:
    training = Earlier(str(place / "first.jsonl"), "", 1.2, SAMPLING, 30)
    starts.save(place / "first.jsonl", network(), training, [])
    starts._KNOWN.clear()


def read_start(place: Path) -> tuple[int, float]:
    """Return the number of trainings that a model comes from, and the ε with this one."""
    trainings = starts.find(network(), place)
    this = Earlier("second.jsonl", "", 1.2, SAMPLING, 10)
    return len(trainings), starts.describe(this, [*trainings], 1e-3).get("epsilon_tight") or 0.0


# ------------------------------------------------------------------------------ what runs are given

RECIPE = """
# A recipe of one's own.
defaults:
  - override /model: complex_mlp
  - override /dataset: phase_digits
  - override /algorithm: zeta_dp_sgd
  - override /optimizer: sgd
name: mine
tags: [a, b]
model:
  hidden: [8]
algorithm:
  noise_multiplier: 1.5
optimizer:
  lr: 0.1
trainer:
  epochs: 2
  sample_rate: 0.1
seed: 3
"""


def write_recipe(place: Path) -> None:
    (place / "mine.yaml").write_text(RECIPE)


def read_recipe(place: Path) -> None:
    config = configured([f"recipe={place / 'mine.yaml'}"])
    assert config.seed >= 0


# --------------------------------------------------------------------------------------- the caches

ROWS = np.arange(40, dtype=np.float32).reshape(10, 4)


def read_rows(place: Path) -> list[list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place))
        return load_or_make("rows", "d" * 64, (10, 4), np.float32, iter([ROWS])).tolist()


def half(number: int) -> list[float]:
    return [number / 2, 1e-300]


def read_number(place: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place))
        return call_cached(half, 3)


# ----------------------------------------------------------------------------------------- own data

SIZES = Form(size=8, channels=1)
RECORDINGS = Form(length=32, channels=1)


def write_image(name: str) -> Callable[[Path], None]:
    pixels = np.arange(120, dtype=np.uint8).reshape(10, 12)
    return lambda place: Image.fromarray(pixels).save(place / name)


def write_sound(name: str) -> Callable[[Path], None]:
    samples = np.sin(np.arange(400) / 9).astype(np.float32)
    return lambda place: soundfile.write(place / name, samples, 100)


def write_itk(name: str) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        sitk = pytest.importorskip("SimpleITK")
        voxels = np.arange(480, dtype=np.int16).reshape(4, 10, 12)
        sitk.WriteImage(sitk.GetImageFromArray(voxels), str(place / name))

    return write


def write_kind(kind: str) -> Callable[[Path], None]:
    ending, write, _ = KINDS[kind]
    return lambda place: write(place / f"a{ending}", 9)


def write_volume(name: str) -> Callable[[Path], None]:
    voxels = np.arange(480, dtype=np.int16).reshape(12, 10, 4)
    return lambda place: nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), place / name)


def write_complex(place: Path) -> None:
    np.save(place / "a.npy", np.exp(1j * np.arange(40)).astype(np.complex64))


def read_own(place: Path) -> None:
    """Check a file and read it as data of its own kind."""
    path = next(path for path in sorted(place.iterdir()) if path.suffix != ".dat")
    readers.check(path)
    kind = readers.kind_of(path)
    form = RECORDINGS if kind.is_recording else SIZES
    kind.inspect(path, form)
    examples = kind.read(path, form)
    assert examples.shape[1:] == kind.shape(form)


def read_listing(place: Path) -> tuple[int, int]:
    made = folder(place / "list.csv")
    info = made.info(place)
    return info.train, info.test


def write_listing(place: Path) -> None:
    write_masks(place, "picture", 6)
    lines = ["path,mask,patient,split"]
    for number in range(6):
        part = "train" if number < 4 else "test"
        name = f"p{number}/scan.png"
        lines.append(f"images/{name},masks/{name},p{number},{part}")
    (place / "list.csv").write_text("\n".join(lines) + "\n")


# ------------------------------------------------------------------------------------- public data


def read_set(name: str) -> Callable[[Path], None]:
    def read(place: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(place.parent / "cache"))
            dataset(name, check=False).load(place)

    return read


# ------------------------------------------------------------------------------------- the subjects


def own(write: Callable[[Path], object], damages: list[Damage] = BYTES) -> Subject:
    return Subject(write, damages, read_own)


SUBJECTS: dict[str, Subject] = {
    "ledger that goes on": Subject(
        write_ledger, LINES, continue_ledger, LEDGER, holds=lambda sound, found: found >= sound
    ),
    "ledger set aside": Subject(
        write_ledger, LINES, begin_beside_ledger, LEDGER, loses_only_cut_steps
    ),
    "checkpoint": Subject(write_checkpoint, BYTES, read_checkpoint, holds=equal),
    "weights of a training": Subject(write_start, JSON, read_start),
    "recipe": Subject(write_recipe, TEXT, read_recipe),
    "cached array": Subject(read_rows, BYTES, read_rows, "zdp-bench/rows/*", equal),
    "cached number": Subject(read_number, JSON, read_number, "zdp-bench/numbers/*", equal),
    "own listing": Subject(write_listing, TEXT, read_listing, "list.csv"),
    **{f"own {kind}": own(write_kind(kind)) for kind in KINDS if kind != "table"},
    "own table": own(write_kind("table"), TEXT),
    "own header": Subject(write_kind("recording"), TEXT, read_own, "*.hea"),
    "own complex array": own(write_complex),
    **{f"own {name}": own(write_image(name)) for name in ("a.png", "a.jpg")},
    **{f"own {name}": own(write_sound(name)) for name in ("a.wav", "a.flac", "a.ogg")},
    **{f"own {name}": own(write_itk(name)) for name in ("a.mha", "a.nrrd")},
    **{f"own {name}": own(write_volume(name)) for name in ("a.nii", "a.nii.gz")},
    "mnist": Subject(write_mini_mnist, BYTES, read_set("mnist"), "MNIST/raw/*"),
    "cifar10": Subject(write_cifar10, BYTES, read_set("cifar10"), "*/*"),
}


def attack(subject: Subject, place: Path, seeds: range) -> list[str]:
    """Return what reading did with the files of each seed that it must not."""
    sound = place / "sound"
    sound.mkdir(parents=True)
    subject.write(sound)
    first = Path(shutil.copytree(sound, place / "first"))
    expected = subject.read(first)
    failed: list[str] = []
    for seed in seeds:
        draw = random.Random(seed)
        damaged = Path(shutil.copytree(sound, place / f"{seed}"))
        path = draw.choice(sorted(damaged.glob(subject.files)))
        damage = draw.choice(subject.damages)
        try:
            damage(path, draw)
        except (ValueError, TypeError):  # the values do not fit one another
            continue
        what = ""
        try:
            with within(SECONDS):
                found = subject.read(damaged)
            if not subject.holds(expected, found):
                what = f"{found!r:.200} instead of {expected!r:.200}"
        except UserError as error:
            if len(str(error)) > 20_000 or "\n" in str(error):
                what = f"says {error!s:.200}"
        except BaseException as error:
            what = name_error(error)
        if what:
            failed.append(f"{seed} {damage.__name__} {path.name}: {what}")
        shutil.rmtree(damaged)
    return failed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "many", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_damaged_file_is_read_as_it_may_be_or_refused(
    name: str, many: bool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seed, count = (pytestconfig.getoption(word) if many else 0 for word in ("seed", "damaged"))
    failed = attack(SUBJECTS[name], tmp_path, range(seed, seed + (count or 3)))
    assert not failed, "\n".join(failed)
