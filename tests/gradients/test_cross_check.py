"""The check of the fast engine sees through dropout: an example draws the same in every batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.gradients import clipped_sum, cross_check

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of maps": lambda x: F.dropout2d(x.view(-1, 4, 2, 3), 0.5).flatten(1),
    "dropout, time first": lambda x: (
        F.dropout(x.view(-1, 4, 6).transpose(0, 1), 0.5).transpose(0, 1).flatten(1)
    ),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "of a weight": lambda x: x @ F.dropout(torch.ones(24, 24), 0.5),
    "noise": lambda x: x + torch.randn_like(x),
    "noise of a size": lambda x: x + torch.randn(len(x), 24),
    "normal": lambda x: torch.normal(x, 1.0),
    "depth": lambda x: x * (0.9 + torch.rand(len(x), 1)).floor(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)).detach(),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[x.view(-1, 2, 3, 4)] * 3, dropout_p=0.5
    ).flatten(1),
    "own generator": lambda x: x + torch.randn(x.shape, generator=torch.Generator()),
}


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor], mixing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 24), nn.Linear(24, 3)
        self.draw, self.mixing = draw, mixing

    def forward(self, x: Tensor) -> Tensor:
        x = self.draw(torch.tanh(self.first(x)))
        return self.last(x + 0.5 * x.roll(1, dims=0) if self.mixing else x)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("kind", DRAWS)
def test_mixing_behind_what_is_drawn_is_found(kind: str, mixing: bool) -> None:
    model = Drawing(DRAWS[kind], mixing)
    batch = torch.randn(4, 5), torch.arange(4) % 3
    assert cross_check.agrees(model, cross_entropy, batch) != mixing


def test_what_was_found_holds_for_a_model_with_its_loss() -> None:
    """A head that mixes, which the first loss does not look at."""

    class Heads(Drawing):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return torch.cat([self.last(x), self.last(x + 0.5 * x.roll(1, dims=0))], dim=1)

    model, batch = Heads(DRAWS["noise"], False), (torch.randn(6, 5), torch.arange(6) % 3)
    losses = (lambda o, t: cross_entropy(o[:, :3], t), lambda o, t: cross_entropy(o[:, 3:], t))
    for loss in (*losses, *losses):
        found = clipped_sum(model, loss, batch, 0.1)
        right = clipped_sum(model, loss, batch, 0.1, engine="reference")
        torch.testing.assert_close(found.norms, right.norms, rtol=1e-3, atol=1e-5)
