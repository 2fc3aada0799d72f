"""A run's folder: its lock, its ledger, its record, and how to find it."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from zdp_bench import disk, records
from zdp_bench.config import configured
from zdp_bench.config.compose import recipe_body
from zdp_bench.config.constraints import EPSILONS
from zdp_bench.config.schema import GROUPS, Run
from zdp_bench.config.words import write_word
from zdp_bench.disk import hold_lock, make_folder
from zdp_bench.errors import UserError, show_warnings, suggestion
from zdp_bench.foreign_files import exists, is_file
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.ledger_files import (
    find_ledgers,
    has_steps,
    is_ledger,
    next_aside,
    set_aside,
    set_aside_others,
)
from zdp_bench.privacy.ledger_lines import LedgerError
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.tally import Position, Tally
from zdp_bench.records import Document, Record, is_named
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.interrupts import CONTINUING, explain_write_errors
from zdp_bench.training.loggers import IDENTITY

log = logging.getLogger(__name__)
# Names of the files that a run writes, apart from ledgers and spendings. All others are the user's.
# The record comes first, so that a kill never leaves a record without its ledger.
FILES = ("record.json", "checkpoint.pt", "run.log", "scores.csv", "example.npz", IDENTITY)
REPLACED = ".replaced"  # suffix of the files of a run that is carried out again, until it ends
# Suffix of an empty file that states the name under which a ledger of that run was set aside
MARKER = f".set_aside{REPLACED}"
_MARKER_NAMES = re.compile(r"(.*\.jsonl\.\d+)(\.set_aside)?\.replaced")  # also of older versions
NOISE = "algorithm.noise_multiplier"
MAX_LISTED = 10  # number of runs that an error lists
START_AGAIN = (
    "add force=true to start again (its steps still count), or rename the run's folder "
    "(`zdp-bench budget` still counts it)"
)


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Attributes:
        record: the run's record.
        path: the record's file.
        was_recorded: whether the run had finished before, so that it was only read.
    """

    record: Record
    path: Path
    was_recorded: bool


def find_or_run(
    config: Run, digest: str, ranks: Ranks, wait: bool, train: Callable[[Path], Document]
) -> Outcome:
    """Return the outcome of a run. Carry out the run first if it has no record.

    Only one process at a time carries out a run, and only its rank 0 writes.

    Args:
        config: the run's configuration.
        digest: digest of the run.
        ranks: processes that carry out the run together.
        wait: whether to wait for another process that is carrying out the run.
        train: carries out the run in a folder, and returns its record.

    Raises:
        UserError: the record lacks metrics for each epoch that the configuration requires.
        Busy: another process is carrying out the run, and `wait` is false.
    """
    home = records.folder(config.results, config.recipe, digest)
    path = home / "record.json"

    def find() -> Record | None:
        return ranks.broadcast(records.read(path) if ranks.is_first else None)

    if not config.force and (done := find()):
        _require_epochs(config, done, path)
        return Outcome(done, path, was_recorded=True)
    advice = f"{CONTINUING} from the last checkpoint"
    with (
        explain_write_errors(home, advice),
        only_one_process(home, wait) if ranks.is_first else nullcontext(),
        _replacing(home, anew=config.force) if ranks.is_first else nullcontext(),
    ):
        if ranks.is_first:
            for partial in disk.list_partial(home):
                partial.unlink()  # left by a killed process; nobody writes it now
        if done := find():
            _require_epochs(config, done, path)
            return Outcome(done, path, was_recorded=True)
        with keep_log(home / "run.log") if ranks.is_first else nullcontext():
            document = ranks.broadcast(train(home))
            record = Record.of(document)
            if ranks.is_first:
                records.write(path, document)
                log.info(f"finished{': ' * bool(record.warning)}{record.warning}")
    return Outcome(record, path, was_recorded=False)


@contextmanager
def keep_log(path: Path) -> Iterator[None]:
    """Append the log, and how the run ends, to a file. The terminal still shows warnings."""
    package = logging.getLogger("zdp_bench")
    level = package.level
    file = logging.FileHandler(path, encoding="utf-8")
    # Ignore write errors: if the disk is full, the ledger raises a clear error.
    file.handleError = lambda record: None  # type: ignore[method-assign]
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    show_warnings()
    package.setLevel(logging.INFO)
    package.addHandler(file)
    try:
        yield
    except BaseException as error:
        log.info(f"stopped: {str(error) or type(error).__name__}")
        raise
    finally:
        package.setLevel(level)
        package.removeHandler(file)
        file.close()


