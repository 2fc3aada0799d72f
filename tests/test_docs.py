"""The documentation builds without a warning, and every command in it works.

Quick commands are run; the others are composed and checked.
"""

import importlib
import math
import pydoc
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zdp_bench
from tests.drivers import ROOT, python
from zdp_bench import cli
from zdp_bench.cli.commands import COMMANDS
from zdp_bench.cli.parser import parse_arguments
from zdp_bench.config import compose, configured, parse
from zdp_bench.config.plugins import list_all_keys
from zdp_bench.experiments.claims import jobs_of
from zdp_bench.training.setup import describe_data

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ELSEWHERE = ("# needs Slurm", "# needs a cluster", "# needs a GPU")
# Commands that take minutes, or runs that are not there: carried out by `pytest --slow` only.
HEAVY = re.compile(
    r"^torchrun|^make|^zdp-bench (search|report|figure --runs|compare|reproduce --profile)"
    r"|^zdp-bench epsilon$"
    r"|audit recipe=quickstart$|launcher=(joblib|submitit)"
    r"|recipe=(chest_xray|phasemnist|mri_recon|mri_sequence_fl|mri_sequence_cl_reduced)"
    r"|recipe=(mnist|fashion_mnist|msd_hippocampus|ecg|speech)"
)


def read_commands(page: Path) -> list[tuple[str, str]]:
    """The (command, remark) lines of a page's console blocks, in order."""
    blocks = re.findall(
        r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines), page
    return [
        (line[2:].split("  #")[0].strip(), "#" + line.split("  #")[1] if "  #" in line else "")
        for line in lines
    ]


def quick_commands(page: Path) -> list[tuple[list[str], int]]:
    """The zdp-bench commands of a page that are quick enough to run, as words, with the exit code
    that the page says.
    """
    quick = [
        (shlex.split(text), int(remark.startswith("# flagged")))
        for text, remark in read_commands(page)
        if not (HEAVY.search(text) or remark.startswith(ELSEWHERE))
    ]
    return [
        (words[1:], code)
        for words, code in quick
        if words[0] == "zdp-bench" and "dataset=rings" not in words
    ]


def exit_code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    return int(left.value.code or 0)


def write_inputs(folder: Path) -> None:
    """What docs/results.md predicts from: three of the quickstart's examples."""
    np.save(folder / "inputs.npy", np.ones((3, 8, 8), dtype=np.complex64))


def write_own_data(folder: Path) -> None:
    """What docs/own_data.md speaks of: scans that its script makes, forty films, two recipes."""
    from PIL import Image

    for name in ("make_scans.py", "ball.yaml", "films_private.yaml"):
        shutil.copy(DOCS / "example" / name, folder)
    python("make_scans.py", at=folder)
    for number in range(40):
        path = folder / "films" / ("NORMAL", "PNEUMONIA")[number % 2] / f"p{number // 2}"
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40), 6 * number, np.uint8)).save(path / "film.png")


def test_the_first_own_data_are_counted_as_the_page_says(here: Path) -> None:
    pytest.importorskip("nibabel")
    write_own_data(here)
    info = describe_data(configured(["recipe=./ball.yaml"]))
    page = (DOCS / "own_data.md").read_text()
    counts = f"{info.train} planes from {info.owners} patients for training, {info.test} planes"
    assert counts in " ".join(page.split())
    private = configured(["recipe=./films_private.yaml"])
    assert private.privacy.by_owner, "the recipe that people copy"


def write_script(folder: Path) -> None:
    """What docs/audit_own.md shows and has its reader save."""
    shutil.copy(ROOT / "zdp_bench/extras/audit/examples/opacus_loop.py", folder / "my_script.py")


def copy_records(folder: Path) -> None:
    """The committed runs of which docs/complex.md makes a table."""
    for runs in (ROOT / "results" / "runs").glob("complex_*"):
        shutil.copytree(runs, folder / "results" / "runs" / runs.name)


