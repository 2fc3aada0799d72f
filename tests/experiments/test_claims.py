"""Which cells the recipes' jobs fill: as the recipes are now, and on other data."""

import shlex
import shutil
import textwrap
from pathlib import Path
from typing import Any

import hydra
import pytest

from tests.conftest import compose_anew
from tests.test_records import record, save
from zdp_bench import assets
from zdp_bench.config import check, compose, configured, parse, to_plain
from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.experiments import claims
from zdp_bench.report import papers
from zdp_bench.report.cells import Filling

TABLE = "zeta_dp_2021/1"
TABLES = [name for name in [*papers.available(), *papers.ours()] if papers.recipes_of(name)]
CLAIMED = sorted({recipe for table in TABLES for recipe in papers.recipes_of(table)})


def some_recipes() -> list[Any]:
    """Every recipe: each tenth now, the others at night, because Hydra is slow."""
    every = [*assets.group(assets.RECIPES)]
    slow = {*every} - {*every[::10], "quickstart"}
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in every]


@pytest.mark.parametrize("recipe", some_recipes())
def test_a_job_is_composed_as_hydra_does(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last of each recipe, which differ in all that its sweep chooses."""
    monkeypatch.setattr(hydra, "compose", compose_anew)
    jobs = claims.jobs_of(recipe)
    for job in {jobs[0], jobs[-1]}:
        ours, hydras = claims.compose_job(recipe, job), compose([f"recipe={recipe}", *job])
        assert ours == to_plain(hydras)


def config_of(recipe: str, job: tuple[str, ...]) -> Run:
    return check(claims.compose_job(recipe, job))


def test_epsilon_is_claimed_by_a_papers_accountant() -> None:
    """As the note below every table says; the ∞ of non-private runs may be by any accountant."""
    for recipe in {recipe for table in papers.available() for recipe in papers.recipes_of(table)}:
        jobs = claims.jobs_of(recipe)
        if config_of(recipe, jobs[0]).accountant in ("pld", "rdp", "rdp_wor", "gdp_clt"):
            assert {config_of(recipe, job).algorithm.name for job in jobs} == {"sgd"}, recipe


def test_no_claimed_recipe_depends_on_a_default_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is the same whatever plug-ins and δ `conf/config.yaml` chooses."""

    def digests() -> dict[str, str]:
        firsts = {recipe: config_of(recipe, claims.jobs_of(recipe)[0]) for recipe in CLAIMED}
        return {recipe: experiment_digest(config) for recipe, config in firsts.items()}

    before = digests()
    shutil.copytree(assets.CONF, tmp_path / "conf")
    path = tmp_path / "conf" / "config.yaml"
    others = {"phase_digits": "mnist", "complex_mlp": "real_mlp", "zeta_dp_sgd": "dp_sgd"}
    others |= {": sgd": ": adam", ": rdp": ": pld", ": poisson": ": shuffled", "1.0e-5": "1.0e-6"}
    text = path.read_text().replace("task: classification", "task: segmentation")
    for old, new in others.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    monkeypatch.setattr(assets, "CONF", tmp_path / "conf")
    assert digests() == before


def test_a_record_of_a_data_set_with_other_options_fills_nothing(tmp_path: Path) -> None:
    datasets: list[Any] = [{"name": "fashion_mnist", "old": 1}, {"name": "gone"}]
    datasets += [{"name": "fashion_mnist", "validation_share": 7}]  # below: no table was built
    datasets += [
        {"name": "synthetic_images", "shape": None},
        {"name": 5},
        {"validation_share": 0.1},
    ]
    for seed, dataset in enumerate(datasets):
        save(tmp_path, record("mnist", seed, config={"dataset": dataset}))
    assert not [filling for filling in claims.fillings(TABLE, tmp_path) if filling.substitute]


def test_a_data_set_on_which_a_job_cannot_run_is_left_out() -> None:
    """A table ended with a sentence on privacy.unit, which nobody had typed."""
    composed = to_plain(compose(["recipe=icu_patients"]))
    assert not claims.digests_on([{"name": "mnist"}], composed)  # of a run per example, say


def test_other_data_is_found_by_the_digest_of_the_recipe_with_it(tmp_path: Path) -> None:
    moved = parse(compose(["recipe=mnist", "dataset=fashion_mnist"]))
    more = parse(compose(["recipe=mnist", "dataset=fashion_mnist", "trainer.epochs=1"]))
    for seed, config in enumerate((moved, more)):
        used = {"dataset": config.resolved["dataset"]}
        save(tmp_path, record("mnist", seed, experiment=experiment_digest(config), config=used))
    on = [filling for filling in claims.fillings(TABLE, tmp_path) if filling.substitute]
    assert [(filling.recipe, filling.substitute, filling.digest) for filling in on] == [
        ("mnist", "fashion_mnist", experiment_digest(moved))
    ]


@pytest.mark.parametrize("path", ["/films", "/my films (2)", '/a, size="x", b=c', "null"])
def test_the_command_on_other_data_takes_any_path(path: str) -> None:
    """Options were written as Python shows them, and not as the command line reads them."""
    composed = to_plain(compose(["recipe=quickstart"]))
    used = configured(["recipe=quickstart", "dataset=folder", "dataset.path=x"])
    options = {"path": path, "size": 32}
    dataset = used.resolved["dataset"] | options
    (label,) = claims.digests_on([dataset], composed).values()
    command = Filling("quickstart", (), "row", None, "d" * 64, label).command
    again = configured(shlex.split(command)[2:]).resolved["dataset"]
    assert again | options == again


def test_jobs_are_remembered_until_a_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = claims.jobs_of_table(TABLE)
    monkeypatch.setattr(claims, "claims_of", None)  # which is not asked again
    assert claims.jobs_of_table(TABLE) == first
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("seed: 1")
    monkeypatch.setattr(assets, "RECIPES", tmp_path)
    states = [claims._state_of_code()]
    recipe.write_text("seed: 12")
    states.append(claims._state_of_code())
    assert states[0] != states[1]
    with pytest.raises(TypeError):
        claims.jobs_of_table(TABLE)


@pytest.fixture
def sweeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe that sweeps, with a row of its own for each job."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    body = """
        defaults: [{override /dataset: phase_digits}]
        claims: {table: zeta_dp_2021/1, row: "${algorithm.gradient}"}
        hydra:
          sweeper:
            params: {algorithm.gradient: "wirtinger,autograd", seed: "1,2", model.hidden: "[8]"}
    """
    (recipes / "sweeping.yaml").write_text(textwrap.dedent(body), encoding="utf-8")
    monkeypatch.setattr(assets, "RECIPES", recipes)
    return "sweeping"


def test_a_sweep_fills_a_row_with_each_job(sweeping: str) -> None:
    assert claims.jobs_of(sweeping) == [
        ("algorithm.gradient=wirtinger", "model.hidden=[8]"),
        ("algorithm.gradient=autograd", "model.hidden=[8]"),
    ]
    with pytest.raises(UserError, match=r"zeta_dp_2021/1 .*'sweeping', 'wirtinger'"):
        claims.fillings(TABLE, Path("none"))


def test_the_folds_of_a_recipe_are_not_other_data_to_each_other() -> None:
    folds = [
        f
        for f in claims.fillings("zeta_dp_2021/2", Path(__file__).parents[2] / "results")
        if "ecg_people" in f.recipe
    ]
    assert len(folds) == 20
    assert not any(filling.substitute for filling in folds)
