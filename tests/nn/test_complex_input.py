"""Complex records and networks with real weights: refused, or mapped as a key says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zdp_bench.config import configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.nn.complex_input import RealInput, real_shape
from zdp_bench.training.setup import Setup

# An example's shape [1, 16, 16], and networks with real weights that take it.
COMPLEX = ["recipe=quickstart", "algorithm=dp_sgd", "dataset=synthetic_images"]
COMPLEX += ["dataset.complex_valued=true", "dataset.shape=[1,16,16]", "dataset.train=60"]
REAL = ["real_mlp", "real_cnn", "real_conv_linear", "real_dfa_cnn", "lenet5"]


@pytest.mark.parametrize("model", REAL)
def test_no_real_network_drops_an_imaginary_part(model: str) -> None:
    for _ in range(2):  # torch warns once a process
        with pytest.raises(UserError, match="complex_as=channels"):
            Setup.of(configured([*COMPLEX, f"model={model}"]))
    for mapped, channels in (("magnitude", 1), ("channels", 2)):
        setup = Setup.of(configured([*COMPLEX, f"model={model}", f"model.complex_as={mapped}"]))
        inputs, _ = setup.data.train.batch(torch.arange(3))
        seen = setup.model[0](inputs)  # type: ignore[index]
        assert seen.shape == (3, channels, 16, 16)
        assert not seen.is_complex()
        setup.check_model()


def test_the_mapping_is_what_it_says() -> None:
    for shape in ((5,), (4, 6), (3, 4, 6), (2, 3, 4, 6)):
        z = torch.randn(2, *shape, dtype=torch.complex64)
        magnitude, channels = (RealInput(mapped)(z) for mapped in ("magnitude", "channels"))
        assert torch.equal(magnitude, z.abs())
        assert tuple(channels.shape[1:]) == real_shape(shape, "channels")
        assert torch.allclose(channels.norm(), z.norm())
        assert torch.equal(channels.flatten()[:4], z.real.flatten()[:4])
    with pytest.raises(TypeError, match="real already"):
        RealInput("magnitude")(torch.ones(1, 2))


def test_the_key_is_part_of_a_run_only_where_it_is_set() -> None:
    plain, null, mapped = (
        experiment_digest(configured([*COMPLEX, "model=real_mlp", *words]))
        for words in ([], ["model.complex_as=null"], ["model.complex_as=magnitude"])
    )
    assert plain == null != mapped


def test_a_mapped_model_trains_and_is_exported(tmp_path: Path) -> None:
    from tests.training.test_run import Silent
    from zdp_bench.extras.sharing.export import export
    from zdp_bench.extras.sharing.loading import load
    from zdp_bench.training.run import run

    words = [*COMPLEX, "model=real_mlp", "model.complex_as=channels", f"paths.results={tmp_path}"]
    record = run(configured([*words, "trainer.epochs=1"]), Silent()).record
    assert record["config"]["model"]["complex_as"] == "channels"
    export(tmp_path, "quickstart", tmp_path / "model")
    outputs = load(tmp_path / "model")(torch.randn(2, 1, 16, 16, dtype=torch.complex64))
    assert outputs.shape == (2, 10)
