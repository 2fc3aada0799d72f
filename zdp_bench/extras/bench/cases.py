"""The cases of the bench's tables: which networks, which sides, and the paper's own ratio beside
them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.extras.bench.measure import Step, by_turns, require_agreement
from zdp_bench.extras.bench.pages import Row, installed
from zdp_bench.extras.bench.peak_memory import peak_memory
from zdp_bench.extras.bench.steps import SIDES, computes, may_be_baseline
from zdp_bench.extras.bench.workload import Workload, device
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.memory_format import channels_last


@dataclass(frozen=True)
class Case:
    """One comparison of a table, measured when asked."""

    name: str
    measure: Callable[[], Iterator[Row]]


def compare(
    name: str,
    workload: Workload,
    sides: list[str],
    seconds: float,
    threads: int,
    memory: bool = False,
    paper: float | None = None,
) -> Case:
    """Compare sides on one workload.

    Args:
        memory: measure peak memory too.
        paper: the paper's own ratio of private to non-private.
    """

    def measure() -> Iterator[Row]:
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
            yield Row(
                name,
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
            yield Row(name, side, nan, nan, nan, nan, nan, note=reason)

    return Case(name, measure)


def _build(workload: Workload, sides: list[str]) -> tuple[dict[str, Step], dict[str, str]]:
    """The sides, and what Opacus says of a model that it does not take."""
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
    name: str, sides: dict[str, Step], seconds: float, paper: float | None = None
) -> Case:
    """Compare an operation with its real twin in torch's default layout."""

    def measure() -> Iterator[Row]:
        deviations = require_agreement(sides, {side: side.split(",")[0] for side in sides})
        runs = {side: step.run for side, step in sides.items()}
        timings = by_turns(runs, lambda side: side == "real", seconds)
        for side, timing in timings.items():
            yield Row(
                name,
                side,
                timing.milliseconds,
                timing.milliseconds / timings["real"].milliseconds,
                timing.low,
                timing.high,
                deviations[side],
                paper_ratio=paper if side.startswith("complex") else None,
            )

    return Case(name, measure)


def _step(run: Callable[[], Tensor]) -> Step:
    def answer() -> Tensor:
        out = run().detach()
        return (torch.view_as_real(out.resolve_conj()) if out.is_complex() else out).flatten()

    return Step(run, answer)


