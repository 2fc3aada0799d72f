"""Every task's loss that is marked as proved keeps examples apart; nobody else gets the mark."""

import functools

import pytest
import torch
from torch import Tensor

from tests.tasks.batches import BATCHES
from zdp_bench.gradients import per_example
from zdp_bench.registry import lookup, names
from zdp_bench.tasks import Task, is_proved
from zdp_bench.tasks.classification import Classification
from zdp_bench.training.setup import loss_of

OPTIONS = {
    "binary_classification": [{}, {"weights": [1.0, 10.0]}],
    "segmentation": [{}, {"loss": "bce"}, {"loss": "dice"}, {"organs": 3}],
}
CASES = [(name, given) for name in names("task") for given in OPTIONS.get(name, [{}])]


@pytest.mark.parametrize(("name", "given"), CASES, ids=str)
@pytest.mark.parametrize("examples", [1, 7])
def test_a_proved_loss_is_that_of_each_example_alone(
    name: str, given: dict[str, object], examples: int
) -> None:
    task: Task = lookup("task", name)(**given)
    assert is_proved(task.loss)
    torch.manual_seed(examples)
    outputs, targets = BATCHES[name][1 if "organs" in given else 0](examples)
    for others in (targets, torch.zeros_like(targets), 1000 * targets.float()):
        if name in ("classification", "binary_classification") and others.is_floating_point():
            continue
        mixed = others.clone()
        mixed[0] = targets[0]
        together = task.loss(outputs, mixed)
        torch.testing.assert_close(per_example(task.loss)(outputs, mixed), together)
        assert torch.allclose(together[0], task.loss(outputs[:1], mixed[:1])[0])
        moved = outputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(moved, mixed)[0], moved)
        assert not gradient[1:].any()


def test_only_the_marked_function_itself_is_trusted_with_a_batch() -> None:
    class Mixing(Classification):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return super().loss(outputs - outputs.mean(dim=0), targets)

    own = Classification()
    wrapped = functools.wraps(own.loss)(lambda outputs, targets: own.loss(outputs, targets) * 2)
    assert loss_of(own).proved
    assert not loss_of(Mixing()).proved
    assert not any(map(is_proved, (wrapped, functools.partial(own.loss), lambda o, t: o)))
