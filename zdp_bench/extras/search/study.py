"""The trials of a search, in Optuna's study: one SQLite file, which several processes may share.

One process at a time is at a trial, and holds its lock. A trial that a killed process left is open:
whoever has no new trial to make carries it out again, with the values it has, so that its run goes
on from its checkpoint. What Optuna proposes depends on
the trial's number and those before it, and on nothing that a restart would lose.
"""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Literal

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import URL

from zdp_bench.errors import Busy
from zdp_bench.extras.search.space import Search
from zdp_bench.privacy.composition import draw_number
from zdp_bench.records import hold_lock

DRAWN = "number of trials"
Direction = Literal["minimize", "maximize"]


class Study:
    """An Optuna study of a search, safe to share between processes and to kill at any time.

    Args:
        folder: the search's own; `study.db` is in it.
        seed: the recipe's, from which proposals follow; of a random number of trials, the
            operating system draws them instead.
    """

    def __init__(self, search: Search, folder: Path, direction: Direction, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        folder.mkdir(parents=True, exist_ok=True)
        self._search, self._folder, self._seed = search, folder, seed
        url = URL.create("sqlite", database=str(folder / "study.db"))
        with self.alone():
            storage = RDBStorage(
                url.render_as_string(), engine_kwargs={"connect_args": {"timeout": 60}}
            )
            self._study = optuna.create_study(
                storage=storage, study_name="search", direction=direction, load_if_exists=True
            )
            if search.law and DRAWN not in self._study.user_attrs:
                drawn = draw_number(search.law, search.trials)
                self._study.set_user_attr(DRAWN, drawn)

    @property
    def count(self) -> int:
        """How many trials there are to be."""
        drawn: int = self._study.user_attrs.get(DRAWN, self._search.trials)
        return drawn

    def trials(self) -> list[FrozenTrial]:
        """Return every trial that has its values, in order."""
        every = self._study.get_trials(deepcopy=False)
        return [one for one in every if set(one.params) == set(self._search.space.searched)]

    @contextmanager
    def take(self, most: int) -> Iterator[list[FrozenTrial]]:
        """Hold trials to carry out, at most so many: new ones, or else open ones; [] if none.

        Waits where other processes hold all that are open.
        """
        while True:
            with ExitStack() as held:
                with self.alone():
                    known = len(self.trials())
                    new = [*map(self._ask, range(known, min(known + most, self.count)))]
                    free = (one for one in new or self._open() if self._hold(one, held))
                    mine = [*islice(free, most)]
                    left = self._open()  # read again: another may have told just now
                taken = [one for one in self.trials() if one.number in {*mine} & {*left}]
                if taken or not left:
                    yield taken
                    return
            with hold_lock(self._lock(left[0])):  # until another process is done with it
                pass

    def _open(self) -> list[int]:
        return [one.number for one in self.trials() if not one.state.is_finished()]

    def _lock(self, trial: int) -> Path:
        return self._folder / f"trial-{trial}.lock"

    def _hold(self, trial: int, held: ExitStack) -> bool:
        """Hold a trial's lock; return False if another process does."""
        with suppress(Busy):
            held.enter_context(hold_lock(self._lock(trial), wait=False))
            return True
        return False

    def tell(self, trial: FrozenTrial, value: float | None) -> None:
        """Enter a trial's score; None: it failed."""
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(trial.number, value, state=state)

    def _ask(self, number: int) -> int:
        search = self._search
        self._study.sampler = self._sampler(number)
        if search.sampler == "grid":
            self._study.enqueue_trial(search.space.grid()[number])
        return self._study.ask(search.space.searched).number

    def _sampler(self, number: int) -> BaseSampler:
        own = hashlib.sha256(f"{self._seed}:{number}".encode()).digest()[:4]
        seed = secrets.randbits(32) if self._search.law else int.from_bytes(own)
        if self._search.sampler == "tpe":
            with warnings.catch_warnings(
                action="ignore", category=optuna.exceptions.ExperimentalWarning
            ):
                return TPESampler(seed=seed, constant_liar=True)
        return RandomSampler(seed=seed)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes of this search waiting."""
        with hold_lock(self._folder / "study.lock"):
            yield
