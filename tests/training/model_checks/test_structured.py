"""What mixes samples only where they are padded, sparse, whole or of several lengths is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.training.model_checks.models import CLASSES, LABELS, cross_entropy
from zdp_bench.errors import UserError
from zdp_bench.library.model_check import check_model

SERIES, TABLE = torch.zeros(3, 10, 2), torch.zeros(3, 4)
IDS, LENGTHS = torch.zeros(3, 10, dtype=torch.int64), torch.ones(3, dtype=torch.int64)


class Net(nn.Module):
    """A function of a few layers and the inputs."""

    def __init__(self, function: Callable[..., Tensor], width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.last = function, nn.Linear(width, CLASSES)
        self.embedding, self.lstm = nn.Identity(), nn.Identity()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def trimmed(net: Net, x: Tensor) -> Tensor:
    last = int((x != 0).any(0).any(-1).nonzero().max()) + 1
    return net.last(x[:, :last]).mean(1)


def left_trimmed(net: Net, x: Tensor) -> Tensor:
    return net.last(x[:, int((x != 0).any(0).any(-1).nonzero().min()) :]).mean(1)


def imputed(net: Net, x: Tensor) -> Tensor:
    missing = x == 0
    return net.last(torch.where(missing, x.sum(0) / (~missing).sum(0).clamp(min=1), x))


def nan_imputed(net: Net, x: Tensor) -> Tensor:
    return net.last(torch.where(x.isnan(), x.nanmean(0), x))


def whole(net: Net, x: Tensor) -> Tensor:
    y = net.last(x)
    return y - 5 * (x == x.round()).float().mean() * y.mean(0, keepdim=True)


def embedded(net: Net, ids: Tensor) -> Tensor:
    last = int((ids != 0).any(0).nonzero().max()) + 1
    return net.last(net.embedding(ids[:, :last])).mean(1)


def run_lstm(net: Net, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    states, (last, _) = net.lstm(packed)
    return pad_packed_sequence(states, batch_first=True)[0], last[-1]


def packed(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return net.last(run_lstm(net, x, lengths)[0]).mean(1)


def last_state(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return net.last(run_lstm(net, x, lengths)[1])


def masked_mean(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    states = run_lstm(net, x, lengths)[0]
    real = torch.arange(states.shape[1]) < lengths[:, None]
    return (net.last(states) * real[..., None]).sum(1) / lengths[:, None]


def nan_as_zero(net: Net, x: Tensor) -> Tensor:
    return net.last(x.nan_to_num())


def trimmed_sum(net: Net, x: Tensor) -> Tensor:
    last = int((x != 0).any(0).any(-1).nonzero().max()) + 1
    return net.last(x[:, :last].sum(1))


def net(function: Callable[..., Tensor], width: int) -> Net:
    made = Net(function, width)
    if function is embedded:
        made.embedding = nn.Embedding(50, width)
    if function in (packed, last_state, masked_mean):
        made.lstm = nn.LSTM(2, width, batch_first=True)
    return made


MIXING = {trimmed: (2, SERIES), left_trimmed: (2, SERIES), imputed: (4, TABLE)}
MIXING |= {nan_imputed: (4, TABLE), whole: (4, TABLE), packed: (5, (SERIES, LENGTHS))}


@pytest.mark.parametrize("function", MIXING)
@pytest.mark.parametrize("public", [False, True])
def test_what_mixes_only_samples_of_some_structure_is_found(
    function: Callable[..., Tensor], public: bool
) -> None:
    width, inputs = MIXING[function]
    torch.manual_seed(1)
    if public:
        inputs = (
            (torch.randn(3, 10, 2), 6 * LENGTHS)
            if function is packed
            else inputs + torch.randn(inputs.shape)
        )
    with pytest.raises(UserError, match=r"the model \(Net\) lets one sample see another"):
        check_model(
            net(function, width),
            cross_entropy,
            (inputs, LABELS.new_tensor([0, 1, 2])),
            public=public,
        )


def test_public_examples_are_padded_too() -> None:
    ids, targets = torch.randint(1, 50, (4, 10)), torch.tensor([0, 1, 2, 0])
    with pytest.raises(UserError, match=r"the model \(Net\) lets one sample see another"):
        check_model(net(embedded, 5), cross_entropy, (ids, targets), public=True)


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("function", [last_state, masked_mean, nan_as_zero, trimmed_sum])
def test_what_keeps_padded_samples_apart_passes(
    function: Callable[..., Tensor], public: bool
) -> None:
    torch.manual_seed(1)
    x, lengths = torch.randn(3, 10, 2), torch.tensor([6, 1, 3])
    inputs = (x, lengths) if function in (last_state, masked_mean) else x
    width = 2 if function is trimmed_sum else 5
    if function is nan_as_zero:
        inputs, width = x[:, 0], 2
    check_model(
        net(function, width), cross_entropy, (inputs, LABELS.new_tensor([0, 1, 2])), public=public
    )
