"""`zdp-bench new`: each start runs as it was written."""

import importlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from tests.drivers import ROOT, python, start
from tests.test_cli import run as command
from zdp_bench import cli
from zdp_bench.cli.commands.new import KINDS, write_template
from zdp_bench.cli.parser import parse_arguments
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.registry import _load_others, _load_ours, installed, of_extras, register


@pytest.mark.usefixtures("here")
def test_the_recipe_validates_and_is_private(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "new", "recipe", "mine")
    assert code == 0
    assert "zdp-bench validate recipe=./mine.yaml" in out
    report = validate(configured(["recipe=./mine.yaml"]), trial=False)
    assert report.privacy["epsilon_tight"] == pytest.approx(3, rel=0.01)
    ConfigStore.instance().repo["recipe"].pop("mine.yaml")


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_names_commands_that_exist(kind: str, tmp_path: Path) -> None:
    paths = write_template(kind, "mine", tmp_path)
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    for words in re.findall(r"^#? {3,}zdp-bench (.*?)(?:  .*)?$", text, flags=re.MULTILINE):
        parse_arguments(words.split())


@pytest.fixture
def plug_in(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs a command in a fork that finds the plug-in `mine`."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        def begin() -> None:
            logging.root.handlers.clear()  # pytest's
            sys.path.insert(0, str(tmp_path / "site"))
            importlib.invalidate_caches()
            for read in (installed, of_extras, _load_ours, _load_others):
                read.cache_clear()
            cli.main(list(words))

        done = start(begin, at=tmp_path).wait()
        assert done.returncode == 0, done.stderr
        return done

    return run


TINY_RUN = ["run", "recipe=quickstart", "trainer.epochs=1", "model.hidden=[4]"]


def test_the_dataset_trains_as_it_is(tmp_path: Path, plug_in: Callable[..., Any]) -> None:
    files = write_template("dataset", "mine", tmp_path)
    assert [path.name for path in files] == ["pyproject.toml", "zdp_mine.py"]
    assert all("NAME" not in path.read_text() for path in files)
    install(tmp_path / "site", files[1].read_text())
    assert "tight ε" in plug_in(*TINY_RUN, "dataset=mine").stdout


@pytest.mark.slow
def test_the_algorithm_trains_as_it_is_and_a_change_of_it_is_another_run(
    tmp_path: Path, plug_in: Callable[..., Any]
) -> None:
    _, module = write_template("algorithm", "mine", tmp_path)
    source = install(tmp_path / "site", module.read_text())
    words = [*TINY_RUN, "algorithm=mine"]
    words += ["algorithm.noise_multiplier=1.5", "algorithm.max_grad_norm=1"]
    plug_in(*words)
    listed = json.loads(plug_in("list", "algorithms", "--format", "json").stdout)
    (line,) = (line for line in listed if line["name"] == "mine")
    assert line["what"].endswith("(plug-in of zdp_mine)")
    records = tmp_path / "results/runs/quickstart"
    plug_in(*words)
    assert len(list(records.glob("*/record.json"))) == 1  # done before
    source.write_text(source.read_text() + "\n# changed\n")
    plug_in(*words)
    assert len(list(records.glob("*/record.json"))) == 2
    for home in records.glob("*/checkpoint.pt"):
        plug_in("export", str(home.parent), "--to", f"model-{home.parent.name}")
        plug_in("verify", f"model-{home.parent.name}")


@pytest.mark.parametrize(("source", "message"), [(None, "no longer exists"), ("1 / 0", "Zero")])
def test_a_broken_plug_in_is_named_once_and_commands_run_without_it(
    tmp_path: Path, plug_in: Callable[..., Any], source: str | None, message: str
) -> None:
    module = install(tmp_path / "site", source or "")
    if source is None:
        module.unlink()
    warned = plug_in("list", "algorithms").stderr
    assert warned.count("plug-in 'mine'") == 1
    assert message in warned


CLASHING = """
import zdp_optimizer  # which must stay registered
from zdp_bench.registry import register
register("model", "before_the_clash")(lambda shape, outputs: None)
register("model", "real_mlp")(lambda shape, outputs: None)
"""
OPTIMIZER = """
import torch
from zdp_bench.registry import register
@register("optimizer", "mine")
class Mine(torch.optim.SGD): pass
"""
COMMAND = """
from zdp_bench import registry
registry.lookup("dataset", "phase_digits")  # so the plug-ins were loaded before zdp-bench's models
assert "before_the_clash" not in registry.names("model")
from zdp_bench import cli
cli.main(["run", "--show-config", "recipe=quickstart", "optimizer=mine"])
"""


def test_a_package_with_a_name_of_ours_is_skipped_by_every_command(tmp_path: Path) -> None:
    """A later zdp-bench may add the name. Every command ended with a traceback."""
    install(tmp_path, CLASHING, "zdp_clashing")
    install(tmp_path, OPTIMIZER, "zdp_optimizer")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python("-c", COMMAND, PYTHONPATH=paths)
    assert "optimizer:\n  name: mine\n  lr: 0.5" in done.stdout
    assert "'clashing' (zdp_clashing) is skipped" in done.stderr
    assert "model 'real_mlp' is already registered by zdp_bench." in done.stderr


BROKEN = """
import zdp_pack.good, zdp_pack.partial
"""
GOOD = """
from zdp_bench.registry import register
register("model", "of_a_good_one")(lambda shape, outputs: None)
"""
PARTIAL = GOOD.replace("of_a_good_one", "of_a_failed_one") + "1 / 0"
NAMES = """
from zdp_bench import registry
print([name for name in registry.names("model") if name.startswith("of_")])
"""
DIGEST = """
from zdp_bench import registry
print(registry.foreign_packages([("model", "real_mlp")]))
"""


def test_a_broken_plug_in_takes_no_other_of_its_package_with_it(tmp_path: Path) -> None:
    """What a good module registered was deleted, because a broken one had imported it first."""
    sources = {"__init__": "", "broken": BROKEN, "good": GOOD, "partial": PARTIAL}
    install(tmp_path, "", "zdp_pack").unlink()
    (tmp_path / "zdp_pack").mkdir()
    for module, source in sources.items():
        (tmp_path / "zdp_pack" / f"{module}.py").write_text(source)
    entries = [f"{module} = zdp_pack.{module}" for module in ("broken", "good", "partial")]
    listing = tmp_path / "zdp_pack-0.1.0.dist-info" / "entry_points.txt"
    listing.write_text("\n".join(["[zdp_bench.plugins]", *entries, ""]))
    done = python("-c", NAMES, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.stdout == "['of_a_good_one']\n"
    for module in ("broken", "partial"):
        assert f"'{module}' (zdp_pack.{module}) is skipped" in done.stderr


def test_a_plug_in_whose_package_raises_is_skipped(tmp_path: Path) -> None:
    """Every command ended with the traceback, because a look for the module imports its package."""
    install(tmp_path, "", "zdp_raising").unlink()
    (tmp_path / "zdp_raising").mkdir()
    (tmp_path / "zdp_raising" / "__init__.py").write_text("1 / 0")
    listing = tmp_path / "zdp_raising-0.1.0.dist-info" / "entry_points.txt"
    listing.write_text("[zdp_bench.plugins]\nraising = zdp_raising.models\n")
    done = python("-c", NAMES, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert "'raising' (zdp_raising.models) is skipped: ZeroDivisionError" in done.stderr


def test_a_package_that_could_not_be_imported_is_not_in_the_digest(tmp_path: Path) -> None:
    """Every run beside such a plug-in ended with a KeyError."""
    install(tmp_path, "1 / 0", "zdp_unloaded")
    done = python("-c", DIGEST, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.stdout == "()\n"


@pytest.mark.parametrize(
    ("kind", "name"), [("dataset", "folder"), ("optimizer", "sgd"), ("scheduler", "step_lr")]
)
def test_a_name_of_an_extra_or_of_torch_is_taken_too(kind: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"by (zdp_bench\.extras|torch\.optim)"):
        register(kind, name)(lambda: None)


def install(site: Path, source: str, name: str = "zdp_mine") -> Path:
    """Write what pip does, an entry point beside the module; return the module."""
    information = site / f"{name}-0.1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    entry = f"{name.removeprefix('zdp_')} = {name}"
    (information / "entry_points.txt").write_text(f"[zdp_bench.plugins]\n{entry}\n")
    (site / f"{name}.py").write_text(source)
    return site / f"{name}.py"


def test_a_template_is_written_in_any_locale(tmp_path: Path) -> None:
    """In others than UTF-8, an empty module was left, and a traceback shown."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    python("-m", "zdp_bench", "new", "algorithm", "foo", at=tmp_path, **locale)
    written = (tmp_path / "zdp_foo" / "zdp_foo.py").read_bytes()
    write_template("algorithm", "foo", tmp_path / "here")
    assert written == (tmp_path / "here" / "zdp_foo" / "zdp_foo.py").read_bytes()


def test_names_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for kind, taken in zip(KINDS, ("quickstart", "mnist", "dp_sgd"), strict=True):
        with pytest.raises(UserError, match=f"{kind} '{taken}' exists already"):
            write_template(kind, taken, tmp_path)
    with pytest.raises(UserError, match="cannot be a name"):
        write_template("recipe", "my-recipe", tmp_path)
    for kind in KINDS:
        with pytest.raises(UserError, match="cannot be a name: use at most 100 characters"):
            write_template(kind, "a" * 240, tmp_path)
    for kind in ("dataset", "algorithm"):  # pip would have replaced zdp-bench by it
        with pytest.raises(UserError, match="package 'zdp_bench' exists already"):
            write_template(kind, "bench", tmp_path)
    assert not list(tmp_path.iterdir())
    write_template("recipe", "mine", tmp_path)
    with pytest.raises(UserError, match="exists already"):
        write_template("recipe", "mine", tmp_path)
