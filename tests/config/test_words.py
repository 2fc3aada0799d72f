"""Words and recipe files: each mistake is one sentence, and nothing in them runs a program."""

import pickle
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override

from tests.test_cli import TINY, leave
from tests.test_cli import run as command
from tests.test_foreign_files import GROWING, MERGING
from zdp_bench import assets
from zdp_bench.config import configured
from zdp_bench.config.compose import recipe_body
from zdp_bench.config.schema import GROUPS
from zdp_bench.config.words import check_recipe, parse_words, read_words, write_word
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.loading import config_of

# (overrides of the recipe quickstart, the sentence; ... stands for any words)
MISTAKES = [
    ("recipe=phasemnits", "recipe 'phasemnits' is not known. Did you mean 'phasemnist'?"),
    ("algorithm=zeta_dp_sdg", "algorithm 'zeta_dp_sdg'...Did you mean 'zeta_dp_sgd'"),
    ("algorithm.noise_multiplyer=1", "'algorithm.noise_multiplyer'...'algorithm.noise_multiplier'"),
    ("sed=1", "'sed'...'seed'"),
    ("+launcher.n=1", "+launcher.n=1: has no effect here"),
    ("+trainer.epoch=1", "'trainer.epoch'...'trainer.epochs'"),
    ("+model.widths=[3]", "key 'model.widths' is not known...model.hidden"),
    ("optimizer.learning_rate=1", "optimizer.learning_rate...Did you mean 'optimizer.lr'"),
    ("+optimizer.momentun=1", "optimizer.momentun...Did you mean 'optimizer.momentum'"),
    ("seed=one", "seed=one: "),
    ("execution.callbacks=mine", "execution.callbacks=mine: "),
    ("algorithm.noise=circluar", "algorithm.noise 'circluar'... 'circular'"),
    ("trainer.sampling=poison", "trainer.sampling 'poison'...Did you mean 'poisson'"),
    ("trainer.sample_rate=1.5", "trainer.sample_rate=1.5: "),
    ("trainer.sample_rate=null", "trainer.sample_rate=null: "),
    ("trainer=uniform", "trainer.batch_size=64 with trainer.sample_rate=0.05: ...set the other"),
    ("trainer=uniform trainer.batch_size=null trainer.sample_rate=null", "needs a size, such as"),
    ("trainer.epochs=0", "trainer.epochs=0: "),
    ("privacy.delta=1", "privacy.delta=1.0: "),
    ("privacy.target_epsilon=1 privacy.claimed_epsilon=1", "give only one of them"),
    ("algorithm=sgd privacy.target_epsilon=1", "algorithm=sgd: "),
    (f"seed={2**64}", "must be less than 18446744073709551616"),
    ("trainer.sampling=shuffled trainer.batch_size=8 trainer.sample_rate=null", "have no ε"),
    (
        "algorithm=band_mf algorithm.bands=0",
        "algorithm.bands=0: must be greater than or",
    ),
    ("trainer.sample_rate=1e-300", "must be greater than or equal to 0.000000001"),
    ("algorithm.noise_multiplier=1e-300", "noise_multiplier=1e-300: "),
    ("execution.prefetch=100000000", "must be less than or equal to 1024"),
    ("model=lenet5 model.hidden=[3]", "key 'model.hidden' is not known...model.kernels"),
    ("optimizer=adam optimizer.amsgrad=true", "write +optimizer.amsgrad=... to add"),
    ("privacy.secure=maybe", "privacy.secure=maybe: "),
    ("trainer.=3", "'trainer.=3' is not an override: write key=value"),
    ("[3", "'[3' is not an override: write key=value"),
    ("recipe=", "recipe '' is not known."),
    ("+trainer.epochs=3", "An item is already at 'trainer.epochs'"),
    ("seed=1,2", "seed=1,2: has several values; give one, or sweep with `zdp-bench run -m`"),
    ("launcher=joblib", "sweep with `zdp-bench run -m`"),
    ("federated={local_steps:2}", "set each key by itself, such as federated.nodes=VALUE"),
    ("claims={row:1e3}", "set each key by itself"),
    ("privacy=[]", "set each key by itself"),
    ("+model.hidden.x=3", "+model.hidden.x=3: Index 'x' (str) is not an int."),
    ("model.hidden={a:1}", "model.hidden={a:1}: Cannot merge"),
    ("+scheduler=step_lr", "a run has one scheduler; write scheduler=NAME"),
    ("=adam", "'=adam' is not an override: write key=value"),
    ("algorithm=3", "algorithm '3' is not known. ...Allowed: ...dp_sgd"),
    ("algorithm=[dp_sgd,sgd]", "a run has one algorithm; write algorithm=NAME"),
    ("representation=[scattering,patches]", "For several side by side, add representation=joined"),
    ("claims.row='abc", "'claims.row='abc' is not an override: ...close every"),
    ("claims.row=a=b", "'claims.row=a=b' is not an override: ...in quotes within"),
    ("name=Müller", "is not an override: ...with anything but A-Z, a-z, 0-9...in quotes within"),
    ("tags=[ä]", "is not an override: ...with anything but A-Z, a-z, 0-9...in quotes within"),
    ("~seed", "seed has no value: set it"),
    ("~algorithm", "algorithm.name is missing: choose one with algorithm=NAME"),
    ("~threads", "~threads: there is no such key, or it is null already"),
    ("~seed=7", "The value of 'seed' is 0 and not 7"),
    ("seed=${sed}", "seed: Interpolation key 'sed' not found"),
    ("trainer.epochs=???", "trainer.epochs has no value"),
    ("model.name=null", "model.name is missing"),
    ("recipe=phasemnist algorithm=sgd algorithm.noise=circular", "key 'algorithm.noise'"),
    ("federated.min_nodes=3", "federated.min_nodes: ...add federated.nodes=N"),
    ("federated.nodes=2 federated.local_lr=3", "federated.local_lr: changes nothing if a node"),
    ("claims.row=x", "claims.row: claims no table; add claims.table"),
    ("recipe=mnist claims.table=null claims.variant=x", "claims.variant: claims no table"),
    ("seed=true", "seed=True: must be a number, not true or false"),
    ("trainer.epochs=true", "trainer.epochs=True: must be a number"),
    ("model.hidden=[true]", "model.hidden=[True]: must be a number"),
    ("execution.callbacks=[x]", "callback 'x' is not known"),
    ("privacy.target_epsilon=2 algorithm.noise_multiplier=3", "algorithm.noise_multiplier=3"),
    (
        "privacy.target_epsilon=2 privacy.max_epsilon=1",
        "privacy.max_epsilon=1 with...raise it, or lower privacy.target_epsilon.",
    ),
    ("algorithm=sgd privacy.max_epsilon=1", "max_epsilon=1 ...or add noise"),
    ("algorithm.noise_multiplier=0 privacy.max_epsilon=1", "max_epsilon=1 with"),
    # NaN was taken, or "must be at most 1e30"
    ("optimizer.lr=nan", "optimizer.lr=nan: must be a number."),
    ("algorithm.noise_multiplier=nan", "algorithm.noise_multiplier=nan: must be a number."),
    ("privacy.max_epsilon=nan", "privacy.max_epsilon=nan: must be a number."),
    ("dataset.test_share=nan", "dataset.test_share=nan: must be a number."),
    # what torch would take and could not use
    ("optimizer=adam optimizer.betas=[0.9]", "optimizer.betas...should have at least 2 items"),
    ("optimizer=adam +optimizer.capturable=true", "optimizer.capturable' is not known"),
    ("optimizer=adam optimizer.lr=inf", "optimizer.lr=inf: "),
    ("scheduler=step_lr scheduler.step_size=0", "scheduler.step_size=0: "),
    ("scheduler=step_lr scheduler.gamma=0", "scheduler.gamma=0: "),
    ("scheduler=step_lr +scheduler.last_epoch=3", "scheduler.last_epoch' is not known"),
    ("optimizer=rmsprop optimizer.alpha=-1", "optimizer.alpha=-1: "),
    ("scheduler=multi_step_lr scheduler.milestones=[0]", "milestones=[0]: "),
    ("scheduler=reduce_on_plateau +scheduler.mode=most", "scheduler.mode 'most' is not known"),
]


