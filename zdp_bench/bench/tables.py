"""The tables of `zdp-bench bench`: which workloads and sides each compares, and how they are laid out beside the paper's numbers.

zeta_dp_2021/6   complex against real: one matrix product, one convolution
zeta_dp_2021/7   conv + linear, real and complex, private against non-private
scaling          time and peak memory of a private step against the batch
algorithms       a private step of each algorithm against the non-private one, on its own paper's network
deepee_2021/3    VGG-11: ours, Opacus, a loop over records, with peak memory (the paper's own numbers are not in its text)
"""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from zdp_bench import records
from zdp_bench.bench.measure import Step, by_turns, hold_memory, peak_memory, require_agreement
from zdp_bench.bench.steps import SIDES, Workload, computes, device, may_be_baseline
from zdp_bench.errors import unknown
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.layout import channels_last


@dataclass(frozen=True)
class Row:
    """One side of one comparison; ratios are to the fastest side that may be the baseline."""

    case: str
    side: str
    milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    deviation: float
    memory: float | None = None
    memory_ratio: float | None = None
    paper_ratio: float | None = None


def available() -> list[str]:
    """The tables there are."""
    return list(_TABLES)


def run(table: str, quick: bool, threads: int, results: Path) -> tuple[list[Row], list[Path]]:
    """Measure a table and write it to `results/tables`.

    Args:
        quick: smaller models, batches and fewer rounds: all tables in under two minutes on two cores.

    Raises:
        UserError: no such table, or sides that should agree do not.
    """
    if table not in _TABLES:
        raise unknown("table", table, _TABLES)
    torch.set_num_threads(threads)
    held = hold_memory()
    rows = list(_TABLES[table](quick, threads))
    stem = results / "tables" / f"bench_{table.replace('/', '_table')}{'_quick' if quick else ''}"
    paths = [stem.with_suffix(".md"), stem.with_suffix(".csv")]
    facts = environment(threads) | {"memory": "held" if held else "as malloc likes"}
    records.write_text(paths[0], as_markdown(table, rows, facts))
    records.write_text(paths[1], as_csv(rows, facts))
    return rows, paths


# -------------------------------------------------------------------------------------------------------- comparing


def _compare(
    case: str, workload: Workload, sides: list[str], seconds: float, threads: int, memory: bool = False
) -> Iterator[Row]:
    steps = {side: SIDES[side](workload) for side in sides}
    deviations = require_agreement(steps, {side: computes(side) for side in sides})
    timings = by_turns({side: step.run for side, step in steps.items()}, may_be_baseline, seconds)
    base = min((side for side in sides if may_be_baseline(side)), key=lambda side: timings[side].milliseconds)
    del steps
    peaks = {side: peak_memory(asdict(workload), side, threads) for side in sides} if memory else dict.fromkeys(sides)
    for side in sides:
        timing, peak, at_base = timings[side], peaks[side], peaks[base]
        ratio = timing.milliseconds / timings[base].milliseconds
        yield Row(
            case,
            side,
            timing.milliseconds,
            ratio,
            timing.low,
            timing.high,
            deviations[side],
            memory=peak,
            memory_ratio=peak / at_base if peak and at_base else None,
        )


