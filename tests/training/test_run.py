"""A run from end to end, small: what it writes, what repeats, what resumes, what is refused."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ledgers import OnDisk, steps_in
from zdp_bench import disk, records
from zdp_bench.config import compose, parse
from zdp_bench.config.schema import Run
from zdp_bench.data import Examples
from zdp_bench.errors import UserError
from zdp_bench.registry import lookup
from zdp_bench.report.terminal import show_run
from zdp_bench.training import checkpoint, evaluation
from zdp_bench.training import run as experiment
from zdp_bench.training.evaluation import evaluate
from zdp_bench.training.progress import Evaluation, Watcher
from zdp_bench.training.run import Outcome, execute
from zdp_bench.training.spending_file import read_sources
from zdp_bench.training.step import Training

TINY = ["recipe=quickstart", "trainer.epochs=2", "trainer.sample_rate=0.1", "model.hidden=[8]"]
TINY += ["accountant=gdp_clt"]  # the fastest


class Silent(Watcher):
    """Remembers."""

    def __init__(self) -> None:
        self.done_at_start = -1
        self.steps: list[int] = []
        self.evaluations: list[Any] = []

    def started(self, config: Run, home: Path, steps: int, done: int, *_: object) -> None:
        self.done_at_start = done

    def stepped(self, step: int) -> None:
        self.steps.append(step)

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)


def configured(results: Path, *overrides: str) -> Run:
    return parse(compose([*TINY, f"paths.results={results}", *overrides]))


def carry_out(results: Path, *overrides: str) -> Outcome:
    return execute(configured(results, *overrides), Silent())


def repeatable(record: records.Document) -> records.Document:
    """Return what two runs of one configuration share."""
    return {key: value for key, value in record.items() if key not in ("environment", "measured")}


def weights_of(outcome: Outcome) -> dict[str, Tensor]:
    """The weights that a run's checkpoint holds."""
    path = outcome.path.parent / "checkpoint.pt"
    return torch.load(path, weights_only=True, map_location="cpu")["model"]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def after_each_step(patch: pytest.MonkeyPatch, act: Callable[[Training, int], object]) -> None:
    """Have runs call `act` with the training and the step's number, from 0, after each step."""
    real = experiment.private_step

    def step(training: Training, number: int, *rest: Any) -> None:
        real(training, number, *rest)
        act(training, number)

    patch.setattr(experiment, "private_step", step)


class PowerCut(BaseException):
    pass


def kill_after(monkeypatch: pytest.MonkeyPatch, step: int, results: Path, *words: str) -> None:
    """Run until `step` is done, and no further."""

    def die(training: Training, number: int) -> None:
        if number == step:
            training.ledger.close()
            raise PowerCut

    with monkeypatch.context() as patch:
        after_each_step(patch, die)
        with pytest.raises(PowerCut):
            carry_out(results, *words)


def test_all_steps_are_on_disk_before_what_they_led_to_is_saved_or_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = OnDisk(monkeypatch)

    def ledgers() -> list[Path]:
        return list(tmp_path.glob("runs/*/*/ledger.jsonl"))

    class Shown(Silent):
        def evaluated(self, *arguments: Any) -> None:
            [held.check(path) for path in ledgers()]

    places = [(checkpoint, "save"), (experiment, "evaluate"), (records, "write")]
    for place, name in places:
        monkeypatch.setattr(place, name, held.before(getattr(place, name), ledgers))
    execute(configured(tmp_path, "execution.checkpoint_steps=3"), Shown())
    assert held.checks >= 20 // 3 + 2 + 1 + 2