FILES_OF = {
    "audit_own": write_script,
    "complex": copy_records,
    "results": write_inputs,
    "own_data": write_own_data,
}  # page -> what makes the files that it speaks of


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_one_that_exists(page: Path, here: Path) -> None:
    """Composed and checked key by key, without being run."""
    FILES_OF.get(page.stem, lambda _: None)(here)
    for text, _ in read_commands(page):
        program, *words = shlex.split(text)
        if program == "torchrun":
            words = words[words.index("zdp_bench") + 1 :]
            program = "zdp-bench"
        if program == "make":
            target, *variables = words
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), (
                text
            )
            known = re.compile(r"PROFILE=(smoke|here|paper)")
            assert all(known.fullmatch(word) for word in variables), text
        elif program == "zdp-bench" and words[0] != "run":
            parse_arguments(words)
        elif program == "zdp-bench" and "dataset=rings" not in words:
            sweeping = [word for word in words[1:] if word != "-m"]
            launcher = [word for word in sweeping if word.startswith("hydra.launcher.")]
            first = [
                re.sub(r"=range\((\d+),.*\)$|=([^=\[,]+),.*$", r"=\1\2", word)
                for word in sweeping
                if word not in launcher
            ]
            parse(compose([word for word in first if not word.startswith("launcher=")]))
            assert not launcher or any(word.startswith("launcher=") for word in first), text
        else:
            assert program in (".", "pip", "zdp-bench"), text


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if quick_commands(page)], ids=lambda page: page.stem
)
def test_quick_commands_run_one_after_the_other(
    page: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZDP_DATA", str(here / "no-data"))
    FILES_OF.get(page.stem, lambda _: None)(here)
    for words, code in quick_commands(page):
        assert exit_code_of(*words) == code, words


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_heavy_commands_run_where_there_is_data(
    page: Path, tmp_path: Path, data_root: Path
) -> None:
    for text, remark in read_commands(page):
        program, *words = shlex.split(text)
        if (
            HEAVY.search(text)
            and not remark.startswith(ELSEWHERE)
            and program in ("zdp-bench", "torchrun")
            and "here" not in words
            and words[0] not in ("compare", "figure", "report")  # of runs that are not there
        ):
            runner = "zdp_bench" if program == "zdp-bench" else "torch.distributed.run"
            python("-m", runner, *words, at=tmp_path)


@pytest.mark.slow
def test_the_readmes_examples_print_what_it_shows(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZDP_DATA", str(here / "no-data"))
    page = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    (second,) = re.findall(r"^    zdp-bench (run recipe=complex.*)$", page, flags=re.MULTILINE)
    for words in (["run", "recipe=quickstart"], shlex.split(second)):
        assert exit_code_of(*words) == 0
    printed = re.sub(r"[│ ]+", " ", capsys.readouterr().out)
    shown = re.findall(r"^    ((?:test|claimed|tight|ε) .*)$", page, flags=re.MULTILINE)
    assert len(shown) == 7
    assert not [line for line in shown if re.sub(" +", " ", line) not in printed]


TRY_PLUG_IN = """
import site
import sys

site.addsitedir(sys.argv[1])
import torch
from zdp_bench import cli
from zdp_bench.algorithms import Problem
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup

for words in (sys.argv[2:], ["run", "recipe=quickstart", "dataset=rigns"]):
    try:
        cli.main(words)
    except SystemExit as left:
        print("exit code", left.code)
loss = lambda y, t: ((y - t) ** 2).sum(1)
problem = Problem(torch.nn.Linear(3, 2), loss, Sampling("poisson", 0.1, 8.0, 80))
algorithm = lookup("algorithm", "sign_sgd")(problem, noise_multiplier=1.0, max_grad_norm=0.5)
parts = algorithm.contributions((1e4 * torch.randn(9, 3), torch.randn(9, 2)))
print(float(sum(v.flatten(1).square().sum(1) for v in parts.values()).sqrt().max()))
"""


@pytest.mark.slow
def test_the_plug_in_of_the_tutorial_is_found_by_name_and_trains(tmp_path: Path) -> None:
    """Installed by the tutorial's own command, into a folder of its own and without a network."""
    pytest.importorskip("editables")  # the build tools are those of `make install`
    shutil.copytree(DOCS / "example", tmp_path / "my_lab")
    (install,) = [text for text, _ in read_commands(DOCS / "tutorial.md") if "pip install" in text]
    place = "--prefix", str(tmp_path / "prefix")
    offline = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    python("-m", *shlex.split(install), *place, at=tmp_path, **offline)
    (site,) = (tmp_path / "prefix").rglob("site-packages")
    (command,) = [
        shlex.split(text)
        for text, _ in read_commands(DOCS / "tutorial.md")
        if "dataset=rings" in text
    ]
    done = python("-c", TRY_PLUG_IN, str(site), *command[1:], "trainer.epochs=1", at=tmp_path)
    trained, _, norm = re.split(r"exit code \d+\n", done.stdout)
    assert re.findall(r"exit code (\d+)", done.stdout) == ["0", "2"]
    assert "rings, synthetic" in trained
    assert "Did you mean 'rings'?" in done.stderr
    assert 0.49 < float(norm) <= 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_loop_with_opacus_and_ours_train_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opacus = pytest.importorskip("opacus")
    monkeypatch.syspath_prepend(DOCS / "example")
    theirs, ours = (importlib.import_module(f"with_{name}") for name in ("opacus", "zdp_bench"))
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(200, 20, generator=generator), torch.arange(200) % 10
    with monkeypatch.context() as patch:  # no noise, all examples in every batch
        patch.setattr(opacus.PrivacyEngine, "get_epsilon", lambda *_: math.inf)
        first, other = (nn.Linear(20, 10) for _ in range(2))
        other.load_state_dict(first.state_dict())
        theirs.train(first, *data, 200, 3, 0.0, 1e-5)
        ours.train(other, *data, 200, 3, 0.0, 1e-5, tmp_path / "without_noise.jsonl")
        torch.testing.assert_close(first.weight, other.weight)
    epsilon = theirs.train(nn.Linear(20, 10), *data, 20, 3, 1.1, 1e-5)
    tight = ours.train(nn.Linear(20, 10), *data, 20, 3, 1.1, 1e-5, tmp_path / "ledger.jsonl")
    assert tight == pytest.approx(epsilon, rel=0.01)
    again = ours.train(nn.Linear(20, 10), *data, 20, 3, 1.1, 1e-5, tmp_path / "ledger.jsonl")
    assert again == tight  # no step more


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_scripts_of_the_library_page_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DOCS / "example")
    for _ in range(2):  # trained, and resumed at its end
        epsilon, accuracy = importlib.import_module("complex_network").train(tmp_path / "complex")
        assert 2.9 < epsilon <= 3.0
        assert accuracy > 0.8
    pytest.importorskip("timm")
    timm_model = importlib.import_module("timm_model")
    assert 7.9 < timm_model.train(tmp_path / "timm", epochs=1) <= 8.0
    assert 7.9 < timm_model.train(tmp_path / "timm", epochs=1) <= 8.0  # resumed at its end


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_module_of_lightning_takes_the_steps_of_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning")
    monkeypatch.syspath_prepend(DOCS / "example")
    shown = importlib.import_module("lightning_module")
    data = TensorDataset(torch.randn(120, 4), torch.arange(120) % 3)
    given = {"batch_size": 40, "noise_multiplier": 1.0, "seed": 3}
    model, plain = (nn.Linear(4, 3) for _ in range(2))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):  # trained, and resumed at its end
        model.load_state_dict(start)
        module = shown.PrivateModule(model, data, ledger=tmp_path / "its.jsonl", **given)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(max_epochs=4, accelerator="cpu", devices=1, **quiet)
        trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "its.ckpt")
    with pytest.raises(zdp_bench.UserError, match="leave ckpt_path out"):
        trainer.fit(module, ckpt_path=tmp_path / "its.ckpt")
    plain.load_state_dict(start)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    given |= {"loss": nn.CrossEntropyLoss(reduction="none"), "epochs": 4}
    with zdp_bench.make_private(
        plain, optimizer, data, ledger=tmp_path / "plain.jsonl", **given
    ) as private:
        for batch in private.batches():
            private.step(batch)
            if private.done % 3 == 0:
                schedule.step()
    assert torch.equal(model.weight, plain.weight)
    assert module.private.done == private.done == 12
    assert float(trainer.callback_metrics["epsilon"]) == pytest.approx(private.epsilon)