def _operations(quick: bool, threads: int) -> Iterator[Row]:
    """Table 6: each operation against its real twin in torch's default layout."""
    torch.manual_seed(0)
    seconds, batch, matrices = (1.5, 8, 8) if quick else (10.0, 64, 64)
    on = device()

    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        return torch.randn(*shape, device=on), torch.randn(*shape, device=on, dtype=torch.complex64)

    def operation(run: Callable[[], Tensor]) -> Step:
        return Step(run, lambda: torch.view_as_real(run().detach().resolve_conj().contiguous()).flatten())

    def real(run: Callable[[], Tensor]) -> Step:
        return Step(run, lambda: run().detach().flatten())

    a, b = pair(64, 512), pair(512, 512)
    yield from _against_real(
        "linear: 64×512 · 512×512",
        {"real": real(lambda: a[0] @ b[0]), "complex, torch's (ours is the same)": operation(lambda: a[1] @ b[1])},
        seconds,
        _paper_ratio("zeta_dp_2021/6", "linear_complex", "linear_real"),
    )
    c = pair(matrices, 512, 512)
    yield from _against_real(
        f"batched product: {matrices} × (512×512 · 512×512)",
        {"real": real(lambda: c[0] @ c[0]), "complex, torch's (ours is the same)": operation(lambda: c[1] @ c[1])},
        seconds,
        None,
    )
    x, y = pair(batch, 3, 224, 224)
    inputs = {"real": x, "real, channels-last": channels_last(x), "complex, torch's": y, "complex, ours": channels_last(y)}
    w, ours = torch.nn.Conv2d(3, 16, 3).to(on), ComplexConv2d(3, 16, 3).to(on)
    native = torch.nn.Conv2d(3, 16, 3, dtype=torch.complex64).to(on)
    native.load_state_dict(ours.state_dict())
    layers = {"real": w, "real, channels-last": w, "complex, torch's": native, "complex, ours": ours}

    def forward(name: str) -> Callable[[], Tensor]:
        return torch.no_grad()(lambda: layers[name](inputs[name]))

    def both(name: str) -> Callable[[], Tensor]:
        needs = inputs[name].clone().requires_grad_()

        def run() -> Tensor:
            out = layers[name](needs)
            return torch.autograd.grad(out, [needs, *layers[name].parameters()], out.detach())[1]

        return run

    for what, made in (("forward", forward), ("forward and backward", both)):
        sides = {name: (operation if name.startswith("complex") else real)(made(name)) for name in inputs}
        paper = _paper_ratio("zeta_dp_2021/6", "conv_complex", "conv_real") if what == "forward" else None
        yield from _against_real(f"convolution {batch}×3×224² → 16, {what}", sides, seconds, paper)
    wide_x, wide_y = pair(8, 64, 28 if quick else 56, 28 if quick else 56)
    wide, wide_ours = torch.nn.Conv2d(64, 64, 3, padding=1).to(on), ComplexConv2d(64, 64, 3, padding=1).to(on)
    wide_last = channels_last(wide_y)
    with torch.no_grad():
        sides = {"real": real(lambda: wide(wide_x)), "complex, ours": operation(lambda: wide_ours(wide_last))}
        yield from _against_real("convolution 8×64×56² → 64, forward", sides, seconds, None)


def _against_real(case: str, sides: dict[str, Step], seconds: float, paper: float | None) -> Iterator[Row]:
    deviations = require_agreement(sides, {name: name.split(",")[0] for name in sides})
    timings = by_turns({name: side.run for name, side in sides.items()}, lambda name: name == "real", seconds)
    for name, timing in timings.items():
        ratio = timing.milliseconds / timings["real"].milliseconds
        shown = paper if name.startswith("complex") else None
        yield Row(case, name, timing.milliseconds, ratio, timing.low, timing.high, deviations[name], paper_ratio=shown)


def _networks(quick: bool, threads: int) -> Iterator[Row]:
    """Table 7, and the complex MLP of Table 1 beside it."""
    seconds, batch = (4.0, 32) if quick else (30.0, 64)
    private = ["private, fast", "private, vmap"]
    for kind in ("real", "complex"):
        workload = Workload(f"{kind}_conv_linear", (3, 32, 32), 1, batch, "squares")
        sides = ["non-private", "non-private, channels first"]
        if kind == "complex":
            sides = ["non-private", "non-private, torch's complex layers", *private]
        else:
            sides += ["private, fast", "private, fast, channels first", "private, vmap", *_opacus()]
        paper = _paper_ratio("zeta_dp_2021/7", f"private_{kind}", f"nonprivate_{kind}")
        for row in _compare(f"{kind} conv + linear, batch {batch}", workload, sides, seconds, threads):
            yield Row(**asdict(row) | {"paper_ratio": paper if row.side.startswith("private") else None})
    mlp = Workload("complex_mlp", (1, 28, 28), 10, batch, "classes", {"hidden": [256, 128]})
    yield from _compare(f"complex MLP 784-256-128-10, batch {batch}", mlp, ["non-private", *private], seconds, threads)


def _scaling(quick: bool, threads: int) -> Iterator[Row]:
    """A private step against the batch, and the U-Net of the medical tasks at its full size."""
    seconds = 1.0 if quick else 6.0
    batches = (16, 64) if quick else (16, 32, 64, 128, 256, 512)
    sides = ["non-private", "private, fast"]
    for batch in batches:
        mlp = Workload("complex_mlp", (1, 28, 28), 10, batch, "classes", {"hidden": [256, 128]})
        yield from _compare(f"complex MLP, batch {batch}", mlp, sides, seconds, threads, memory=not quick)
    for batch in batches:
        cnn = Workload("complex_cnn", (1, 32, 32), 10, batch, "classes", {"channels": [16, 32]})
        yield from _compare(f"complex CNN, batch {batch}", cnn, sides, seconds, threads, memory=not quick)
    for batch in () if quick else batches:
        small = Workload("complex_unet", (1, 32, 32), 1, batch, "map", {"width": 8, "depth": 2})
        yield from _compare(f"complex U-Net, 8 channels, 32², batch {batch}", small, sides, seconds, threads, memory=True)
    size, width, batch = (64, 8, 2) if quick else (320, 32, 4)
    unet = Workload("complex_unet", (1, size, size), 1, batch, "map", {"width": width})
    sides = [*sides, "non-private, one record at a time", "private, fast, one record at a time"]
    yield from _compare(f"complex U-Net, {width} channels, {size}², batch {batch}", unet, sides, seconds, threads, memory=True)