def test_a_run_writes_what_it_promises(finished: Outcome, tmp_path: Path) -> None:
    record, privacy, home = (
        finished.record.document,
        finished.record.document["privacy"],
        finished.path.parent,
    )
    assert home == records.folder(tmp_path, "quickstart", record["run"])
    wanted = {"record.json", "ledger.jsonl", "spending.json", "checkpoint.pt", "run.log"}
    assert {path.name for path in home.iterdir()} == wanted
    assert privacy["steps"] == 20 == len(steps_in(home / "ledger.jsonl"))
    assert privacy["z"] == pytest.approx(1.5)
    assert 0 < privacy["epsilon_tight"] < privacy["epsilon_rdp"]
    assert [epoch["step"] for epoch in record["epochs"]] == [10, 20]
    assert record["data"]["provenance"] == "derived"
    assert record["headline"] == {"name": "accuracy", "value": record["metrics"]["accuracy"]}
    text = finished.path.read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    # an image is in two records
    assert (privacy["examples_per_patient"], privacy["unit"]) == (2, "image")
    assert 1.5 * privacy["epsilon_tight"] < privacy["epsilon_patient"] < math.inf
    # which files were read stays in the folder
    (source,) = read_sources(home) or ()
    assert source in (home / "spending.json").read_text()
    assert source not in text


def test_files_that_a_kill_left_half_written_go_with_the_same_command(
    finished: Outcome, tmp_path: Path
) -> None:
    home = finished.path.parent
    left_behind = [disk.name_partial(home / name) for name in ("record.json", "checkpoint.pt")]
    for path in left_behind:
        path.write_text("half")
    (home / "record.json").unlink()  # a finished run is only read
    assert not carry_out(tmp_path).was_recorded
    assert not any(path.exists() for path in left_behind)
    csv_left_behind = disk.name_partial(tmp_path / "records.csv")
    csv_left_behind.write_text("half")
    records.rebuild_csv(tmp_path)
    assert not csv_left_behind.exists()


def cut_checkpoint(home: Path) -> None:
    whole = (home / "checkpoint.pt").read_bytes()
    (home / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])  # of a copy that broke off


def leave_out(line: int) -> Callable[[Path], None]:
    """Leave out one of the ledger's lines that stand for steps, and all of starts."""

    def change(home: Path) -> None:
        head, *lines = (home / "ledger.jsonl").read_text().splitlines(keepends=True)
        lines = [line for line in lines if '"state"' not in line]
        del lines[line]
        (home / "ledger.jsonl").write_text("".join([head, *lines]))

    return change


def name_another_run(home: Path) -> None:
    body = torch.load(home / "checkpoint.pt", weights_only=True)
    torch.save(body | {"run": "f" * 64}, home / "checkpoint.pt")