def sentence_of(*words: str) -> str:
    """Return the sentence with which a configuration is refused."""
    with pytest.raises(UserError) as caught:
        configured([*([] if words[0].startswith("recipe=") else ["recipe=quickstart"]), *words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("words", "sentence"), MISTAKES, ids=lambda value: value)
def test_a_mistake_ends_in_one_sentence(words: str, sentence: str) -> None:
    assert re.search(
        re.escape(sentence).replace(re.escape("..."), ".*"), sentence_of(*words.split())
    )


def test_what_is_quoted_stays_on_one_line_and_is_cut() -> None:
    assert sentence_of("optimizer=\nñ").startswith("'optimizer= ñ' is not an override")
    message = sentence_of("trainer.epochs=" + "9" * 400)
    assert message.startswith("trainer.epochs=999999999999… (400 digits): ")
    assert "nested too deep" in sentence_of("seed=" + "sort(" * 1500 + "1" + ")" * 1500)


# (a word, the same word as it is read: with what is text in quotes)
TEXTS = [
    *((word, word) for word in ("name=choice(1,2)", "name=choice( 7 ,7)", "name=choice('1_0',10)")),
    *(
        ("name=2024_11", 'name="2024_11"'),
        ("notes=1.50", 'notes="1.50"'),
        ("name=1e3", 'name="1e3"'),
        ("name=True", 'name="True"'),
        ("tags=[True,a]", 'tags=["True",a]'),
    ),
    *(("+tags=[a,1_2,3]", '+tags=[a,"1_2",3]'), ("paths.results=1e3", 'paths.results="1e3"')),
    *(("dataset.path=2024_01,x", 'dataset.path="2024_01",x'), ("name=true", 'name="true"')),
    *(
        (word, word)
        for word in (
            "dataset.name=1e3",
            "model.return=1e3",
            "model.init_from=12",
            "~name",
            "name=null",
            "seed=1_0",
        )
    ),
    *((word, word) for word in ("optimizer.lr=1e-1,1e-2", "seed=range(1,3)", "name='1_0'")),
]


@pytest.mark.parametrize(("typed", "read"), TEXTS, ids=[typed for typed, _ in TEXTS])
def test_texts_keep_the_words_as_typed(typed: str, read: str) -> None:
    assert [override.input_line for override in read_words([typed], sweep=True)] == [read]


@pytest.mark.parametrize(
    "word",
    [
        *("name=choice(1e3,2)", "tags=[1e3],[2_0]", "name='a,b',1e3", "name=choice(a,True)"),
        # of which another part is written as the number that 1_0 would be read as
        *("name=choice(1_0,10)", "tags=[10,a],[1_0,b]", "name=choice('a, 10',1_0)"),
        *("name=choice(a 10 b,1_0)", r"name=choice(a\,10,1_0)", r"name=choice('\', 10',1_0)"),
    ],
)
def test_a_text_that_would_change_is_refused(word: str) -> None:
    """1e3 was 1000.0, and 2_0 was 20."""
    with pytest.raises(UserError, match="in quotes"):
        read_words([word], sweep=True)


@pytest.mark.parametrize(
    "values",
    ["range(0,inf)", "range(nan,3)", "range(0,1e9)", "range(0,4,0)", f"range(0.5,1{'0' * 400})"],
)
def test_a_range_without_end_is_refused(values: str) -> None:
    """Hydra lists all values of a range, which never ended."""
    assert read_words(["seed=range(0,1,0.0001)"], sweep=True)
    with pytest.raises(UserError, match="at most 10,000 values"):
        read_words([f"seed={values}"], sweep=True)


SWEEP_MISTAKES = [
    ("launcher=joblib optimizer.foo=1,2", "key 'optimizer.foo' is not known"),
    ("model=glob(complex_m*) optimizer.foo=1", "key 'optimizer.foo' is not known"),
    ("hydra.sweeper.params.seed=3", "hydra.launcher.*, hydra.sweeper.max_batch_size and"),
    ("hydra.sweeper.max_batch_size=0", "max_batch_size=0: must be greater than"),
    ("launcher=joblib hydra.launcher.n_jobs=x", "n_jobs=x: Value 'x' of type 'str' could not"),
    ("launcher=joblib hydra.launcher.n_jobs=0", "n_jobs=0' cannot be carried out: n_jobs == 0"),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "says"), SWEEP_MISTAKES, ids=[line[0] for line in SWEEP_MISTAKES]
)
def test_a_mistake_of_a_sweep_is_named(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "joblib" in words:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    assert says in leave(["run", "-m", "recipe=quickstart", *words.split(), *TINY], capsys)


def test_a_launchers_value_may_be_a_path() -> None:
    word = "hydra.launcher.submitit_folder=/scratch/logs"
    assert read_words([word], sweep=True)[0].value() == "/scratch/logs"


def test_a_name_may_look_like_a_number() -> None:
    """It was 202411, and nan had to be a number."""
    assert configured(["recipe=quickstart", "name=2024_11"]).name == "2024_11"
    assert configured(["recipe=quickstart", "name=nan"]).name == "nan"


PLAIN_VALUES = ["my, results", "(x)", "a=b", "{}", "[x", "true", "1e3", "null", "it's", 'a "b"']
PLAIN_VALUES += ["back\\", "a b ", "", "ü", "glob(*)", 1, 0.5, None, True, [1, 2], ["a,b", None]]


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=repr)
def test_a_value_is_written_as_it_is_read(value: Any) -> None:
    (override,) = read_words([write_word("a", value)])
    assert plain_value(override) == value


