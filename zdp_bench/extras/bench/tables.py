"""The tables of `zdp-bench bench`: the sides and networks to compare, next to the paper's ratio.

zeta_dp_2021/6   complex against real: one matrix product, one convolution
zeta_dp_2021/7   conv + linear, real and complex, private against non-private
deepee_2021/3    VGG-11 and two U-Nets: ours, Opacus, a loop over examples, with peak memory
zoo              ResNet-20, Model-3, AlexNet, complex CNN and U-Net: non-private, ours, Opacus
library          a step of a user's whole loop: non-private, ours, Opacus's, with peak memory
startup          commands that do not train, relative to `import torch`

Writing a table keeps rows that were measured on another machine or with another number of threads.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from zdp_bench import records
from zdp_bench.extras.bench.measure import by_turns, hold_memory, peak_memory, require_agreement
from zdp_bench.extras.bench.startup import startup
from zdp_bench.extras.bench.steps import SIDES
from zdp_bench.extras.bench.workload import Step, Workload, as_real, device
from zdp_bench.foreign_files import expect, reading
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.memory_format import channels_last
from zdp_bench.report import papers
from zdp_bench.report.number_format import rounded
from zdp_bench.report.sheet import markdown_table
from zdp_bench.training.machine import processor_name

Row = dict[Any, Any]  # one side of one comparison, with its ratio to the baseline of the case
COLUMNS = {
    "side": "side",
    "milliseconds": "ms",
    "ratio": "× baseline",
    "quartiles": "quartiles",
    "memory": "peak MiB",
    "memory_ratio": "× its memory",
    "paper_ratio": "paper's ratio",
    "deviation": "agrees to",
}
NUMBERS = [
    *("milliseconds", "ratio", "ratio_low", "ratio_high", "deviation"),
    *("memory", "memory_ratio", "paper_ratio"),
]
FACTS = ("python", "torch", "numpy", "opacus", "date", "allocator")  # of `environment` and `run`
ABOUT = """Times are the best of alternating rounds. The baseline of a case is its fastest
non-private side or, if operations are compared, 'real' in torch's default layout. Compare ratios
across machines, not times. 'Agrees to' is the deviation from the first side that computes the same.
Peak memory is the most that a step holds at once, measured in its own process."""
ABOUT_STARTUP = """Times are processor times of a command and the processes that it starts, the best
of alternating rounds. The baseline is `import torch`. Compare ratios across machines, not times."""
# What rows of an earlier date were measured with, until they are measured again. It is
# the day after the change: the committed rows of the day itself were measured before it.
CHANGED = "2026-11-30"
FORMER_MEMORY = f"""Before {CHANGED}, peak memory on a GPU was measured in the process of the
timing, and includes what that process held."""
FORMER_BATCHES = f"""Before {CHANGED}, zdp-bench's loop took a batch from tensors by one index,
while the other loops collated its examples (for the MLP, 0.05 ms against 0.29 ms on a CPU)."""

# ------------------------------------------------------------------------------------- comparisons


def compare(
    case: str,
    steps: dict[str, Step],
    seconds: float,
    paper: float | None = None,
    peak: Callable[[str], float | None] = lambda side: None,
) -> list[Row]:
    """Compare sides on one workload.

    Args:
        case: name of the comparison.
        steps: the sides, by name; emptied after they are timed.
        seconds: total time of the timing.
        paper: the paper's ratio.
        peak: side -> its peak memory in MiB, or None.

    Returns:
        a row for each side.
    """
    deviations = require_agreement(steps)
    runs = {side: step.run for side, step in steps.items()}
    baseline, timings = by_turns(runs, seconds)
    # Free the sides' memory, so that the processes that measure memory have enough.
    runs.clear()
    steps.clear()
    peaks = {side: peak(side) for side in timings}
    rows: list[Row] = []
    for side, timing in timings.items():
        memory, base_memory = peaks[side], peaks[baseline]
        row = {
            "case": case,
            "side": side,
            **timing,
            "deviation": deviations[side],
            "memory": memory,
            "memory_ratio": memory / base_memory if memory and base_memory else None,
            "paper_ratio": paper if side.startswith(("private", "complex")) else None,
        }
        rows.append(row)
    return rows


def compare_training(
    case: str,
    workload: Workload,
    sides: list[str],
    seconds: float,
    memory: bool = False,
    paper: float | None = None,
) -> list[Row]:
    """Compare training steps on one workload.

    Args:
        case: name of the comparison.
        workload: the model and its examples.
        sides: names of the sides, keys of `SIDES`.
        seconds: total time of the timing.
        memory: if True, measures peak memory too.
        paper: the paper's ratio.

    Returns:
        a row for each side.
    """
    steps = {side: SIDES[side](workload) for side in sides}
    peak = partial(peak_memory, workload) if memory else lambda side: None
    return compare(case, steps, seconds, paper, peak)


def _step(run: Callable[[], Tensor]) -> Step:
    return Step(run, lambda: as_real(run()))


# ------------------------------------------------------------------------------------------ tables


def operations(quick: bool) -> Iterator[list[Row]]:
    """Measure Table 6 of Ziller et al. 2021: single complex operations relative to real ones."""
    torch.manual_seed(0)
    seconds, batch = (1.5, 8) if quick else (10.0, 64)

    def draw(*shape: int) -> tuple[Tensor, Tensor]:
        real = torch.randn(*shape, device=device())
        return real, torch.randn(*shape, device=device(), dtype=torch.complex64)

    real_left, complex_left = draw(64, 512)
    real_right, complex_right = draw(512, 512)
    products = {
        "real": _step(lambda: real_left @ real_right),
        "complex, torch's (ours is the same)": _step(lambda: complex_left @ complex_right),
    }
    paper = _paper_ratio("zeta_dp_2021/6", "linear_complex", "linear_real")
    yield compare("linear: 64×512 · 512×512", products, seconds, paper)

    def convolve(layer: nn.Module, maps: Tensor) -> Step:
        return _step(torch.no_grad()(lambda: layer(maps)))

    x, y = draw(batch, 3, 224, 224)
    real = nn.Conv2d(3, 16, 3).to(device())
    ours = ComplexConv2d(3, 16, 3).to(device())
    native = nn.Conv2d(3, 16, 3, dtype=torch.complex64).to(device())
    native.load_state_dict(ours.state_dict())
    convolutions = {
        "real": convolve(real, x),
        "real, channels-last": convolve(real, channels_last(x)),
        "complex, torch's": convolve(native, y),
        "complex, ours": convolve(ours, channels_last(y)),
    }
    paper = _paper_ratio("zeta_dp_2021/6", "conv_complex", "conv_real")
    yield compare(f"convolution {batch}×3×224² → 16, forward", convolutions, seconds, paper)


def networks(quick: bool) -> Iterator[list[Row]]:
    """Measure Table 7 of Ziller et al. 2021, and the complex MLP of its Table 1."""
    seconds, batch = (3.0, 32) if quick else (12.0, 64)
    ours = ["private, fast", "private, vmap"]
    sides = {
        "real": ["non-private", "non-private, channels first", *ours, *_opacus()],
        "complex": ["non-private", *ours],
    }
    for kind in sides:
        workload = Workload(f"{kind}_conv_linear", (3, 32, 32), 1, batch, "squares")
        case = f"{kind} conv + linear, batch {batch}"
        paper = _paper_ratio("zeta_dp_2021/7", f"private_{kind}", f"nonprivate_{kind}")
        yield compare_training(case, workload, sides[kind], seconds, paper=paper)
    mlp_sides = ["non-private", *ours, "private, loop over examples"]
    for size in (batch,) if quick else (batch, 4 * batch):
        mlp = Workload("complex_mlp", (1, 28, 28), 10, size, "classes", {"hidden": [256, 128]})
        case = f"complex MLP 784-256-128-10, batch {size}"
        yield compare_training(case, mlp, mlp_sides, seconds)


def imaging(quick: bool) -> Iterator[list[Row]]:
    """Measure Table 3 of the deepee paper with smaller batches and images.

    The paper's batch of 32 and images of 256² pixels need a GPU.
    """
    seconds, batch = (1.0, 2) if quick else (10.0, 8)
    hidden, width = (256, 16) if quick else (4096, 64)
    big, small = (32, 32) if quick else (224, 64)
    vgg = Workload("vgg11", (3, big, big), 2, batch, "classes", {"hidden": hidden})
    vgg_unet = Workload("vgg11_unet", (1, small, small), 1, batch, "map", {"width": width})
    unet = Workload("transposed_unet", (1, small, small), 1, batch, "map", {"width": width})
    sides = ["non-private", "private, fast", *_opacus(), "private, loop over examples"]
    cases = {
        f"VGG-11, {big}², batch {batch}": vgg,
        f"VGG-11-U-Net, {small}², batch {batch}": vgg_unet,
        f"U-Net with transposed convolutions, {small}², batch {batch}": unet,
    }
    for case, workload in cases.items():
        case_sides = [*sides, "non-private, channels first"] if workload is vgg else sides
        yield compare_training(case, workload, case_sides, seconds, memory=not quick)


def zoo(quick: bool) -> Iterator[list[Row]]:
    """Measure the networks of GReDP's Table I and two complex networks, in the layouts of runs."""
    batch, seconds = (8, 2.0) if quick else (64, 30.0)
    width, size, unet_batch = (8, 32, 2) if quick else (32, 320, 4)
    sides = ["non-private", "non-private, channels first", "private, fast"]
    for name in ("resnet20", "model3", "alexnet"):
        workload = Workload(name, (3, 32, 32), 10, batch, "classes")
        case = f"{name}, batch {batch}"
        yield compare_training(case, workload, [*sides, *_opacus()], seconds)
    channels = {"channels": [16, 32]}
    cnn = Workload("complex_cnn", (1, 32, 32), 10, batch, "classes", channels)
    yield compare_training(f"complex CNN, 32², batch {batch}", cnn, sides, seconds)
    unet = Workload("complex_unet", (1, size, size), 1, unet_batch, "map", {"width": width})
    yield compare_training(f"complex U-Net, {size}², batch {unet_batch}", unet, sides, seconds)


