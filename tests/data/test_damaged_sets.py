"""Damaged files of every public data set: it is loaded with another digest, or refused in one
sentence.

A few whenever the tests are run; with `--slow`, as many of each set as `--damaged` says, drawn from
`--seed`.
"""

import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.damage import BYTES, TEXT, Subject, attack, seeds_of
from tests.data.conftest import write_every_set
from tests.data.helpers import copy_folder, dataset
from tests.data.test_digests import CASES, content
from zdp_bench.data import cifar10

TEXTS = {".csv", ".txt", ".hea", ".json"}
# The same files and the same code as another case.
AGAIN = {"fashion_mnist", "ham10000 diagnosis", "roahd every lead"}


@cache
def every_set() -> Path:
    """Return a data root with a little of every set."""
    root = Path(tempfile.mkdtemp())
    write_every_set(root)
    return root


def damage_any(path: Path, draw: random.Random) -> None:
    """Damage a file as one of its kind is."""
    draw.choice(TEXT if path.suffix in TEXTS else BYTES)(path, draw)


def of_set(case: str) -> Subject:
    folders, options = CASES[case]
    assert isinstance(folders, list)

    def write(place: Path) -> None:
        for name in folders:
            copy_folder(every_set(), place, name)

    def read(place: Path) -> tuple[str, str]:
        """Return the digest of a data set, and what a run sees of it."""
        kept = place.with_suffix(".cache")
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", str(kept))
                patch.setattr(cifar10, "release_of", lambda paths, of: "binary")
                splits = dataset(case.split()[0], **options).load(place)
                return splits.digest, content(splits)
        finally:
            shutil.rmtree(kept, ignore_errors=True)

    return Subject(write, [damage_any], read, "**/*.*", differ)


def differ(sound: tuple[str, str], damaged: tuple[str, str]) -> bool:
    """Return True unless one digest stands for two contents."""
    return damaged[0] != sound[0] or damaged[1] == sound[1]


SUBJECTS = {
    case: of_set(case) for case in CASES if case not in AGAIN and not case.startswith("folder")
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "many", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_damaged_set_is_another_one_or_refused(
    name: str, many: bool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    failed = attack(SUBJECTS[name], tmp_path, seeds_of(pytestconfig, many))
    assert not failed, "\n".join(failed)
