"""Models of several inputs or of complex layers: their clipped sums are those of torch.func.

Those of one real input are in `test_architectures.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

import zdp_bench
from tests.library import small
from tests.library.architectures import ARCHITECTURES
from tests.library.small import begin, train
from tests.modules import Made

CLASSES, BOUND = 5, 0.7

pytestmark = [
    # torch's, of LSTM and attention under vmap on a CPU
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    # transformers', of a name that peft asks for
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing"),
]

# networks with random weights, small enough for a test, and batches for them


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Logits(nn.Module):
    """The output that counts of a Hugging Face model, which returns an object.

    A mask [B, T] is looked into (`mask.all()`), which torch.func cannot do; [B, 1, 1, T] is not.
    Positions for each example keep the model on the fast engine.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = torch.finfo(torch.float32).min * (1.0 - attention_mask.float())
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.model(
            input_ids,
            attention_mask=hidden[:, None, None, :],
            position_ids=positions,
            token_type_ids=torch.zeros_like(input_ids),
        ).logits


def bert() -> tuple[nn.Module, Any]:
    """Hugging Face's BERT with a classifier: inputs by name."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 5:] = mask[2, 2:] = 0
    inputs = {"input_ids": torch.randint(0, 50, (4, 8)), "attention_mask": mask}
    return Logits(transformers.BertForSequenceClassification(config)), inputs


def siamese() -> tuple[nn.Module, Any]:
    """One network on two inputs: `model(a, b)`."""
    features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
    apart = lambda net, a, b: net.head((net.features(a) - net.features(b)).abs())  # noqa: E731
    model = Made(apart, features=features, head=nn.Linear(4 * 36, CLASSES))
    return model, (torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8))


def complex_images() -> Tensor:
    return torch.randn(4, 1, 8, 8, dtype=torch.complex64)


def complex_net() -> tuple[nn.Module, Any]:
    """Layers of complexPyTorch, which hold real parameters in pairs."""
    layers = pytest.importorskip("complexPyTorch.complexLayers")
    features = nn.Sequential(layers.ComplexConv2d(1, 4, 3), layers.ComplexReLU(), nn.Flatten())
    head = layers.ComplexLinear(4 * 36, CLASSES)
    answer = lambda net, z: net.head(net.features(z)).abs()  # noqa: E731
    return Made(answer, features=features, head=head), complex_images()


def complex_vit(norm: str | None = None) -> tuple[nn.Module, Any]:
    """torchcvnn's vision transformer, and a head as its documentation has it.

    Its own norms take their statistics over the batch: see `test_norms_over_the_batch_are_refused`.
    """
    layers = pytest.importorskip("torchcvnn.nn")
    norm_layer = getattr(layers, norm) if norm else nn.Identity
    conv = nn.Conv2d(1, 8, 4, stride=4, dtype=torch.complex64)
    patches = Made(lambda net, z: net.conv(z).flatten(2).transpose(1, 2), conv=conv)
    backbone = layers.ViT(patches, 2, 2, 8, 16, norm_layer=norm_layer)
    head = nn.Sequential(nn.Linear(8, CLASSES, dtype=torch.complex64), layers.Mod())
    answer = lambda net, z: net.head(net.backbone(z).mean(dim=1))  # noqa: E731
    return Made(answer, backbone=backbone, head=head), complex_images()


TARGETS = torch.arange(4) % CLASSES


def cut(inputs: Any, at: slice | int) -> Any:
    """Return some examples, or one, of a tensor, a tuple or a dictionary of tensors."""
    if isinstance(inputs, dict):
        return {name: value[at] for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(value[at] for value in inputs)
    return inputs[at]


def sum_by_torch_func(model: nn.Module, inputs: Any, targets: Tensor) -> dict[str, Tensor]:
    """Σᵢ clip(gᵢ), one example after the other, in the plainest way there is."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss_of(moved: dict[str, Tensor], example: Any, target: Tensor) -> Tensor:
        kwargs = example if isinstance(example, dict) else {}
        args = () if kwargs else example if isinstance(example, tuple) else (example,)
        return loss(functional_call(model, moved, args, kwargs), target).sum()

    total = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for i in range(len(targets)):
        at = slice(i, i + 1)
        gradients = grad(loss_of)(parameters, cut(inputs, at), targets[at])
        norm = sum(float(g.abs().double().square().sum()) for g in gradients.values()) ** 0.5
        for name, g in gradients.items():
            total[name] += min(1.0, BOUND / norm) * g
    return total


