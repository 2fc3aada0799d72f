"""What people bring: losses, models, data and optimizers, served or refused for the true reason."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence

import zdp_bench
from tests.library.conftest import Make
from tests.library.small import CLASSES, EXAMPLES, data, loss, network, train
from tests.modules import Made
from zdp_bench.errors import UserError
from zdp_bench.gradients.program import alone

NOT_SERVED = {"LBFGS", "SparseAdam", "Optimizer"}
WHOLE = {"sample_rate": 1.0, "expected_batch": EXAMPLES, "epochs": 1, "noise_multiplier": 0.0}


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# ------------------------------------------------- gradients that do not pass through the outputs


def penalty(model: nn.Module) -> Tensor:
    return 0.3 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def beside(model: nn.Module) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    start, head = weights_of(model), nn.Linear(CLASSES, CLASSES)
    return {
        "a penalty": lambda o, t: loss(o, t) + penalty(model),
        "a proximal term": lambda o, t: (
            loss(o, t)
            + (torch.cat([p.flatten() for p in model.parameters()]) - start).square().sum()
        ),
        "the model again": lambda o, t: loss(o, t) + loss(model(torch.ones(1, 4)), t),
        "parameters of its own": lambda o, t: loss(head(o), t),
    }


@pytest.mark.parametrize("name", beside(network()))
def test_a_gradient_beside_the_outputs_is_not_dropped_in_silence(make: Make, name: str) -> None:
    model = network()
    message = "parameters of its own" if "own" in name else r"parameter '0\.weight' .*regulariser="
    with pytest.raises(UserError, match=message):
        make(model, loss=beside(model)[name])


def test_a_penalty_that_begins_late_is_not_dropped_either(make: Make) -> None:
    model, late = network(), [0.0]
    private = make(model, loss=lambda o, t: loss(o, t) + (penalty(model) if late[0] else 0.0))
    late[0] = 1.0
    with pytest.raises(UserError, match=r"beside the model's outputs"):
        train(private)


def differentiated_already(model: nn.Module) -> Tensor:
    value = penalty(model)
    value.backward()
    return value


@pytest.mark.parametrize("several", [False, True])
def test_a_regularisers_gradient_is_added_after_clipping_and_noise(
    make: Make, tmp_path: Path, several: bool
) -> None:
    model, plain = network(), network()
    before = weights_of(model)
    both: tuple[tuple[Any, dict[str, Any]], ...] = (model, {"regulariser": penalty}), (plain, {})
    for each, given in both:
        optimizer: Any = torch.optim.SGD(each.parameters(), lr=0.5)
        if several:
            parts = each[0].parameters(), each[2].parameters()
            optimizer = [torch.optim.SGD(part, lr=0.5) for part in parts]
        given |= {"optimizer": optimizer, "ledger": tmp_path / f"{len(given)}.jsonl"}
        train(make(each, **WHOLE | given))
    torch.testing.assert_close(weights_of(model), weights_of(plain) - 0.5 * 0.6 * before)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda m: 0.0, "one real number that depends on the model's weights"),
        (lambda m: m[0].weight, "one real number that depends on the model's weights"),
        (lambda m: penalty(m) * float("nan"), "its gradient is not finite"),
        (lambda m: penalty(m) * 1j, "one real number"),
        (lambda m: torch.special.zeta(penalty(m) + 2, penalty(m)), "gradient cannot be computed"),
        (differentiated_already, "must return its number and not call backward"),
    ],
)
def test_a_regulariser_that_cannot_be_used_is_refused(
    make: Make, wrong: Any, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        train(make(regulariser=wrong))


def test_an_optimizer_holds_each_parameter_of_the_model_once(make: Make) -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    part = torch.optim.SGD([model[0].weight], lr=0.5)  # type: ignore[index]
    for twice in ([sgd, sgd], [sgd, part]):
        with pytest.raises(UserError, match=r"parameter '0\.weight' is in the optimizer 2 times"):
            make(model, optimizer=twice)
    private = make(model, optimizer=sgd)
    sgd.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    for late in (lambda: train(private), lambda: make(model, optimizer=sgd)):
        with pytest.raises(UserError, match="a parameter that does not belong to the model"):
            late()
    with pytest.raises(UserError, match=r"^optimizer: a value of type dict was given, but an opt"):
        make(model, optimizer={"lr": 0.5})


ROWS = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
CLASS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("probe", "sentence"),
    [
        ((ROWS[:, :3], CLASS), r"float32 inputs of shape \[3\], but .* inputs of shape \[4\]:"),
        ((ROWS, CLASS.float()), r"float32 targets of shape \[\], but .* int64 targets"),
        ((ROWS * float("nan"), CLASS), "the model gives NaN"),
    ],
)
def test_a_wrong_probe_is_refused_for_its_reason(make: Make, probe: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make(probe=probe)


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        self.seen = 0.9 * self.seen + losses.mean().detach()
        return losses / (1 + self.seen)


def test_a_loss_that_remembers_or_draws_is_told_apart(make: Make, caplog: Any) -> None:
    with pytest.raises(UserError, match=r"the loss changes 'seen' when it is called"):
        make(loss=RunningMean())
    make(loss=lambda o, t: F.cross_entropy(o, t, reduction="none") * torch.rand(len(o)))
    assert "depends on the batch" not in caplog.text


def test_the_number_of_examples_does_not_reach_what_a_regulariser_draws(make: Make) -> None:
    drawn = []

    def noisy(model: nn.Module) -> Tensor:
        drawn.append(torch.randn(3))
        return (model[0].weight[0, :3] * drawn[-1]).sum()  # type: ignore[index]

    for many in (20, 21):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, CLASSES))
        dataset = [data()[i] for i in range(many)]
        private = make(model, regulariser=noisy, dataset=dataset, **WHOLE | {"epochs": 2})
        torch.manual_seed(6)
        train(private)
        private.close()
        private.ledger.path.unlink()
    assert torch.equal(torch.stack(drawn[:2]), torch.stack(drawn[2:]))


# ------------------------------------------------------------ inputs that no random numbers can be


def characters() -> nn.Module:
    """[B, T] -> [B, T, 5], with fewer characters than places."""
    return nn.Sequential(nn.Embedding(5, 8), nn.Tanh(), nn.Linear(8, 5))


def packed() -> nn.Module:
    def function(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
        of = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return net.last(net.rnn(of)[1][-1])

    return Made(function, rnn=nn.GRU(4, 6, batch_first=True), last=nn.Linear(6, CLASSES))


def not_negative(least: float) -> nn.Module:
    def function(net: Any, x: Tensor) -> Tensor:
        assert bool((x >= least).all()), "too small"
        return net.first(x.sqrt())

    return Made(function, first=nn.Linear(4, CLASSES))


def ctc(outputs: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    return F.ctc_loss(outputs.transpose(0, 1), *targets, reduction="none")


def transposed(outputs: Tensor, targets: Tensor) -> Tensor:
    return loss(outputs.transpose(1, 2), targets).mean(dim=1)


def brought() -> dict[str, tuple[nn.Module, list[Any], Any]]:
    """Models, 20 examples of theirs, and losses."""
    torch.manual_seed(0)
    many = range(20)
    texts = [(torch.randint(5, (12,)), torch.randint(5, (12,))) for _ in many]
    films = [(torch.randn(9, 4), (torch.randint(1, 6, (3,)), 9, 3)) for _ in many]
    series = [((torch.randn(7, 4), 1 + i % 7), i % CLASSES) for i in many]
    counts = [(5 + torch.rand(4), i % CLASSES) for i in many]
    return {
        "characters": (characters(), texts, transposed),
        "ctc": (nn.Sequential(nn.Linear(4, 6), nn.LogSoftmax(-1)), films, ctc),
        "packed": (packed(), series, loss),
        "five or more": (not_negative(5.0), counts, loss),
    }


@pytest.mark.parametrize("name", brought())
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_examples_of_any_domain_are_served(
    make: Make, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`probe` where guesses are no use; sums are those of each example alone, as is told."""
    model, dataset, own = brought()[name]
    given: dict[str, Any] = {"dataset": dataset, "loss": own}
    if name == "five or more":
        with pytest.raises(UserError, match=r"give probe=\(inputs, targets\)"):
            make(model, **given)
        given["probe"] = torch.utils.data.default_collate(dataset[:3])
    before = weights_of(model)
    private = make(model, **given | WHOLE | {"expected_batch": 20, "max_grad_norm": 0.1})
    message = r"depends on the values of a tensor.*: examples are processed one at a time"
    assert bool(re.search(message, caplog.text)) == (name == "five or more")
    alone, by_hand = torch.zeros_like(before), brought()[name][0]
    for index in range(20):
        inputs, targets = torch.utils.data.default_collate([dataset[index]])
        outputs = by_hand(*inputs) if isinstance(inputs, list) else by_hand(inputs)
        gradients = torch.autograd.grad(own(outputs, targets).sum(), [*by_hand.parameters()])
        g = torch.cat([part.flatten() for part in gradients])
        alone += g * (0.1 / g.norm()).clamp(max=1.0)
    train(private)
    torch.testing.assert_close(weights_of(model), before - 0.5 * alone / 20, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------- what was refused in error


def teacher(net: Any, x: Tensor) -> Tensor:
    return net.student(x) + net.teacher(x).detach()


class Doubling(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs.mul_(2), targets)


def doubling_in_a_loop(outputs: Tensor, targets: Tensor) -> Tensor:
    doubled = outputs.mul_(2)
    return loss(doubled, targets) if float(doubled.detach().sum()) < 1e9 else loss(outputs, targets)


HONEST: dict[str, Callable[[], dict[str, Any]]] = {
    "a pass that writes into its inputs": lambda: {
        "model": Made(lambda net, x: net.last(x.div_(2)), last=nn.Linear(4, CLASSES))
    },
    "an expanded buffer": lambda: {
        "model": Made(
            lambda net, x: net.last(x * net.scale),
            last=nn.Linear(4, CLASSES),
            scale=torch.ones(1).expand(4),
        )
    },
    "a teacher": lambda: {
        "model": Made(
            teacher,
            student=nn.Linear(4, CLASSES),
            teacher=nn.Linear(4, CLASSES).requires_grad_(False),
        )
    },
    "int32 classes": lambda: {
        "dataset": [(x, target.int()) for x, target in data()],
        "loss": nn.CrossEntropyLoss(reduction="none"),
    },
    "len(x)": lambda: {
        "model": Made(lambda net, x: net.last(x).view(len(x), -1), last=nn.Linear(4, CLASSES))
    },
    "a loss that writes into the outputs": lambda: {"loss": lambda o, t: loss(o.mul_(2), t)},
    "a loss module that writes into the outputs": lambda: {"loss": Doubling()},
    "a loss that writes into the outputs and takes no vmap": lambda: {"loss": doubling_in_a_loop},
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_code_is_served_in_a_batch(make: Make, name: str) -> None:
    given = HONEST[name]()
    private = make(given.pop("model", None), **given)
    train(private, most=2)
    assert not alone(private.model)


# ----------------------------------------------------------------------------- the true reason


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    near = F.normalize(outputs, dim=1)
    return loss(near @ near.T / 0.1, torch.arange(len(near)))


def similarities() -> nn.Module:
    def function(net: Any, first: Tensor, second: Tensor) -> Tensor:
        return F.normalize(net.first(first)) @ F.normalize(net.second(second)).T

    return Made(function, first=network(), second=network())


def sequential_and_centred() -> nn.Module:
    def function(net: Any, x: Tensor) -> Tensor:
        centred = x - 0.1 * x.mean(0)
        states, _ = net.rnn(centred.view(-1, 2, 2))
        return net.last(states.flatten(1))

    return Made(function, rnn=nn.GRU(2, 3), last=nn.Linear(6, CLASSES))


def match(outputs: Tensor, _: Tensor) -> Tensor:
    return loss(outputs, torch.arange(len(outputs)))


def pair() -> nn.Module:
    return Made(lambda net, x: (net.first(x), x), first=network())


def autocast() -> nn.Module:
    def function(net: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.inside(x)

    return Made(function, inside=network())


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(6, CLASSES))


def between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), layer, nn.Linear(6, CLASSES))


