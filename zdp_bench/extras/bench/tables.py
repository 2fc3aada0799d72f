"""The tables of `zdp-bench bench`: which sides are compared on which networks, and the paper's own
ratio beside them.

zeta_dp_2021/6   complex against real: one matrix product, one convolution
zeta_dp_2021/7   conv + linear, real and complex, private against non-private
deepee_2021/3    VGG-11 and two U-Nets: ours, Opacus, a loop over examples, with peak memory
zoo              ResNet-20, Model-3, AlexNet, complex CNN and U-Net: non-private, ours, Opacus
library          a step of a user's whole loop: non-private, ours, Opacus's, with peak memory

What another machine measured, or another number of threads, stays beside what is measured now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench import records
from zdp_bench.errors import unknown
from zdp_bench.extras.bench.measure import by_turns, hold_memory, peak_memory, require_agreement
from zdp_bench.extras.bench.pages import (
    Measured,
    Measurement,
    as_csv,
    as_markdown,
    environment,
    installed,
    machine,
    read_csv,
)
from zdp_bench.extras.bench.steps import SIDES, computes, may_be_baseline
from zdp_bench.extras.bench.workload import Step, Workload, device
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.memory_format import channels_last
from zdp_bench.report import papers

# ------------------------------------------------------------------------------------- comparisons


def compare(
    case: str,
    workload: Workload,
    sides: list[str],
    seconds: float,
    threads: int,
    memory: bool = False,
    paper: float | None = None,
) -> Iterator[Measurement]:
    """Compare sides on one workload.

    Args:
        memory: measure peak memory too.
        paper: the paper's own ratio of private to non-private.
    """
    steps, refused = _build(workload, sides)
    deviations = require_agreement(steps, {side: computes(side) for side in steps})
    runs = {side: step.run for side, step in steps.items()}
    timings = by_turns(runs, may_be_baseline, seconds)
    del steps, runs  # their memory, before that of each side is measured
    best = {side: timing.milliseconds for side, timing in timings.items()}
    base = min(filter(may_be_baseline, best), key=best.__getitem__)
    peaks = {
        side: peak_memory(asdict(workload), side, threads) if memory else None for side in best
    }
    for side, timing in timings.items():
        peak, at_base = peaks[side], peaks[base]
        yield Measurement(
            case,
            side,
            timing.milliseconds,
            timing.milliseconds / best[base],
            timing.low,
            timing.high,
            deviations[side],
            peak,
            peak / at_base if peak and at_base else None,
            paper if side.startswith("private") else None,
        )
    for side, reason in refused.items():
        nan = math.nan
        yield Measurement(case, side, nan, nan, nan, nan, nan, note=reason)


def _build(workload: Workload, sides: list[str]) -> tuple[dict[str, Step], dict[str, str]]:
    """Return the sides, and what Opacus says of a model that it does not take."""
    steps: dict[str, Step] = {}
    refused: dict[str, str] = {}
    for side in sides:
        try:
            step = SIDES[side](workload)
            if "Opacus" in side:
                step.answer()
            steps[side] = step
        except Exception as error:
            if "Opacus" not in side:
                raise
            refused[side] = (
                f"refuses the model: {(str(error).splitlines() or [type(error).__name__])[0][:120]}"
            )
    return steps, refused


def compare_with_real(
    case: str, sides: dict[str, Step], seconds: float, paper: float
) -> Iterator[Measurement]:
    """Compare an operation with its real twin in torch's default layout."""
    deviations = require_agreement(sides, {side: side.split(",")[0] for side in sides})
    runs = {side: step.run for side, step in sides.items()}
    timings = by_turns(runs, lambda side: side == "real", seconds)
    for side, timing in timings.items():
        yield Measurement(
            case,
            side,
            timing.milliseconds,
            timing.milliseconds / timings["real"].milliseconds,
            timing.low,
            timing.high,
            deviations[side],
            paper_ratio=paper if side.startswith("complex") else None,
        )


def _step(run: Callable[[], Tensor]) -> Step:
    def answer() -> Tensor:
        out = run()
        return (torch.view_as_real(out.resolve_conj()) if out.is_complex() else out).flatten()

    return Step(run, answer)


