"""Damaged files in a results folder: every command answers, or says in one sentence what is wrong.

A few whenever the tests are run; with `--slow`, as many as `--damaged` says, drawn from `--seed`.
"""

import contextlib
import io
import random
import resource
import shutil
from pathlib import Path

import pytest

from tests.damage import (
    edit_json,
    edit_lines,
    name_error,
    replace_file,
    seeds_of,
    spoil_bytes,
    within,
)
from tests.training.test_run import TINY, carry_out
from zdp_bench import cli, records
from zdp_bench.extras.page.curves import curves_of_all
from zdp_bench.training.spending_file import FILE

SECONDS = 20  # for the commands on one folder
MOST = 1000  # characters on stderr
MORE = 500_000  # kB, whatever a file claims to hold
DAMAGES = {
    "record.json": [edit_json, edit_json, edit_json, spoil_bytes, replace_file],
    FILE: [edit_json, edit_json, edit_json, spoil_bytes, replace_file],
    "ledger.jsonl": [edit_lines, edit_lines, edit_lines, spoil_bytes, replace_file],
    "checkpoint.pt": [spoil_bytes, replace_file],
    "records.csv": [spoil_bytes, replace_file],
    ".records.index": [spoil_bytes, replace_file],
    ".curves.index": [spoil_bytes, replace_file],
}
READING = [
    ["results"],
    ["results", "--format", "json", "--columns", "seed,epsilon_tight,accuracy,lr"],
    ["budget"],
    ["compare", "seed=0", "seed=1"],
    ["table", "zeta_dp_2021/1"],
    ["report"],
]
# A command line gives each key once.
GOING_ON = ["run", *TINY[:1], *TINY[2:], "trainer.epochs=1", "threads=1"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with two finished runs and one that was stopped."""
    results = tmp_path_factory.mktemp("sound")
    for seed in range(3):
        outcome = carry_out(results, f"seed={seed}", "trainer.epochs=1", "threads=1")
        if seed == 2:
            outcome.path.unlink()
    records.rebuild_csv(results)  # which leaves an index as well
    curves_of_all(results)  # and this one another
    return results


def answer(results: Path, commands: list[list[str]]) -> list[str]:
    """Return what commands said that they must not, each on the results folder."""
    wrong = []
    for words in commands:
        place = [f"paths.results={results}"] if words[0] == "run" else ["--results", str(results)]
        out, err = io.StringIO(), io.StringIO()
        code: object = None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main([*words, *place])
            except SystemExit as left:
                code = left.code or 0
        message = err.getvalue()
        if code not in (0, 1, 2) or "Traceback" in message or len(message) > MOST:
            wrong.append(f"{words[0]}: {code} {message[-300:]}")
    return wrong


def attack(sound: Path, place: Path, seeds: range) -> list[str]:
    """Return what the commands did with a folder of each seed that they must not."""
    failed: list[str] = []
    for seed in seeds:
        draw = random.Random(seed)
        results = Path(shutil.copytree(sound, place / f"{seed}"))
        name = draw.choice([*DAMAGES])
        path = draw.choice(sorted(results.rglob(name)))
        damage = draw.choice(DAMAGES[name])
        damage(path, draw)
        commands = [draw.choice(READING), ["budget"]]
        if draw.random() < 0.1:
            commands = [[*GOING_ON, f"seed={draw.randrange(3)}"]]
        try:
            with within(SECONDS):
                wrong = answer(results, commands)
        except BaseException as error:
            wrong = [f"{commands}: {name_error(error)}"]
        failed += [f"{seed} {damage.__name__} {path.name}: {what}" for what in wrong]
        shutil.rmtree(results)
    return failed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "many", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_a_damaged_results_folder_is_answered_or_refused_in_little_memory(
    sound: Path, many: bool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failed = attack(sound, tmp_path, seeds_of(pytestconfig, many, few=8))
    assert not failed, "\n".join(failed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MORE