def remembering(in_place: bool, begun: Callable[[], bool] = lambda: True) -> nn.Module:
    """A memory bank that is no buffer of the model. It runs one example at a time."""
    bank = torch.zeros(6)

    def function(net: Any, x: Tensor) -> Tensor:
        nonlocal bank
        features = net.first(x.flip(0))
        answer = net.last(features + bank)
        if begun():
            mean = 0.9 * bank + 0.1 * features.detach().mean(0)
            bank = bank.copy_(mean) if in_place else mean
        return answer

    return Made(function, first=nn.Linear(4, 6), last=nn.Linear(6, CLASSES))


def own_generator() -> nn.Module:
    draws = np.random.default_rng(0)
    return Made(lambda net, x: net.inside(x * float(draws.random())), inside=network())


def averaging() -> Callable[[Tensor, Tensor], Tensor]:
    """Losses over their running mean."""
    mean = torch.zeros(())

    def function(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal mean
        losses = loss(outputs, targets)
        mean = 0.9 * mean + 0.1 * losses.detach().mean()
        return losses / mean

    return function


def batch_norm_by_hand() -> nn.Module:
    return Made(lambda net, x: net.inside((x - x.mean(0)) / x.std(0)), inside=network())


def overwritten() -> nn.Module:
    return Made(lambda net, x: net.inside(x).relu_().mul_(2), inside=network())


def conjugated() -> nn.Module:
    weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64).conj())
    return Made(lambda net, x: (x.to(torch.complex64) @ net.weight).abs(), weight=weight)