def plain_value(override: Override) -> Any:
    """Return an override's value as Hydra sets it."""
    value = override.value()
    if isinstance(value, list):
        return [getattr(element, "text", element) for element in value]
    return getattr(value, "text", value)


# recipe files

MINE = """
defaults:
  - override /dataset: synthetic_images
  - override /model: real_mlp
  - override /algorithm: dp_sgd
dataset: {shape: [1, 8, 8], train: 60, test: 20}
model: {hidden: [4]}
algorithm: {noise_multiplier: 1.5}
trainer: {sample_rate: 0.5, epochs: 1}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "elsewhere/mine.yaml"
    path.parent.mkdir()
    path.write_text(MINE)
    yield path
    for name in ("mine.yaml", "other.yaml"):
        ConfigStore.instance().repo.get("recipe", {}).pop(name, None)


def test_a_file_is_a_recipe_by_its_name(mine: Path) -> None:
    config = configured([f"recipe={mine}", "seed=3"])
    assert (config.recipe, config.seed) == ("mine", 3)
    assert config.model.options["hidden"] == [4]
    assert config.algorithm.options["noise_multiplier"] == 1.5
    mine.write_text(MINE.replace("1.5", "2.5"))  # read anew each time
    assert configured([f"recipe={mine}"]).algorithm.options["noise_multiplier"] == 2.5


@pytest.mark.parametrize("folder", ["Röntgen", "two words", "a,b", "d'or", "(new)"])
def test_a_recipe_file_is_named_in_quotes_or_without(mine: Path, folder: str) -> None:
    moved = mine.parent / folder / "mine.yaml"
    moved.parent.mkdir()
    mine.rename(moved)
    for value in (f'"{moved}"', *([f"{moved}"] if "," not in folder else [])):
        assert configured([f"recipe={value}"]).recipe == "mine"
        overrides = read_words([f"recipe={value},quickstart"], sweep=True)
        assert [override.input_line for override in overrides] == ["recipe=mine,quickstart"]


@pytest.mark.parametrize("text", ["Müller", "Röntgen 2", "./Ergebnisse_ü", "größer (b)"])
def test_a_text_with_any_letters_is_read_in_quotes(text: str) -> None:
    config = configured(
        ["recipe=quickstart", f'name="{text}"', f'tags=["{text}"]', f'paths.results="{text}"']
    )
    assert (config.name, config.tags, str(config.results)) == (text, [text], str(Path(text)))


def test_options_meant_for_another_plug_in_are_dropped_as_in_a_recipe_that_ships(
    mine: Path,
) -> None:
    config = configured([f"recipe={mine}", "model=complex_mlp", "dataset.complex_valued=true"])
    assert config.model.name == "complex_mlp"
    assert configured([f"recipe={mine}", "algorithm=sgd"]).algorithm.options == {}
    assert recipe_body("nothing") is None


def test_a_file_may_have_truth_values_and_merged_mappings(mine: Path) -> None:
    merged = "execution: {<<: {deterministic: true, prefetch: 1}}\n"
    mine.write_text(MINE + merged)
    assert configured([f"recipe={mine}"]).execution.deterministic is True
    copy = mine.with_name("copied.yaml")
    copy.write_text((assets.RECIPES / "msd_hippocampus_tuned.yaml").read_text())
    assert configured([f"recipe={copy}"]).dataset.options["augment"] is False


def test_a_folder_may_have_a_number_as_its_name() -> None:
    assert str(configured(["recipe=quickstart", "paths.results=2024"]).paths.results) == "2024"


def test_another_data_set_keeps_the_validation_share_of_the_recipe(mine: Path) -> None:
    """The recipe's validation patients were trained on when its data set was replaced."""
    mine.write_text(MINE.replace("dataset: {", "dataset: {validation_share: 0.2, "))
    assert configured([f"recipe={mine}", "dataset=phase_digits"]).validation_share == 0.2


