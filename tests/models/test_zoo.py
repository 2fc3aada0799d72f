"""Every architecture: shapes, parameter counts its paper states, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from zdp_bench import assets
from zdp_bench.config import check_options
from zdp_bench.errors import UserError
from zdp_bench.registry import lookup, names


def parameters(name: str, shape: tuple[int, ...], outputs: int, **options: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in lookup("model", name)(shape, outputs, **options).parameters())


def test_every_model_has_a_configuration_that_builds_it() -> None:
    assert set(assets.group(assets.CONF / "model")) == set(names("model"))
    for name in names("model"):
        options = dict(assets.read_yaml(assets.CONF / "model" / f"{name}.yaml"))
        assert options.pop("name") == name
        assert set(check_options("model", lookup("model", name), options)) == set(options)


def test_table_7s_linear_layer_has_28800_inputs() -> None:
    assert parameters("complex_conv_linear", (3, 32, 32), 1) == 32 * 27 + 32 + 28800 + 1


def test_vgg11_has_as_many_parameters_as_the_paper_says() -> None:
    assert parameters("vgg11", (3, 224, 224), 1000) == 132_863_336


def test_unet_has_fastmris_size() -> None:
    assert 7.7e6 < parameters("complex_unet", (1, 320, 320), 1) < 7.8e6


@pytest.mark.parametrize("name", ["complex_unet", "real_unet"])
def test_unet_answers_with_a_map(name: str) -> None:
    model = lookup("model", name)((1, 16, 24), 3, width=4, depth=2)
    answer = model(torch.randn(2, 1, 16, 24))
    assert answer.shape == (2, 3, 16, 24)
    assert not answer.is_complex()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.depth=4"):
        lookup("model", "complex_unet")((1, 12, 100), 1)
    with pytest.raises(UserError, match=r"model\.channels"):
        lookup("model", "complex_cnn")((1, 3, 3), 1, channels=[4, 4])
