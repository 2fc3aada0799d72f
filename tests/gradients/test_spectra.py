"""Padded spectra against torch.func on a kernel of every lag; half spectra against whole ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from zdp_bench.errors import UserError
from zdp_bench.gradients import fast
from zdp_bench.gradients.clipping import trainable
from zdp_bench.gradients.parts import pack, takes_parts
from zdp_bench.gradients.rules.circulant import Correlation
from zdp_bench.gradients.spectra import kernel_domain, padded_domain
from zdp_bench.nn.surgery import standardise_weights

B = 5


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).sin() * targets.unsqueeze(1)).sum(dim=1)


def network(**options: object) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 3, (3, 2), **options), nn.Tanh(), nn.Conv2d(3, 2, 2))
    return model.double(), (torch.randn(B, 2, 7, 8).double(), torch.randn(B).double())


def every_lag(
    layer: nn.Conv2d, sizes: tuple[int, ...], rest: nn.Module, batch: tuple[Tensor, Tensor]
) -> Tensor:
    """Per-sample gradients of a kernel of M×M lags in which the layer's own is embedded.

    Its lags are −(Ho' − 1) … Hp − 1 in each dimension; rolled by Ho' − 1, entry 0 is lag 0, as in a
    circular correlation.
    """
    inputs, targets = batch
    reversed_padding = layer._reversed_padding_repeated_twice
    stride, dilation = layer.stride, layer.dilation
    map_sizes = F.pad(inputs, reversed_padding).shape[2:]
    before = [m - h for m, h in zip(sizes, map_sizes, strict=True)]  # Ho' − 1

    def of_one(kernel: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x = F.pad(x.unsqueeze(0), reversed_padding)
        x = F.pad(x, (before[1], before[1], before[0], before[0]))
        return loss(rest(F.conv2d(x, kernel, layer.bias, stride)), y.unsqueeze(0)).sum()

    kernel = torch.zeros(*layer.weight.shape[:2], *sizes, dtype=torch.float64)
    per_dimension = zip(before, dilation, layer.kernel_size, strict=True)
    taps = [slice(b, b + d * (k - 1) + 1, d) for b, d, k in per_dimension]
    kernel[(..., *taps)] = layer.weight.detach()
    gradients = vmap(grad(of_one), in_dims=(None, 0, 0))(kernel, inputs, targets)
    return gradients.detach().roll([-b for b in before], dims=(-2, -1))


OPTIONS = [{}, {"padding": (1, 2)}, {"stride": (2, 1)}, {"stride": 2, "padding": 1}]
OPTIONS += [{"dilation": (2, 3), "padding": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_padded_spectra_are_the_whole_correlation(options: dict[str, object]) -> None:
    model, batch = network(**options)
    domain = padded_domain(model, loss, batch[0][:0])
    spectrum = domain.spectra["0.weight"]
    expected = every_lag(model[0], spectrum.sizes, model[1:], batch)
    unclipped = domain.contributions(batch, 1e9)["0.weight"]
    transformed = torch.fft.fftn(expected, dim=(-2, -1), norm="ortho")
    torch.testing.assert_close(unclipped, transformed.to(unclipped.dtype))

    bound = 0.3 * float(torch.linalg.vector_norm(expected.flatten(1), dim=1).min())
    formed = {name: value.sum(dim=0) for name, value in domain.contributions(batch, bound).items()}
    clipped = domain.clipped_sum(batch, bound)
    torch.testing.assert_close(clipped, formed, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("padded", [True, False])
def test_released_spectra_become_the_gradient(padded: bool) -> None:
    model, batch = network(stride=2, padding=1)
    domain = padded_domain(model, loss, batch[0][:0]) if padded else kernel_domain(model, loss)
    back, parameters = domain.gradients(domain.clipped_sum(batch, 1e9)), trainable(model)
    whole = loss(model(batch[0]), batch[1]).sum()
    ordinary = torch.autograd.grad(whole, list(parameters.values()))
    expected = dict(zip(parameters, ordinary, strict=True))
    torch.testing.assert_close(back, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("option", ["stride", "padding", "dilation"])
def test_one_number_in_a_tuple_is_for_all_dimensions(option: str) -> None:
    """`nn.Conv2d` keeps it as it is."""
    gradients = []
    for value in ((2,), 2):
        model, batch = network(**{option: value})
        domain = padded_domain(model, loss, batch[0][:0])
        gradients.append(domain.gradients(domain.clipped_sum(batch, 0.5)))
        gradients.append(fast.clipped_sum(model, loss, batch, 0.5).sums)
    torch.testing.assert_close(gradients[:2], gradients[2:])


@pytest.mark.parametrize(
    "sizes", [(7,), (8,), (5, 6), (6, 5), (1, 4), (3, 4, 5), (70,), (70, 6), (6, 71)]
)
def test_half_a_spectrum_is_enough(sizes: tuple[int, ...]) -> None:
    """Up to 64 points by matrices, beyond by FFT."""
    torch.manual_seed(0)
    x, g = (
        torch.randn(B, channels, *(max(1, s // 2) for s in sizes), dtype=torch.float64)
        for channels in (2, 3)
    )
    correlation = Correlation(x, g, sizes)
    formed = correlation.per_sample(0, B)  # [B, O, I, *sizes]
    dims = tuple(range(-len(sizes), 0))
    of_g, of_x = (torch.fft.fftn(signal, s=sizes, dim=dims) for signal in (g, x))
    spectra = of_g.conj().unsqueeze(2) * of_x.unsqueeze(1)
    torch.testing.assert_close(formed, torch.fft.ifftn(spectra, dim=dims).real)
    torch.testing.assert_close(correlation.squared_norms(), formed.square().flatten(1).sum(dim=1))
    factors = torch.rand(B, dtype=torch.float64)
    weighted = torch.einsum("b,b...->...", factors, formed)
    torch.testing.assert_close(correlation.weighted_sum(factors), weighted)


def test_many_examples_are_transformed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = torch.randn(9, 2, 3, 3), torch.randn(9, 1, 2, 2)
    of, factors = Correlation(x, g, (4, 4)), torch.rand(9, dtype=torch.float64)
    at_once = of.squared_norms(), of.weighted_sum(factors)
    monkeypatch.setattr("zdp_bench.gradients.rules.circulant.SPECTRA_BYTES", 1000)
    of = Correlation(x, g, (4, 4))
    torch.testing.assert_close(of.squared_norms(), at_once[0])
    torch.testing.assert_close(of.weighted_sum(factors), at_once[1])


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.Conv2d(2, 4, 2, groups=2), r"grouped or transposed convolution.*algorithm=gredp"),
        (nn.ConvTranspose2d(2, 4, 2), r"layer '0' is a grouped or transposed convolution"),
        (nn.Linear(8, 3, dtype=torch.complex64), r"'0\.weight' is complex.*algorithm=zeta_dp_sgd"),
    ],
)
def test_what_has_no_padded_spectrum_is_refused(layer: nn.Module, says: str) -> None:
    with pytest.raises(UserError, match=says):
        padded_domain(nn.Sequential(layer), loss, torch.empty(0, 2, 7, 8))


class Standardised(nn.Conv2d):
    """As the convolutions of timm that standardise their weights in their forward function."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias)


def with_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda _, __, output: 10 * output)
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: Standardised(2, 4, 3),
        lambda: standardise_weights(nn.Conv2d(2, 4, 3)),
        lambda: with_hook(nn.Conv2d(2, 4, 3)),
    ],
)
def test_a_convolution_that_may_compute_something_else_has_no_padded_spectrum(
    make: Callable[[], nn.Module],
) -> None:
    model, maps = nn.Sequential(make()), torch.empty(0, 2, 7, 8)
    with pytest.raises(UserError, match=r"layer '0' \(\w+\) may compute something else"):
        padded_domain(model, loss, maps)
    model.requires_grad_(False)
    model.append(nn.Conv2d(4, 1, 1))
    assert [*padded_domain(model, loss, maps).spectra] == ["1.weight"]


