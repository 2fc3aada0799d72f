"""The command line as a person meets it: words, mistakes, secrets and memory."""

import argparse
import csv
import errno
import gc
import io
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.conftest import write_mini_mnist
from tests.drivers import ROOT, python, start
from tests.test_records import record, save
from zdp_bench import cli
from zdp_bench.cli.commands import COMMANDS, GROUPS
from zdp_bench.cli.parser import build_parser, parse_arguments
from zdp_bench.errors import UserError, print_message
from zdp_bench.training.interrupts import Stopped, explain

TINY = ["trainer.epochs=1", "trainer.sample_rate=0.2", "model.hidden=[4]", "threads=1"]
TINY += ["accountant=gdp_clt"]  # the quickest


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command in this process: exit code, standard output and error."""
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def leave(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence with which a command line leaves."""
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("zdp-bench: ")
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    "module",
    ["zdp_bench.cli", "zdp_bench.cli.parser", "zdp_bench.training.interrupts", "rich.table"],
)
def test_ctrl_c_while_a_command_begins_prints_no_traceback(module: str) -> None:
    """It did in the first third of a second, before the command was known."""
    interrupt = (
        "import importlib.abc, os, runpy, signal, sys\n"
        # A job in the background ignores it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupting(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "sys.argv[1:] = ['list', 'tasks']\n"
        "runpy.run_module('zdp_bench', run_name='__main__')"
    )
    ended = python("-c", interrupt, leaves=130)
    assert (ended.stdout, ended.stderr) == ("", "zdp-bench: interrupted.\n")


def test_the_installed_command_is_that_which_ends_quietly() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"zdp-bench": "zdp_bench.__main__:main"}


def test_ctrl_c_while_a_command_ends_prints_no_traceback() -> None:
    """Libraries take a second to shut down, after a sweep for one."""
    ending = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    command = "import sys; sys.argv[1:] = ['data', 'cache']; import zdp_bench.cli as c; c.main()"
    assert python("-c", f"{ending}; {command}").stderr == ""


LIGHT = """
import sys
import zdp_bench, zdp_bench.cli
def command(*words, code=(None, 0)):
    try:
        zdp_bench.cli.main(list(words))
    except SystemExit as left:
        assert left.code in code, words
command("--help")
assert not {"torch", "hydra", "pandas", "rich", "numpy", "yaml"} & set(sys.modules)
command("epsilon", "--sigma", "1", "--sample-rate", "0.1", "--steps", "3")
command("run", "recipe=quickstart", "optimzer.lr=1", code=(2,))
import zdp_bench.report.results, zdp_bench.training.spending  # of `results` and `budget`
command("list")
assert not {"torch", "sklearn", "skimage"} & set(sys.modules)
command("validate", "recipe=quickstart")
assert not {"torch._dynamo", "sklearn"} & set(sys.modules)
command("export", "quickstart", "--to", "model")
command("verify", "model")
command("predict", "model", "inputs.npy", "--out", "outputs.npy")
assert "torch" in sys.modules
assert "torch._dynamo" not in sys.modules
"""