def test_another_model_drops_what_was_chosen_for_the_recipes(mine: Path) -> None:
    chosen = "replace_batchnorm: instance, complex_as: magnitude, init_from: x"
    mine.write_text(MINE.replace("model: {", f"model: {{{chosen}, "))
    config = configured([f"recipe={mine}", "model=complex_mlp"])
    assert (config.replace_batchnorm, config.complex_as, config.init_from) == (None, None, None)


def test_another_data_set_takes_an_option_that_only_its_code_declares() -> None:
    """A default of it is left out, so that an unfinished run of either spelling continues."""
    replaced = ["dataset=msd_synthetic"]
    hippocampus = configured(["recipe=msd_hippocampus_private", *replaced])
    assert hippocampus.dataset.options["task"] == "hippocampus"
    liver = configured(["recipe=msd_liver_private", *replaced])
    assert "task" not in liver.resolved["dataset"]


def test_the_command_line_runs_and_validates_it(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine.parent)
    assert command(capsys, "run", "recipe=./mine.yaml")[0] == 0
    assert list(Path("results/runs/mine").glob("*/record.json"))
    code, out, _ = command(capsys, "validate", "recipe=mine.yaml", "trainer.epoch=3")
    assert code == 2
    Path("other.yaml").write_text(MINE.replace("epochs: 1", "epochs: 2"))
    code, out, _ = command(capsys, "run", "-m", "recipe=./mine.yaml,other.yaml", "seed=0")
    assert code == 0
    assert "2 jobs, 0 failed" in out