def _imaging(quick: bool, threads: int) -> Iterator[Row]:
    size, batch, hidden, seconds = (64, 4, 256, 4.0) if quick else (224, 8, 4096, 40.0)
    workload = Workload("vgg11", (3, size, size), 2, batch, "classes", {"hidden": hidden})
    sides = ["non-private", "non-private, channels first", "private, fast", "private, fast, channels first", *_opacus()]
    sides.append("private, loop over records")
    yield from _compare(f"VGG-11, {size}², batch {batch}", workload, sides, seconds, threads, memory=True)


def _algorithms(quick: bool, threads: int) -> Iterator[Row]:
    """A private step of each algorithm against the non-private one, on the networks of its own paper."""
    seconds = 3.0 if quick else 15.0
    options = {"hidden": [128, 256], "activation": "sigmoid"}
    mlp = Workload("real_mlp", (28, 28), 10, 128, "classes", options)
    sides = ["non-private", "private, fast", "DP-DFA"]
    yield from _compare("DP-DFA's MLP 784-128-256-10, batch 128", mlp, sides, seconds, threads)
    lenet = Workload("lenet5", (28, 28), 10, 500, "classes", {"linear": "circulant"})
    sides = ["non-private", "private, fast", "Spectral-DP", "GReDP"]
    yield from _compare("LeNet-5 with circulant layers, batch 500", lenet, sides, seconds, threads)


_TABLES: dict[str, Callable[[bool, int], Iterator[Row]]] = {
    "zeta_dp_2021/6": _operations,
    "zeta_dp_2021/7": _networks,
    "scaling": _scaling,
    "deepee_2021/3": _imaging,
    "algorithms": _algorithms,
}


def _opacus() -> list[str]:
    """Opacus's sides, where it is installed (the extra `peers`)."""
    return ["private, Opacus hooks", "private, Opacus ghost"] if _version("opacus") else []


def _paper_ratio(table: str, above: str, below: str) -> float:
    """The paper's own ratio of two rows, on its CPU (or GPU, where ours was one)."""
    from zdp_bench.report.tables import reference

    column = "gpu" if torch.cuda.is_available() else "cpu"
    values = {number.row: float(number.value) for number in reference(table) if number.column == column}
    return values[above] / values[below]


# ---------------------------------------------------------------------------------------------------------- writing


def environment(threads: int) -> dict[str, str]:
    """What the measurement was made on and with."""
    named = ("torch", "numpy", "opacus")
    on = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({_processor()})"
    return {
        "device": on,
        "threads": str(threads),
        "python": platform.python_version(),
        **{name: _version(name) or "not installed" for name in named},
        "date": datetime.now(UTC).date().isoformat(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


COLUMNS = ("side", "time", "× baseline", "quartiles", "peak MiB", "× its memory", "paper's ratio", "agrees to")


def cells(row: Row) -> dict[str, str]:
    """A row as it is shown."""

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    quartiles = f"{row.ratio_low:.2f} to {row.ratio_high:.2f}"
    numbers = (
        f"{row.milliseconds:.3g} ms",
        f"{row.ratio:.2f}",
        quartiles,
        shown(row.memory, ".0f"),
        shown(row.memory_ratio, ".2f"),
    )
    return dict(zip(COLUMNS, (row.side, *numbers, shown(row.paper_ratio, ".1f"), f"{row.deviation:.0e}"), strict=True))


def as_markdown(table: str, rows: list[Row], facts: dict[str, str]) -> str:
    """One table a case."""
    lines = [f"# Measured: {table}", "", f"`zdp-bench bench {table}` made this on {facts['device']}, {facts['threads']} threads"]
    lines[-1] += f" ({', '.join(f'{key} {value}' for key, value in facts.items() if key not in ('device', 'threads'))})."
    lines += [
        "",
        "Times are the best of rounds taken by turns; the baseline of a case is its fastest non-private (or real) side.",
    ]
    lines += [
        "Only the ratios travel to another machine. 'Agrees to': the deviation from the first side that computes the same.",
        "",
    ]
    for case in dict.fromkeys(row.case for row in rows):
        lines += [f"## {case}", "", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
        lines += ["| " + " | ".join(cells(row).values()) + " |" for row in rows if row.case == case]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def as_csv(rows: list[Row], facts: dict[str, str]) -> str:
    """The numbers, and on every line what they were measured on."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [*asdict(rows[0]), *facts], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        plain = {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(row).items()}
        writer.writerow({**plain, **facts})
    return out.getvalue()