@pytest.mark.parametrize(
    "make",
    [siamese, complex_net, complex_vit, pytest.param(bert, marks=pytest.mark.slow)],
    ids=lambda make: make.__name__,
)
def test_the_sum_is_that_of_torch_func_and_a_private_step_is_taken(
    make: Callable[[], tuple[nn.Module, Any]], tmp_path: Path
) -> None:
    model, inputs = make()
    ours = zdp_bench.clipped_sum(model, loss, (inputs, TARGETS), BOUND).sums
    theirs = sum_by_torch_func(model, inputs, TARGETS)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # up to the 1e-5 that clipping leaves for rounding, of the bound
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=name)

    data = [(cut(inputs, i), TARGETS[i]) for i in range(4)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zdp_bench.make_private(
        model,
        optimizer,
        data,
        loss=loss,
        epochs=1,
        sample_rate=1.0,
        expected_batch=4,
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        delta=1e-3,
        ledger=tmp_path / "ledger.jsonl",
        algorithm="zeta_dp_sgd" if any(p.is_complex() for p in before.values()) else "dp_sgd",
    ) as private:
        for batch in private.batches():
            private.step(batch)
        assert private.done == private.steps == private.report()["steps"] == 1
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name


GROUP_NORM = "use zdp_bench.nn.ComplexGroupNorm there"


def normed(norm: nn.Module) -> nn.Module:
    conv = nn.Conv2d(1, 4, 3, dtype=torch.complex64)
    layers = conv, norm, nn.Flatten(), nn.Linear(4 * 36, 3, dtype=torch.complex64)
    return Made(lambda net, z: net.layers(z).abs(), layers=nn.Sequential(*layers))


@pytest.mark.parametrize(
    ("library", "name", "sentence"),
    [
        ("torchcvnn.nn", "BatchNorm2d", f"stores .* 'running_mean'.*{GROUP_NORM}"),
        ("complexPyTorch.complexLayers", "ComplexBatchNorm2d", f"stores .*{GROUP_NORM}"),
        ("complexPyTorch.complexLayers", "NaiveComplexBatchNorm2d", r"replace_batchnorm\(model"),
        ("torchcvnn.nn", "LayerNorm", f"norm1' .LayerNorm. lets one example .*{GROUP_NORM}"),
    ],
)
def test_norms_over_the_batch_are_refused_with_their_fix(
    library: str, name: str, sentence: str
) -> None:
    """torchcvnn 0.10 divides by the deviation of a feature over all examples of the batch."""
    layer = getattr(pytest.importorskip(library), name)
    model = complex_vit(name)[0] if name == "LayerNorm" else normed(layer(4))
    batch = complex_images(), torch.arange(4) % 3
    with pytest.raises(zdp_bench.UserError, match=sentence):
        zdp_bench.check_model(model, loss, batch, algorithm="zeta_dp_sgd")


@pytest.mark.parametrize(
    "name", ["timm ViT", pytest.param("transformers BERT", marks=pytest.mark.slow)]
)
def test_checkpoints_of_libraries_are_refused_with_their_switch(name: str) -> None:
    model, inputs = ARCHITECTURES[name]()
    if name == "timm ViT":
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    else:
        model.model.gradient_checkpointing_enable()  # type: ignore[union-attr,operator]
    sentence = r"checkpoint is called there.*set_grad_checkpointing.*gradient_checkpointing_dis"
    with pytest.raises(zdp_bench.UserError, match=sentence):
        zdp_bench.check_model(model.train(), loss, (inputs, torch.arange(len(inputs)) % 4))


def test_a_model_and_a_loss_may_differentiate(tmp_path: Path) -> None:
    """As models of forces and losses that weigh examples by their slopes do."""

    def force(net: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net.energy(x).sum(), x, create_graph=True)[0]

    def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
        leaf = outputs.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(small.loss(leaf, targets).sum(), leaf)
        return small.loss(outputs, targets) * slopes.norm(dim=1)

    torch.manual_seed(0)
    energy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1, bias=False))
    with begin(Made(force, energy=energy), tmp_path / "ledger.jsonl", loss=weighted) as private:
        train(private, most=1)
    assert private.done == 1