def library(quick: bool) -> Iterator[list[Row]]:
    """Measure a step of a user's whole loop, with `make_private` and with Opacus."""
    seconds, batch = (1.0, 16) if quick else (20.0, 128)
    hidden, width = ([32], 16) if quick else ([512, 256], 64)
    images = (3, 16, 16) if quick else (3, 32, 32)
    words = (12, 16) if quick else (48, 64)
    sides = ["non-private, whole loop", "private, zdp-bench's whole loop", *_opacus(whole=True)]
    networks: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
        "MLP": ("real_mlp", (1, 28, 28), {"hidden": hidden}),
        "CNN with GroupNorm": ("norm_cnn", images, {"width": width}),
        "LSTM": ("lstm", words, {"width": width}),
        "transformer": ("transformer", words, {"width": width}),
    }
    for name, (model, shape, options) in networks.items():
        workload = Workload(model, shape, 10, batch, "classes", options)
        case = f"{name}, batch {batch}"
        yield compare_training(case, workload, sides, seconds, memory=not quick)


OPACUS = [side for side in SIDES if "Opacus" in side]


def _opacus(whole: bool = False) -> list[str]:
    """Return the names of Opacus's sides, empty if it is not installed (the extra `peers`).

    Args:
        whole: return the sides of whole loops instead of those of steps.
    """
    if not find_spec("opacus"):
        return []
    return [side for side in OPACUS if ("whole loop" in side) == whole]


