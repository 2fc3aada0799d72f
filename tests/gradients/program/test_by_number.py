"""Operations number by number and over dimensions keep examples apart, or are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.gradients.program.apart import Function, as_number, require_alone, require_apart
from zdp_bench.gradients.program.table import BY_NUMBER, OVER_DIMS

# ---------------------------------------------------------------------------- number by number

CALLS: dict[str, Function] = {
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "__and__": lambda x: ((x > 0) & (x > 1)).float(),
    "__or__": lambda x: ((x > 0) | (x > 1)).float(),
    "__xor__": lambda x: ((x > 0) ^ (x > 1)).float(),
    "bitwise_and": lambda x: torch.bitwise_and(x > 0, x > 1).float(),
    "bitwise_not": lambda x: (~(x > 0)).float(),
    "bitwise_or": lambda x: torch.bitwise_or(x > 0, x > 1).float(),
    "bitwise_xor": lambda x: torch.bitwise_xor(x > 0, x > 1).float(),
    "bernoulli": lambda x: torch.bernoulli((x > 0).float()),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_max": lambda x: torch.clamp_max(x, 0.3),
    "clamp_min": lambda x: torch.clamp_min(x, 0.3),
    "clip": lambda x: x.clip(-1, 1),
    "complex": lambda x: torch.complex(x, x.exp()).abs(),
    "polar": lambda x: torch.polar(x.abs(), x).real,
    "dropout": lambda x: F.dropout(x, 0.0, True),
    "alpha_dropout": lambda x: torch.alpha_dropout(x, 0.0, True),
    "float_power": lambda x: torch.float_power(x.abs(), 2.0),
    "imag": lambda x: torch.complex(x, x.exp()).imag,
    "real": lambda x: torch.complex(x, x.exp()).real,
    "_conj": lambda x: torch.complex(x, x.exp()).conj().imag,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "lerp": lambda x: torch.lerp(x, x.exp(), 0.3),
    "logical_and": lambda x: torch.logical_and(x > 0, x > 1).float(),
    "logical_not": lambda x: torch.logical_not(x > 0).float(),
    "logical_or": lambda x: torch.logical_or(x > 0, x > 1).float(),
    "logical_xor": lambda x: torch.logical_xor(x > 0, x > 1).float(),
    "logit": lambda x: torch.logit(x.sigmoid()),
    "masked_fill": lambda x: x.masked_fill(x > 0, 2.0),
    "pow": lambda x: x.pow(2),
    "remainder": lambda x: x.remainder(0.7),
    "rrelu": lambda x: F.rrelu(x, 0.2, 0.2),
    "rsub": lambda x: 1 - x,
    "threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "to": lambda x: x.to(torch.float64),
    "_to_copy": lambda x: x.double(),
    "type_as": lambda x: x.type_as(x),
    "where": lambda x: torch.where(x > 0, x, 0.5 * x),
    "xlogy": lambda x: torch.xlogy(x.abs(), x.abs()),
    "special_xlog1py": lambda x: torch.special.xlog1py(x.abs(), x.abs()),
    "special_expit": lambda x: torch.special.expit(x),
    "copy": lambda x: torch.ops.aten.copy.default(x, x.exp()),
    "alias": lambda x: torch.ops.aten.alias.default(x),
    "lift_fresh_copy": lambda x: torch.ops.aten.lift_fresh_copy.default(x),
    "log_sigmoid": lambda x: F.logsigmoid(x),
}
BINARY = """
    add atan2 copysign div eq floor_divide fmax fmin fmod ge greater gt heaviside hypot le less
    logaddexp lt maximum minimum mul multiply ne sub subtract true_divide
"""


def call_of(name: str) -> Function:
    if name in CALLS:
        return CALLS[name]
    operation = getattr(torch, name, None) or getattr(F, name, None)
    operation = operation or getattr(torch.ops.aten, name)
    if name in BINARY.split():
        return lambda x: operation(x, x.cos())
    return operation


def test_operations_by_number_keep_examples_apart() -> None:
    calls = {name: call_of(name) for name in BY_NUMBER}
    require_apart(
        {
            name: lambda _, x, call=call: call(x.abs() + 0.1).contiguous()
            for name, call in calls.items()
        }
    )


@pytest.mark.parametrize("name", BINARY.split())
def test_operations_by_number_of_two_examples_are_refused(name: str) -> None:
    binary = getattr(torch, name)
    require_alone(lambda _, x: as_number(binary(x[:, None, 0], x[None, :, 0])).sum(1))


def test_the_number_of_examples_is_no_number_to_compute_with() -> None:
    require_alone(lambda _, x: x * len(x))


# ---------------------------------------------------------------------------- over dimensions

OVER: dict[str, Function] = {
    "all": lambda x, dim: (x > 0).all(dim).float(),
    "any": lambda x, dim: (x > 0).any(dim).float(),
    "argmax": lambda x, dim: x.argmax(dim).float(),
    "argmin": lambda x, dim: x.argmin(dim).float(),
    "cosine_similarity": lambda x, dim: torch.cosine_similarity(x, x.exp(), dim=dim),
    "count_nonzero": lambda x, dim: torch.count_nonzero(x > 0, dim).float(),
    "kthvalue": lambda x, dim: x.kthvalue(1, dim)[0],
    "max": lambda x, dim: x.max(dim)[0],
    "median": lambda x, dim: x.median(dim)[0],
    "min": lambda x, dim: x.min(dim)[0],
    "mode": lambda x, dim: x.round().mode(dim)[0],
    "linalg_vector_norm": lambda x, dim: torch.linalg.vector_norm(x, dim=dim),
    "norm": lambda x, dim: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [dim]),
    "std_mean": lambda x, dim: torch.std_mean(x, dim)[0],
    "var_mean": lambda x, dim: torch.var_mean(x, dim)[1],
}


def over(name: str) -> Function:
    return OVER.get(name) or (lambda x, dim: getattr(torch, name)(x, dim))


def test_operations_over_dimensions_keep_examples_apart() -> None:
    calls: dict[str, Function] = {}
    for name in OVER_DIMS:
        reduce = over(name)
        for dim in (1, 2, -1):
            calls[f"{name} {dim}"] = lambda _, x, call=reduce, dim=dim: call(x, dim)
        turned = lambda _, x, call=reduce: call(x.transpose(0, 1), 2).transpose(0, 1)  # noqa: E731
        calls[f"{name}, turned"] = turned
    require_apart(calls)


@pytest.mark.parametrize("name", OVER_DIMS)
def test_operations_over_examples_are_refused(name: str) -> None:
    dim = 0 if len(name) % 2 else -3
    require_alone(lambda _, x: x[:, 0, 0] + over(name)(x, dim).sum())
    require_alone(lambda _, x: over(name)(x.transpose(0, 1), 1).sum() + x[:, 0, 0])


WHOLE: dict[str, Function] = {
    "sum": torch.sum,
    "var, whose second argument is no dimension": lambda x: x.var(True),
    "std": lambda x: x.std(),
    "amax": lambda x: x.amax(()),
    "norm": lambda x: x.norm(),
    "prod": torch.prod,
    "argmax": lambda x: x.argmax().float(),
    "any": lambda x: (x > 1e9).any().float(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_reductions_of_all_dimensions_are_refused(name: str) -> None:
    require_alone(lambda _, x: x[:, 0] * WHOLE[name](x))