def start_anew(home: Path, keep: bool = False) -> None:
    """Delete the files of a run, except for its spending, that of its nodes, and the user's files.

    Its ledgers are renamed, not deleted.

    Args:
        home: the run's folder.
        keep: whether to keep the run until the new one ends, so that `settle_replaced` can restore
            it. Its files are renamed, with the suffix `REPLACED`. If an earlier run is kept
            already, the files of the present one, which did not finish, are deleted instead.
    """
    ledgers = [path for path in home.rglob("*.jsonl") if is_ledger(path)]
    kept = _find_kept(home)
    if keep and not kept:
        for ledger in ledgers:
            aside = next_aside(ledger)
            disk.write_bytes(aside.with_name(aside.name + MARKER), b"")
    for path in _list_files(home, FILES):
        if keep and not kept:
            disk.rename(path, path.with_name(path.name + REPLACED))
        else:
            path.unlink()
    if not keep:
        for path in kept:
            path.unlink()
    for ledger in ledgers:
        set_aside(ledger)


@contextmanager
def _replacing(home: Path, anew: bool) -> Iterator[None]:
    """Settle what an earlier process replaced. Then start the run anew, if `anew` is true.

    If an error or a signal ends the run before its first step, the run before it is restored. Once
    the run has finished, the files of the run before it are deleted.
    """
    settle_replaced(home)
    try:
        if anew:
            _require_ledger(home)
            start_anew(home, keep=True)
        yield
    except BaseException:
        settle_replaced(home)
        raise
    for path in _find_kept(home):
        path.unlink()


def _find_kept(home: Path) -> list[Path]:
    """Return the kept files of a run that is carried out again, and the markers of its ledgers."""
    return [*_list_files(home, [name + REPLACED for name in FILES]), *_find_markers(home)]


def _list_files(home: Path, names: Sequence[str]) -> list[Path]:
    paths = [home / name for name in names]
    return [path for path in paths if os.path.lexists(path) and not path.is_dir()]


def _find_markers(home: Path) -> dict[Path, Path]:
    """Return the path of the ledger that was set aside by that of its marker, an empty file."""
    aside_of = {}
    for path in home.rglob(f"*{REPLACED}"):
        name = _MARKER_NAMES.fullmatch(path.name)
        if name and is_file(path) and path.stat().st_size == 0:
            aside_of[path] = path.with_name(name[1])
    return aside_of


def _require_ledger(home: Path) -> None:
    """Reject a finished run with secure noise of which only the record is left, as in a clone.

    Steps are counted in ledgers, so those of the record would not count beside new ones. Seeded
    steps that are repeated are the same releases.
    """
    record = records.read(home / "record.json")
    if record is None or not record.privacy.is_secure:
        return
    if not find_ledgers(home, ignored=("record.json",)):
        raise UserError(
            f"{home}: has the record of a run with secure noise, but not its ledger, so its steps "
            "would not count if it ran again there. Use another results folder: "
            "paths.results=FOLDER."
        )


def settle_replaced(home: Path) -> None:
    """Restore the run that `start_anew` kept in a folder, unless the new one has taken a step.

    If the new one has finished, the kept files are deleted. After a kill, this may be called again.
    """
    kept = _find_kept(home)
    aside_of = _find_markers(home)
    asides = aside_of.values()
    # Where nothing has that name, the ledger has not been renamed yet, or is restored already.
    in_place = {aside.with_suffix("") for aside in asides if not exists(aside)}
    new_ledgers = [path for path in home.rglob("*.jsonl") if path not in in_place]
    if kept and any(is_ledger(path) and has_steps(path) for path in new_ledgers):
        is_finished = exists(home / "record.json")
        for path in kept:
            if is_finished or (path in aside_of and not exists(aside_of[path])):
                path.unlink()
        return
    for aside in asides:
        if exists(aside):
            disk.rename(aside, aside.with_suffix(""))
    for path in kept:
        if path not in aside_of:
            disk.rename(path, path.with_name(path.name.removesuffix(REPLACED)))
    for marker in aside_of:  # last: they tell which ledgers are those of the kept run
        marker.unlink()


def _require_epochs(config: Run, done: Record, path: Path) -> None:
    """Reject a finished run that lacks the metrics of each epoch that the configuration wants."""
    if config.execution.evaluate == "each" and not done.has_each_epoch:
        raise UserError(
            f"{path}: was evaluated only after its last epoch. Add force=true to run it again "
            "with metrics for each epoch, or execution.evaluate=last to use it as it is."
        )


@contextmanager
def only_one_process(home: Path, wait: bool = True) -> Iterator[None]:
    """Hold the run's lock. A second process waits if `wait` is true, else `Busy` is raised."""
    make_folder(home)
    with hold_lock(
        home.with_suffix(".lock"), f"{home}: another process is working on this run.", wait
    ):
        yield


