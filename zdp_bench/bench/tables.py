"""The tables of `zdp-bench bench`: which workloads and sides each compares, and how they are laid out beside the paper's numbers.

zeta_dp_2021/6   complex against real: one matrix product, one convolution
zeta_dp_2021/7   conv + linear, real and complex, private against non-private
scaling          time and peak memory of a private step against the batch
algorithms       a private step of each algorithm against the non-private one, on its own paper's network
deepee_2021/3    VGG-11 and two U-Nets: ours, Opacus, a loop over records, with peak memory (its text has no numbers)

A table is a list of cases, each measured by itself: `--case` measures some of them anew and leaves the others as they stand. What
another machine measured, or another number of threads, stays beside it.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from zdp_bench import records
from zdp_bench.bench.measure import Step, by_turns, hold_memory, peak_memory, require_agreement
from zdp_bench.bench.pages import (
    Measured,
    Row,
    as_csv,
    as_markdown,
    environment,
    installed,
    machine,
    read_csv,
)
from zdp_bench.bench.steps import SIDES, Workload, computes, device, may_be_baseline
from zdp_bench.errors import UserError, unknown
from zdp_bench.kernels.memory_format import channels_last
from zdp_bench.nn.convolution import ComplexConv2d


@dataclass(frozen=True)
class Case:
    """One comparison of a table, measured when asked."""

    name: str
    measure: Callable[[], Iterator[Row]]


def available() -> list[str]:
    """The tables there are."""
    return list(_TABLES)


def require_case(names: Sequence[str], quick: bool, threads: int, only: str) -> None:
    """Refuse a case that not every one of the tables has, before any is measured.

    Raises:
        UserError: names the tables that have it.
    """
    having = [name for name in names if not only or _chosen(_TABLES[name](quick, threads), only)]
    if having and len(having) < len(names):
        raise UserError(
            f"--case '{only}': is in {', '.join(having)} only; name the table, as in `zdp-bench bench {having[0]}`."
        )


def _chosen(cases: list[Case], only: str) -> list[Case]:
    return [case for case in cases if only.lower() in case.name.lower()]


def run(
    table: str, quick: bool, threads: int, results: Path, only: str = ""
) -> tuple[list[Row], list[Path]]:
    """Measure a table and write it to `results/tables`.

    Args:
        quick: smaller models, batches and fewer rounds: all tables in under two minutes on two cores.
        only: measure the cases whose name contains this; what the table has of the others stays.

    Raises:
        UserError: no such table or case, sides that should agree do not, or the table that is there is none of ours.
    """
    if table not in _TABLES:
        raise unknown("table", table, _TABLES)
    torch.set_num_threads(threads)
    held = hold_memory()
    cases = _TABLES[table](quick, threads)
    chosen = _chosen(cases, only)
    if not chosen:
        raise unknown("case", only, [case.name for case in cases])
    stem = results / "tables" / f"bench_{table.replace('/', '_table')}{'_quick' if quick else ''}"
    paths = [stem.with_suffix(".md"), stem.with_suffix(".csv")]
    facts = environment(threads) | {"allocator": "held" if held else "as malloc likes"}
    stood = read_csv(paths[1]) if paths[1].exists() else []
    fresh = {case.name: list(case.measure()) for case in chosen}
    measured: list[Measured] = []
    for case in cases:
        of_case = [(row, on) for row, on in stood if row.case == case.name]
        if case.name in fresh:
            of_case = [(row, on) for row, on in of_case if machine(on) != machine(facts)]
        measured += of_case + [(row, facts) for row in fresh.get(case.name, [])]
    records.write_text(paths[0], as_markdown(table, measured))
    records.write_text(paths[1], as_csv(measured))
    return [row for rows in fresh.values() for row in rows], paths


# -------------------------------------------------------------------------------------------------------- comparing


def _compare(
    name: str,
    workload: Workload,
    sides: list[str],
    seconds: float,
    threads: int,
    memory: bool = False,
    paper: float | None = None,
) -> Case:
    """A case of one workload; `paper`: the paper's own ratio of private to non-private."""

    def measure() -> Iterator[Row]:
        steps, refused = _ready(workload, sides)
        deviations = require_agreement(steps, {side: computes(side) for side in steps})
        timings = by_turns(
            {side: step.run for side, step in steps.items()}, may_be_baseline, seconds
        )
        base = min(
            (side for side in steps if may_be_baseline(side)),
            key=lambda side: timings[side].milliseconds,
        )
        ready = list(steps)
        del steps
        peaks = {
            side: peak_memory(asdict(workload), side, threads) if memory else None for side in ready
        }
        for side in ready:
            timing, peak, at_base = timings[side], peaks[side], peaks[base]
            ratio = timing.milliseconds / timings[base].milliseconds
            shown = paper if side.startswith("private") else None
            share = peak / at_base if peak and at_base else None
            yield Row(
                name,
                side,
                timing.milliseconds,
                ratio,
                timing.low,
                timing.high,
                deviations[side],
                peak,
                share,
                shown,
            )
        for side, reason in refused.items():
            yield Row(name, side, math.nan, math.nan, math.nan, math.nan, math.nan, note=reason)

    return Case(name, measure)