def test_a_convolution_that_is_only_initialised_in_another_way_has_its_spectrum() -> None:
    class Initialised(nn.Conv2d):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            nn.init.orthogonal_(self.weight)

    plain, derived = nn.Conv2d(2, 3, 3).double(), Initialised(2, 3, 3).double()
    derived.load_state_dict(plain.state_dict())
    batch = torch.randn(B, 2, 7, 8).double(), torch.randn(B).double()
    domains = [padded_domain(nn.Sequential(layer), loss, batch[0]) for layer in (plain, derived)]
    torch.testing.assert_close(*(domain.clipped_sum(batch, 0.5) for domain in domains))


class UsedTwice(nn.Module):
    """Uses the weight of its convolution once more, as `use` says."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)
        self.use = use
        if use == "in another layer":
            self.second.weight = self.first.weight

    def forward(self, maps: Tensor) -> Tensor:
        means = self.second(self.first(maps)).flatten(2).mean(dim=2)
        return means * self.first.weight.sum() if self.use == "by itself" else means


@pytest.mark.parametrize("use", ["in another layer", "by itself"])
def test_a_weight_that_is_used_elsewhere_too_has_no_padded_spectrum(use: str) -> None:
    model = UsedTwice(use)
    with pytest.raises(UserError, match=r"'first\.weight' is used outside the calls of its layer"):
        padded_domain(model, loss, torch.empty(0, 2, 7, 8))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_each_module_stays_in_its_mode() -> None:
    """A frozen part is in evaluation mode while the model is in training mode."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout(), nn.BatchNorm2d(4))
    model[1].eval()
    model[2].eval()
    padded_domain(model, loss, torch.empty(0, 2, 7, 8))
    assert [module.training for module in model.modules()] == [True, True, False, False]