WITHOUT_OUTPUTS = "^the loss of an example does not change with the model's outputs"
KEEPS = "output for an example changes once others have been processed, so the model keeps"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": lambda: remembering(in_place=True)}, KEEPS),
        ({"model": lambda: remembering(in_place=False)}, KEEPS),
        ({"model": own_generator}, KEEPS),
        ({"loss": averaging()}, "loss of an example changes once others are computed"),
        ({"loss": lambda o, t: o.argmax(1) != t}, "the loss gives bool for 1 example"),
        ({"model": batch_norm_by_hand}, "run one at a time, because mean combines"),
        ({"model": sequential_and_centred}, r"layer 'rnn' \(GRU\) has batch_first=False"),
        ({"model": overwritten}, "the model has no gradient: torch raises: one of the variables"),
        ({"loss": contrastive}, r"compares the examples of a batch.*\(\(a, b\), target\)"),
        (
            {"model": similarities, "dataset": [((torch.ones(4), torch.ones(4)), 0)] * 20}
            | {"loss": match},
            r"compares the examples of a batch.*\(\(a, b\), target\)",
        ),
        ({"loss": lambda o, t: [loss(o, t)]}, "the loss gives list for 1 example"),
        ({"loss": lambda o, t: loss(o.detach(), t)}, WITHOUT_OUTPUTS),
        ({"loss": lambda o, t: (o.argmax(1) != t).float()}, WITHOUT_OUTPUTS),
        ({"loss": lambda o, t: loss(torch.tensor(o.detach().tolist()), t)}, WITHOUT_OUTPUTS),
        ({"loss": "cross_entropy"}, "str was given, but a function of"),
        ({"model": lambda: between(weight_norm(nn.Linear(6, 6)))}, "layer '1' .*weight_norm wri"),
        ({"model": autocast}, "'inside' .* runs under torch.autocast.*precision=\"bf16\""),
        (
            {"model": sparse, "dataset": [(torch.tensor([1, 2]), 0)] * 20},
            r"layer '0' \(Embedding\) has sparse gradients.*sparse=False",
        ),
        ({"model": lambda: between(spectral_norm(nn.Linear(6, 6)))}, "changes '_u' in each pass"),
        (
            {"model": conjugated, "algorithm": "zeta_dp_sgd"},
            r"parameter 'weight' is a conjugate or negative view.*resolve_conj\(\)",
        ),
        ({"model": pair}, r"returns tuple instead of a tensor: put it into a module"),
        ({"model": lambda: network().bfloat16()}, "keep parameters in float32"),
        ({"dataset": [(torch.zeros(4), "cat")] * 20}, "contains 'cat'.*encode classes"),
        ({"dataset": [([0.0] * 4, 0)] * 20}, "A list or tuple of 4 reaches .* return that"),
        ({"dataset": [(torch.zeros(4), [0])] * 20}, "A list or tuple of 1 reaches .* return that"),
    ],
    ids=lambda changed: next(iter(changed)) if isinstance(changed, dict) else "",
)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_the_true_reason_is_given_in_pythons_words(
    make: Make, changed: dict[str, Any], sentence: str
) -> None:
    if "model" in changed:
        changed = changed | {"model": changed["model"]()}
    with pytest.raises(UserError, match=sentence) as refused:
        make(**changed)
    assert not [key for key in ("algorithm.", "trainer.", "privacy.") if key in str(refused.value)]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_a_parameter_gets_later_is_refused_before_a_step_counts(
    make: Make, register: str
) -> None:
    """Steps were taken without it, in silence."""
    model = network()
    private = make(model)
    train(private, most=1)
    handle = getattr(model[0].weight, register)(lambda gradient: None)
    with pytest.raises(UserError, match=r"^parameter '0\.weight' has a hook"):
        train(private, most=1)
    assert private.ledger.releases == 1
    handle.remove()
    train(private, most=1)