# ------------------------------------------------------------------------------------------ tables


def operations(quick: bool, threads: int) -> Iterator[Measurement]:
    """Table 6 of the 2021 paper: single operations, complex against real."""
    torch.manual_seed(0)
    seconds, batch = (1.5, 8) if quick else (10.0, 64)
    on = device()

    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        return torch.randn(*shape, device=on), torch.randn(*shape, device=on, dtype=torch.complex64)

    left, right = pair(64, 512), pair(512, 512)
    products = {
        "real": _step(lambda: left[0] @ right[0]),
        "complex, torch's (ours is the same)": _step(lambda: left[1] @ right[1]),
    }
    paper = _paper_ratio("zeta_dp_2021/6", "linear_complex", "linear_real")
    yield from compare_with_real("linear: 64×512 · 512×512", products, seconds, paper)
    x, y = pair(batch, 3, 224, 224)
    real, ours = nn.Conv2d(3, 16, 3).to(on), ComplexConv2d(3, 16, 3).to(on)
    native = nn.Conv2d(3, 16, 3, dtype=torch.complex64).to(on)
    native.load_state_dict(ours.state_dict())

    def convolve(layer: nn.Module, maps: Tensor) -> Step:
        return _step(torch.no_grad()(lambda: layer(maps)))

    convolutions = {
        "real": convolve(real, x),
        "real, channels-last": convolve(real, channels_last(x)),
        "complex, torch's": convolve(native, y),
        "complex, ours": convolve(ours, channels_last(y)),
    }
    paper = _paper_ratio("zeta_dp_2021/6", "conv_complex", "conv_real")
    case = f"convolution {batch}×3×224² → 16, forward"
    yield from compare_with_real(case, convolutions, seconds, paper)


def networks(quick: bool, threads: int) -> Iterator[Measurement]:
    """Table 7 of the 2021 paper, and the complex MLP of Table 1 beside it."""
    seconds, batch = (3.0, 32) if quick else (12.0, 64)
    ours = ["private, fast", "private, vmap"]
    sides = {
        "real": ["non-private", "non-private, channels first", *ours, *_opacus()],
        "complex": ["non-private", "non-private, torch's complex layers", *ours],
    }
    for kind in sides:
        workload = Workload(f"{kind}_conv_linear", (3, 32, 32), 1, batch, "squares")
        case = f"{kind} conv + linear, batch {batch}"
        paper = _paper_ratio("zeta_dp_2021/7", f"private_{kind}", f"nonprivate_{kind}")
        yield from compare(case, workload, sides[kind], seconds, threads, paper=paper)
    of_mlp = ["non-private", *ours, "private, loop over records"]
    for size in (batch,) if quick else (batch, 4 * batch):
        mlp = Workload("complex_mlp", (1, 28, 28), 10, size, "classes", {"hidden": [256, 128]})
        case = f"complex MLP 784-256-128-10, batch {size}"
        yield from compare(case, mlp, of_mlp, seconds, threads)


def imaging(quick: bool, threads: int) -> Iterator[Measurement]:
    """Table 3 of the deepee paper, smaller: its batch 32 and maps of 256² are a GPU's work."""
    seconds, hidden, width = (1.0, 256, 16) if quick else (10.0, 4096, 64)
    big, small, batch = (32, 32, 2) if quick else (224, 64, 8)
    vgg = Workload("vgg11", (3, big, big), 2, batch, "classes", {"hidden": hidden})
    vgg_unet = Workload("vgg11_unet", (1, small, small), 1, batch, "map", {"width": width})
    unet = Workload("transposed_unet", (1, small, small), 1, batch, "map", {"width": width})
    sides = ["non-private", "private, fast", *_opacus(), "private, loop over records"]
    for case, workload, own in (
        (f"VGG-11, {big}², batch {batch}", vgg, [*sides, "non-private, channels first"]),
        (f"VGG-11-U-Net, {small}², batch {batch}", vgg_unet, sides),
        (f"U-Net with transposed convolutions, {small}², batch {batch}", unet, sides),
    ):
        yield from compare(case, workload, own, seconds, threads, memory=not quick)


