"""The command line as a person meets it."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import write_mini_mnist
from zdp_bench import cli
from zdp_bench.cli.commands import GROUPS
from zdp_bench.cli.parser import build_parser

TINY = ["trainer.epochs=1", "trainer.sample_rate=0.2", "model.hidden=[4]", "threads=1"]


def start(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, in the folder `at`."""
    return subprocess.run(
        [sys.executable, "-m", "zdp_bench", *words],
        cwd=at,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command in this process: exit code, standard output and error."""
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, zdp_bench.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print({'torch', 'hydra', 'pandas', 'rich', 'numpy', 'yaml'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
    assert "reproduce" in done.stdout


# (command line, part of the sentence)
MISTAKES = [
    ("rnu", "Did you mean 'run'?"),
    ("list algoritms", "Did you mean 'algorithms'?"),
    ("table zeta_dp_2021/11", "Did you mean 'zeta_dp_2021/1'?"),
    ("table", "`zdp-bench table` needs PAPER/N; see `zdp-bench table --help`."),
    ("figure", "`zdp-bench figure` needs PAPER/figN, or --runs"),
    ("", "`zdp-bench` needs one of run, search, federate, "),
    ("federate", "`zdp-bench federate` needs one of server, client; see"),
    ("federate sever", "role 'sever' is not known. Did you mean 'server'?"),
    (
        "federate server recipe=quickstart",
        "federated.nodes is not set: say how many nodes the federation has, such as",
    ),
    (
        "results --format xml",
        "--format 'xml' is not known. Did you mean 'html'? Allowed: csv, html, json, md, rich.",
    ),
    (
        "results --colums seed",
        "`zdp-bench results`: option '--colums' is not known. Did you mean '--columns'?",
    ),
    (
        "audit recipe=quickstart --confidance=0.9",
        "option '--confidance' is not known. Did you mean '--confidence'?",
    ),
    ("results --sort", "--sort needs a value; see `zdp-bench results --help`."),
    ("reproduce zeta_dp_2021/1 --seeds x", "--seeds=x: must be a whole number, 1 or more."),
    ("bench --threads 1.5", "--threads=1.5: must be a whole number, 1 or more."),
    ("find-lr recipe=quickstart --steps x", "--steps=x: must be a whole number, 3 or more."),
    ("find-lr recipe=quickstart --steps 0", "--steps=0: must be at least 3."),
    ("find-lr recipe=quickstart --lowest x", "--lowest=x: must be a number above 0."),
    (
        "find-lr recipe=quickstart --lowest 0",
        "--lowest=0.0: must be positive and below --highest=1.",
    ),
    ("run", "recipe=NAME is missing"),
    (
        "validate recipe=quickstart paths.results=pyproject.toml/x",
        "pyproject.toml/x: Not a directory, so nothing can",
    ),
    ("run recipe=quickstart model=/", "model= has no name. Allowed: "),
    ("run recipe=quickstart model=a/b", "model 'a/b' is not known."),
    ("run recipe=phasemnits", "Did you mean 'phasemnist'?"),
    (
        "validate recipe=quickstart launcher=joblib",
        "launcher=joblib: only `zdp-bench run` reads it",
    ),
    ("audit recipe=quickstart hydra.launcher.n_jobs=2", "leave it out of `zdp-bench audit`"),
    ("find-lr recipe=quickstart hydra/launcher=joblib", "leave it out of `zdp-bench find-lr`"),
    ("reproduce zeta_dp_2021/1 launcher=joblib", "leave it out of `zdp-bench reproduce`"),
    ("reproduce --profile smoke launcher=slurm", "leave it out of `zdp-bench reproduce`"),
    ("federate server recipe=quickstart launcher=joblib", "leave it out of `zdp-bench federate`"),
    ("run -x recipe=quickstart", "option '-x' is not known"),
    ("run recipe=quickstart algorithm.nois=circular", "Did you mean 'algorithm.noise'?"),
    ("run -m recipe=phasemnits seed=1,2", "Did you mean 'phasemnist'?"),
    (
        "reproduce zeta_dp_2021/1 trainer.epochs=1",
        "trainer.epochs: `zdp-bench reproduce` runs recipes as they stand",
    ),
    (
        "reproduce zeta_dp_2021/1 +federated.nodes=2",
        "federated.nodes: `zdp-bench reproduce` runs recipes as they stand",
    ),
    (
        "reproduce zeta_dp_2021/1 recipe=quickstart",
        "recipe: not in `zdp-bench reproduce`; a table has its own recipes",
    ),
    ("reproduce zeta_dp_2021/1 seed=3", "say --seeds N"),
    ("reproduce --profile smoke paths.results=X", "say --results DIR"),
    (
        "reproduce zeta_dp_2021/1 force=true",
        "force: `zdp-bench reproduce` runs recipes as they stand",
    ),
    (
        "validate recipe=quickstart claims.table=zeta_dp_2021/99",
        "claims.table 'zeta_dp_2021/99' is not known.",
    ),
    (
        "validate recipe=phasemnist claims.row=phasemnst_private",
        "Did you mean 'phasemnist_private'?",
    ),
    ("validate recipe=phasemnist claims.row=null", "claims.row 'null' is not known"),
    (
        "validate recipe=dp_dfa_fig4_fashion algorithm.noise_multiplier=3",
        "A run of your own fills no row: claims.table=null.",
    ),
    ("run recipe=quickstart claims.table=foo", "claims.table 'foo' is not known."),
    (
        "run recipe=quickstart claims.row=foo",
        "claims.row=foo: of no table; add claims.table=PAPER/N",
    ),
    ("reproduce zeta_dp_2021/1 --seeds 0", "must be at least 1"),
    ("reproduce zeta_dp_2021/1 --seedz 2", "'--seedz' is not known"),
    ("run recipe=quickstart launcher=joblib", "launcher=joblib: only a sweep reads it; add -m"),
    ("run recipe=quickstart hydra.sweeper.max_batch_size=2", "only a sweep reads it; add -m"),
    ("run recipe=quickstart hydra.run.dir=x", "hydra.run.dir=x: has no effect here."),
    ("run -m recipe=quickstart hydra.sweep.dir=x", "paths.results=DIR says where it lies"),
    ("run recipe=quickstart +hydra.job.chdir=true", "has no effect here"),
    ("run recipe=quickstart --resolve", "--resolve belongs to --cfg"),
    ("run -m recipe=quickstart --cfg job", "show one run: leave -m out"),
    ("run recipe=quickstart --show-config sed=1", "Did you mean 'seed'?"),
    ("run recipe=quickstart --cfg jobs", "Did you mean 'job'?"),
    ("compare quickstart", "`zdp-bench compare` needs RUN"),
    ("compare nothing nothing", "nothing: names no run here."),
    ("budget mnits", "data set with runs 'mnits' is not known."),
    ("budget --delta 2", "--delta=2.0: must lie above 0 and below 0.1"),
    ("data fetch", "needs a data set"),
    ("data check mnsit", "Did you mean 'mnist'?"),
    ("results recip=a", "Did you mean 'recipe'?"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistakes_end_in_one_sentence_and_2(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    code, _, err = run(capsys, *line.split())
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_every_verb_and_every_option_says_what_it_is() -> None:
    (verbs,) = (
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert set(verbs.choices) == set(cli.COMMANDS)
    for verb, of in verbs.choices.items():
        assert of.description, verb
        assert not [action.dest for action in of._actions if not action.help], verb


def test_the_help_has_every_verb_in_a_group_on_one_line_of_80_columns() -> None:
    shown = build_parser().format_help().splitlines()
    for verb, command in cli.COMMANDS.items():
        assert command.GROUP in GROUPS, verb
        assert [line.split()[1:] for line in shown if line.startswith(f"  {verb} ")] == [
            command.HELP.split()
        ]
    assert max(map(len, shown)) <= 80


def test_a_configuration_is_shown_and_nothing_is_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "run", "--show-config", "recipe=quickstart", "optimizer.lr=0.25")
    assert code == 0
    shown = yaml.safe_load(out)
    assert (shown["recipe"], shown["optimizer"]["lr"]) == ("quickstart", 0.25)
    assert not {"hydra", "launcher"} & set(shown)
    code, out, _ = run(capsys, "run", "recipe=mnist", "--cfg", "job")
    assert "${oc.env:ZDP_DATA" in out
    code, out, _ = run(capsys, "run", "recipe=mnist", "--cfg", "job", "--resolve")
    assert yaml.safe_load(out)["dataset"]["name"] == "mnist"
    assert "${" not in out
    code, out, _ = run(capsys, "run", "recipe=mnist", "--info", "defaults")
    assert "recipe/mnist" in out
    assert not list(tmp_path.iterdir())


def test_everything_that_is_listed_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", "--format", "json")
    assert code == 0
    assert not [line for line in json.loads(out) if not line["what"]]


@pytest.mark.parametrize("verb", ["list", "data", "coverage", "results", "table zeta_dp_2021/1"])
@pytest.mark.parametrize("form", ["md", "csv", "json", "html"])
def test_every_table_has_every_form(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    form: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, *verb.split(), "--format", form)
    assert code == 0
    if form == "json":
        assert isinstance(json.loads(out), list)
    elif form == "csv":
        widths = {len(row) for row in csv.reader(io.StringIO(out))}
        assert len(widths) == 1
        assert (widths == {0}) == (verb == "results")  # there are none: a table without columns
    else:
        assert out.startswith({"md": ("|", "#"), "html": "<!doctype"}[form])


def test_every_kind_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    for name in (
        "zeta_dp_sgd",
        "complex_mlp",
        "phasemnist",
        "classification",
        "nadam",
        "gdp_clt",
        "quickstart",
        "zeta_dp_2021/1",
    ):
        assert name in out


def test_the_data_root_is_shown_checked_and_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "data", "--root", str(tmp_path))
    assert code == 0
    assert "missing" in out
    assert "bundled" in out
    code, _, err = run(capsys, "data", "check", "phasemnist", "--root", str(tmp_path))
    assert code == 2
    assert err.count("is missing") == 4
    write_mini_mnist(tmp_path)
    code, _, err = run(capsys, "data", "check", "mnist", "--root", str(tmp_path))
    assert code == 2
    assert err.count("were expected") == 4
    code, out, _ = run(capsys, "data", "fetch", "mnist", "--root", str(tmp_path))
    assert code == 0
    assert "nothing is missing" in out


@pytest.mark.real_data
def test_the_real_data_root_checks_out(data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "data", "check", "phasemnist", "--root", str(data_root))
    assert code == 0
    assert out.count("ok: ") == 4


def test_run_in_an_empty_folder_then_again_then_results(tmp_path: Path) -> None:
    first = start("run", "recipe=quickstart", *TINY, at=tmp_path)
    assert first.returncode == 0, first.stderr
    for words in (
        "test accuracy",
        "claimed ε",
        "tight ε",
        "ε of an image",
        "derived",
        "record.json",
    ):
        assert words in first.stdout
    (hydra,) = (tmp_path / "results" / "runs" / "quickstart").glob("*/.hydra")
    assert {path.name for path in hydra.iterdir()} == {
        *("config.yaml", "hydra.yaml", "overrides.yaml")
    }
    again = start("run", "recipe=quickstart", *TINY, at=tmp_path)
    assert "done before" in again.stdout
    shown = start("results", "recipe=quickstart", "--format", "json", at=tmp_path)
    assert len(json.loads(shown.stdout)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"results"}


def test_a_sweep_makes_one_folder_a_job_and_goes_past_a_failure(tmp_path: Path) -> None:
    sweep = ["recipe=quickstart", *TINY, "seed=1,2", "algorithm.max_grad_norm=1,0"]
    done = start("run", "-m", "launcher=joblib", *sweep, at=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("algorithm.max_grad_norm=0.0: must lie in 1e-12 to 1e+12") == 2, (
        done.stderr
    )
    assert "Traceback" not in done.stderr
    records = list((tmp_path / "results" / "runs" / "quickstart").glob("*/record.json"))
    assert sorted(json.loads(path.read_text())["seed"] for path in records) == [1, 2]
    assert not (tmp_path / "results" / "records.csv").exists()
    start("results", "--write", at=tmp_path)
    assert len((tmp_path / "results" / "records.csv").read_text().splitlines()) == 3


def test_a_missing_file_without_a_network_is_one_sentence(tmp_path: Path) -> None:
    write_mini_mnist(tmp_path / "root")
    (tmp_path / "root" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    words = [
        "recipe=mnist",
        "dataset.mirror=http://127.0.0.1:9/",
        f"paths.data={tmp_path / 'root'}",
    ]
    done = start("run", *words, at=tmp_path)
    assert done.returncode == 2
    assert "lacks t10k-labels-idx1-ubyte.gz" in done.stderr
    assert "zdp-bench data fetch mnist" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_that_is_ours_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli.COMMANDS["list"], "run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["list"])