def test_commands_import_no_more_than_they_need(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing torch takes longer than all else of a command, its compiler as long again."""
    assert run(capsys, "run", "recipe=quickstart", *TINY)[0] == 0
    np.save("inputs.npy", np.ones((1, 8, 8), dtype=np.complex64))
    assert "reproduce" in python("-c", LIGHT, at=here).stdout


@pytest.mark.parametrize(("verb", "collects"), [("list", False), ("data", True)])
def test_a_command_that_only_reads_does_without_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch, verb: str, collects: bool
) -> None:
    states = []

    def run_nothing(_: object) -> int:
        states.append(gc.isenabled())
        return 0

    monkeypatch.setattr(COMMANDS[verb], "run", run_nothing)
    with pytest.raises(SystemExit):
        cli.main([verb])
    assert states == [collects]
    assert gc.isenabled()


def test_on_a_terminal_the_first_word_comes_at_once(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    words = [sys.executable, "-m", "zdp_bench", "run", "recipe=quickstart"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=its, stderr=its) as process:
        output = os.read(ours, 100).decode()
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        process.kill()
    os.close(ours)
    os.close(its)
    assert output.startswith("zdp-bench: run recipe=quickstart ...")
    assert "libtorch" not in loaded


# (command line, part of the sentence)
MISTAKES = [
    ("rnu", "Did you mean 'run'?"),
    ("figure", "`zdp-bench figure` needs PAPER/figN, or --runs"),
    ("results --format xml", "--format 'xml'"),
    ("results --colums seed", "'--colums'"),
    ("validate recipe=quickstart trainer.lr_batch=5", "'trainer.lr_batch'"),
    ("reproduce zeta_dp_2021/1 --seeds x", "--seeds: "),
    ("run receipe=quickstart", "`zdp-bench list recipes`"),
    ("validate recipe=quickstart paths.results=pyproject.toml/x", "pyproject.toml/x: Not a"),
    ("run recipe=quickstart model=/", "model '/' is not known. The nearest of "),
    ("validate recipe=quickstart launcher=joblib", "sweep with `zdp-bench run -m`"),
    ("reproduce zeta_dp_2021/1 launcher=joblib", "use --launcher NAME"),
    ("reproduce zeta_dp_2021/1 seed=1,2", "use --seeds N"),
    ("reproduce zeta_dp_2021/1 paths={results:b}", "set each key by itself, such as paths.data"),
    ("reproduce threads=1 zeta_dp_2021/99 --plan", "'zeta_dp_2021/99'"),
    ("reproduce zeta_dp_2021/1 trainer.epochs=1", "trainer.epochs: "),
    ("reproduce zeta_dp_2021/1 recipe=quickstart", "recipe: "),
    ("reproduce zeta_dp_2021/1 seed=3", "--seeds N"),
    ("reproduce --results A", "write paths.results=..."),
    ("run recipe=quickstart seed=1 seed=2", "seed=1 and seed=2"),
    ("run quickstart", "write recipe=quickstart"),
    ("run recipe=quickstart --optimizer.lr=1", "write optimizer.lr=1"),
    ("run recipe=quickstart.yaml", "file not found"),
    ("run -m recipe=quickstart seed=1,2 hydra/sweeper=optuna", "has no effect here"),
    ("validate recipe=quickstart claims.table=zeta_dp_2021/99", "claims.table 'zeta_dp_2021/99'"),
    ("validate recipe=dp_dfa_fig4_fashion algorithm.noise_multiplier=3", "claims.table=null."),
    ("run -m recipe=quickstart hydra.sweep.dir=x", "has no effect here"),
    ("compare nothing nothing", "nothing: "),
    ("results recipe=quickstrat", "recipe=quickstrat: none of "),
    ("budget --delta 2", "--delta=2.0: "),
    ("data check mnsit", "Did you mean 'mnist'?"),
    ("data fetch", "needs a data set"),
    ("data check nowhere", "dataset 'nowhere'"),
    ("data cache fashion_mnist --delete", "all data sets share the cache"),  # deleted all of it
    ("data show mnist --delete", "--delete: only `zdp-bench data cache` deletes"),
    ("data cache --format json", "--format json: only `zdp-bench data show`"),
    ("data check recipe=quickstart --format json", "--format json: only `zdp-bench data show`"),
    ("data cache --root data", "--root data: the cache is in the user's cache folder"),
    ("data check ./docs --root data", "--root data: docs is your own data"),
    ("epsilon --delta 1e-6", "--delta alone is not enough: add --sigma"),
    ("epsilon --sampling full", "--sampling alone is not enough: add --sigma"),
    ("epsilon --results out", "--results out: needs --write"),
    ("epsilon --sigma 1 --sample-rate 0.1 --steps 9 --write", "are for the papers' ε"),
    ("epsilon --sigma 1 --sample-rate 0.1 --steps 9 --results out", "are for the papers' ε"),
    ("table --write --format json", "--format json: all tables are written, not printed"),
    ("results --descending", "--descending needs --sort COLUMN"),
    ("results --by seed --descending", "--descending needs --sort COLUMN"),
    ("new recipe true", "recipe=true would be read as a value"),
    ("new dataset nan", "dataset=nan would be read as a value"),
    ("results paths.results=a", "write --results a"),
    ("table paths.results=a", "write --results a"),
    ("table ++paths.results=a", "write --results a"),
    ("reproduce cost ++paths.results=pyproject.toml/x", "pyproject.toml/x: Not a"),
    ("budget mnits", "'mnits'"),
    ("list recipes chset", "'chset'"),
    ("list mri cnn", "mri cnn: give one word, or a kind and a word"),
    ("help nonsense", "verb 'nonsense' is not known"),
    ("data check recipe=quickstart paths.data=a --root b", "paths.data sets the data root too"),
    ("table zeta_dp_2021/11", "Did you mean 'zeta_dp_2021/1'?"),
    ("run -m recipe=quickstart --show-config", "leave -m out"),
    ("run recipe=chest", "Did you mean 'chest_xray_"),
    ("run recipe=quickstart device=gpu", "device=gpu: "),
    ("run recipe=mri_recon seed=2 paths.data=a.b", "use dataset=kspace_phantom dataset.patients="),
    ("run recipe=quickstart dataset=MNIST", "Did you mean 'mnist'?"),
    ("validate recipe=quickstart model=lenet5", "8×8"),
    ("reproduce zeta_dp_2021/6 --plan", "no recipe fills it"),
    ("run recipe=quickstart lr=0.1", "Did you mean 'optimizer.lr'?"),
    ("run recipe=quickstart -m seed=1,2 hydra.launcher._target_=a.b", "choose what runs by name"),
    ("run recipe=quickstart -m seed=range(1,0)", "this sweep has no jobs"),
    ("run recipe=quickstart paths.results=", "paths.results=: "),
    ("reproduce cost --plan paths.results=", "paths.results=: "),
    ("reproduce cost --plan paths.results=null", "paths.results=null: "),
    ("reproduce cost --plan paths.results=[a]", "paths.results=['a']: "),
    ("data check recipe=quickstart recipe=phasemnist", "recipe=quickstart and recipe=phasemnist"),
    ("results --results=~no_such_person/runs", "there is no such home folder"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistakes_end_in_one_sentence_and_2(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert message in leave(line.split(), capsys)


@pytest.mark.parametrize(
    "line", ["report --output {}.html", "results --results {}", "data check {}", "verify {}"]
)
def test_a_name_that_is_too_long_is_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    save(here / "results", record("a"))
    message = leave(line.format("n" * 300).split(), capsys)
    assert message.endswith("the name is too long for the file system; choose a shorter one.\n")


def test_an_error_names_the_file_and_not_what_is_written_before_it() -> None:
    partial = "a/.mine.yaml.0123456789abcdef.partial"
    error = OSError(errno.EROFS, "Read-only file system", partial)
    assert str(explain(error)).startswith("a/mine.yaml: Read-only file system. ")


EMPTY = [
    ("results", "zdp-bench run recipe=quickstart"),
    ("results recipe=quickstart metric=accuracy --by seed --sort seed", "contains no runs"),
    ("budget", "contains no runs"),
    ("budget --results nowhere", "nowhere: folder not found"),
    ("report", "contains no runs"),
    ("figure --runs --x seed --y accuracy", "contains no runs"),
    ("figure cost", "Create it with `zdp-bench table cost"),
    ("table faceoff", "`zdp-bench reproduce faceoff` makes missing runs"),
    ("export quickstart --to out", "no finished run with weights"),
    ("predict out in.npy --out o.npy", "out"),
]


@pytest.mark.parametrize(("line", "message"), EMPTY, ids=[line for line, _ in EMPTY])
def test_nothing_to_show_is_no_success(
    here: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert message in leave(line.split(), capsys)
    assert not list(here.rglob("*"))


@pytest.mark.parametrize(
    ("line", "says"), [("", "run a recipe:"), ("help", "run a recipe:"), ("help run", "-m, ")]
)
def test_help_is_there_for_whoever_asks(
    capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    code, out, _ = run(capsys, *line.split())
    assert code == 0
    assert says in out


def test_the_papers_epsilon_are_written_where_asked_only(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zdp_bench.report.epsilon.read_quoted", list)
    run(capsys, "epsilon")
    assert not (here / "results").exists()
    run(capsys, "epsilon", "--write")
    assert (here / "results/tables/epsilon.md").is_file()


def test_every_verb_and_every_option_says_what_it_is() -> None:
    actions = build_parser()._actions
    (verbs,) = (action for action in actions if isinstance(action, argparse._SubParsersAction))
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
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZDP_DATA", "")
    code, out, _ = run(capsys, "run", "--show-config", "recipe=quickstart", "optimizer.lr=0.25")
    assert code == 0
    shown = yaml.safe_load(out)
    assert (shown["recipe"], shown["optimizer"]["lr"]) == ("quickstart", 0.25)
    assert not {"hydra", "launcher"} & set(shown)
    assert shown["paths"]["data"] == "~/.cache/zdp-bench"  # as if ZDP_DATA were not set
    replaced = ["recipe=quickstart", "algorithm=sgd", "privacy.max_epsilon=null"]
    shown = yaml.safe_load(run(capsys, "run", "--show-config", *replaced)[1])
    assert shown["algorithm"] == {"name": "sgd"}  # without the recipe's options of zeta_dp_sgd
    assert not list(here.iterdir())


def test_everything_that_is_listed_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", "--format", "json")
    assert code == 0
    assert not [line for line in json.loads(out) if not line["what"]]


@pytest.mark.parametrize("verb", ["list", "results", "table zeta_dp_2021/1"])
def test_every_table_has_every_form(
    capsys: pytest.CaptureFixture[str], here: Path, verb: str
) -> None:
    if verb == "results":
        save(here / "results", record())
    shown = [run(capsys, *verb.split(), "--format", form) for form in ("md", "csv", "json")]
    assert [code for code, _, _ in shown] == [0, 0, 0]
    page, table, lines = (out for _, out, _ in shown)
    assert page.startswith(("|", "#"))
    assert len({len(row) for row in csv.reader(io.StringIO(table))}) == 1
    assert isinstance(json.loads(lines), list)


def test_the_data_root_is_shown_and_damaged_files_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mini_mnist(tmp_path)
    code, out, _ = run(capsys, "data", "--root", str(tmp_path))
    assert (code, "missing" in out, "bundled" in out) == (0, True, True)
    code, _, err = run(capsys, "data", "check", "mnist", "--root", str(tmp_path))
    assert (code, err.count("were expected")) == (2, 4)
    code, out, _ = run(capsys, "data", "fetch", "mnist", "--root", str(tmp_path))
    assert (code, "nothing is missing" in out) == (0, True)


def test_a_data_sets_name_is_not_a_file_of_the_working_folder(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a data root, its folders were checked as the user's own data, and passed."""
    write_mini_mnist(here / "root")
    (here / "mnist").mkdir()
    code, _, err = run(capsys, "data", "check", "mnist", "--root", str(here / "root"))
    assert (code, err.count("were expected")) == (2, 4)
    code, _, err = run(capsys, "data", "check", "./mnist")
    assert "contains no file in a class folder" in err


@pytest.mark.real_data
def test_the_real_data_root_checks_out(data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "data", "check", "phasemnist", "--root", str(data_root))
    assert code == 0
    assert "mnist: 4 files checked, 0 refused" in out  # phasemnist reads them


def test_run_in_an_empty_folder_then_again_then_results(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "run", "recipe=quickstart", *TINY)
    assert code == 0, err
    parts = ("test accuracy", "claimed ε", "tight ε", "ε per image", "derived", "record.json")
    assert not [words for words in parts if words not in out]
    assert "done before" in run(capsys, "run", "recipe=quickstart", *TINY)[1]
    shown = run(capsys, "results", "recipe=quickstart", "--format", "json")[1]
    assert len(json.loads(shown)) == 1
    assert {path.name for path in here.iterdir()} == {"results"}


def test_a_sweep_makes_one_folder_a_job_and_goes_past_a_failure(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["recipe=quickstart", *TINY, "seed=1,2", "algorithm.max_grad_norm=1,0"]
    code, out, err = run(capsys, "run", "-m", *sweep)
    assert code == 2
    assert out.count("seed=1 algorithm.max_grad_norm=1: accuracy 0.") == 1
    assert "Tight ε of these 2 runs on phase_digits together: " in " ".join(out.split())
    assert err.count("algorithm.max_grad_norm=0: must be greater than") == 2, err
    assert "Traceback" not in err
    records = list((here / "results" / "runs" / "quickstart").glob("*/record.json"))
    assert sorted(json.loads(path.read_text())["seed"] for path in records) == [1, 2]
    listed = here / "results" / "records.csv"
    assert len(listed.read_text().splitlines()) == 3
    listed.unlink()
    run(capsys, "run", *sweep[:-2], "seed=1", "algorithm.max_grad_norm=1")  # found
    assert len(listed.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"recipe\n1\n",
        b"train_seconds\nx\n",
        b"recipe,dataset,train_seconds\nquickstart,phase_digits,inf\n",
        b"recipe,dataset,train_seconds\nquickstart,phase_digits,-5\n",
    ],
)
def test_recipes_are_listed_without_times_that_cannot_be_read(
    here: Path,
    content: bytes,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (here / "results").mkdir()
    (here / "results" / "records.csv").write_bytes(content)
    code, out, _ = run(capsys, "list", "recipes")
    assert code == 0
    assert "quickstart" in out
    assert re.search(
        r"records\.csv: .* The times in it are not shown\.$", caplog.text, re.MULTILINE
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize(
    "words",
    [
        ["run", "recipe=quickstart", *TINY],
        ["list", "recipes"],
        ["epsilon", "--sigma", "1", "--sample-rate", "0.1", "--steps", "3"],
    ],
)
def test_an_output_on_a_full_disk_is_one_sentence(words: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = start(lambda: cli.main(words), full.fileno(), at=tmp_path).wait()
    assert done.returncode == 2
    assert "cannot be written: No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize(
    ("words", "leaves"), [("run", 75), ("list nope", 2), ("validate recipe=nope", 2)]
)
def test_a_message_on_a_full_disk_keeps_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, words: str, leaves: int
) -> None:
    """A scheduler queues a job again that ends with 75. It ended with 1."""

    def stop(_: object) -> int:
        raise Stopped(signal.SIGTERM)

    def begin() -> None:
        os.dup2(full.fileno(), 2)
        cli.main(words.split())

    monkeypatch.setattr(cli.COMMANDS["run"], "run", stop)
    with open("/dev/full", "w") as full:
        assert start(begin).wait().returncode == leaves


def test_every_message_to_standard_error_goes_through_one_function() -> None:
    sources = (ROOT / "zdp_bench").rglob("*.py")
    printing = [path.name for path in sources if "file=sys.stderr" in path.read_text("utf-8")]
    assert printing == ["errors.py"]


class WithoutFile(io.StringIO):
    """A stream as of a notebook, whose disk is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_message_that_cannot_be_printed_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, WithoutFile(), None):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            print_message("is lost")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [["run", "recipe=quickstart"], ["results"], ["list", "recipes"]])
def test_a_working_folder_that_is_gone_is_one_sentence(words: list[str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()

    def begin() -> None:
        gone.rmdir()
        cli.main(words)

    done = start(begin, at=gone).wait()
    assert done.returncode == 2
    assert "the working folder no longer exists" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_error_that_is_ours_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli.COMMANDS["list"], "run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["list"])


RUN = ["run", "recipe=quickstart"]


@pytest.mark.parametrize("key", ["seed", "device", "algorithm", "paths.results"])
def test_a_secret_of_the_environment_is_in_no_sentence(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    (here / "hunter2").touch()
    monkeypatch.setenv("SECRET", "hunter2")
    message = leave([*RUN, f"{key}=${{oc.env:SECRET}}"], capsys)
    assert "hunter2" not in message
    assert "${oc.env:SECRET}" in message


@pytest.mark.parametrize("words", [["data", "check"], ["run"]], ids=" ".join)
def test_a_secret_is_hidden_in_each_place_and_with_its_line_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setenv("SECRET", "hun\nter2")
    message = leave([*words, "seed=${oc.env:SECRET}", "recipe=quickstart"], capsys)
    assert "ter2" not in message
    assert "seed=${oc.env:SECRET}" in message


def test_the_number_of_a_job_is_not_hidden(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`optimizer.lr=-1.51` was shown as -${oc.env:JOB}.5${oc.env:JOB}."""
    monkeypatch.setenv("JOB", "1")
    assert "lr=-1.51: " in leave([*RUN, "seed=${oc.env:JOB}", "optimizer.lr=-1.51"], capsys)


def test_a_reference_in_the_results_folder_is_resolved_by_reproduce(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs went to the folder, and its tables to one named `${oc.env:AWAY}`."""
    monkeypatch.setenv("AWAY", "pyproject.toml")
    words = ["reproduce", "cost", "--plan", "paths.results=${oc.env:AWAY}/x"]
    assert "/x: Not a directory" in leave(words, capsys)


def test_a_home_folder_is_found_after_an_equals_sign(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_arguments(["results", "--results=~/a"]).results == tmp_path / "a"
    assert parse_arguments(["figure", "--out=~/a.png"]).out == tmp_path / "a.png"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_failure_without_a_reader_is_no_success(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`zdp-bench verify MODEL | head -1` passed in a script with pipefail."""
    reader, writer = os.pipe()
    os.close(reader)

    def write_much(_: object) -> int:
        print("a line\n" * 10_000)
        raise UserError("is wrong")

    monkeypatch.setattr(COMMANDS["list"], "run", write_much)
    with open(writer, "w", buffering=1) as broken, monkeypatch.context() as patch:
        patch.setattr(sys, stream, broken)
        with pytest.raises(SystemExit) as left:
            cli.main(["list"])
    assert left.value.code == {"stdout": 141, "stderr": 2}[stream]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
@pytest.mark.usefixtures("here")
def test_too_little_memory_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("zdp_bench.experiments.sweep.carry_out", refuse)
    monkeypatch.setattr(COMMANDS["list"], "run", refuse)
    assert "out of memory" in leave(RUN, capsys)
    assert "out of memory" in leave(["list"], capsys)


@contextmanager
def limited(more: int) -> Iterator[None]:
    """Let this process take so many bytes more, and no others, as `ulimit -v` does."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_model_that_memory_does_not_hold_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = [*RUN, "model.hidden=[40000,3000]", f"paths.results={tmp_path}"]
    with limited(2**28):
        message = leave(large, capsys)
    assert "model=complex_mlp: needs more memory than is available (" in message


def test_list_searches_every_kind_and_says_data_and_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "list", "mnist", "--format", "csv")
    entries = {tuple(row[:2]): row[2] for row in csv.reader(io.StringIO(out))}
    assert code == 0
    assert {("datasets", "mnist"), ("recipes", "mnist")} < set(entries)
    assert re.search(r"\[mnist, .*(min|s)\]$", entries["recipes", "mnist"])
    assert run(capsys, "list", "recipe", "mnist") == run(capsys, "list", "recipes", "mnist")
