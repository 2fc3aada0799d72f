"""`zdp_bench.load` and `zdp-bench predict`: the same model, in another process."""

import json
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zdp_bench
from tests.extras.sharing.conftest import edit_source
from tests.library.small import CLASSES, begin, network, train
from tests.training.test_run import configured
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.loading import config_of, predict_file, read_inputs
from zdp_bench.extras.sharing.verification import verify
from zdp_bench.training.run import Outcome
from zdp_bench.training.setup import ModelSetup


class Magnitudes(nn.Module):
    """The magnitudes of a linear layer's outputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES, dtype=dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.to(self.layer.weight.dtype)).abs()


INPUTS = torch.randn(5, 8, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))


def test_predict_writes_what_the_run_s_model_gives(
    exported: Path, finished: Outcome, tmp_path: Path
) -> None:
    np.save(tmp_path / "in.npy", INPUTS.numpy())
    assert not zdp_bench.load(exported).training
    assert predict_file(exported, tmp_path / "in.npy", tmp_path / "out.npy") == (5, 10)
    model = ModelSetup.of(configured(finished.path.parents[3])).model
    saved = torch.load(finished.path.parent / "checkpoint.pt", weights_only=True)["model"]
    model.load_state_dict(saved)
    with torch.no_grad():
        expected = model.eval()(INPUTS).numpy()
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_predict_warns_of_inputs_that_are_not_finite(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = INPUTS.clone()
    inputs[3, 0, 0], inputs[4, 1, 1] = float("nan"), float("inf")
    for values, num_warnings in ((INPUTS, 0), (inputs, 1)):
        np.save(tmp_path / "in.npy", values.numpy())
        assert predict_file(exported, tmp_path / "in.npy", tmp_path / "out.npy") == (5, 10)
        assert len(caplog.messages) == num_warnings
    assert (
        "in.npy: 2 of 5 examples contain NaN or infinite values (the first is example 3)"
        in (caplog.messages[0])
    )


@pytest.mark.parametrize("kind", ["u1", "i2", "i8", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_numbers_of_either_byte_order_are_read(tmp_path: Path, kind: str, order: str) -> None:
    """An instrument's big-endian numbers were called damaged."""
    numbers = np.arange(6).reshape(1, 2, 3)
    np.save(tmp_path / "in.npy", numbers.astype(order + kind))
    inputs = read_inputs({}, tmp_path / "in.npy")
    np.testing.assert_array_equal(inputs.numpy(), numbers)
    assert inputs.numpy().dtype == np.dtype(kind)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="is float64 on this machine")
@pytest.mark.parametrize("kind", [np.longdouble, np.clongdouble])
def test_numbers_that_torch_lacks_are_not_called_damaged(tmp_path: Path, kind: type) -> None:
    np.save(tmp_path / "in.npy", np.zeros((1, 2, 3), kind))
    with pytest.raises(UserError, match=r"contains .*; save it as float64 or complex128\.$"):
        read_inputs({}, tmp_path / "in.npy")


def test_inputs_that_do_not_fit_are_refused(exported: Path, of_loop: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.zeros((2, 9, 8)))
    np.save(tmp_path / "scalar.npy", np.float32(3))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "words.npy", np.array(["a"]))
    fits = r"contains float64 \[2, 9, 8\], but the model takes complex64 \[n, 8, 8\]"
    for folder, name, out, says in [
        (exported, "wide.npy", "out.npy", fits),
        (exported, "scalar.npy", "out.npy", r"contains float32 \[\], but the model takes"),
        (exported, "wide.npy", "wide.npy", "is the file with the inputs; choose another one"),
        (exported, "objects.npy", "out.npy", "objects.npy: cannot be read"),
        (exported, "words.npy", "out.npy", r"words\.npy: contains <U1, not numbers\."),
        (exported, "none.npy", "out.npy", "none.npy: is missing"),
        (exported, "film.png", "out.npy", "INPUTS .*film.png: must end with .npy"),
        (exported, "wide.npy", "out.txt", "--out .*out.txt: must end with"),
        (of_loop, "wide.npy", "out.npy", "does not contain the network's code"),
    ]:
        with pytest.raises(UserError, match=says):
            predict_file(folder, tmp_path / name, tmp_path / out)


def test_a_loop_s_weights_come_back_into_its_network(of_loop: Path, tmp_path: Path) -> None:
    model = zdp_bench.load(of_loop, model=network())
    assert not model.training
    assert not torch.equal(model[0].weight, network()[0].weight)  # type: ignore[index]
    with pytest.raises(UserError, match=r"'Sequential'.*model=\.\.\."):
        zdp_bench.load(of_loop)
    with pytest.raises(UserError, match=r"does not fit the model: .*size mismatch"):
        zdp_bench.load(of_loop, model=nn.Sequential(nn.Linear(4, 9)))
    with torch.device("meta"), pytest.raises(UserError, match=r"'0\.weight' is on the meta device"):
        zdp_bench.load(of_loop, model=network())
    with pytest.raises(UserError, match=r"^model: a value of type str was given, but"):
        zdp_bench.load(of_loop, model="network")  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"^weights: with a model of your own, .* leave weights out"
    ):
        zdp_bench.load(of_loop, model=network(), weights=tmp_path / "public.pth")
    with pytest.raises(UserError, match=r"no record\.json"):
        zdp_bench.load(tmp_path / "modle")


def test_complex_weights_do_not_lose_their_imaginary_parts(tmp_path: Path) -> None:
    """torch copies complex weights into a real network with no more than a warning."""
    complex_model = Magnitudes(torch.complex64)
    ledger = tmp_path / "ledger.jsonl"
    with begin(complex_model, ledger, algorithm="zeta_dp_sgd") as private:
        train(private, most=1)
        private.export(tmp_path / "model")
    with pytest.raises(UserError, match=r"'layer\.weight' is complex, but real in the model"):
        zdp_bench.load(tmp_path / "model", model=Magnitudes(torch.float32))


@pytest.mark.parametrize("value", [None, False])
def test_an_option_that_was_off_and_was_removed_is_ignored(exported: Path, value: object) -> None:
    record = json.loads((exported / "record.json").read_text())
    config = config_of(record)
    record["config"]["model"]["removed"] = value
    assert config_of(record) == config
    record["config"]["model"]["removed"] = True
    with pytest.raises(UserError, match="removed"):
        config_of(record)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden", [10**7, 10**7]),
        ("hidden", [1] * 100_000),
        ("outputs", 10**12),
        ("input_shape", [2**14, 2**14]),
        ("input_shape", [2**40, 2**40]),
    ],
)
def test_no_model_is_made_that_is_larger_than_its_weights(
    folder: Path, key: str, value: object
) -> None:
    def enlarge(record: dict) -> None:
        of = record["config"]["model"] if key == "hidden" else record["data"]["example"]
        of[key] = value

    edit_source(folder, enlarge)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for use in (zdp_bench.load, verify):
        begun = time.monotonic()
        with pytest.raises(UserError):
            use(folder)
        assert time.monotonic() - begun < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
