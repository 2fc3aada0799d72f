"""Products of float32 numbers: exact within, and everything is set back, whichever interface was
used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zdp_bench.nn.precision import float32_products

backends: Any = torch.backends
SETTINGS = [
    backends,
    backends.cuda.matmul,
    backends.cudnn.conv,
    backends.cudnn.rnn,
    *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
]


def older() -> list[object]:
    """What torch's older interface says; reading it raises where both were used."""
    answers: list[object] = []
    for read in (
        torch.get_float32_matmul_precision,
        lambda: backends.cudnn.allow_tf32,
        lambda: backends.cuda.matmul.allow_tf32,
    ):
        try:
            answers.append(read())
        except RuntimeError:
            answers.append("both were used")
    return answers


def newer() -> list[str]:
    return [each.fp32_precision for each in SETTINGS]


@pytest.mark.parametrize(
    "choose",
    [
        lambda: None,
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(backends, "fp32_precision", "tf32"),
        lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: setattr(backends.cudnn.rnn, "fp32_precision", "ieee"),
        lambda: setattr(backends.cudnn, "fp32_precision", "tf32"),
        lambda: setattr(backends.cudnn, "allow_tf32", False),
        lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
        lambda: setattr(backends.mkldnn.matmul, "fp32_precision", "bf16"),
    ],
)
def test_products_are_exact_within_and_all_is_set_back(choose: Callable[[], None]) -> None:
    first = newer(), older()
    with float32_products():
        choose()
        before = newer(), older()
        with float32_products():
            assert set(newer()) == {"ieee"}
            assert older() == ["highest", False, False]
            with backends.cudnn.flags(enabled=False, allow_tf32=False):  # torch's own can be used
                assert set(newer()) == {"ieee"}
        assert (newer(), older()) == before
    assert (newer(), older()) == first