def _ready(workload: Workload, sides: list[str]) -> tuple[dict[str, Step], dict[str, str]]:
    """The sides, built; and what Opacus says of a model that it does not take."""
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


def _operations(quick: bool, threads: int) -> list[Case]:
    """Table 6: each operation against its real twin in torch's default layout."""
    torch.manual_seed(0)
    seconds, batch, matrices = (1.5, 8, 8) if quick else (10.0, 64, 64)
    on = device()

    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        return torch.randn(*shape, device=on), torch.randn(*shape, device=on, dtype=torch.complex64)

    def operation(run: Callable[[], Tensor]) -> Step:
        return Step(
            run, lambda: torch.view_as_real(run().detach().resolve_conj().contiguous()).flatten()
        )

    def real(run: Callable[[], Tensor]) -> Step:
        return Step(run, lambda: run().detach().flatten())

    cases: list[Case] = []
    a, b = pair(64, 512), pair(512, 512)
    cases += _against_real(
        "linear: 64×512 · 512×512",
        {
            "real": real(lambda: a[0] @ b[0]),
            "complex, torch's (ours is the same)": operation(lambda: a[1] @ b[1]),
        },
        seconds,
        _paper_ratio("zeta_dp_2021/6", "linear_complex", "linear_real"),
    )
    c = pair(matrices, 512, 512)
    cases += _against_real(
        f"batched product: {matrices} × (512×512 · 512×512)",
        {
            "real": real(lambda: c[0] @ c[0]),
            "complex, torch's (ours is the same)": operation(lambda: c[1] @ c[1]),
        },
        seconds,
        None,
    )
    x, y = pair(batch, 3, 224, 224)
    inputs = {
        "real": x,
        "real, channels-last": channels_last(x),
        "complex, torch's": y,
        "complex, ours": channels_last(y),
    }
    w, ours = torch.nn.Conv2d(3, 16, 3).to(on), ComplexConv2d(3, 16, 3).to(on)
    native = torch.nn.Conv2d(3, 16, 3, dtype=torch.complex64).to(on)
    native.load_state_dict(ours.state_dict())
    layers = {
        "real": w,
        "real, channels-last": w,
        "complex, torch's": native,
        "complex, ours": ours,
    }

    def forward(name: str) -> Callable[[], Tensor]:
        return torch.no_grad()(lambda: layers[name](inputs[name]))

    def both(name: str) -> Callable[[], Tensor]:
        needs = inputs[name].clone().requires_grad_()

        def run() -> Tensor:
            out = layers[name](needs)
            return torch.autograd.grad(out, [needs, *layers[name].parameters()], out.detach())[1]

        return run

    for what, made in (("forward", forward), ("forward and backward", both)):
        sides = {
            name: (operation if name.startswith("complex") else real)(made(name)) for name in inputs
        }
        paper = (
            _paper_ratio("zeta_dp_2021/6", "conv_complex", "conv_real")
            if what == "forward"
            else None
        )
        cases += _against_real(f"convolution {batch}×3×224² → 16, {what}", sides, seconds, paper)
    wide_x, wide_y = pair(8, 64, 28 if quick else 56, 28 if quick else 56)
    wide, wide_ours = (
        torch.nn.Conv2d(64, 64, 3, padding=1).to(on),
        ComplexConv2d(64, 64, 3, padding=1).to(on),
    )
    wide_last = channels_last(wide_y)
    quiet = torch.no_grad()
    sides = {
        "real": real(quiet(lambda: wide(wide_x))),
        "complex, ours": operation(quiet(lambda: wide_ours(wide_last))),
    }
    return cases + _against_real(
        f"convolution 8×64×{wide_x.shape[-1]}² → 64, forward", sides, seconds, None
    )