def operations(quick: bool, threads: int) -> list[Case]:
    """Table 6 of the 2021 paper: single operations, complex against real."""
    torch.manual_seed(0)
    seconds, batch, matrices = (1.5, 8, 8) if quick else (10.0, 64, 64)
    on = device()

    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        return torch.randn(*shape, device=on), torch.randn(*shape, device=on, dtype=torch.complex64)

    def products(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> dict[str, Step]:
        return {
            "real": _step(lambda: left[0] @ right[0]),
            "complex, torch's (ours is the same)": _step(lambda: left[1] @ right[1]),
        }

    paper = _paper_ratio("zeta_dp_2021/6", "linear_complex", "linear_real")
    dense = products(pair(64, 512), pair(512, 512))
    square = pair(matrices, 512, 512)
    cases = [
        compare_with_real("linear: 64×512 · 512×512", dense, seconds, paper),
        compare_with_real(
            f"batched product: {matrices} × (512×512 · 512×512)", products(square, square), seconds
        ),
    ]
    x, y = pair(batch, 3, 224, 224)
    inputs = {
        "real": x,
        "real, channels-last": channels_last(x),
        "complex, torch's": y,
        "complex, ours": channels_last(y),
    }
    real, ours = nn.Conv2d(3, 16, 3).to(on), ComplexConv2d(3, 16, 3).to(on)
    native = nn.Conv2d(3, 16, 3, dtype=torch.complex64).to(on)
    native.load_state_dict(ours.state_dict())
    layers = dict(zip(inputs, (real, real, native, ours), strict=True))

    def forward(side: str) -> Callable[[], Tensor]:
        return torch.no_grad()(lambda: layers[side](inputs[side]))

    def both(side: str) -> Callable[[], Tensor]:
        needs = inputs[side].clone().requires_grad_()

        def run() -> Tensor:
            out = layers[side](needs)
            return torch.autograd.grad(out, [needs, *layers[side].parameters()], out.detach())[1]

        return run

    paper = _paper_ratio("zeta_dp_2021/6", "conv_complex", "conv_real")
    for what, make, ratio in (("forward", forward, paper), ("forward and backward", both, None)):
        sides = {side: _step(make(side)) for side in inputs}
        name = f"convolution {batch}×3×224² → 16, {what}"
        cases.append(compare_with_real(name, sides, seconds, ratio))
    size = 28 if quick else 56
    wide_real, wide_complex = pair(8, 64, size, size)
    wide_complex = channels_last(wide_complex)
    wide = nn.Conv2d(64, 64, 3, padding=1).to(on)
    wide_ours = ComplexConv2d(64, 64, 3, padding=1).to(on)
    quiet = torch.no_grad()
    sides = {
        "real": _step(quiet(lambda: wide(wide_real))),
        "complex, ours": _step(quiet(lambda: wide_ours(wide_complex))),
    }
    name = f"convolution 8×64×{size}² → 64, forward"
    return [*cases, compare_with_real(name, sides, seconds)]


def networks(quick: bool, threads: int) -> list[Case]:
    """Table 7 of the 2021 paper, and the complex MLP of Table 1 beside it."""
    seconds, batch = (3.0, 32) if quick else (12.0, 64)
    compiled = [] if quick else _compiled()
    sides = {
        "real": [
            "non-private",
            "non-private, channels first",
            "private, fast",
            "private, fast, channels first",
            "private, vmap",
            *_opacus(),
            *compiled,
        ],
        "complex": [
            "non-private",
            "non-private, torch's complex layers",
            "private, fast",
            "private, vmap",
            *compiled,
        ],
    }
    cases = []
    for kind in sides:
        workload = Workload(f"{kind}_conv_linear", (3, 32, 32), 1, batch, "squares")
        name = f"{kind} conv + linear, batch {batch}"
        paper = _paper_ratio("zeta_dp_2021/7", f"private_{kind}", f"nonprivate_{kind}")
        cases.append(compare(name, workload, sides[kind], seconds, threads, paper=paper))
    of_mlp = [
        "non-private",
        "private, fast",
        "private, vmap",
        "private, loop over records",
        *compiled,
    ]
    for size in (batch,) if quick else (batch, 4 * batch):
        mlp = Workload("complex_mlp", (1, 28, 28), 10, size, "classes", {"hidden": [256, 128]})
        name = f"complex MLP 784-256-128-10, batch {size}"
        cases.append(compare(name, mlp, of_mlp, seconds, threads))
    return cases


def scaling(quick: bool, threads: int) -> list[Case]:
    """A private step against the batch, and the U-Net of the medical tasks at its full width."""
    seconds = 0.5 if quick else 2.0
    batches = (16, 64) if quick else (16, 32, 64, 128, 256, 512)
    sides = ["non-private", "private, fast"]
    models: dict[str, Callable[[int], Workload]] = {
        "complex MLP": lambda batch: Workload(
            "complex_mlp", (1, 28, 28), 10, batch, "classes", {"hidden": [256, 128]}
        ),
        "complex CNN": lambda batch: Workload(
            "complex_cnn", (1, 32, 32), 10, batch, "classes", {"channels": [16, 32]}
        ),
    }
    if not quick:
        models["complex U-Net, 8 channels, 32²"] = lambda batch: Workload(
            "complex_unet", (1, 32, 32), 1, batch, "map", {"width": 8, "depth": 2}
        )
    cases = [
        compare(f"{label}, batch {batch}", make(batch), sides, seconds, threads, memory=not quick)
        for label, make in models.items()
        for batch in batches
    ]
    size, width, batch = (64, 8, 2) if quick else (320, 32, 4)
    unet = Workload("complex_unet", (1, size, size), 1, batch, "map", {"width": width})
    sides = [*sides, "non-private, one record at a time", "private, fast, one record at a time"]
    name = f"complex U-Net, {width} channels, {size}², batch {batch}"
    seconds = seconds if quick else 120.0  # a round takes a quarter of a minute
    return [*cases, compare(name, unet, sides, seconds, threads, memory=True)]


def imaging(quick: bool, threads: int) -> list[Case]:
    """The deepee paper's networks, smaller than there: batch 32, and 256² for the U-Nets, are a
    GPU's work.
    """
    seconds, hidden, width = (1.0, 256, 16) if quick else (10.0, 4096, 64)
    big, small, batch = (32, 32, 2) if quick else (224, 64, 8)
    vgg = Workload("vgg11", (3, big, big), 2, batch, "classes", {"hidden": hidden})
    vgg_unet = Workload("vgg11_unet", (1, small, small), 1, batch, "map", {"width": width})
    unet = Workload("transposed_unet", (1, small, small), 1, batch, "map", {"width": width})
    workloads = {
        f"VGG-11, {big}², batch {batch}": vgg,
        f"VGG-11-U-Net, {small}², batch {batch}": vgg_unet,
        f"U-Net with transposed convolutions, {small}², batch {batch}": unet,
    }
    sides = [
        "non-private",
        "non-private, channels first",
        "private, fast",
        "private, fast, channels first",
        *_opacus(),
        "private, loop over records",
    ]
    one_layout = [side for side in sides if "channels first" not in side]
    return [
        compare(
            name,
            workload,
            one_layout if workload.input_shape[0] == 1 else sides,
            seconds,
            threads,
            memory=not quick,
        )
        for name, workload in workloads.items()
    ]


def algorithms(quick: bool, threads: int) -> list[Case]:
    """A private step of each algorithm on the networks of its own paper, DP-DFA's with its Adam."""
    seconds = 3.0 if quick else 6.0

    def mlp(shape: tuple[int, ...], hidden: list[int]) -> Workload:
        options = {"hidden": hidden, "activation": "sigmoid"}
        return Workload("real_mlp", shape, 10, 128, "classes", options, "adam")

    fashion, cifar = mlp((28, 28), [128, 256]), mlp((3, 32, 32), [256, 256, 256])
    lenet = Workload("lenet5", (28, 28), 10, 500, "classes", {"linear": "circulant"})
    of_dfa = ["non-private", "private, fast", "DP-DFA"]
    of_gredp = ["non-private", "private, fast", "Spectral-DP", "GReDP"]
    return [
        compare(name, workload, sides, seconds, threads)
        for name, workload, sides in (
            ("DP-DFA's MLP 784-128-256-10 with Adam, batch 128", fashion, of_dfa),
            ("DP-DFA's MLP 3072-256-256-256-10 with Adam, batch 128", cifar, of_dfa),
            ("LeNet-5 with circulant layers, batch 500", lenet, of_gredp),
        )
    ]


def kernels(quick: bool, threads: int) -> list[Case]:
    """Steps with the compiled CPU kernels on and off, on the papers' networks."""
    sides = [
        "non-private",
        "private, fast",
        "non-private, kernels off",
        "private, fast, kernels off",
    ]
    size, width = (64, 8) if quick else (320, 32)
    maps, mlp, cnn = {"width": width}, {"hidden": [256, 128]}, {"channels": [16, 32]}
    networks = {
        "PhaseMNIST MLP, batch 600": Workload("complex_mlp", (1, 28, 28), 10, 600, "classes", mlp),
        "complex CNN, batch 64": Workload("complex_cnn", (1, 32, 32), 10, 64, "classes", cnn),
        f"complex U-Net, {size}²": Workload("complex_unet", (1, size, size), 1, 1, "map", maps),
        "LeNet-5, batch 500": Workload("lenet5", (28, 28), 10, 500, "classes"),
    }
    if not quick:
        vgg = Workload("vgg11", (3, 224, 224), 2, 8, "classes", {"hidden": 4096})
        networks["VGG-11, 224², batch 8"] = vgg
    seconds = 1.0 if quick else 30.0
    return [compare(name, of, sides, seconds, threads) for name, of in networks.items()]


def library(quick: bool, threads: int) -> list[Case]:
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
    return [
        compare(
            f"{name}, batch {batch}",
            Workload(model, shape, 10, batch, "classes", options),
            sides,
            seconds,
            threads,
            memory=not quick,
        )
        for name, (model, shape, options) in networks.items()
    ]


def _opacus(whole: bool = False) -> list[str]:
    """Opacus's sides, of steps or of whole loops, if it is installed (the extra `peers`)."""
    sides = [side for side in SIDES if "Opacus" in side and whole == ("whole loop" in side)]
    return sides if installed("opacus") else []


def _compiled() -> list[str]:
    """The side of `torch.compile` if there is a compiler for it to call: half a minute for each
    network.
    """
    return ["non-private, compiled"] if shutil.which("g++") else []


def _paper_ratio(table: str, above: str, below: str) -> float:
    """The paper's own ratio of two rows, on its CPU (or GPU, where ours was one)."""
    from zdp_bench.report.papers import reference

    column = "gpu" if torch.cuda.is_available() else "cpu"
    values = {
        number.row: float(number.value) for number in reference(table) if number.column == column
    }
    return values[above] / values[below]