def _paper_ratio(
    table: str,
    above: str,
    below: str,
) -> float:
    """Return the paper's ratio of the rows `above` and `below`.

    It is that of the paper's GPU if this machine has a GPU, otherwise that of its CPU.
    """
    column = "gpu" if torch.cuda.is_available() else "cpu"
    values = {}
    for number in papers.reference(table):
        if number.column == column:
            values[number.row] = float(number.value)
    return values[above] / values[below]


# The name of a table -> the function (quick -> rows of each case) that measures it.
TABLES: dict[str, Callable[[bool], Iterator[list[Row]]]] = {
    "zeta_dp_2021/6": operations,
    "zeta_dp_2021/7": networks,
    "deepee_2021/3": imaging,
    "zoo": zoo,
    "library": library,
    "startup": startup,
}


def run(
    table: str,
    quick: bool,
    threads: int,
    results: Path,
) -> Iterator[list[Row]]:
    """Measure one of `TABLES`, and yield the rows of each case after writing them.

    Args:
        table: name of the table.
        quick: whether to measure small models for a short time.
        threads: number of threads of PyTorch.
        results: the results folder.
    """
    torch.set_num_threads(threads)
    facts = environment(threads) | {"allocator": "held" if hold_memory() else "as malloc likes"}
    paths = paths_of(table, quick, results)
    read(paths[1])  # a damaged file must not lose what was measured
    for rows in TABLES[table](quick):
        case_rows = [{**row, **facts} for row in rows]
        _write(table, paths, case_rows)
        yield case_rows