def test_a_model_that_begins_to_keep_something_later_takes_no_step(make: Make) -> None:
    flags = [False]
    model = remembering(in_place=True, begun=lambda: flags[0])
    private = make(model, **WHOLE | {"epochs": 2})
    train(private, most=1)
    flags[0] = True
    weights = [p.clone() for p in model.parameters()]
    with pytest.raises(UserError, match=KEEPS):
        train(private, most=1)
    assert all(
        torch.equal(now, then) for now, then in zip(model.parameters(), weights, strict=True)
    )


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (torch.zeros(5), "pad them in the dataset"),
        (torch.zeros(4).double(), "have a different dtype"),
        (torch.zeros(4, dtype=torch.complex64), "have a different dtype"),
    ],
)
def test_items_that_make_no_batch_cost_nothing(make: Make, odd: Tensor, message: str) -> None:
    dataset = [(odd if 5 < i < 15 else torch.zeros(4), 0) for i in range(20)]
    private = make(dataset=dataset, **WHOLE)
    with pytest.raises(UserError, match=rf"do not form a batch: .*{message}"):
        train(private)
    assert private.ledger.releases == 0


def test_a_lazy_module_is_asked_for_a_first_call(make: Make) -> None:
    model = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, CLASSES))
    optimizer = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(UserError, match="call the model once"):
        make(model, optimizer=optimizer)
    model(torch.zeros(1, 4))
    train(make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5)), most=1)