@pytest.mark.parametrize("other", ["other/mine.yaml", "elsewhere/mine.yml"])
def test_two_files_of_one_name_are_refused(mine: Path, other: str) -> None:
    path = mine.parent.parent / other
    path.parent.mkdir(exist_ok=True)
    path.write_text(MINE.replace("1.5", "4.0"))
    # both jobs had the noise of the second file
    with pytest.raises(UserError, match=r"two files have the name mine, .*; rename one"):
        read_words([f"recipe={mine},{path}"], sweep=True)
    path_as_typed = mine.parent / "../elsewhere/mine.yaml"
    assert read_words([f"recipe={mine},{path_as_typed}"], sweep=True)  # the same file


def test_several_files_are_named_in_each_form_of_a_sweep(mine: Path) -> None:
    other = mine.with_name("other.yaml")
    other.write_text(MINE)
    for value in (f"choice({mine},{other})", f"{mine}, {other}"):
        (override,) = read_words([f"recipe={value}"], sweep=True)
        assert override.input_line == "recipe=mine,other"


def test_a_files_name_may_be_in_quotes(mine: Path) -> None:
    assert configured([f'recipe="{mine}"', 'launcher="local"']).recipe == "mine"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("claims: []", "Cannot merge DictConfig with ListConfig."),
        ("hydra: {sweeper: {params: {seed: null}}}", "field 'hydra.sweeper.params.seed' is not"),
    ],
)
def test_a_recipe_that_does_not_compose_says_why(mine: Path, line: str, why: str) -> None:
    """The sentence ended before the reason."""
    mine.write_text(f"{MINE}{line}\n")
    assert why in sentence_of(f"recipe={mine}")


def test_a_recipe_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "mine.yaml"
    loop.symlink_to(loop)
    with pytest.raises(UserError, match=r"mine.yaml"):
        read_words([f"recipe={loop}"], sweep=False)


