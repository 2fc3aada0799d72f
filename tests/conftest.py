"""What every test shares: one thread, a data root where there is one, and a miniature MNIST in the
real file format."""

import copy
import gc
import gzip
import os
import random
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_path

# Before numpy and torch are loaded: several workers with a thread on every core are twenty times
# slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What takes long to compile is kept from session to session.
os.environ.setdefault("NUMBA_CACHE_DIR", str(user_cache_path("zdp-bench").parent))
os.environ.setdefault("MPLCONFIGDIR", str(user_cache_path("matplotlib")))

import hydra
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from omegaconf import DictConfig, OmegaConf

from tests.shared_state import differences, process_settings, seed_all, shared_values
from zdp_bench import assets
from zdp_bench.config.compose import files
from zdp_bench.config.schema import GROUPS
from zdp_bench.config.words import parse_words
from zdp_bench.experiments.claims import merge_job

# The same examples in every session, however slow the machine is.
settings.register_profile(
    "tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# Folders whose tests carry out no run.
NO_RUNS = {"algorithms", "config", "gradients", "models", "nn", "privacy", "tasks"}

CHOICES = "|".join(("recipe", "launcher", *GROUPS))  # a word of these names a plug-in
compose_anew = hydra.compose
composed: dict[tuple[str | Path, ...], DictConfig] = {}


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """Compose a choice of plug-ins once; set values in a copy, which is what Hydra does last.

    Whatever is not as plain as that, and every mistake, is Hydra's own.
    """
    values = [word for word in overrides if re.match(rf"(?!hydra|({CHOICES})=)[\w.]+=", word)]
    chosen = [word for word in overrides if word not in values]
    key = (*chosen, assets.CONF, assets.DATASETS, assets.RECIPES)
    try:
        if key not in composed:
            composed[key] = merge(chosen)
        config = copy.deepcopy(composed[key])
        for override in parse_words(values):
            assert not override.is_sweep_override()
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    except Exception:
        return compose_anew(config_name, overrides)
    return config


def merge(chosen: list[str]) -> DictConfig:
    """Return a recipe with our plug-ins by merging their files, which is 20 times as fast."""
    names = dict(word.split("=") for word in chosen)
    assert len(names) == len(chosen)
    assert all(kind in ("recipe", *GROUPS) and name in files(kind) for kind, name in names.items())
    recipe = names.pop("recipe")
    config = OmegaConf.create(merge_job(recipe, map("=".join, names.items())))
    OmegaConf.set_struct(config, True)
    return config


torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")
    amounts = {"kills": 100, "configurations": 1000, "damaged": 400}
    amounts |= {"gigabytes": 4}  # how large a data set is
    for what, count in amounts.items():
        parser.addoption(f"--{what}", type=int, default=count, help=f"with --slow: {what}")
    drawn = random.SystemRandom().randrange(2**32)
    parser.addoption("--seed", type=int, default=drawn, help="with --slow: repeats what failed")


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a cache: nothing an earlier one kept stands in for today's."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share it
        folder = tempfile.mkdtemp(prefix="zdp-bench-tests-")
        os.environ["XDG_CACHE_HOME"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"--seed {config.getoption('seed')}" if config.getoption("--slow") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: add --slow"))
    if find_spec("fcntl") is None:
        for item in items:
            if item.path.relative_to(Path(__file__).parent).parts[0] not in NO_RUNS:
                reason = "a run needs fcntl, which is of POSIX systems; Windows has none"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported and collected: a search of it takes seconds."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _kept_compositions() -> Iterator[None]:
    """Keeps what Hydra composes, and waits for no disk: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra, "compose", compose)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _module_keeps_its_values(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail where a test changed a tensor, array or layer that its module shares."""
    before = shared_values(request.module)
    yield
    changed = differences(before, shared_values(request.module))
    assert not changed, f"a test of {request.module.__name__} changed {', '.join(changed)}"


@pytest.fixture(autouse=True)
def _process_keeps_its_settings() -> Iterator[None]:
    """Seed every generator; fail where the test leaves a setting of the process changed."""
    seed_all()
    before = process_settings()
    yield
    changed = differences(before, process_settings())
    assert not changed, f"the test leaves changed: {', '.join(changed)}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch uses, until the test is over."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The real data root; the test skips where ZDP_DATA names none."""
    root = os.environ.get("ZDP_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("ZDP_DATA names no data root")
    return Path(root)


def idx_bytes(array: np.ndarray) -> bytes:
    """An array of unsigned bytes in the idx format."""
    return (
        struct.pack(">HBB", 0, 8, array.ndim)
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_mini_mnist(root: Path, train: int = 200, test: int = 50) -> Path:
    """A tiny MNIST in torchvision's layout: noise images, every label several times. Returns the
    folder of the files."""
    rng = np.random.default_rng(0)
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28))
        labels = np.arange(count) % 10
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels)))
    return folder


@pytest.fixture
def mini_mnist(tmp_path: Path) -> Path:
    """A data root that holds the tiny MNIST."""
    write_mini_mnist(tmp_path)
    return tmp_path