# What stands in a reader's script before the lines of the library's page.
OF_THE_READER = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

dataset = TensorDataset(torch.randn(512, 4), torch.arange(512) % 3)
films = TensorDataset(torch.randn(200, 2), torch.zeros(200))
model, network, judge, generator = (nn.Linear(*size) for size in ((4, 3), (4, 3), (2, 1), (2, 2)))
"""


def read_lines() -> list[str]:
    """The library page's blocks of Python, in order."""
    page = (DOCS / "library.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("here")
def test_the_lines_of_the_library_page_train_export_and_load_and_run_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time in the cells of the same process."""
    monkeypatch.syspath_prepend(DOCS / "example")
    gan = importlib.import_module("gan")
    lines, export, load = read_lines()
    mine: dict[str, Any] = {}
    exec(OF_THE_READER, mine)
    for _ in range(2):
        exec(lines, mine)
        private = mine["private"]
        assert 7.9 < private.epsilon <= 8.0
        assert private.done == private.steps == private.report()["steps"]
        assert 7.9 < gan.train(*(mine[name] for name in ("judge", "generator", "films"))) <= 8.0
        exec(export, mine)
        exec(load, mine)
        assert torch.equal(mine["network"].weight, mine["model"].weight)
        assert exit_code_of("verify", "my-model") == 0


READY = """
import zdp_bench
from zdp_bench import make_private
model = nn.Sequential(nn.Linear(4, 8), NORM, nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = nn.CrossEntropyLoss(reduction="none")
"""
OURS = re.findall(r"^\| `.+` \| `(.+)` \|$", (DOCS / "library.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("line", OURS)
@pytest.mark.usefixtures("here")
def test_each_idiom_beside_opacus_runs(line: str) -> None:
    assert len(OURS) == 8
    mine: dict[str, Any] = {}
    norm = "nn.BatchNorm1d(8)" if "replace_batchnorm" in line else "nn.GroupNorm(2, 8)"
    exec(OF_THE_READER + READY.replace("NORM", norm), mine)
    if "private." in line:
        started = "make_private(model, optimizer, dataset, loss=loss, epochs=1, batch_size=64,"
        line = f"with {started} noise_multiplier=1.0) as private:\n    {line}"
    elif line.startswith("make_private"):
        line = f"with {line} as private:\n    private.step(next(iter(private.batches())))"
    exec(line.replace(": private.step", ":\n        private.step"), mine)
    assert not any(isinstance(layer, nn.BatchNorm1d) for layer in mine["model"])


def read_outputs(cells: list[dict]) -> list[str]:
    """What each code cell printed."""
    return [
        "".join("".join(out.get("text", "")) for out in cell["outputs"] if out["name"] == "stdout")
        for cell in cells
        if cell["cell_type"] == "code"
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("here")
def test_the_notebook_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers within 1 %: noise follows from the operating system, and nothing of it is shown."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(DOCS / "example" / "patients.ipynb", as_version=4)
    shown = read_outputs(notebook.cells)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    number = re.compile(r"\d+(?:\.\d+)?")
    assert any(shown)
    for before, now in zip(shown, read_outputs(notebook.cells), strict=True):
        assert number.sub("#", now) == number.sub("#", before)
        expected = [float(value) for value in number.findall(before)]
        assert [float(value) for value in number.findall(now)] == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    words = shlex.split(
        f"-m sphinx -q -W --keep-going -b html -d {tmp_path}/trees {DOCS} {tmp_path}"
    )
    python(*words)
    assert (tmp_path / "tutorial.html").is_file()


def test_the_reference_has_every_command_and_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    reference = importlib.import_module("reference")
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert not [v for v, command in COMMANDS.items() if f"| `{v}` | {command.HELP} |" not in page]
    text = reference.fill(page)
    assert "<!-- " not in text, "what is shown in the repository is replaced"
    keys = [key for key, _ in list_all_keys() if not key.startswith("launcher")]
    assert not [key for key in keys if f"`{key}" not in text and f"## {key}\n" not in text]
    assert not [verb for verb in COMMANDS if f"## {verb}\n" not in text]


def test_every_paper_has_its_section() -> None:
    from zdp_bench.report.papers import available

    papers = {name.split("/")[0] for name in available()}
    text = (DOCS / "papers.md").read_text(encoding="utf-8")
    assert papers == set(re.findall(r"<!-- made by coverage (\w+) -->", text))
    assert jobs_of("quickstart") == [()]


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda page: page.stem)
def test_every_file_and_name_it_mentions_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "```{" not in text, "a forge shows directives as text"
    roots = "zdp_bench|tests|recipes|conf|datasets|results|docs|papers"
    paths = set(re.findall(rf"(?<![\w/.(])(?:{roots})/[\w./*-]*\w", text))
    paths = {
        path
        for path in paths
        if not re.search(r"NAME|PAPER|^results/(runs|re|\.records|tensorboard|mlflow|wandb)", path)
    }
    assert not [path for path in paths if not any(ROOT.glob(path))]
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert not [link for link in links if not (page.parent / link).exists()]
    for name in re.findall(r"\bzdp_bench(?:\.\w+)+", text):
        try:
            located = pydoc.locate(name.removesuffix(".plugins"))
        except pydoc.ErrorDuringImport as error:
            missing = getattr(error.value, "name", None) or "zdp_bench"
            if missing.startswith("zdp_bench"):
                raise
            pytest.skip(f"{name} needs {missing}")
        assert located is not None, name