WRONG = [
    ("none.yaml", None, "file not found"),
    ("quickstart.yaml", MINE, "and our own recipes"),
    ("a-b.yaml", MINE, "0-9 and _"),
    ("aé.yaml", MINE, "0-9 and _"),
    ("NULL.yaml", MINE, "differs from false, inf, nan, null, true"),
    ("optimizer.yaml", MINE + "optimizer: adam", "'- override /optimizer: adam'"),
    ("trainer.yaml", "trainer: uniform", "'- override /trainer: uniform'"),
    ("seed.yaml", MINE + "seed: ???", r"seed: \?\?\? is no value"),
    (
        "twice.yaml",
        "defaults: [{override /model: real_mlp}, {override /model: complex_mlp}]",
        "override /model: is there twice",
    ),
    ("path.yaml", "dataset: {path: 2024_01}", "dataset.path: 2024_01: YAML reads this as 202401"),
    ("tags.yaml", "tags: [a, 010]", "tags: 010: YAML reads this as 8; put it in quotes"),
    (
        "names.yaml",
        "hydra: {sweeper: {params: {name: '1e3,a'}}}",
        "hydra.sweeper.params.name: 1e3,a: has a number",
    ),
    ("list.yaml", "- 1\n", "holds no keys of a run"),
    ("broken.yaml", "a: [1\n", r"broken.yaml: is not valid YAML in line 2: expected ',' or '\]'"),
]