def paths_of(
    table: str,
    quick: bool,
    results: Path,
) -> list[Path]:
    """Return the page and the CSV of a table."""
    stem = results / "tables" / f"bench_{table.replace('/', '_table')}{'_quick' if quick else ''}"
    return [stem.with_suffix(".md"), stem.with_suffix(".csv")]


def _write(
    table: str,
    paths: list[Path],
    case_rows: list[Row],
) -> None:
    """Write the rows of a case, replacing those that this machine measured earlier."""
    page, csv = paths
    old_rows = read(csv)
    new_rows = pd.DataFrame([rounded(row) for row in case_rows])
    keys = ["case", "device", "threads"]
    is_replaced = old_rows[keys].eq(new_rows[keys].iloc[0]).all(axis=1)
    rows = pd.concat([old_rows[~is_replaced], new_rows], ignore_index=True)
    order = {case: index for index, case in enumerate(rows.case.unique())}
    rows = rows.sort_values("case", key=lambda cases: cases.map(order), kind="stable")
    records.write_text(page, as_markdown(table, rows))
    records.write_text(csv, rows.to_csv(index=False, lineterminator="\n"))


def read(path: Path) -> pd.DataFrame:
    """Return the rows in a CSV file of `run`, empty if there is no such file."""
    columns = ["case", "side", "device", "threads", *NUMBERS]
    if not path.exists():
        return pd.DataFrame([], columns=columns)
    with reading(path):
        rows = pd.read_csv(path, dtype={"threads": str} | dict.fromkeys(NUMBERS, float))
        expect({*columns} <= {*rows.columns}, "lacks columns of a table of the bench; delete it")
    return rows


def cells(row: Row) -> list[str]:
    """Return the formatted values of a row, in the order of `COLUMNS`."""
    texts = {
        **row,
        "milliseconds": _format(row["milliseconds"], ".3g"),
        "ratio": _format(row["ratio"], ".2f"),
        "quartiles": f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}",
        "memory": _format(row["memory"], ".0f"),
        "memory_ratio": _format(row["memory_ratio"], ".2f"),
        "paper_ratio": _format(row["paper_ratio"], ".1f"),
        "deviation": _format(row["deviation"], ".0e"),
    }
    if row["milliseconds"] >= 1000:
        texts["milliseconds"] = f"{row['milliseconds']:,.0f}"
    return [str(texts[column]) for column in COLUMNS]


def _format(value: Any, form: str) -> str:
    return "" if pd.isna(value) else format(value, form)


def as_markdown(table: str, rows: pd.DataFrame) -> str:
    """Return a Markdown page with a table for each case and machine."""
    lines = [
        f"# Measured: {table}",
        "",
        f"`zdp-bench bench {table}` made this.",
        *(ABOUT_STARTUP if table == "startup" else ABOUT).split("\n"),
        *_describe_former(rows),
    ]
    facts = [name for name in FACTS if name in rows]
    columns = list(COLUMNS.values())
    for case, case_rows in rows.groupby("case", sort=False):
        lines += ["", f"## {case}"]
        for (machine, threads), measured in case_rows.groupby(["device", "threads"], sort=False):
            known = measured.iloc[0][facts].dropna()
            versions = ", ".join(f"{key} {value}" for key, value in known.items())
            lines += ["", f"On {machine}, {threads} threads ({versions}).", ""]
            lines += markdown_table(columns, [cells(row) for row in measured.to_dict("records")])
    return "\n".join(lines) + "\n"


def _describe_former(rows: pd.DataFrame) -> list[str]:
    """Return lines about rows that were measured in another way than today."""
    if "date" not in rows:
        return []
    rows = rows[rows.date < CHANGED]
    lines = []
    if (rows.memory.notna() & ~rows.device.str.startswith("cpu")).any():
        lines += ["", *FORMER_MEMORY.split("\n")]
    if rows.side.str.contains("zdp-bench's whole loop").any():
        lines += ["", *FORMER_BATCHES.split("\n")]
    return lines


def environment(threads: int) -> Row:
    """Return the machine, the number of threads, the versions and the date of a measurement."""
    facts = {
        "device": f"cpu ({processor_name()})",
        "threads": str(threads),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    for name in ("torch", "numpy", "opacus"):
        if find_spec(name):
            facts[name] = version(name)
    facts["date"] = datetime.now(UTC).date().isoformat()
    return facts
