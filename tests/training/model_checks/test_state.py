"""What a model holds beside its weights stays as it was checked, and the check leaves it so."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.conftest import Make
from tests.library.small import CLASSES, data, loss, train
from tests.modules import Made
from tests.training.model_checks.models import check, convolutional, mlp
from zdp_bench import UserError
from zdp_bench.gradients import per_example
from zdp_bench.training.model_checks.state import record_versions

# -------------------------------------------------------------------------- what the check leaves


def makes_a_mask() -> nn.Module:
    """A layer that makes a mask at its first call, and holds what cannot be copied."""

    def forward(net: Any, x: Tensor) -> Tensor:
        if net.mask is None:
            net.mask = torch.ones_like(x[:1])
        return x * net.mask

    return Made(forward, mask=None, lock=threading.Lock())


def test_the_check_leaves_a_model_exactly_as_it_was() -> None:
    model = mlp(makes_a_mask())
    weights = copy.deepcopy(model.state_dict())
    held = {key: id(value) for key, value in vars(model[1]).items()}
    assert check(model) == []
    assert {key: id(value) for key, value in vars(model[1]).items()} == held
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def carries(net: Any, x: Tensor) -> Tensor:
    outputs, state = net.gru(x.unsqueeze(1), net.state)
    net.state = state.detach()
    return outputs[:, -1]


class Shortens(nn.Module):
    """Looks rows up by torch's function, which shortens them."""

    def __init__(self, _: int, width: int, max_norm: float) -> None:
        super().__init__()
        self.weight, self.most = nn.Parameter(torch.randn(4, width)), max_norm

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, max_norm=self.most)


class Renormalises(Shortens):
    """As networks for EEG do, in every pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, self.most)
        return F.embedding(x, self.weight)


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag, Shortens, Renormalises])
def test_a_layer_that_shortens_its_rows_is_refused_however_long_they_are(
    kind: Callable[..., nn.Module], max_norm: float
) -> None:
    layer = kind(4, 8, max_norm=max_norm)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(4))
    model(torch.zeros(1, 3, dtype=torch.int64))
    before = copy.deepcopy(layer.weight)
    with pytest.raises(UserError, match=r"layer '0' .*'weight'.*max_norm"):
        check(model, torch.zeros(0, 3, dtype=torch.int64))
    assert torch.equal(layer.weight, before)


def test_weights_that_are_replaced_are_found_wherever_their_memory_lies() -> None:
    layer = nn.Linear(1000, 1000)
    for _ in range(20):  # each time torch hands out memory again that it freed before
        layer.weight.data = layer.weight.data.clone()
        versions = record_versions(dict(layer.named_parameters()))
        for _ in range(20):
            layer.weight.data = layer.weight.data.clone()
            assert record_versions(dict(layer.named_parameters())) != versions


# ------------------------------------------------------------------------- what is found at once


def averages(net: Any, x: Tensor) -> Tensor:
    net.average = 0.9 * net.average + 0.1 * x.detach().mean(dim=0)
    return x


def in_a_tensor() -> nn.Module:
    layer = Made(averages)
    layer.average = torch.zeros(8)  # not in a buffer
    return layer


def counts(net: Any, x: Tensor) -> Tensor:
    net.examples = len(x)
    return x


def caches(net: Any, x: Tensor) -> Tensor:
    net.seen["last"][0] = x.detach()
    return x


def with_another_forward_function(model: Any) -> nn.Module:
    forward = model.forward
    model.forward = lambda x: 2 * forward(x)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make_model", "sentence"),
    [
        (lambda: mlp(in_a_tensor()), r"layer '1' \(Made\) stores.*'average'"),
        (
            lambda: with_another_forward_function(mlp(in_a_tensor())),
            r"layer '1' \(Made\) stores.*'average'",
        ),
        (lambda: mlp(Made(averages, average=torch.zeros(8))), r"\(Made\) stores.*'average'"),
        (lambda: mlp(Made(counts)), r"layer '1' \(Made\) stores.*'examples'"),
        (lambda: mlp(Made(caches, seen={"last": [None]})), r"stores.*'seen\['last'\]\[0\]'"),
        (
            lambda: convolutional(nn.InstanceNorm2d(8, track_running_stats=True)),
            r"layer '1\.0' \(InstanceNorm2d\) stores.*'running_mean'.*track_running_stats=False",
        ),
        (
            lambda: mlp(Made(carries, gru=nn.GRU(8, 8, batch_first=True), state=None)),
            r"layer '1' \(Made\) stores training examples in 'state'",
        ),
    ],
)
def test_what_keeps_examples_is_found_wherever_it_keeps_them(
    make_model: Callable[[], nn.Module], sentence: str
) -> None:
    model = make_model()
    with pytest.raises(UserError, match=sentence):
        check(model)
    assert not torch.as_tensor(getattr(model[1], "average", 0)).any()  # and put back


def test_an_attribute_that_was_made_in_inference_mode_is_refused_in_a_sentence() -> None:
    with torch.inference_mode():
        scale = torch.ones(8)
    message = r"^the model fails where a copy of it does not: .*Inference tensors cannot be saved"
    with pytest.raises(UserError, match=message):
        check(mlp(Made(lambda net, x: x * net.scale[0], scale=[scale])))


class FitsAsACopy(nn.Module):
    is_copy = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"is_copy": True}

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_copy:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x


class Forgets(nn.Module):
    """Leaves the scale of its outputs out of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 3.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "scale"}

    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(self, "scale", 1.0)