def zoo(quick: bool, threads: int) -> Iterator[Measurement]:
    """The networks of GReDP's Table I and two complex ones, each in the layout that a run takes."""
    images, batch = (3, 32, 32), 8 if quick else 64
    both = ["non-private", "non-private, channels first", "private, fast"]
    width, size, few = (8, 32, 2) if quick else (32, 320, 4)
    for name in ("resnet20", "model3", "alexnet"):
        workload = Workload(name, images, 10, batch, "classes")
        sides = [*both, *_opacus()]
        yield from compare(
            f"{name}, batch {batch}", workload, sides, 2.0 if quick else 30.0, threads
        )
    channels = {"channels": [16, 32]}
    for case, workload in {
        "complex CNN": Workload("complex_cnn", (1, 32, 32), 10, batch, "classes", channels),
        "complex U-Net": Workload("complex_unet", (1, size, size), 1, few, "map", {"width": width}),
    }.items():
        title = f"{case}, {workload.input_shape[1]}², batch {workload.batch}"
        yield from compare(title, workload, both, 1.0 if quick else 30.0, threads)


def library(quick: bool, threads: int) -> Iterator[Measurement]:
    """A step of the whole loop that a user writes, with `make_private` and with Opacus."""
    seconds, batch = (1.0, 16) if quick else (20.0, 128)
    hidden, width = ([32], 16) if quick else ([512, 256], 64)
    images, words = (3, 16, 16) if quick else (3, 32, 32), (12, 16) if quick else (48, 64)
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
        yield from compare(case, workload, sides, seconds, threads, memory=not quick)


def _opacus(whole: bool = False) -> list[str]:
    """Return Opacus's sides, of steps or of whole loops, if it is installed (the extra `peers`)."""
    sides = [side for side in SIDES if "Opacus" in side and whole == ("whole loop" in side)]
    return sides if installed("opacus") else []


def _paper_ratio(table: str, above: str, below: str) -> float:
    """Return the paper's own ratio of two rows, on its CPU (or GPU, where ours was one)."""
    column = "gpu" if torch.cuda.is_available() else "cpu"
    values = {
        number.row: float(number.value)
        for number in papers.reference(table)
        if number.column == column
    }
    return values[above] / values[below]


# (quick, threads) -> what is measured
TABLES: dict[str, Callable[[bool, int], Iterator[Measurement]]] = {
    "zeta_dp_2021/6": operations,
    "zeta_dp_2021/7": networks,
    "deepee_2021/3": imaging,
    "zoo": zoo,
    "library": library,
}


def run(
    table: str, quick: bool, threads: int, results: Path
) -> tuple[list[Measurement], list[Path]]:
    """Measure a table and write it to `results/tables`.

    Args:
        quick: smaller models, batches and fewer rounds: all tables in under two minutes on two
            cores.

    Raises:
        UserError: no such table, sides that should agree do not, or the file is no table of ours.
    """
    if table not in TABLES:
        raise unknown("table", table, TABLES)
    torch.set_num_threads(threads)
    held = hold_memory()
    stem = results / "tables" / f"bench_{table.replace('/', '_table')}{'_quick' if quick else ''}"
    paths = [stem.with_suffix(".md"), stem.with_suffix(".csv")]
    facts = environment(threads) | {"allocator": "held" if held else "as malloc likes"}
    before = read_csv(paths[1]) if paths[1].exists() else []
    fresh = list(TABLES[table](quick, threads))
    measured: list[Measured] = []
    for case in dict.fromkeys(row.case for row in fresh):
        measured += [
            (row, on) for row, on in before if row.case == case and machine(on) != machine(facts)
        ]
        measured += [(row, facts) for row in fresh if row.case == case]
    records.write_text(paths[0], as_markdown(table, measured))
    records.write_text(paths[1], as_csv(measured))
    return fresh, paths


def measure_missing(
    results: Path, others: Collection[str], quick: bool, say: Callable[[str], None]
) -> None:
    """Measure the tables that `results` lacks, but for `others`, which records fill."""
    for name in [name for name in TABLES if name not in others]:
        if not (results / "tables" / f"{papers.file_stem(name)}.md").exists():
            say(f"measuring {name} ...")
            run(name, quick=quick, threads=2, results=results)