class TwoConvolutions(nn.Module):
    """Calls `used` on one of its inputs, and `other` as `call` says."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.used, self.other = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3)
        self.call = call

    def forward(self, maps: Tensor, more: Tensor | None = None) -> Tensor:
        means = self.used(maps).flatten(2).mean(dim=2)
        match self.call:
            case "by keyword":
                means = means + self.other(input=maps).flatten(2).mean(dim=2)
            case "of a function":
                means = means + F.conv2d(maps, self.other.weight).flatten(2).mean(dim=2)
            case "on more":
                means = means + self.other(more).flatten(2).mean(dim=2)
        return means


@pytest.mark.parametrize("call", ["never", "by keyword", "of a function"])
def test_a_convolution_that_is_not_called_on_a_tensor_is_refused(call: str) -> None:
    model = TwoConvolutions(call)
    with pytest.raises(UserError, match="layer 'other' is a convolution that the model does not"):
        padded_domain(model, loss, torch.empty(0, 2, 7, 8))
    model.other.requires_grad_(False)
    domain = padded_domain(model, loss, torch.empty(0, 2, 7, 8))
    assert [*domain.spectra] == ["used.weight"]


def test_padded_spectra_are_those_of_inputs_of_several_tensors() -> None:
    model, maps = TwoConvolutions("on more"), torch.randn(5, 2, 7, 8)
    inputs = pack({"maps": maps, "more": maps[..., :6]})
    domain = padded_domain(model, loss, inputs[:0])
    assert domain.spectra["used.weight"].sizes == (11, 13)
    assert domain.spectra["other.weight"].sizes == (11, 9)
    with takes_parts(model):
        sums = domain.clipped_sum((inputs, torch.randn(5)), 1.0)
    assert all(value.isfinite().all() for value in sums.values())


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect"])
def test_a_map_is_padded_once(mode: str) -> None:
    """A recorded program pads by an operation of its own, except with zeros."""
    model, batch = network(padding=1, padding_mode=mode)
    domain = padded_domain(model, loss, batch[0][:0])
    rules = {"per_layer": True, "rules": domain.rules}
    by_layers = fast.clipped_sum(model, loss, batch, 1.0, **rules).sums
    torch.testing.assert_close(domain.clipped_sum(batch, 1.0), by_layers)


@pytest.mark.parametrize(("padding", "larger"), [(0, 2), (1, 1), (1, 2)])
def test_a_map_of_another_size_is_refused(padding: int, larger: int) -> None:
    model, (inputs, targets) = network(padding=padding)
    domain = padded_domain(model, loss, inputs[:0])
    with pytest.raises(UserError, match=r"map of \[\d+, \d+\] is not of the size"):
        domain.clipped_sum((F.pad(inputs, (0, larger, 0, larger)), targets), 1.0)