def change_the_optimizer(home: Path) -> None:
    body = torch.load(home / "checkpoint.pt", weights_only=True)
    body["optimizer"]["param_groups"][0]["lr"] = "much"
    torch.save(body, home / "checkpoint.pt")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (change_the_optimizer, r"checkpoint\.pt: does not fit this run: .* force=true"),
        (cut_checkpoint, r"checkpoint\.pt: is damaged.*force=true"),
        (name_another_run, "belongs to run ffffffffffff"),
        (leave_out(1), r"ledger\.jsonl, line 3.*edited.*cannot be trusted"),
        (leave_out(-1), r"line 21: the file ends here.* 19 releases, .* was written after 20"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    finished: Outcome, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    finished.path.unlink()
    damage(finished.path.parent)
    with pytest.raises(UserError, match=says):
        carry_out(tmp_path)


def test_a_damaged_record_is_refused_and_written_again_once_it_is_gone(
    finished: Outcome, tmp_path: Path
) -> None:
    finished.path.write_bytes(finished.path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"record\.json: is damaged .* Delete it"):
        carry_out(tmp_path)
    assert not carry_out(tmp_path, "seed=1").was_recorded  # another run is not lost over it
    finished.path.unlink()
    assert repeatable(carry_out(tmp_path).record.document) == repeatable(finished.record.document)


def test_another_seed_is_another_run_of_the_same_experiment_and_only_the_test_set_is_evaluated(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = evaluation.predict

    def spy(model: Any, task: Any, test: Any, *rest: Any) -> Any:
        sizes.append(len(test))
        return real(model, task, test, *rest)

    monkeypatch.setattr(evaluation, "predict", spy)
    other = carry_out(tmp_path, "seed=1")
    assert set(sizes) == {360}  # the test set's, never the training set's
    assert not [
        key
        for key in other.record.document["metrics"] | other.record.document["epochs"][0]
        if "train" in key
    ]
    assert not same(weights_of(finished), weights_of(other))
    assert other.record.document["experiment"] == finished.record.document["experiment"]
    assert other.record.document["run"] != finished.record.document["run"]


def test_the_same_run_again_is_found_and_force_repeats_it(
    finished: Outcome, tmp_path: Path
) -> None:
    first, again = finished, carry_out(tmp_path)
    assert again.was_recorded
    assert again.record.document == first.record.document
    before = weights_of(first)
    forced = carry_out(tmp_path, "force=true")
    assert not forced.was_recorded
    assert repeatable(forced.record.document) == repeatable(first.record.document)
    assert same(weights_of(forced), before)
    assert (first.path.parent / "ledger.jsonl.1").exists()


def test_a_record_of_its_last_epoch_alone_is_the_same_run_but_no_curve(
    finished: Outcome, tmp_path: Path
) -> None:
    own = tmp_path / "last"
    last = carry_out(own, "execution.evaluate=last")
    assert last.record.document["run"] == finished.record.document["run"]
    assert same(weights_of(last), weights_of(finished))
    assert last.record.document["epochs"] == finished.record.document["epochs"][-1:]
    assert finished.record.has_each_epoch
    assert not last.record.has_each_epoch
    assert carry_out(own, "execution.evaluate=last").was_recorded
    with pytest.raises(UserError, match="only after its last epoch"):
        carry_out(own)
    again = carry_out(own, "force=true")
    assert again.record.document["epochs"] == finished.record.document["epochs"]


def test_a_run_whose_epochs_were_not_evaluated_continues_without_them_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returned a record that the next call refused."""
    kill_after(monkeypatch, 13, tmp_path, "execution.evaluate=last")  # its checkpoint is at 10
    with pytest.raises(UserError, match="not all its epochs were evaluated"):
        carry_out(tmp_path)
    assert carry_out(tmp_path, "execution.evaluate=last").record.document["epochs"]


@pytest.mark.parametrize(
    ("words", "step", "done"),  # by default, the last whole epoch is saved
    [([], 3, 0), ([], 13, 10), (["execution.checkpoint_steps=4"], 17, 16)],
)
def test_a_killed_run_goes_on_and_ends_the_same(
    tiny: tuple[Path, Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    step: int,
    done: int,
) -> None:
    kill_after(monkeypatch, step, tmp_path, *words)
    watcher = Silent()
    resumed = execute(configured(tmp_path), watcher)  # without the key: it is no part of the run
    assert watcher.done_at_start == done
    assert repeatable(resumed.record.document) == repeatable(tiny[1].record.document)


@pytest.mark.parametrize("jump", [-86_400, 86_400])
def test_a_clock_that_jumps_by_a_day_changes_no_count_and_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    whole = carry_out(tmp_path / "whole").record
    clock, jumps = time.time, [0]
    monkeypatch.setattr(time, "time", lambda: clock() + sum(jumps))
    kill_after(monkeypatch, 4, tmp_path / "results", "execution.checkpoint_steps=3")
    jumps.append(jump)
    after_each_step(monkeypatch, lambda training, number: jumps.append(jump))
    words = "execution.checkpoint_steps=3", "trainer.epochs=2"
    record = carry_out(tmp_path / "results", *words).record
    assert 0 <= (record.measured.train_seconds or 0) < 3600
    assert record.privacy.steps == whole.privacy.steps
    assert record.privacy.epsilon_tight == whole.privacy.epsilon_tight
    assert [run.run for run in records.read_all(tmp_path / "results")] == [record.run]


def test_a_run_that_learnt_nothing_is_recorded_with_a_warning(tmp_path: Path) -> None:
    still = carry_out(tmp_path, "optimizer.lr=0.0", "trainer.epochs=1").record
    assert still.warning == "the model does not seem to learn: optimizer.lr is 0."
    assert dict(show_run(still, tmp_path, was_recorded=False).rows)["warning"] == still.warning


def test_a_run_whose_loss_grows_a_hundredfold_says_so(tmp_path: Path) -> None:
    record = carry_out(tmp_path, "optimizer.lr=1e9", "trainer.epochs=1").record.document
    assert record["metrics"]["loss"] < math.inf
    assert "training diverged, the test loss rose from" in record["warning"]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (
            "model=complex_cnn",
            r": needs examples of shape \[channels, height, width\], but these are \[8, 8\]\. Use",
        ),
        ("task=binary_classification", ": needs two classes, but dataset=phase_digits has 10"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_trained(
    tmp_path: Path, word: str, why: str
) -> None:
    with pytest.raises(UserError, match=word + why) as refused:
        execute(parse(compose(["recipe=quickstart", f"paths.results={tmp_path}", word])), Silent())
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("runs/*/*/ledger.jsonl"))


@pytest.mark.parametrize(("more", "step"), [([], 50), (["execution.checkpoint_steps=20"], 20)])
def test_a_run_that_diverges_does_not_wait_for_the_end_of_the_epoch(
    tmp_path: Path, more: list[str], step: int
) -> None:
    slow = ["optimizer.lr=1e20", "trainer.sample_rate=0.01", *more]
    for _ in range(2):  # and again: from the ledger, and from no state that leads nowhere
        with pytest.raises(UserError, match=rf"^diverged at epoch 1, step {step}: "):
            carry_out(tmp_path, *slow)
        (home,) = (path for path in tmp_path.glob("runs/*/*") if path.is_dir())
        assert len(steps_in(home / "ledger.jsonl")) == step
        assert not (home / "checkpoint.pt").exists()
        assert not (home / "record.json").exists()


@pytest.mark.parametrize(
    ("name", "shape", "targets"),
    [
        ("classification", (2, 3), torch.tensor([0, 1])),
        ("binary_classification", (2, 1), torch.tensor([0, 1])),
        ("segmentation", (2, 1, 8, 8), torch.zeros(2, 8, 8)),
        ("reconstruction", (2, 1, 8, 8), torch.rand(2, 2, 8, 8)),
    ],
)
def test_outputs_that_are_no_numbers_have_a_loss_that_is_none(
    name: str, shape: tuple[int, ...], targets: Tensor
) -> None:
    for bad in (math.nan, math.inf):
        test, task = Examples(torch.full(shape, bad), targets), lookup("task", name)()
        assert math.isnan(evaluate(torch.nn.Identity(), task, test, torch.device("cpu"))["loss"])


def test_a_private_reconstruction_by_slice(tmp_path: Path) -> None:
    words = "recipe=mri_recon_small dataset=kspace_phantom dataset.patients=4 dataset.slices=2"
    words += f" dataset.test_share=0.25 trainer.epochs=1 threads=1 paths.data={tmp_path}"
    outcome = execute(parse(compose([*words.split(), f"paths.results={tmp_path}"])), Silent())
    privacy = outcome.record.document["privacy"]
    drawn = {"scheme": "poisson", "sample_rate": 1 / 6, "expected_batch_size": 1.0, "records": 6}
    assert privacy["sampling"] == drawn
    assert privacy["examples_per_patient"] == 2
    assert privacy["epsilon_patient"] > privacy["epsilon_tight"]
    assert outcome.record.document["headline"]["name"] == "ssim"
    with np.load(outcome.path.parent / "example.npz", allow_pickle=False) as arrays:
        shapes = {name: image.shape for name, image in arrays.items()}
    assert shapes == dict.fromkeys(("reference", "zero_filled", "reconstruction"), (32, 40))
