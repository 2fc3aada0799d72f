"""A recipe is data: nothing in a stranger's file, or in a word, runs a program."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hydra.conf import HydraConf

from tests.test_foreign_files import GROWING, MERGING
from tests.test_words import leave
from zdp_bench import assets
from zdp_bench.config import configured
from zdp_bench.config.adopted import check_recipe
from zdp_bench.config.compose import GROUPS
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.loading import config_of

HYDRA = [field.name for field in fields(HydraConf)]
READ = ("launcher", "sweeper", "verbose")  # of Hydra's keys, those that a word may set
TINY = ["trainer.epochs=1", "trainer.sample_rate=0.2", "model.hidden=[4]", "threads=1"]


class Trap:
    """What leaves a file behind when its pickle is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (self.mark,))


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the callback that loads a pickle, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.pkl").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    return {"_target_": "joblib.load", "filename": str(tmp_path / "w.pkl")}


def refuse(text: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the sentence with which a run of a recipe of this text ends; nothing was made."""
    Path("friend.yaml").write_text(text)
    said = leave(["run", "recipe=./friend.yaml", *(words or TINY)], capsys)
    assert "friend.yaml: " in said
    assert not Path("sprung").exists()
    assert not Path("results").exists()
    return said


@pytest.mark.parametrize("key", HYDRA)
def test_hydras_keys_in_a_recipe_run_nothing(
    key: str, trap: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for node in ({"a": trap}, {"dir": "elsewhere"}, "text", [1], None):
        refuse(yaml.safe_dump({"hydra": {key: node}}), capsys)
    refuse(yaml.safe_dump({f"hydra.{key}": {"a": 1}}), capsys)
    refuse(yaml.safe_dump({"hydra": {"sweeper": {"params": {f"hydra.{key}.a": "1,2"}}}}), capsys)
    refuse(yaml.safe_dump({"defaults": [{f"override /hydra/{key}": "default"}]}), capsys)


@pytest.mark.parametrize("key", HYDRA)
def test_hydras_keys_on_the_command_line_run_nothing(
    key: str, trap: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    node = f"{{a: {{_target_: joblib.load, filename: {trap['filename']}}}}}"
    words = [
        *(f"{mark}hydra.{key}={node}" for mark in ("", "+", "++")),
        *(f"{mark}hydra={{{key}: {node}}}" for mark in ("", "+", "++")),
        *(f"{mark}hydra.{key}.a._target_=joblib.load" for mark in ("", "+", "++")),
        f"+model@hydra.{key}.a=complex_mlp",
        f"+hydra/launcher@hydra.{key}.a=joblib",
    ]
    words += [f"hydra.{key}.a=1", f"+hydra.{key}.a=1", f"~hydra.{key}"] if key not in READ else []
    for word in words:
        for start in (["run"], ["run", "-m", "seed=1,2"], ["validate"]):
            leave([*start, "recipe=quickstart", word, *TINY], capsys)
            assert not Path("sprung").exists(), word
    assert not Path("results").exists()


@pytest.mark.parametrize("group", ["recipe", "launcher", *GROUPS])
def test_a_group_has_a_name_and_no_path(
    group: str, trap: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    evil = Path("evil.yaml").absolute()
    evil.write_text("# @package _global_\n" + yaml.safe_dump({"hydra": {"callbacks": {"a": trap}}}))
    up = "../" * len(assets.CONF.parts) + str(evil.with_suffix(""))[1:]
    for name in (up, f"quickstart,{up}", f"choice({up})", str(evil.with_suffix(""))):
        leave(["run", "-m", "recipe=quickstart", f"{group}={name}", *TINY], capsys)
        assert not Path("sprung").exists()
    params = {"hydra": {"sweeper": {"params": {group: f"{up},"}}}}
    for body in ({"defaults": [{f"override /{group}": up}]}, params):
        refuse(yaml.safe_dump(body), capsys)


NO_DATA = [
    "model: {_target_: os.system}",
    "trainer: {epochs: {_target_: os.system, command: id}}",
    "dataset: [{a: {_args_: [1]}}]",
    "defaults: [quickstart]",
    "defaults: [{recipe: quickstart}]",
    "defaults: [{model: complex_mlp}]",
    "defaults: [{override /model@hydra.callbacks.a: complex_mlp}]",
    "defaults: [{optional /model: complex_mlp}]",
    "defaults: [{override /launcher: slurm}]",
    "defaults: [{override /model: '${oc.env:HOME}'}]",
    "defaults: [{override /model: [complex_mlp]}]",
    "defaults: {hydra/job_logging: default}",
    "launcher: {a: 1}",
    "paths: {results: elsewhere}",
    "sytem: {a: 1}",
    "1: 2",
    "hydra: {sweeper: {params: {recipe: quickstart}}}",
    "hydra: {sweeper: {params: {+seed: '1,2'}}}",
    "hydra: {sweeper: {params: {paths.results: a}}}",
    "hydra: {sweeper: {params: [1]}}",
    *(
        f"claims: {{variant: '{value}'}}"
        for value in (
            "${oc.env:HOME}",
            "a ${ oc.env:HOME,none } b",
            "${oc.decode:1}",
            "${oc.create:{a:1}}",
            "${oc.dict.keys:model}",
            "${hydra:runtime.cwd}",
            "${hydra.runtime.cwd}",
            "${paths.data}",
            "${oc.select:paths.data}",
            '${oc.select:"paths.data"}',
            "${oc.select:${seed}}",
            "${choose:a,{a: ${oc.env:HOME}}}",
            "${.row}",
            "${..paths.data}",
            "${model[name]}",
            "${${seed}}",
            "${mine:1}",
        )
    ),
    "hydra: {sweeper: {params: {claims.variant: '${oc.env:HOME},b'}}}",
    "model: {'${oc.env:HOME}': 1}",
    "model: {a: '" + "${seed}" * 17 + "'}",
    GROWING,
    MERGING,
    "a: [" * 500,
    "model: {hidden: [4], hidden: [8]}",
    "#" * 40_000,
]


@pytest.mark.parametrize("text", NO_DATA, ids=[text[:50] for text in NO_DATA])
def test_what_is_no_data_is_refused_before_it_is_composed(
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "secret"))
    begun = time.process_time()
    assert "secret" not in refuse(text, capsys)
    assert time.process_time() - begun < 5


def test_the_longest_way_to_refer_takes_no_time(tmp_path: Path) -> None:
    chain = [f"'{key}': ['${{model.{key + 1}}}', '${{model.{key + 1}}}']" for key in range(8)]
    path = tmp_path / "friend.yaml"
    path.write_text("model: {" + ", ".join(chain) + ", '8': [" + "1, " * 900 + "]}")
    begun = time.process_time()
    with pytest.raises(UserError, match=r"model\.0"):
        configured([f"recipe={path}"])
    assert time.process_time() - begun < 30


def test_all_our_recipes_would_be_adopted() -> None:
    for path in assets.RECIPES.glob("*.yaml"):
        check_recipe(assets.read_yaml(path))


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "${seed}", "${hydra:runtime.cwd}"])
def test_a_record_refers_to_nothing(value: str) -> None:
    plain = configured(["recipe=quickstart"]).resolved
    assert config_of({"config": plain}).resolved == plain
    for section, key in (("claims", "variant"), ("model", "hidden"), ("task", "_target_")):
        config = {**plain, section: {**plain[section], key: value}}
        with pytest.raises(UserError, match=r"^record\.json: config: "):
            config_of({"config": config})
