"""What torch's optimisers refuse ends in a sentence."""

from __future__ import annotations

import pytest

from zdp_bench.config import compose, parse
from zdp_bench.errors import UserError
from zdp_bench.experiment import build_optimizer
from zdp_bench.registry import lookup


def test_fused_optimisers_refuse_complex_parameters() -> None:
    config = parse(compose(["recipe=quickstart", "optimizer=adam", "+optimizer.fused=true"]))
    with pytest.raises(UserError, match=r"optimizer\.fused=true"):
        build_optimizer(config, lookup("model", "complex_mlp")((2,), 2, hidden=[3]))