def test_what_a_first_pass_keeps_outside_is_no_constant_of_the_program() -> None:
    """Each private step subtracted the mean of the check's made-up inputs."""
    means: list[Tensor] = []

    def centre(net: Any, x: Tensor) -> Tensor:
        if not means:
            means.append(x.detach().mean())
        return x - means[0]

    with pytest.raises(UserError, match="output for an example changes once others"):
        check(mlp(Made(centre)))
    assert not means


def test_a_model_whose_copies_return_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="a copy of the model, which private steps run, returns"):
        check(mlp(Forgets()))


@pytest.mark.parametrize("read", [dict.__getitem__, dict.get])
def test_a_model_that_looks_its_modules_up_in_a_global_is_told_so(read: Any) -> None:
    """The error advised a probe, which cannot help."""
    scales: dict[nn.Module, float] = {}
    net = Made(lambda net, x: x * (read(scales, net) or 1.0))
    scales[net] = 3.0
    sentence = (
        "^a copy of the model.* in attributes of the model, not by a module or its id in a global"
    )
    with pytest.raises(UserError, match=sentence):
        check(mlp(net))


def test_memory_that_ran_out_is_not_said_to_be_the_models_fault() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        check(mlp(FitsAsACopy()))


# ------------------------------------------------------------- what a loss or a hook finds stored


STORED: dict[str, Any] = {}


def in_a_private_list(net: Any, x: Tensor) -> None:
    net._stored.append(x.square().mean(dim=1))


def in_a_namespace(net: Any, x: Tensor) -> None:
    net.options.auxiliary = x.square().mean(dim=1)


def in_a_global(net: Any, x: Tensor) -> None:
    STORED["auxiliary"] = x.square().mean(dim=1)


def in_a_global_without_gradients(net: Any, x: Tensor) -> None:
    STORED["auxiliary"] = (x[:, 0] > 0.5).detach().float()


Read = Callable[[nn.Module], Tensor]


