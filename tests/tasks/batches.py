"""Batches of random outputs and targets of every task; a new task has its entry here."""

from collections.abc import Callable

import torch
from torch import Tensor

from zdp_bench.tasks.reconstruction import scale
from zdp_bench.tasks.segmentation import split_organs

SIZE = (8, 9)  # of an image; a window of SSIM is 7 wide
Draw = Callable[[int], tuple[Tensor, Tensor]]


def _classes(count: int) -> Draw:
    return lambda n: (torch.randn(n, count), torch.arange(n).remainder(count)[torch.randperm(n)])


def _one_logit(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1), torch.randint(0, 2, (n,))


def _masks(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 4, 5), torch.randint(0, 2, (n, 4, 5))


def _organs(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 4, 5), torch.randint(0, 5, (n, 4, 5))  # 4 is no organ


def _images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, *SIZE), torch.rand(n, 2, *SIZE)


# task -> what draws outputs and targets of n examples, a case each
BATCHES: dict[str, list[Draw]] = {
    "classification": [_classes(4), _classes(2)],
    "binary_classification": [_one_logit],
    "segmentation": [_masks, _organs],
    "reconstruction": [_images],
}


# (task, case) -> the options of the task that the case is for
OPTIONS = {("segmentation", 1): {"organs": 3}}


def right_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs of the same shape that are right, or nearly so."""
    if targets.dim() == 4:
        return 1.001 * targets[:, :1] / scale(targets)[:, None]
    if outputs.dim() == 4 and outputs.shape[1] > 1:
        return 10.0 * split_organs(targets, outputs.shape[1]) - 5.0
    if outputs.dim() == 2 and outputs.shape[1] > 1:
        return 5.0 * torch.nn.functional.one_hot(targets, outputs.shape[1])
    return (10.0 * targets - 5.0).reshape(outputs.shape)