@pytest.mark.parametrize(
    ("make_optimizer", "sentence"),
    [
        (lambda p: torch.optim.Adam(p, capturable=True), "Adam cannot take a private step"),
        (torch.optim.LBFGS, "LBFGS cannot take a private step.*closure"),
    ],
)
def test_an_optimizer_that_cannot_step_is_refused_before_a_step_counts(
    make: Make, tmp_path: Path, make_optimizer: Any, sentence: str
) -> None:
    model = network()
    before = weights_of(model)
    with pytest.raises(UserError, match=sentence):
        make(model, optimizer=make_optimizer(model.parameters()))
    assert torch.equal(weights_of(model), before)
    assert not (tmp_path / "ledger.jsonl").exists()


def optimizers_of_torch() -> list[str]:
    """Return the names of torch's optimizers that can be served, without its functions."""
    names = {*torch.optim.__all__} - NOT_SERVED
    return sorted(name for name in names if isinstance(getattr(torch.optim, name), type))


class Around(torch.optim.Optimizer):
    """An optimizer around another, as Lookahead is."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.optimizer, self.steps = inner, 0

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.steps += 1


def test_an_optimizer_around_another_takes_the_steps(make: Make) -> None:
    model = network()
    around = Around(torch.optim.SGD(model.parameters(), lr=0.5))
    train(make(model, optimizer=around), most=2)
    assert around.steps == 2


@pytest.mark.parametrize("name", optimizers_of_torch())
def test_groups_step_from_the_clipped_mean_at_their_own_rate_and_decay(
    make: Make, name: str
) -> None:
    """One is frozen, and its gradient of earlier steps nothing; a schedule is left as it was."""
    ends = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        sizes = (4, 6), (6, 6), (6, CLASSES)
        model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
        groups: list[dict[str, Any]] = [{"params": part.parameters(), "lr": 0.1} for part in model]
        groups[0]["lr"], groups[2]["weight_decay"] = 0.01, 0.3
        optimizer = getattr(torch.optim, name)(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 0.5**t] * 3)
        frozen = model[1].weight.requires_grad_(False)
        if by_hand:
            for _ in range(3):
                sums = zdp_bench.clipped_sum(model, loss, data().tensors, 0.1).sums  # type: ignore[arg-type]
                for key, value in sums.items():
                    model.get_parameter(key).grad = value / EXAMPLES
                optimizer.step()
                schedule.step()
        else:
            frozen.grad = torch.ones_like(frozen)
            private = make(
                model, optimizer=optimizer, **WHOLE | {"epochs": 3, "max_grad_norm": 0.1}
            )
            for batch in private.batches():
                private.step(batch)
                schedule.step()
        ends.append(weights_of(model))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def of_layers(kind: Any, model: nn.Module, order: tuple[int, int], several: bool = False) -> Any:
    """Optimizers, or groups of one, of the two linear layers."""
    parts = [list(model[at].parameters()) for at in order]  # type: ignore[index]
    if several:
        return [kind(part, lr=0.5) for part in parts]
    return kind([{"params": part} for part in parts], lr=0.5)


def halves(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


def falls(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def in_turn(*schedules: Any) -> Any:
    def build(optimizer: Any) -> Any:
        parts = [schedule(optimizer) for schedule in schedules]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3])

    return build


SGD, ADAM = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize(
    ("saved", "given", "reason"),
    [
        ((SGD, (0, 2)), (ADAM, (0, 2)), "class of the optimizer"),
        ((ADAM, (0, 2)), (torch.optim.AdamW, (0, 2)), "class of the optimizer"),
        ((SGD, (0, 2)), (SGD, (2, 0)), "order of the optimizer's parameters"),
        ((SGD, (0, 2), True), (SGD, (2, 0), True), "order of the optimizer's parameters"),
        (halves, falls, "class of the schedule"),
        (halves, None, "class of the schedule"),
        (None, halves, "class of the schedule"),
        (in_turn(halves, falls), in_turn(falls, halves), "class of the schedule"),
    ],
)
def test_a_state_that_fits_another_training_is_refused_in_one_sentence(
    make: Make, saved: Any, given: Any, reason: str
) -> None:
    def build(change: Any) -> tuple[nn.Module, Any, Any]:
        model = network()
        if isinstance(change, tuple):
            return model, of_layers(change[0], model, *change[1:]), None
        optimizer = SGD(model.parameters(), lr=0.5)
        return model, optimizer, change and change(optimizer)

    model, optimizer, schedule = build(saved)
    private = make(model, optimizer=optimizer)
    train(private, most=1)
    private.save(schedule)
    model, optimizer, schedule = build(given)
    before = weights_of(model)
    message = rf"ledger\.pt: does not fit this model, optimizer and schedule: the {reason}"
    with pytest.raises(UserError, match=message):
        make(model, optimizer=optimizer).resume(schedule)
    assert torch.equal(weights_of(model), before)


# ------------------------------------------------------------------- steps beside `private.step`


def step_openly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs, targets = data().tensors
    loss(model(inputs), targets).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("several", [False, True])
def test_a_step_outside_private_step_is_refused_until_the_training_is_closed(
    make: Make, tmp_path: Path, several: bool
) -> None:
    model = network()
    given = of_layers(SGD, model, (0, 2), several)
    last = given[1] if several else given
    halves(last)  # wraps `step`
    first = make(model, optimizer=given)
    train(first, most=1)
    copy.deepcopy(last).step()  # of other weights
    second = make(model, optimizer=given, ledger=tmp_path / "second.jsonl")  # the next stage
    first.close()
    before = weights_of(model)
    another = SGD([model[2].weight], lr=0.1)  # type: ignore[index]
    for step in (last.step, torch.compile(last.step, backend="eager"), another.step):
        with pytest.raises(UserError, match=r"outside private\.step: .* call close\(\)"):
            step()
    assert torch.equal(weights_of(model), before)
    train(second, most=1)
    second.close()
    step_openly(model, last)


def test_a_state_of_open_steps_is_said_and_one_of_private_steps_is_not(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    for stage in range(2):
        train(make(model, optimizer=optimizer, ledger=tmp_path / f"{stage}.jsonl"), most=1)
    other = network()
    make(other, optimizer=torch.optim.Adagrad(other.parameters()))  # has a state at step 0
    assert "no ε covers" not in caplog.text
    step_openly(model, optimizer)
    make(model, optimizer=optimizer, ledger=tmp_path / "2.jsonl")
    assert caplog.text.count("has state from earlier steps, which no ε covers") == 1


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a step by hand": ("step", lambda m: nn.init.normal_(m[0].weight)),
    "another state": ("save", lambda m: m.load_state_dict(network().state_dict())),
    "a clamp": ("export", lambda m: nn.init.constant_(m[0].bias, 0.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_weights_changed_between_steps_are_said_once(
    make: Make, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, change = CHANGES[what]
    private = make(regulariser=penalty)
    train(private, most=2)
    private.save()
    private.export(tmp_path / "as_left")
    private = make(model := network(), regulariser=penalty)
    assert private.resume()
    train(private, most=1)
    assert "outside private.step" not in caplog.text
    message = "the weights were changed outside private.step: ε holds"
    for _ in range(2):
        change(model)
        if before == "save":
            private.save()
        elif before == "export":
            private.export(tmp_path / "changed")
        else:
            train(private, most=1)
        assert caplog.text.count(message) == 1
        before = "step"


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (torch.no_grad, "no_grad"),
        (torch.inference_mode, "no_grad"),
        (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
    ],
)
def test_without_exact_gradients_no_step_is_counted(make: Make, mode: Any, name: str) -> None:
    model = network()
    private = make(model)
    batch = next(private.batches())
    for act in (lambda: private.step(batch), lambda: make(model)):
        with mode(), pytest.raises(UserError, match=rf"call it outside torch\.{name}\(\)"):
            act()
    assert private.ledger.releases == 0


# ---------------------------------------------------------------------------------- no ledger


def test_without_a_ledger_one_is_named_after_the_training_and_said(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:

    def started(model: nn.Module, **changed: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        given = {"noise_multiplier": 1.2, "batch_size": 20, "epochs": 1, "loss": loss} | changed
        many = [data()[index % EXAMPLES] for index in range(100)]
        return zdp_bench.make_private(model, optimizer, many, **given)

    with started(network()) as private:
        train(private)
        private.save()
        assert (private.delta, private.algorithm.max_grad_norm) == (1e-5, 1.0)
    (file,) = (here / "ledgers").glob("*.jsonl")
    assert file.name.startswith("Sequential-")
    assert f"ledgers/{file.name}" in caplog.text
    with started(network()) as again:
        assert again.resume()
        assert again.done == 5
    with started(network(), noise_multiplier=1.3) as other:
        assert other.ledger.path.name != file.name
    earlier = file.rename(file.with_name("Sequential-0123abcd.jsonl"))
    advice = (
        rf"0123abcd\.jsonl: may be .* rename it to {file.name}\. .* set ledger=.ledgers/{file.name}"
    )
    with pytest.raises(UserError, match=advice):
        started(network())  # its steps were not counted: another ledger began
    earlier.rename(file)
    earlier.mkdir()  # neither this nor the link is a ledger
    file.with_name("Sequential-00000000.jsonl").symlink_to("nowhere")
    file.with_name("Sequential-mine.jsonl").write_bytes(file.read_bytes())
    with started(network()) as once_more:
        assert once_more.resume()