def _against_real(
    case: str, sides: dict[str, Step], seconds: float, paper: float | None
) -> list[Case]:
    def measure() -> Iterator[Row]:
        deviations = require_agreement(sides, {name: name.split(",")[0] for name in sides})
        timings = by_turns(
            {name: side.run for name, side in sides.items()}, lambda name: name == "real", seconds
        )
        for name, timing in timings.items():
            ratio = timing.milliseconds / timings["real"].milliseconds
            shown = paper if name.startswith("complex") else None
            yield Row(
                case,
                name,
                timing.milliseconds,
                ratio,
                timing.low,
                timing.high,
                deviations[name],
                paper_ratio=shown,
            )

    return [Case(case, measure)]


def _networks(quick: bool, threads: int) -> list[Case]:
    """Table 7, and the complex MLP of Table 1 beside it."""
    seconds, batch = (3.0, 32) if quick else (12.0, 64)
    private = ["private, fast", "private, vmap"]
    cases = []
    for kind in ("real", "complex"):
        workload = Workload(f"{kind}_conv_linear", (3, 32, 32), 1, batch, "squares")
        sides = ["non-private", "non-private, channels first"]
        if kind == "complex":
            sides = ["non-private", "non-private, torch's complex layers", *private]
        else:
            sides += ["private, fast", "private, fast, channels first", "private, vmap", *_opacus()]
        sides += [] if quick else _compiled()
        paper = _paper_ratio("zeta_dp_2021/7", f"private_{kind}", f"nonprivate_{kind}")
        cases.append(
            _compare(
                f"{kind} conv + linear, batch {batch}",
                workload,
                sides,
                seconds,
                threads,
                paper=paper,
            )
        )
    for records_ in (batch,) if quick else (batch, 4 * batch):
        mlp = Workload("complex_mlp", (1, 28, 28), 10, records_, "classes", {"hidden": [256, 128]})
        sides = [
            "non-private",
            *private,
            "private, loop over records",
            *([] if quick else _compiled()),
        ]
        cases.append(
            _compare(f"complex MLP 784-256-128-10, batch {records_}", mlp, sides, seconds, threads)
        )
    return cases


def _scaling(quick: bool, threads: int) -> list[Case]:
    """A private step against the batch, and the U-Net of the medical tasks at its full width."""
    seconds = 0.5 if quick else 2.0
    batches = (16, 64) if quick else (16, 32, 64, 128, 256, 512)
    sides = ["non-private", "private, fast"]
    models = {
        "complex MLP": ("complex_mlp", (1, 28, 28), 10, "classes", {"hidden": [256, 128]}),
        "complex CNN": ("complex_cnn", (1, 32, 32), 10, "classes", {"channels": [16, 32]}),
        "complex U-Net, 8 channels, 32²": (
            "complex_unet",
            (1, 32, 32),
            1,
            "map",
            {"width": 8, "depth": 2},
        ),
    }
    cases = []
    for label, (model, shape, outputs, loss, options) in models.items():
        for batch in batches:
            workload = Workload(model, shape, outputs, batch, loss, options)  # type: ignore[arg-type]
            if not (quick and model == "complex_unet"):
                cases.append(
                    _compare(
                        f"{label}, batch {batch}",
                        workload,
                        sides,
                        seconds,
                        threads,
                        memory=not quick,
                    )
                )
    size, width, batch = (64, 8, 2) if quick else (320, 32, 4)
    unet = Workload("complex_unet", (1, size, size), 1, batch, "map", {"width": width})
    sides = [*sides, "non-private, one record at a time", "private, fast, one record at a time"]
    name = f"complex U-Net, {width} channels, {size}², batch {batch}"
    seconds = seconds if quick else 120.0  # a round takes a quarter of a minute
    cases.append(_compare(name, unet, sides, seconds, threads, memory=True))
    return cases


