"""What mixes samples is found in the recorded operations: such a model's samples run alone, and the
log names the operation and the line. A norm of the batch is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_map

from tests.modules import Made
from tests.training.model_checks.models import (
    CLASSES,
    LABELS,
    Layer,
    check,
    convolutional,
    cross_entropy,
    mlp,
)
from zdp_bench.errors import UserError
from zdp_bench.gradients.program import alone
from zdp_bench.library.model_check import check_model


class BatchWideNorm(nn.Module):
    """What torchcvnn's LayerNorm does: statistics over the batch as well."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean()) / x.std()


def mixing_in_its_own_forward() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(net.first(x) - 0.1 * net.first(x).mean(dim=0))

    return Made(forward, first=nn.Linear(5, 8), last=nn.Linear(8, CLASSES))


def attend(net: Any, x: Tensor) -> Tensor:
    """batch_first left at False: attends over the samples."""
    return net.attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1))[0].squeeze(1)


NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (
        lambda: convolutional(nn.Identity(), nn.BatchNorm2d(8)),
        r"layer '1\.1' \(BatchNorm2d\).*replace_batchnorm=group",
    ),
    "batch norm of vectors": (
        lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False)),
        r"layer '1' \(BatchNorm1d\)",
    ),
    "frozen batch norm in train mode": (
        lambda: convolutional(nn.BatchNorm2d(8).requires_grad_(False)),
        r"layer '1\.0' \(BatchNorm2d\).*call eval\(\) on the frozen part",
    ),
    "statistics of the batch": (
        lambda: nn.Sequential(BatchWideNorm(), mlp()),
        r"layer '0' \(BatchWideNorm\).*use zdp_bench\.nn\.ComplexGroupNorm there",
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_the_batch_is_refused_and_named(name: str) -> None:
    model, sentence = NORMS[name]
    torch.manual_seed(0)
    with pytest.raises(UserError, match=sentence):
        check(model())


def test_a_frozen_batch_norm_in_eval_mode_is_served() -> None:
    model = convolutional(nn.BatchNorm2d(8).requires_grad_(False))
    model[1].eval()
    check(model)
    assert not alone(model)


SINS: dict[str, Callable[[Tensor], Tensor]] = {
    "the mean": lambda x: x - 0.1 * x.mean(dim=0),
    "a mean that no gradient passes": lambda x: x - 0.1 * x.mean(dim=0).detach(),
    "the largest": lambda x: x / x.abs().max(),
    "all before": lambda x: torch.cumsum(x, dim=0),
    "other numbers' places": lambda x: x.t().reshape(x.shape),
    "back to front": lambda x: x.flip(0),
    "the neighbour": lambda x: x + 0.1 * x.roll(1, dims=0),
    "the first one": lambda x: x + 1e-3 * x[:1],
    "the last one learns of the first": lambda x: torch.cat([x[:-1], x[-1:] + x[:1]]),
}


@pytest.mark.parametrize("sin", SINS)
def test_ways_to_mix_run_alone_and_the_line_is_named(sin: str, caplog: Any) -> None:
    model = mlp(nn.Dropout(0.5), Layer(SINS[sin]))
    check(model)
    assert re.search(r"models\.py, line \d+|other batch sizes", alone(model))
    assert caplog.text.count("examples are processed one at a time") == 1


@pytest.mark.parametrize(
    "model",
    [
        lambda: mlp(Made(attend, attention=nn.MultiheadAttention(8, 2))),
        lambda: nn.Sequential(nn.Identity(), mixing_in_its_own_forward()),
        mixing_in_its_own_forward,
        lambda: mlp(Layer(Mixed.apply)),
    ],
)
def test_layers_that_mix_run_alone(model: Callable[[], nn.Module]) -> None:
    built = model()
    check(built)
    assert alone(built)


class Mixed(torch.autograd.Function):
    """Forward, every sample for itself; backward, not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (1 + x.abs().mean())


# ---------------------------------------- what mixes padded, sparse, whole or short samples only

SERIES, TABLE = torch.zeros(3, 10, 2), torch.zeros(3, 4)
IDS, LENGTHS = torch.zeros(3, 10, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
MASK = torch.ones(3, 10, dtype=torch.bool)


def trimmed(net: Any, x: Tensor) -> Tensor:
    last = int((x != 0).any(0).any(-1).nonzero().max()) + 1
    return net.last(x[:, :last]).mean(1)


def embedded(net: Any, ids: Tensor) -> Tensor:
    last = int((ids != 0).any(0).nonzero().max()) + 1
    return net.last(net.embedding(ids[:, :last])).mean(1)


def imputed(net: Any, x: Tensor) -> Tensor:
    missing = x == 0
    return net.last(torch.where(missing, x.sum(0) / (~missing).sum(0).clamp(min=1), x))


def whole(net: Any, x: Tensor) -> Tensor:
    y = net.last(x)
    return y - 5 * (x == x.round()).float().mean() * y.mean(0, keepdim=True)


def masked_mean(net: Any, x: Tensor, kept: Tensor) -> Tensor:
    return (net.last(x) * kept[..., None]).sum(1) / kept.sum(-1, keepdim=True)


def run_lstm(net: Any, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    states, (last, _) = net.lstm(packed)
    return pad_packed_sequence(states, batch_first=True)[0], last[-1]


def masked_by_length(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    states = run_lstm(net, x, lengths)[0]
    real = torch.arange(states.shape[1]) < lengths[:, None]
    return (net.last(states) * real[..., None]).sum(1) / lengths[:, None]


def experts(net: Any, x: Tensor) -> Tensor:
    """The second expert no sample reaches."""
    outputs = torch.zeros(len(x), CLASSES)
    for chosen in (x[:, 0] < 1e9, x[:, 0] >= 1e9):
        if chosen.any():
            outputs[chosen] = net.last(x[chosen])
    return outputs


def gradient(net: Any, x: Tensor) -> Tensor:
    """Force fields and score models answer with a gradient."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(net.last(x).square().sum(), x, create_graph=True)[0]


TEXTS, MASKED = (SERIES, LENGTHS), (SERIES, MASK)
# By what becomes of them: the model's function, the width of its last layer's inputs, its inputs.
KINDS: dict[str, dict[str, tuple[Callable[..., Tensor], int, Any]]] = {
    "alone": {
        "imputed": (imputed, 4, TABLE),
        "NaN imputed": (lambda net, x: net.last(torch.where(x.isnan(), x.nanmean(0), x)), 4, TABLE),
        "whole numbers": (whole, 4, TABLE),
        "a shared mask": (lambda net, x, mask: masked_mean(net, x, mask.any(0)), 2, MASKED),
        "by size": (lambda net, x: net.last(x / len(x)), 4, TABLE),
        "trimmed": (trimmed, 2, SERIES),
        "embedded": (embedded, 5, IDS),
        "experts": (experts, 4, TABLE),
        "a gradient": (gradient, 4, TABLE),
        "packed": (lambda net, *given: net.last(run_lstm(net, *given)[0]).mean(1), 5, TEXTS),
        "the last state": (lambda net, *given: net.last(run_lstm(net, *given)[1]), 5, TEXTS),
        "masked by length": (masked_by_length, 5, TEXTS),
    },
    "in a batch": {
        "NaN as zero": (lambda net, x: net.last(x.nan_to_num()), 4, TABLE),
        "classes": (lambda net, ids: net.last(F.one_hot(ids, 50).float()).mean(1), 50, IDS),
        "a mean under a mask": (masked_mean, 2, MASKED),
        "at its end": (
            lambda net, x, lengths: net.last(x)[torch.arange(len(x)), lengths - 1],
            2,
            TEXTS,
        ),
    },
}


def differ(leaf: Tensor) -> Tensor:
    numbers = torch.arange(1, 4).view(3, *[1] * (leaf.dim() - 1))
    return leaf if leaf.dtype == torch.bool else leaf + numbers


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in KINDS[kind]])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_samples_of_any_structure_stay_apart(kind: str, name: str, public: bool) -> None:
    function, width, inputs = KINDS[kind][name]
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {"last": nn.Linear(width, CLASSES)}
    if name == "embedded":
        layers["embedding"] = nn.Embedding(50, width)
    if kind == "alone" and inputs is TEXTS:
        layers["lstm"] = nn.LSTM(2, width, batch_first=True)
    if public:
        inputs = tree_map(differ, inputs)
    model, batch = Made(function, **layers), (inputs, LABELS.new_tensor([0, 1, 2]))
    check_model(model, cross_entropy, batch, public=public)
    assert bool(alone(model)) == (kind == "alone")