def open_ledger(
    path: Path,
    mechanism: Mechanism,
    repeatable: bool,
    checkpoint_position: Position | None,
    start: tuple[str, int, str] | None,
    find_other_ledgers: Callable[[], list[Path]] | None = None,
    ranks: Ranks = ALONE,
    identity: str = "",
    facts: Mapping[str, str] | None = None,
    advice: str = START_AGAIN,
) -> Tally:
    """Open a training's ledger. Rank 0 writes the file; the other ranks count in memory.

    Args:
        path: the ledger's file.
        mechanism: mechanism of every step.
        repeatable: whether a step that is taken again has the same noise.
        checkpoint_position: where the ledger ended at the last checkpoint; None without a
            checkpoint.
        start: first arguments of `Ledger.choose_generation`. None if the training never repeats a
            step.
        find_other_ledgers: see `Ledger.choose_generation`.
        ranks: processes that take each step together.
        identity: what else must match; see `Ledger`.
        facts: properties that the mechanism does not cover; see `Ledger`.
        advice: what to do about a ledger that cannot be used, for the error.

    Raises:
        UserError: the ledger is damaged, or belongs to another training.
    """
    if not ranks.is_first:
        return ranks.broadcast(Tally(repeatable))
    # If a checkpoint has lost its ledger, `Ledger` raises an error: leave the folder as it is.
    if start is not None and (checkpoint_position is None or exists(path)):
        set_aside_others(path, identity)
    try:
        ledger = Ledger(path, mechanism, repeatable, checkpoint_position, identity, facts)
    except LedgerError as error:
        raise UserError(f"{error}. Its ε cannot be trusted: {advice}.") from None
    if start is not None:
        ledger.choose_generation(*start, find_other_ledgers)
    ranks.broadcast(ledger.copy())
    return ledger


def find_weights(
    results: Path,
    name: str,
    key: str = "",
    tell_differences: Callable[[list[Record]], list[str]] | None = None,
) -> Path:
    """Return the folder of the only matching finished run that still has its weights.

    Args:
        results: the results folder.
        name: name of a run, as for `is_named`, or the path of its folder or record.
        key: the key or option to which the user gave `name`, such as "model.init_from=".
        tell_differences: describes how several runs differ, for the error.

    Raises:
        UserError: no run matches, several do, or the weights are gone.
    """
    searched = results / "runs"
    finished = [path.parent for path in sorted(searched.glob("*/*/record.json"))]
    folders = [path for path in finished if is_named(name, path.parent.name, path.name)]
    path_of_name = Path(name).parent if name.endswith("record.json") else Path(name)
    with suppress(OSError):  # no path, but a name that the system finds too long
        if not folders and is_file(path_of_name / "record.json"):
            folders = [path_of_name]
            searched = path_of_name
    with_weights = [folder for folder in folders if is_file(folder / "checkpoint.pt")]
    if len(with_weights) == 1:
        return with_weights[0]
    if not folders:
        recipe = name.partition("/")[0]
        recipes = {path.parent.name for path in finished}
        near = "" if recipe in recipes else suggestion(recipe, recipes)
        advice = "`zdp-bench results` lists the runs."
        if recipe_body(recipe) and recipe not in recipes:
            advice = f"Run it first: zdp-bench run recipe={recipe}."
        raise UserError(
            f"{key}{name}: no finished run with weights under {searched}.{near} {advice}"
        )
    if not with_weights and (record := records.read(folders[0] / "record.json")):
        raise UserError(
            f"{key}{name}: no finished run with weights under {searched}, only its record, as in a "
            f"clone. To train the weights again: {command_of(record)}."
        )
    labels = [f"{path.parent.name}/{path.name[:8]}" for path in with_weights]
    if tell_differences:
        runs = [run for path in with_weights if (run := records.read(path / "record.json"))]
        labels = [
            f"{label} ({difference}{', ' * bool(difference)}seed {run.seed})"
            for label, run, difference in zip(labels, runs, tell_differences(runs), strict=True)
        ]
    more = ", …" if len(labels) > MAX_LISTED else ""
    raise UserError(
        f"{key}{name}: {len(with_weights)} runs match. Choose one of them: "
        f"{', '.join(labels[:MAX_LISTED])}{more}."
    )


def command_of(record: Record) -> str:
    """Return the command that carries out a record's run again."""
    recorded = records.flatten(record.config)
    words = [f"recipe={record.recipe}"]
    if recipe_body(record.recipe) is None:  # a recipe file of the user, whose path is unknown
        words = [f"{words[0]}.yaml", f"seed={record.seed}"]
        return shlex.join(["zdp-bench", "run", *words, "force=true"])
    recipe = records.flatten(configured(words).resolved)
    for group in GROUPS:
        name = recorded.get(f"{group}.name")
        if name != recipe.get(f"{group}.name"):
            words.append(f"{group}={name or 'none'}")
    # Groups first, because another group has other defaults.
    default = records.flatten(configured(words).resolved)
    # Of a run with a target or claimed ε, the recorded noise is what that ε gave.
    is_calibrated = any(recorded.get(key) is not None for key in EPSILONS)
    for key, value in sorted(recorded.items()):
        is_changed = key in default and default[key] != value
        is_derived = key == NOISE and is_calibrated
        if is_changed and not is_derived and not key.startswith("claims."):
            words.append(write_word(key, value))
    return shlex.join(["zdp-bench", "run", *words, "force=true"])
