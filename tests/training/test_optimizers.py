"""Adam without the privacy noise in its second moment, against the formula of its paper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.test_run import carry_out, configured
from zdp_bench.errors import UserError
from zdp_bench.training.optimizers import AdamBC
from zdp_bench.training.setup import Setup


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_step_is_that_of_the_paper(dtype: torch.dtype, noise: float) -> None:
    """Tang et al. 2023, Algorithm 1, number by number; a complex one is two."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4, dtype=dtype))
    given = torch.randn(5, 4, dtype=dtype)
    optimizer = AdamBC([parameter], lr=0.1, betas=(0.8, 0.9), eps=1e-3, floor=0.3)
    optimizer.noise = {id(parameter): noise}
    reals = torch.view_as_real if dtype.is_complex else torch.clone
    theta = reals(parameter.detach()).clone()
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    for t, gradient in enumerate(given, start=1):
        g = reals(gradient)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        m_hat, v_hat = m / (1 - 0.8**t), v / (1 - 0.9**t)
        least = (0.3 * noise) ** 2 + 1e-3**2
        theta = theta - 0.1 * m_hat / (v_hat - noise**2).clamp(min=least).sqrt()
        parameter.grad = gradient
        optimizer.step()
        torch.testing.assert_close(reals(parameter.detach()), theta)


def test_a_run_tells_it_the_noise_of_its_mechanism(tmp_path: Path) -> None:
    words = ["optimizer=adam_bc", "optimizer.lr=0.01"]
    setup = Setup.of(configured(tmp_path, *words))
    optimizer, sampling = setup.optimizer, setup.plan.sampling
    assert isinstance(optimizer, AdamBC)
    expected = {1.5 / sampling.expected_batch_size}
    assert set(optimizer.noise.values()) == expected
    assert optimizer.noise.keys() == {id(p) for p in setup.model.parameters()}
    assert carry_out(tmp_path, *words).record["metrics"]["accuracy"] > 0.5
    for more in (["algorithm.clip_quantile=0.5"], ["federated.nodes=2"]):
        with pytest.raises(UserError, match="optimizer=adam_bc"):
            Setup.of(configured(tmp_path, *words, *more))