@pytest.mark.parametrize(("name", "text", "says"), WRONG, ids=[line[0] for line in WRONG])
def test_a_file_that_is_no_recipe_is_refused(
    tmp_path: Path, name: str, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        configured([f"recipe={tmp_path / name}"])


# what runs nothing

HYDRA = [field.name for field in fields(HydraConf)]
READ = ("launcher", "sweeper", "verbose")  # of Hydra's keys, those that a word may set


class Trap:
    """What leaves a file behind when its pickle is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (self.mark,))


@pytest.fixture
def trap(here: Path) -> dict[str, str]:
    """Return the callback that loads a pickle, in a folder of its own."""
    (here / "w.pkl").write_bytes(pickle.dumps(Trap(here / "sprung")))
    return {"_target_": "joblib.load", "filename": str(here / "w.pkl")}


def refuse(text: str) -> str:
    """Return the sentence with which a recipe of this text is refused."""
    Path("friend.yaml").write_text(text)
    with pytest.raises(UserError, match=r"friend\.yaml: ") as caught:
        read_words(["recipe=./friend.yaml"])
    return str(caught.value)


def refuse_word(word: str) -> None:
    """Hold that a word is refused, whether or not it is for a sweep."""
    for sweep in (False, True):
        with pytest.raises(UserError):
            read_words(["recipe=quickstart", word], sweep)


@pytest.mark.parametrize("key", HYDRA)
def test_hydras_keys_run_nothing(key: str, trap: dict[str, str]) -> None:
    for node in ({"a": trap}, {"dir": "elsewhere"}, "text", [1], None):
        refuse(yaml.safe_dump({"hydra": {key: node}}))
    refuse(yaml.safe_dump({f"hydra.{key}": {"a": 1}}))
    refuse(yaml.safe_dump({"hydra": {"sweeper": {"params": {f"hydra.{key}.a": "1,2"}}}}))
    refuse(yaml.safe_dump({"defaults": [{f"override /hydra/{key}": "default"}]}))
    given = f"{{a: {{_target_: joblib.load, filename: {trap['filename']}}}}}"
    for mark in ("", "+", "++"):
        refuse_word(f"{mark}hydra.{key}={given}")
        refuse_word(f"{mark}hydra={{{key}: {given}}}")
        refuse_word(f"{mark}hydra.{key}.a._target_=joblib.load")
    refuse_word(f"+model@hydra.{key}.a=complex_mlp")
    refuse_word(f"+hydra/launcher@hydra.{key}.a=joblib")
    for word in (f"hydra.{key}.a=1", f"+hydra.{key}.a=1", f"~hydra.{key}"):
        if key not in READ:
            refuse_word(word)


@pytest.mark.parametrize("start", [["run"], ["run", "-m", "seed=1,2"], ["validate"], ["audit"]])
def test_no_command_runs_what_a_word_or_a_recipe_names(
    start: list[str], trap: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    callback = {"hydra": {"callbacks": {"a": trap}}}
    Path("friend.yaml").write_text(yaml.safe_dump(callback))
    word = f"+hydra.callbacks={{a: {{_target_: joblib.load, filename: {trap['filename']}}}}}"
    for words in (["recipe=./friend.yaml"], ["recipe=quickstart", word]):
        leave([*start, *words, *TINY], capsys)
        assert not Path("sprung").exists()
        assert not Path("results").exists()


@pytest.mark.parametrize("group", ["recipe", "launcher", *GROUPS])
def test_a_group_has_a_name_and_no_path(group: str, trap: dict[str, str]) -> None:
    evil = Path("evil.yaml").absolute()
    evil.write_text("# @package _global_\n" + yaml.safe_dump({"hydra": {"callbacks": {"a": trap}}}))
    up = "../" * len(assets.CONF.parts) + str(evil.with_suffix(""))[1:]
    for name in (up, f"quickstart,{up}", f"choice({up})", str(evil.with_suffix(""))):
        refuse_word(f"{group}={name}")
    params = {"hydra": {"sweeper": {"params": {group: f"{up},"}}}}
    for body in ({"defaults": [{f"override /{group}": up}]}, params):
        refuse(yaml.safe_dump(body))


NO_DATA = [
    "model: {_target_: os.system}",
    "trainer: {epochs: {_target_: os.system, command: id}}",
    "defaults: [quickstart]",
    "defaults: [{model: complex_mlp}]",
    "defaults: [{override /model@hydra.callbacks.a: complex_mlp}]",
    "defaults: [{override /launcher: slurm}]",
    "defaults: [{override /model: '${oc.env:HOME}'}]",
    "defaults: [{override /model: [complex_mlp]}]",
    "defaults: {hydra/job_logging: default}",
    "launcher: {a: 1}",
    "paths: {results: elsewhere}",
    "sytem: {a: 1}",
    "hydra: {sweeper: {params: {recipe: quickstart}}}",
    "hydra: {sweeper: {params: {+seed: '1,2'}}}",
    "hydra: {sweeper: {params: {paths.results: a}}}",
    *(
        f"claims: {{variant: '{value}'}}"
        for value in (
            "${oc.env:HOME}",
            "a ${ oc.env:HOME,none } b",
            "${oc.create:{a:1}}",
            "${oc.dict.keys:model}",
            "${hydra:runtime.cwd}",
            "${paths.data}",
            "${oc.select:paths.data}",
            "${oc.select:${seed}}",
            "${choose:a,{a: ${oc.env:HOME}}}",
            "${.row}",
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
    text: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here / "secret"))
    begun = time.process_time()
    assert "secret" not in refuse(text)
    assert time.process_time() - begun < 5


def test_the_longest_way_to_refer_takes_no_time(tmp_path: Path) -> None:
    chain = [f"'{key}': ['${{model.{key + 1}}}', '${{model.{key + 1}}}']" for key in range(6)]
    path = tmp_path / "friend.yaml"
    path.write_text("model: {" + ", ".join(chain) + ", '6': [" + "1, " * 900 + "]}")
    begun = time.process_time()
    with pytest.raises(UserError, match=r"model\.0"):
        configured([f"recipe={path}"])
    assert time.process_time() - begun < 30


def test_all_our_recipes_would_be_adopted() -> None:
    for path in assets.RECIPES.glob("*.yaml"):
        check_recipe(assets.read_yaml(path))


def test_a_record_refers_to_nothing() -> None:
    plain = configured(["recipe=quickstart"]).resolved
    assert config_of({"config": plain}).resolved == plain
    places = ("claims", "variant"), ("model", "hidden"), ("task", "_target_")
    values = "${oc.env:HOME}", "${seed}", "${hydra:runtime.cwd}"
    for (section, key), value in product(places, values):
        config = {**plain, section: {**plain[section], key: value}}
        with pytest.raises(UserError, match=r"^record\.json: config: "):
            config_of({"config": config})


TEXTS = [
    "",
    "a",
    "/data/José x",
    "it's",
    'a"b',
    "C:\\x y",
    "a\\",
    "\\'",
    "$HOME",
    "a,b",
    "[1]",
    "a=b",
]
TEXTS += ["null", "True", "1e3", "12", ".5", "-1", "NaN", "inf", "{a:1}", "a\nb", "~", "é"]


@pytest.mark.parametrize(
    "value",
    [
        *TEXTS,
        TEXTS,
        *(None, True, 3, -1e-7, 1e20, float("inf"), [], {}),
        *([1, [2.5, None]], {"a": "b c", "d": [False]}),
    ],
    ids=repr,
)
def test_a_value_is_read_as_it_was_written(value: object) -> None:
    (override,) = parse_words([write_word("dataset.path", value)])
    assert override.value() == value
    assert type(override.value()) is type(value)
