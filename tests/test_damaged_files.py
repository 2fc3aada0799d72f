"""Damaged files of every kind: what reads them returns what it may, or says in one sentence what is
wrong.

A few whenever the tests are run; with `--slow`, as many of each kind as `--damaged` says, drawn
from `--seed`. Folders of results and exports have tests of their own.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.damage import BYTES, JSON, LINES, TEXT, Damage, Subject, attack, equal, seeds_of
from tests.extras.own_data.own_data import KINDS, folder, write_masks
from tests.library.small import network
from tests.privacy.ledger_runs import MECHANISM, SAMPLING
from tests.report.test_comparisons import compare_pairs, make_run, write_scores
from zdp_bench.cli.commands import list as listing
from zdp_bench.config import configured
from zdp_bench.data.cache import load_or_make
from zdp_bench.errors import UserError
from zdp_bench.extras.figures.reconstructions import read_example
from zdp_bench.extras.own_data import readers
from zdp_bench.extras.own_data.readers import Form
from zdp_bench.extras.page import page
from zdp_bench.extras.sharing.loading import read_inputs
from zdp_bench.library import starts
from zdp_bench.library.starts import Earlier
from zdp_bench.models.resnet import Transfer
from zdp_bench.nn.state import state_digest
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.ledger_lines import MIN_STEP_LINE
from zdp_bench.privacy.memory import call_cached
from zdp_bench.privacy.tally import Position, count_releases
from zdp_bench.records import write_arrays
from zdp_bench.report import coverage
from zdp_bench.representations import build
from zdp_bench.training import checkpoint, loggers
from zdp_bench.training.checkpoint import Checkpoint
from zdp_bench.training.run_folder import open_ledger

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


def loses_only_cut_steps(sound: tuple[int, int], damaged: tuple[int, int]) -> bool:
    """True if a ledger counts all its steps, but for those whose bytes are gone."""
    lost = max(0, sound[1] - damaged[1])
    return damaged[0] >= sound[0] - lost / MIN_STEP_LINE - 1


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
    return state_digest({"step": saved.step, **vars(saved)}, model.state_dict())


def write_start(place: Path) -> None:
    training = Earlier(str(place / "first.jsonl"), "", 1.2, SAMPLING, 30, "first")
    starts.save(place / "first.jsonl", network(), [], training, [])
    starts._KNOWN.clear()


def read_start(place: Path) -> tuple[int, float]:
    """Return the number of trainings that a model comes from, and the ε with this one."""
    trainings = starts.find(network(), place)
    this = Earlier("second.jsonl", "", 1.2, SAMPLING, 10, "second")
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


def read_masks(place: Path) -> None:
    splits = folder(place, "volume").load(place)
    indices = torch.arange(len(splits.train))
    splits.train.batch(indices, None)


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


# ------------------------------------------------------------------------------- weights and inputs


def write_network(name: str) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        timm = pytest.importorskip("timm")
        weights = timm.create_model("test_efficientnet").state_dict()
        save = save_file if name.endswith(".safetensors") else torch.save
        save(weights, place / name)

    return write


def read_network(place: Path) -> None:
    (path,) = place.iterdir()
    build(
        "network",
        {"network": "test_efficientnet", "weights": str(path), "trained_on": "birds"},
        (3, 8, 8),
        torch.float32,
    )


def write_resnet(place: Path) -> None:
    from torchvision.models import resnet18

    torch.save(resnet18().state_dict(), place / "w.pth")


def read_resnet(place: Path) -> None:
    Transfer((3, 32, 32), 2, weights=str(place / "w.pth"))


def write_inputs(place: Path) -> None:
    np.save(place / "in.npy", np.ones((2, 8, 8), np.float32))


def read_predicted(place: Path) -> tuple[int, ...]:
    return tuple(read_inputs({}, place / "in.npy").shape)


# -------------------------------------------------------------------------------- a results folder

TABLES = Path(__file__).parents[1] / "results" / "tables"


def write_reported(place: Path) -> None:
    """Copy a table, and draw a figure."""
    (place / "figures").mkdir()
    (place / "figures" / "fig.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (place / "tables").mkdir()
    for name in ("zeta_dp_2021_table1.csv", "zeta_dp_2021_table1.md", "cost.md"):
        shutil.copy(TABLES / name, place / "tables" / name)


def read_reported(place: Path) -> None:
    coverage.sheet(place)
    page.write({}, place, place / "page.html")


def write_times(place: Path) -> None:
    (place / "results").mkdir()
    lines = (TABLES / "records.csv").read_text().splitlines()
    (place / "results" / "records.csv").write_text("\n".join(lines[:4]) + "\n")


def read_times(place: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        listing._read_times()


SCORED = {name: [make_run(name, seed=1, value=0.9)] for name in ("good", "bad")}


def write_all_scores(place: Path) -> None:
    for name, (run,) in SCORED.items():
        write_scores(place, run, {"good": 2.0, "bad": 0.7}[name])


def read_all_scores(place: Path) -> None:
    compare_pairs("roc_auc", SCORED, place)


def write_example(place: Path) -> None:
    images = np.arange(60, dtype=np.float32).reshape(3, 5, 4)
    names = ("reference", "zero_filled", "reconstruction")
    write_arrays(place / "example.npz", dict(zip(names, images, strict=True)))


def read_images(place: Path) -> None:
    images = read_example(place / "example.npz")
    assert len({image.shape for image in images.values()}) == 1


def write_identity(place: Path) -> None:
    loggers._identity_of(place)


def read_identity(place: Path) -> None:
    name = loggers._identity_of(place)
    assert name.isprintable()
    assert 0 < len(name) < 256


# ------------------------------------------------------------------------------------- the subjects


def own(write: Callable[[Path], object], damages: list[Damage] = BYTES) -> Subject:
    return Subject(write, damages, read_own)


SUBJECTS: dict[str, Subject] = {
    "ledger that goes on": Subject(
        write_ledger, LINES, continue_ledger, LEDGER, holds=lambda sound, damaged: damaged >= sound
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
    "own masks": Subject(
        lambda place: write_masks(place, "volume", 5), BYTES, read_masks, "masks/*/*"
    ),
    **{
        f"weights {name}": Subject(write_network(name), BYTES, read_network)
        for name in ("w.pth", "w.safetensors")
    },
    "weights of ResNet-18": Subject(write_resnet, BYTES, read_resnet),
    "inputs": Subject(write_inputs, BYTES, read_predicted),
    "tables": Subject(write_reported, TEXT, read_reported, "*/*"),
    "times": Subject(write_times, TEXT, read_times, "*/*"),
    "scores": Subject(write_all_scores, TEXT, read_all_scores, "runs/*/*/*"),
    "example": Subject(write_example, BYTES, read_images),
    "identity": Subject(write_identity, TEXT, read_identity),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "many", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_damaged_file_is_read_as_it_may_be_or_refused(
    name: str, many: bool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    failed = attack(SUBJECTS[name], tmp_path, seeds_of(pytestconfig, many))
    assert not failed, "\n".join(failed)