@pytest.mark.parametrize("branches", [False, True], ids=["as a program", "one at a time"])
@pytest.mark.parametrize(
    ("store", "read"),
    [
        (in_a_private_list, lambda net: net._stored[-1]),
        (in_a_namespace, lambda net: net.options.auxiliary),
        (in_a_global, lambda net: STORED["auxiliary"]),
        (in_a_global_without_gradients, lambda net: STORED["auxiliary"]),
        (in_a_global_without_gradients, lambda net: STORED.get("auxiliary", torch.ones(1))),
    ],
)
def test_a_loss_that_reads_what_a_forward_pass_stores_is_refused(
    store: Callable[[Any, Tensor], None], read: Read, branches: bool
) -> None:
    """A step would not find it, or would find what the check has left there."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.layer(x)
        if branches and float(x.detach().max()) > 1e9:
            x = x / 2
        store(net, x)
        return x

    layer = nn.Linear(8, 8)
    middle = Made(forward, layer=layer, _stored=[], options=SimpleNamespace())
    model = mlp(middle)

    def balanced_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses + 0.1 * read(middle)

    with pytest.raises(UserError, match=r"the loss reads something that .* stores.*torch\.cat"):
        check(model, loss=balanced_loss)
    assert not STORED


@pytest.mark.parametrize("seed", range(4))
def test_a_hook_that_keeps_the_largest_gradient_is_refused_at_every_call(seed: int) -> None:
    model = mlp(nn.Tanh())
    largest = [1e-3]

    def shorten(layer: nn.Module, inputs: Any, outputs: Any) -> Any:
        largest[0] = max(largest[0], float(outputs[0].abs().max()))
        return (inputs[0] / largest[0],)

    model[2].register_full_backward_hook(shorten)
    torch.manual_seed(seed)
    nn.init.normal_(model[0].weight)
    for _ in range(2):
        with pytest.raises(UserError, match="a hook or a backward function keeps state"):
            check(model)
        assert largest == [1e-3]


def test_a_check_draws_the_same_numbers_at_every_call(capsys: Any) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        print(float(torch.rand(())))
        return x

    printed = []
    for seed in range(2):
        model = mlp(Made(forward))
        torch.manual_seed(seed)
        check(model)
        printed.append(capsys.readouterr().out)
    assert printed[0]
    assert printed[0] == printed[1]


# ---------------------------------------------------------------------------- what changes later


def count_passes(net: Any, x: Tensor) -> Tensor:
    net.passes += 1
    return x


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_sparse_attribute_is_compared(is_kept: bool) -> None:
    def propagate(net: Any, x: Tensor) -> Tensor:
        if is_kept:
            net.graph = torch.diag(x[0].detach()).to_sparse()
        return (net.graph @ x.T).T

    layer = Made(propagate)
    layer.graph = torch.eye(8).to_sparse()
    if is_kept:
        with pytest.raises(UserError, match="stores training examples in 'graph'"):
            check(mlp(layer))
    else:
        check(mlp(layer))


def test_what_counts_passes_is_refused() -> None:
    with pytest.raises(UserError, match=r"layer '1' .*'passes'"):
        check(mlp(Made(count_passes, passes=0)))


def draws_features(net: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in net.features:
        net.features[x.shape[1]] = torch.randn(x.shape[1], dtype=x.dtype)
    return x * net.features[x.shape[1]]


def test_what_the_first_pass_draws_and_keeps_is_asked_for() -> None:
    """Private steps drew it anew each time, and after the training it was gone."""
    model = mlp(Made(draws_features, features={}))
    with pytest.raises(UserError, match=r"draws 'features\[8\]' at random in its first forward"):
        check(model)
    model(torch.randn(2, 5))
    assert check(model) == []


def test_a_part_made_in_the_first_pass_is_asked_for() -> None:
    def build_head(net: Any, x: Tensor) -> Tensor:
        if net.head is None:
            net.head = nn.Linear(x.shape[1], CLASSES)
        return net.head(x)

    with pytest.raises(UserError, match=r"'head\.\w+' .*first forward pass"):
        check(Made(build_head, head=None, first=nn.Linear(5, 5)))


def scaled(net: Any, x: Tensor) -> Tensor:
    return x * net.temperature


def raise_temperature(model: Any) -> None:
    model[1].temperature = 3.0


def put_layer(model: Any) -> None:
    model[1] = nn.Tanh()


def wrap_forward(model: Any) -> None:
    forward = model[1].forward
    model[1].forward = lambda x: 0.5 * forward(x)


def write_buffer(model: Any) -> None:
    model[1].scale.mul_(2.0)


SCHEDULES = {
    "an attribute": raise_temperature,
    "a layer": put_layer,
    "a forward function": wrap_forward,
    "a buffer": write_buffer,
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_model_that_its_loop_changes_trains_as_it_is_then(make: Make, kind: str) -> None:
    ends = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        scale = torch.full((6,), 0.7)
        middle = Made(lambda net, x: scaled(net, x) * net.scale, temperature=1.0, scale=scale)
        model = nn.Sequential(nn.Linear(4, 6), middle, nn.Linear(6, CLASSES))
        given = {"sample_rate": 1.0, "expected_batch": 60, "epochs": 2, "noise_multiplier": 0.0}
        private = make(model, **given, max_grad_norm=0.1)
        if by_hand:
            inputs, targets = data().tensors
            for step in range(2):
                if step:
                    SCHEDULES[kind](model)
                sums = clipped_sum_by_hand(model, inputs, targets)
                with torch.no_grad():
                    for parameter, value in zip(model.parameters(), sums, strict=True):
                        parameter -= 0.5 * value / 60
        else:
            for step, batch in enumerate(private.batches()):
                if step:
                    SCHEDULES[kind](model)
                private.step(batch)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def clipped_sum_by_hand(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    total = [torch.zeros_like(p, requires_grad=False) for p in model.parameters()]
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        gradients = torch.autograd.grad(loss(model(x), y).sum(), [*model.parameters()])
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        for value, gradient in zip(total, gradients, strict=True):
            value += gradient * (0.1 / norm).clamp(max=1)
    return total


class WritesIfLarge(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if (x > 4000).any():
            with torch.no_grad():
                self.weight.add_(1.0)
        return super().forward(x)


def with_one_large_example() -> list[tuple[Tensor, int]]:
    return [(torch.randn(4) if index else torch.full((4,), 5e3), 0) for index in range(9)]


def writes_if_large(layer: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss that writes the weight of a layer if an output is large."""

    def write(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.abs().max() > 500:
            layer.weight.data = layer.weight.data + 1.0
        return F.cross_entropy(outputs, targets, reduction="none")

    return write


@pytest.mark.parametrize(
    ("by_loss", "engine"), [(False, "auto"), (False, "reference"), (True, "reference")]
)
def test_a_weight_written_while_gradients_are_computed_ends_a_loop_for_good(
    by_loss: bool, engine: str, make: Make, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, CLASSES) if by_loss else WritesIfLarge(4, CLASSES)
    options = {"dataset": with_one_large_example(), "sample_rate": 1.0, "gradients": engine}
    if by_loss:
        options["loss"] = writes_if_large(layer)
    private = make(nn.Sequential(layer), **options)
    train_it, export = partial(train, private), partial(private.export, tmp_path / "out")
    for act in (train_it, train_it, private.save, export):
        with pytest.raises(UserError, match=r"'0\.weight' was changed"):
            act()
    assert private.ledger.releases == 1
    assert not (tmp_path / "out").exists()
    assert not private.checkpoint.exists()


def test_a_weight_that_a_loss_writes_is_restored() -> None:
    layer = nn.Linear(4, CLASSES)
    weight = layer.weight.detach().clone()
    examples = per_example(writes_if_large(layer))
    examples(torch.full((2, CLASSES), 1e3), torch.zeros(2, dtype=torch.long))
    assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_what_is_made_at_the_first_call_ends_nothing(
    make: Make, tmp_path: Path, engine: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), makes_a_mask(), nn.Dropout(0.1), nn.Linear(6, CLASSES))
    private = make(model, epochs=1, gradients=engine)
    train(private)
    model.eval()
    private.export(tmp_path / "out")
    assert model(torch.zeros(2, 4)).isfinite().all()
