"""What a program must give for a batch: what each of its examples gives alone, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.modules import Made
from zdp_bench.gradients.program import Alone, make

Function = Callable[..., Tensor]
X = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0))


def program_of(function: Function, x: Tensor = X, **held: Any) -> Any:
    model = Made(lambda net, x: function(net, x), weight=nn.Parameter(torch.ones(1)), **held)
    return model.train(), make(model, x)


def require_apart(functions: dict[str, Function], x: Tensor = X, **held: Any) -> None:
    """The program of functions, recorded at once, answers for a batch as for each example."""

    def answer(net: Any, x: Tensor) -> Tensor:
        results = [as_number(function(net, x.clone())) for function in functions.values()]
        return torch.cat([result.reshape(x.shape[0], -1) for result in results], 1)

    model, program = program_of(answer, x, **held)
    for count in (5, 2, 1):
        outputs = program.run(model, x[:count].clone())
        begin = 0
        for name, function in functions.items():
            rows = [as_number(function(model, row.clone())) for row in x[:count].split(1)]
            alone = torch.cat([row.reshape(1, -1) for row in rows])
            end = begin + alone.shape[1]
            torch.testing.assert_close(
                outputs[:, begin:end],
                alone,
                equal_nan=True,
                msg=lambda text, of=name: f"{of}: {text}",
            )
            begin = end


def require_alone(function: Function, x: Tensor = X, **held: Any) -> str:
    with pytest.raises(Alone) as refused:
        program_of(function, x, **held)
    return str(refused.value)


def as_number(value: Tensor) -> Tensor:
    return torch.view_as_real(value).sum(-1) if value.is_complex() else value.float()