def _imaging(quick: bool, threads: int) -> list[Case]:
    """The deepee paper's networks. Batch 32, and 256² for the U-Nets, are a GPU's work; the names say what is measured."""
    seconds = 1.0 if quick else 10.0
    hidden = 256 if quick else 4096
    big, small, batch = (32, 32, 2) if quick else (224, 64, 8)
    width = 16 if quick else 64
    workloads = {
        f"VGG-11, {big}², batch {batch}": Workload(
            "vgg11", (3, big, big), 2, batch, "classes", {"hidden": hidden}
        ),
        f"VGG-11-U-Net, {small}², batch {batch}": Workload(
            "vgg11_unet", (1, small, small), 1, batch, "map", {"width": width}
        ),
        f"U-Net with transposed convolutions, {small}², batch {batch}": Workload(
            "transposed_unet", (1, small, small), 1, batch, "map", {"width": width}
        ),
    }
    sides = [
        "non-private",
        "non-private, channels first",
        "private, fast",
        "private, fast, channels first",
        *_opacus(),
    ]
    sides.append("private, loop over records")

    def of(workload: Workload) -> list[str]:
        return [
            side for side in sides if workload.input_shape[0] > 1 or "channels first" not in side
        ]  # one channel: one layout

    return [
        _compare(case, workload, of(workload), seconds, threads, memory=not quick)
        for case, workload in workloads.items()
    ]


def _algorithms(quick: bool, threads: int) -> list[Case]:
    """A private step of each algorithm against the non-private one, on the networks of its own paper; DP-DFA's with its Adam."""
    seconds = 3.0 if quick else 6.0
    fashion = Workload(
        "real_mlp",
        (28, 28),
        10,
        128,
        "classes",
        {"hidden": [128, 256], "activation": "sigmoid"},
        "adam",
    )
    cifar = Workload(
        "real_mlp",
        (3, 32, 32),
        10,
        128,
        "classes",
        {"hidden": [256, 256, 256], "activation": "sigmoid"},
        "adam",
    )
    sides = ["non-private", "private, fast", "DP-DFA"]
    lenet = Workload("lenet5", (28, 28), 10, 500, "classes", {"linear": "circulant"})
    of_gredp = ["non-private", "private, fast", "Spectral-DP", "GReDP"]
    return [
        _compare(
            "DP-DFA's MLP 784-128-256-10 with Adam, batch 128", fashion, sides, seconds, threads
        ),
        _compare(
            "DP-DFA's MLP 3072-256-256-256-10 with Adam, batch 128", cifar, sides, seconds, threads
        ),
        _compare("LeNet-5 with circulant layers, batch 500", lenet, of_gredp, seconds, threads),
    ]


_TABLES: dict[str, Callable[[bool, int], list[Case]]] = {
    "zeta_dp_2021/6": _operations,
    "zeta_dp_2021/7": _networks,
    "scaling": _scaling,
    "deepee_2021/3": _imaging,
    "algorithms": _algorithms,
}


def _opacus() -> list[str]:
    """Opacus's sides, where it is installed (the extra `peers`)."""
    return [side for side in SIDES if "Opacus" in side] if installed("opacus") else []


def _compiled() -> list[str]:
    """The side of `torch.compile`, where there is a compiler for it to call: half a minute for each network."""
    return ["non-private, compiled"] if shutil.which("g++") else []


def _paper_ratio(table: str, above: str, below: str) -> float:
    """The paper's own ratio of two rows, on its CPU (or GPU, where ours was one)."""
    from zdp_bench.report.papers import reference

    column = "gpu" if torch.cuda.is_available() else "cpu"
    values = {
        number.row: float(number.value) for number in reference(table) if number.column == column
    }
    return values[above] / values[below]
