"""Where and in which arithmetic: policies are set, taken back, and refused where they would lie."""

import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.training.test_run import carry_out, repeatable, weights_of
from zdp_bench.data import Examples
from zdp_bench.errors import UserError
from zdp_bench.tasks.classification import BinaryClassification
from zdp_bench.training import machine
from zdp_bench.training.batches import read_ahead
from zdp_bench.training.evaluation import predict, quick_loss
from zdp_bench.training.machine import arithmetic, pick_device

CPU = torch.device("cpu")
PRIVATE, PLAIN = (
    SimpleNamespace(mechanism=lambda own=own: own, sums_in_float32=False)
    for own in (SimpleNamespace(is_private=True), SimpleNamespace(is_private=False))
)


def flags() -> tuple[str, bool, int]:
    tf32 = torch.backends.cudnn.allow_tf32
    return torch.get_float32_matmul_precision(), tf32, torch.get_deterministic_debug_mode()


def test_tf32_is_off_unless_asked_for_and_everything_is_set_back() -> None:
    torch.set_deterministic_debug_mode("warn")  # a caller's own: 1
    try:
        before = flags()
        with arithmetic(None, False, nn.Linear(2, 2), PRIVATE, CPU):
            assert flags() == ("highest", False, 1)
        with arithmetic("tf32", False, nn.Linear(2, 2), PLAIN, CPU):
            assert flags() == ("high", True, 1)
        with arithmetic(None, True, nn.Linear(2, 2), PRIVATE, CPU):
            assert flags() == ("highest", False, 2)
        assert flags() == before
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(
    ("precision", "model", "algorithm", "why"),
    [
        ("tf32", nn.Linear(2, 2), PRIVATE, "clipped sum of TF32 products exceeds its bound"),
        ("bf16", nn.Linear(2, 2), PRIVATE, "does not keep its clipped sums in float32"),
        ("bf16", nn.Linear(2, 2, dtype=torch.complex64), PLAIN, "bfloat16 has no complex type"),
        ("fp16", nn.Linear(2, 2), PLAIN, r"precision 'fp16' is not known.*Did you mean 'bf16'"),
    ],
)
def test_a_precision_that_would_lie_is_refused(
    precision: str, model: nn.Module, algorithm: object, why: str
) -> None:
    with pytest.raises(UserError, match=why), arithmetic(precision, False, model, algorithm, CPU):
        pass


def test_bf16_is_in_the_forward_pass_and_nowhere_else() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inside = []
    model[1].register_forward_hook(lambda _, x, y: inside.append((x[0].dtype, y.dtype)))
    with arithmetic("bf16", False, model, PLAIN, CPU):
        out = model(torch.ones(1, 3))
        assert not torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 7))
        assert not torch.is_autocast_enabled("cpu")
    assert inside == [(torch.bfloat16, torch.bfloat16)]
    assert out.dtype == torch.float32
    assert model(torch.ones(1, 3)).grad_fn is not None
    assert inside[-1] == (torch.float32, torch.float32)


def test_a_complex_output_of_a_network_in_bf16_keeps_its_imaginary_part() -> None:
    class Complex(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.view_as_complex(super().forward(input).float().unflatten(-1, (-1, 2)))

    model = Complex(3, 4)
    with arithmetic("bf16", False, model, PLAIN, CPU):
        output = model(torch.ones(1, 3))
    assert output.dtype == torch.complex64
    assert output.imag.abs().min() > 0


def test_what_is_trained_in_bf16_is_evaluated_in_float32() -> None:
    """Rounded outputs tie: 4,000 scores had 249 values, and ROC-AUC counts ties as half."""
    model, task = nn.Linear(3, 1), BinaryClassification()
    test = Examples(torch.randn(4000, 3), torch.arange(4000) % 2)
    plain, start = predict(model, task, test, CPU)[0], quick_loss(model, task, test, CPU)
    with arithmetic("bf16", False, model, PLAIN, CPU):
        trained = model(test.inputs)
        assert torch.equal(predict(model, task, test, CPU)[0], plain)
        assert torch.equal(predict(deepcopy(model), task, test, CPU)[0], plain)
        assert quick_loss(model, task, test, CPU) == start
        assert torch.equal(model(test.inputs), trained)
    assert len(trained.unique()) < len(plain.unique()) / 2


def test_reading_ahead_and_determinism_change_nothing(tmp_path: Path) -> None:
    pieces, ahead = "trainer.micro_batch=40", "execution.prefetch=2"
    plain = carry_out(tmp_path / "a", pieces)
    other = carry_out(tmp_path / "b", pieces, ahead, "execution.deterministic=true")
    assert repeatable(plain.record.document) == repeatable(other.record.document)
    assert other.record.document["environment"]["execution"]["prefetch"] == 2


@pytest.mark.parametrize("count", [0, 1, 5])
def test_reading_ahead_keeps_order_and_tells_errors(count: int) -> None:
    assert list(read_ahead(iter(range(4)), count)) == [0, 1, 2, 3]

    def broken():
        yield 1
        raise ValueError("no such file")

    values = read_ahead(broken(), count)
    assert next(values) == 1
    with pytest.raises(ValueError, match="no such file"):
        next(values)


def test_ranks_of_one_machine_take_its_gpus_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"device=cuda:63: .*\d+ CUDA devices"):
        pick_device("cuda:63")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cpu") == CPU
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda", 1)


@pytest.mark.gpu
def test_a_gpu_run_repeats_itself_and_agrees_with_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    words = ["device=cuda", "execution.deterministic=true"]
    first = carry_out(tmp_path / "a", *words)
    second = carry_out(tmp_path / "b", *words, "execution.prefetch=3")
    assert repeatable(first.record.document) == repeatable(second.record.document)
    noiseless = "algorithm.noise_multiplier=0"
    gpu = carry_out(tmp_path / "c", *words, noiseless)
    cpu = carry_out(tmp_path / "d", "device=cpu", noiseless)
    torch.testing.assert_close(weights_of(gpu), weights_of(cpu), rtol=1e-4, atol=1e-5)


def test_the_digest_of_code_covers_a_subpackage_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change there left the execution's digest, so steps passed for repeats of other ones."""
    package, linked = tmp_path / "a_plugin", tmp_path / "elsewhere"
    for folder in (package, linked):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (package / "inner").symlink_to(linked)
    (linked / "round").symlink_to(package)
    monkeypatch.setitem(sys.modules, package.name, SimpleNamespace(__path__=[str(package)]))
    digests = set()
    for text in ("a = 1", "a = 2"):
        (linked / "code.py").write_text(text)
        machine._digest_of.cache_clear()
        digests.add(machine._digest_of((package.name,)))
    machine._digest_of.cache_clear()
    assert len(digests) == 2


@pytest.mark.parametrize("change", ["processor", "kernels", "library"])
def test_what_chooses_the_kernels_of_a_product_is_in_the_digest_of_an_execution(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    def digest() -> str:
        return machine.execution_digest([], torch.device("cpu"), 8, ranks=1, deterministic=False)

    before = digest()
    if change == "processor":
        monkeypatch.setattr(machine, "processor_name", lambda: "another processor")
    elif change == "kernels":
        monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "SSE4_2")
    else:
        monkeypatch.setattr(machine, "_version", lambda _: "0")
    assert digest() != before
