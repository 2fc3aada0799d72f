"""Data sets of tens of gigabytes train in the memory that one of a gigabyte takes.

`pytest --slow --gigabytes 40 -rP tests/test_large_data.py` prints the figures of
docs/performance.md: of each size, the most anonymous memory (what cannot be dropped and read again)
before and while steps were taken, in MB. The files are sparse: they have the real format and size,
and take no place on the disk.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.drivers import python
from zdp_bench.config import compose, parse
from zdp_bench.privacy.noise import SeededNoise, add_noise
from zdp_bench.training.setup import Setup
from zdp_bench.training.step import descend, sum_shares

GB, STEPS = 2**30, 4
LEAST = 64  # MB that allocators and Poisson's batches move the peak by


def write_fastmri(root: Path, size: int) -> None:
    """Volumes of the release's size, whose numbers are a hole in the file."""
    import h5py

    shape, image = (40, 640, 372), (40, 320, 320)
    each = 8 * np.prod(shape) + 4 * np.prod(image)
    for number in range(max(2, round(size / each))):
        folder = root / "fastMRI" / ("singlecoil_train" if number else "singlecoil_val")
        folder.mkdir(parents=True, exist_ok=True)
        with h5py.File(folder / f"file{number}.h5", "w") as file:
            for name, of, kind in (
                ("kspace", shape, np.complex64),
                ("reconstruction_esc", image, np.float32),
            ):
                layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                kind_id = h5py.h5t.py_create(np.dtype(kind), logical=True)
                space = h5py.h5s.create_simple(of)
                h5py.h5d.create(file.id, name.encode(), kind_id, space, layout)
            file.attrs.update({"acquisition": "PD", "max": 1.0, "patient_id": f"p{number}"})


def write_msd(root: Path, size: int) -> None:
    """Uncompressed CT volumes: a header, and a hole for the voxels."""
    import nibabel

    shape = (512, 512, 128)
    for number in range(max(5, round(size / (3 * np.prod(shape))))):
        for kind, dtype in (("images", np.int16), ("labels", np.uint8)):
            path = root / "Task03_Liver" / f"{kind}Tr" / f"liver_{number}.nii"
            path.parent.mkdir(parents=True, exist_ok=True)
            header = nibabel.Nifti1Header()
            header.set_data_dtype(dtype)
            header.set_data_shape(shape)
            header.set_xyzt_units("mm")
            header["vox_offset"], header["magic"] = 352, b"n+1"
            header.set_sform(np.eye(4), code=1)
            path.write_bytes(header.binaryblock + bytes(4))
            os.truncate(path, 352 + int(np.prod(shape)) * np.dtype(dtype).itemsize)


KINDS: dict[str, tuple[Callable[[Path, int], None], str]] = {
    "fastmri": (
        write_fastmri,
        "dataset=fastmri task=reconstruction model=complex_unet model.width=4 model.depth=2 "
        "dataset.height=64 dataset.width=64",
    ),
    "msd": (
        write_msd,
        "dataset=msd task=segmentation model=vgg11_unet model.width=4 model.norm=batch "
        "model.replace_batchnorm=group dataset.size=64",
    ),
}


class Memory(threading.Thread):
    """Looks at this process's anonymous memory all the time; `most` is in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0.0

    def run(self) -> None:
        while True:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    self.most = max(self.most, int(line.split()[1]) / 1024)
            time.sleep(0.01)


def take_step(setup: Setup, step: int = 0) -> None:
    """Take one private step on the run's own data; nothing is written."""
    seed = setup.config.seed
    batches, divisor = setup.draw(seed, step)
    total = sum_shares(setup.algorithm, setup.mechanism, batches, setup.device)
    noisy = add_noise(total, setup.mechanism, SeededNoise(seed), step)
    release = setup.algorithm.postprocess(noisy, divisor)
    descend(dict(setup.model.named_parameters()), setup.optimizer, release)


def measure(kind: str, gigabytes: float, folder: Path) -> None:
    """Train on so much data, in a process of its own, and print what it took."""
    torch.set_num_threads(1)
    write, words = KINDS[kind]
    write(folder, int(gigabytes * GB))
    memory = Memory()
    memory.start()
    time.sleep(0.1)
    before = memory.most
    given = ["recipe=quickstart", f"paths.data={folder}", *words.split()]
    given += ["trainer.sample_rate=null", "trainer.batch_size=8"]
    setup = Setup.of(parse(compose(given)))
    for step in range(STEPS):
        take_step(setup, step)
    measurements = {"kind": kind, "gigabytes": gigabytes, "examples": len(setup.data.train)}
    print(json.dumps(measurements | {"before": round(before), "most": round(memory.most)}))


def measured(kind: str, gigabytes: float, folder: Path) -> dict[str, Any]:
    """Return what `measure` prints."""
    words = kind, str(gigabytes), str(folder)
    measurements = json.loads(python(__file__, *words, XDG_CACHE_HOME=str(folder / "cache")).stdout)
    print(measurements)  # `pytest -rP` shows it
    return measurements


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("kind", ["fastmri", "msd"])
def test_memory_does_not_grow_with_the_data(
    kind: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    size = pytestconfig.getoption("gigabytes")
    small, large = (measured(kind, of, tmp_path / f"{of}") for of in (0.5, size))
    assert large["examples"] > size * small["examples"]
    assert large["most"] < 1.2 * small["most"] + LEAST


if __name__ == "__main__":
    measure(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
