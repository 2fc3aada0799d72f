"""DP-DFA: private direct feedback alignment (Lee & Kifer 2020, Algorithm 1), and its hybrid.

A fully connected layer ℓ learns from the error e at the output, carried back by a fixed random
matrix instead of by the weights:

    δ_ℓ = (B_ℓ e) ⊙ φ′(z_ℓ)   in hidden layers,   δ_L = e   in the output layer   (eq. 5)
    one example's share: δ_ℓ · clip(h_{ℓ−1}, τ_h)ᴴ for the weight, δ_ℓ for the bias (lines 11 to 16)

with ‖e‖ ≤ τ_e by clipping, ‖B_ℓ‖ = β by scaling and |φ′| ≤ γ, so ‖δ_ℓ‖ ≤ γβτ_e. All clipping comes
after the forward pass: the output does not depend on τ_h, and φ′ is taken at the network's true
activations. No per-sample gradient is formed: the sum over a batch is one matrix product per layer.

Layers in front of the first fully connected one (convolutions, norms) have two ways to learn, each
layer's weight and bias clipped JOINTLY at C/√L:

    convolutions: hybrid    back-propagation from δ of the first fully connected layer,
                            stop-gradient (section 4.2)
                  dfa       an own matrix B carries e to each layer's output, as the next layer
                            sees it (ours: the paper leaves the details to a supplement)

Also ours: the INPUT is an activation and is clipped too (else ‖x‖ = 1000 exceeds the bound
3.6-fold); δ is clipped at γβτ_e, which changes nothing if γ is right and keeps the bound if it is
not; complex networks: complex B, the adjoint of the derivative for ⊙ φ′, noise on each part.

What C means. The paper sets 'the sensitivity of each iteration' to C, and its section 4.2 computes
it for a REPLACED example, which moves the sum by two shares. `max_grad_norm` bounds one example's
share, as in DP-SGD, so it is C/2, and noise_multiplier is σ·m/(C/2) with the paper's σ, the noise
on the MEAN of m examples. The tight ε of fixed-size batches counts the replaced example, so
z = σ·m/C, as in the paper. (It also sets C to the clipping bound of DP-BP 'following [1]', which is
one example's share; its ε do not follow from that.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem, parameter_block
from zdp_bench.errors import UserError, require, setting
from zdp_bench.gradients import Batch, PerExample, add_up, fast
from zdp_bench.gradients.clipping import (
    all_finite,
    clip_factors,
    flush_factors,
    layers,
    split_batch,
    squared_norms,
    trainable,
    zero_rows,
)
from zdp_bench.gradients.layer_gradient import apply_factors, contract, matrix_sum
from zdp_bench.gradients.program import state_of
from zdp_bench.gradients.rules import NoRule
from zdp_bench.nn.memory_format import arrange
from zdp_bench.privacy.mechanism import Mechanism, NoiseKind
from zdp_bench.privacy.noise import stream
from zdp_bench.registry import register

HALF = (torch.float16, torch.bfloat16)  # whose sums round upwards
Weighed = tuple[Tensor, Tensor]  # signals [B, n] and their factors [B]


@register("algorithm", "dp_dfa")
class DPDFA(Algorithm):
    """DP-DFA on a chain of layers that ends in fully connected ones, real or complex.

    Formal guarantees: an example's share is at most `max_grad_norm`, whatever inputs, weights and
    targets are, NaN and ∞ included (such an example contributes nothing); z = noise_multiplier
    under Poisson sampling. As published, the share exceeds `max_grad_norm`, and z is smaller.

    Args:
        as_published: solve τ_h from section 4.2's formula, which has γβτ_e for the output layer
            too, though its signal is up to τ_e. Fully connected networks only.

    Raises:
        UserError: a value is out of range, or the network is not such a chain.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        error_clip: float = 0.1,
        feedback_norm: float = 0.9,
        slope: float = 0.25,
        convolutions: Literal["hybrid", "dfa"] = "hybrid",
        as_published: bool = False,
    ) -> None:
        super().__init__(problem, noise_multiplier=noise_multiplier)
        self.max_grad_norm = max_grad_norm
        self.error_clip = error_clip
        self.feedback_norm = feedback_norm
        self.slope = slope
        for name in ("max_grad_norm", "error_clip", "feedback_norm", "slope"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"algorithm.{name}", value, "must be positive and finite")
        self.convolutions = convolutions
        self.front, self.connected = split_chain(problem.model)
        self.of_connected: list[nn.Parameter] = []
        for layer in self.connected.values():
            self.of_connected += layer.parameters(recurse=False)
        # ‖δ‖ of each fully connected layer: γβτ_e, and τ_e at the output
        self.hidden_signal = slope * feedback_norm * error_clip
        hidden = len(self.connected) - 1
        self.signals = [self.hidden_signal] * hidden + [error_clip]
        require(
            not (as_published and self.front),
            "algorithm.as_published",
            as_published,
            "is section 4.2's formula for fully connected networks; this one has other layers",
        )
        self.activation_clips = self._activation_clips(as_published)
        self.bound = self._bound_share() if as_published else max_grad_norm
        self.limits = torch.tensor(
            [[limit] for limit in (*self.signals, *self.activation_clips)],  # [2L, 1]
            dtype=torch.float64,
            device=self.of_connected[0].device,
        )
        self.parameters = set(trainable(problem.model))
        self._feedback: dict[str, Tensor] = {}
        self._mechanism = self._build_mechanism()

    def _activation_clips(self, as_published: bool) -> list[float]:
        """Solve τ_h of each fully connected layer from the target sensitivity C.

        In fully connected networks all share one: C² = Σ_ℓ ‖δ_ℓ‖²(τ_h² + 1). With other layers in
        front, each of the L layers has C/√L. A layer without bias has no 1.
        """
        squares = [signal**2 for signal in self.signals]
        if as_published:
            squares[-1] = self.hidden_signal**2
        pairs = list(zip(squares, self._biases(), strict=True))
        square_bound = self.max_grad_norm**2
        if self.front:
            share = square_bound / len(layers(self.problem.model))
            solved = [share / square - bias for square, bias in pairs]
        else:
            of_biases = sum(square * bias for square, bias in pairs)
            common = (square_bound - of_biases) / sum(squares)
            solved = [common] * len(squares)
        require(
            min(solved) > 0,
            "algorithm.max_grad_norm",
            self.max_grad_norm,
            "is too small for this error_clip: biases alone exceed it",
        )
        return [math.sqrt(square) for square in solved]

    def _bound_share(self) -> float:
        """Return the largest norm of one example's share in a fully connected network."""
        limits = zip(self.signals, self.activation_clips, self._biases(), strict=True)
        squares = [signal**2 * (clip**2 + bias) for signal, clip, bias in limits]
        return math.sqrt(sum(squares))

    def _biases(self) -> list[float]:
        """Return the squared activation that each layer's bias sees: 1, or 0 without a bias."""
        return [0.0 if layer.bias is None else 1.0 for layer in self.connected.values()]

    def _build_mechanism(self) -> Mechanism:
        std = self.noise_multiplier * self.max_grad_norm
        blocks = []
        for name, parameter in trainable(self.problem.model).items():
            noise: NoiseKind = "circular" if parameter.is_complex() else "real"
            blocks.append(parameter_block(name, parameter, self.bound, std, noise))
        return Mechanism(tuple(blocks), self.problem.sampling)

    def mechanism(self) -> Mechanism:
        return self._mechanism

    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Batch,
    ) -> None:
        if not len(batch[0]):
            return
        reason = state_of(self.problem.model, batch[0]).alone
        if reason:
            raise UserError(f"{reason}: this algorithm cannot process examples one at a time.")
        add_up(total, self._sums(batch))

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        rows = zero_rows(self.problem.model, len(batch[0]))
        for number, example in enumerate(split_batch(batch)):
            for name, share in self._sums(example).items():
                rows[name][number] = share
        return rows

    def _sums(self, batch: Batch) -> dict[str, Tensor]:
        """Return Σᵢ uᵢ by parameter name."""
        model, loss = self.problem.model, self.problem.loss
        if not self.front:
            inputs, targets = batch
            with self._cut() as seen, torch.enable_grad():
                outputs = model(arrange(model, inputs))
                sums, _, _ = self._connected_sums(seen, loss(outputs, targets))
                return sums
        of_connected: dict[str, Tensor] = {}

        def objective(outputs: Tensor, targets: Tensor) -> Tensor:
            """The loss of the layers in front, [B]; called without broken ones, it sums anew."""
            sums, first, error = self._connected_sums(seen, loss(outputs, targets))
            of_connected.update(sums)
            return self._objective_of_front(seen, apply_factors(*first), apply_factors(*error))

        with self._cut() as seen:
            in_front = len(layers(model))  # the fully connected ones are frozen here
            share = in_front / (in_front + len(self.connected))
            bound = self.max_grad_norm * math.sqrt(share)  # each layer: C/√L
            of_front = PerExample(objective, proved=True)  # of shares that are clipped one by one
            try:
                clipped = fast.clipped_sum(model, of_front, batch, bound, per_layer=True)
            except NoRule as error:
                raise UserError(f"{_named()}: does not support {error}.") from None
        # If no example was left, `objective` was not called again, and its sums must go.
        is_left = torch.isfinite(clipped.norms).all(dim=1)
        for value in of_connected.values():
            value.mul_(is_left.any())
        return clipped.sums | of_connected

    def _connected_sums(
        self,
        seen: Seen,
        losses: Tensor,
    ) -> tuple[dict[str, Tensor], Weighed, Weighed]:
        """Sum the shares of the fully connected layers; also δ of the first of them [B, n] and the
        error [B, K], each with its clip factors [B].

        An example's δ is linear in its error, so all are computed unclipped, measured together and
        scaled in the sum.
        """
        names = list(self.connected)
        deltas = self._deltas(seen, losses)
        activations = [seen.arrived[name].detach() for name in names]
        signals = [*deltas, *activations]  # 2L of [B, n]
        if any(rows.dtype in HALF for rows in signals):
            signals = [rows.float() for rows in signals]
        squares = [squared_norms(rows) for rows in signals]
        norms = torch.stack(squares).sqrt_()  # [2L, B], float64
        factors = clip_factors(norms, self.limits)
        of_deltas, of_activations = factors.chunk(2)  # [L, B] each
        of_error = of_deltas[-1]
        of_deltas = torch.minimum(of_deltas, of_error)  # if clipping the error was not enough
        of_both = flush_factors(of_deltas * of_activations)
        # 0 · NaN is NaN: a broken example is set to zero before it is weighed. No GPU is waited
        # for.
        if not (norms.is_cpu and all_finite(norms)):
            is_whole = torch.isfinite(norms).all(dim=0)  # [B]
            signals = [torch.where(is_whole.unsqueeze(1), rows, 0) for rows in signals]
        deltas, activations = signals[: len(names)], signals[len(names) :]
        dtype = deltas[-1].real.dtype
        weight_factors = of_both.to(dtype)
        bias_factors = of_deltas.to(dtype)
        sums = {}
        for i, (name, layer) in enumerate(self.connected.items()):
            weighed = apply_factors(deltas[i], weight_factors[i])
            weight_sum = matrix_sum(weighed, activations[i])
            sums[f"{name}.weight"] = weight_sum.to(layer.weight.dtype)
            if layer.bias is not None:
                bias_sum = contract(deltas[i], bias_factors[i])
                sums[f"{name}.bias"] = bias_sum.to(layer.bias.dtype)
        own_sums = {name: value for name, value in sums.items() if name in self.parameters}
        return own_sums, (deltas[0], of_deltas[0]), (deltas[-1], of_error)

    def _deltas(
        self,
        seen: Seen,
        losses: Tensor,
    ) -> list[Tensor]:
        """Return δ of each fully connected layer, [B, n], unclipped; the last one is the error."""
        *hidden, last = self.connected
        ones = torch.ones_like(losses)
        (error,) = torch.autograd.grad(losses, seen.outputs[last], ones)
        if not hidden:
            return [error]
        activations = [seen.arrived[following] for following in [*hidden[1:], last]]
        pairs = zip(hidden, activations, strict=True)
        carried = [self._carried(name, error, activation) for name, activation in pairs]
        outputs = [seen.outputs[name] for name in hidden]
        deltas = torch.autograd.grad(activations, outputs, carried)  # ⊙ φ′
        return [*deltas, error]

    def _objective_of_front(
        self,
        seen: Seen,
        delta: Tensor,
        error: Tensor,
    ) -> Tensor:
        """The loss of the layers in front, [B], whose gradient is the feedback.

        hybrid: ⟨z, δ⟩ of the first fully connected layer, z = W h, so ⟨h, Wᴴδ⟩.
        dfa: Σ ⟨h, B e⟩ over every layer's own output h.
        """
        first, layer = next(iter(self.connected.items()))
        if self.convolutions == "hybrid":
            return _inner(seen.arrived[first], delta @ layer.weight.conj())
        products = []
        for name, following in pairwise([*self.front, first]):
            output = seen.arrived[following]
            products.append(_inner(output, self._carried(name, error, output)))
        return torch.stack(products).sum(dim=0)

    def _carried(
        self,
        name: str,
        error: Tensor,
        like: Tensor,
    ) -> Tensor:
        """Return B e in the shape [B, *] and dtype of `like`; B is Gaussian with ‖B‖ = β."""
        rows = math.prod(like.shape[1:])
        if name not in self._feedback:
            dtype = torch.promote_types(like.dtype, error.dtype)
            wide = torch.complex128 if dtype.is_complex else torch.float64
            generator = torch.Generator().manual_seed(_seed(self.problem.seed, name))
            columns = error.shape[1]
            drawn = torch.randn(rows, columns, dtype=wide, generator=generator)
            drawn *= self.feedback_norm / torch.linalg.matrix_norm(drawn, 2)
            self._feedback[name] = drawn.to(error.device, dtype)
        feedback = self._feedback[name]
        carried = error.to(feedback.dtype) @ feedback.T
        if not like.is_complex():
            carried = carried.real
        return carried.to(like.dtype).view_as(like)

    @contextmanager
    def _cut(self) -> Iterator[Seen]:
        """Inside, every layer that learns by feedback starts a graph of its own."""
        seen = Seen()
        model = self.problem.model
        fed = list(self.connected)
        if self.convolutions != "hybrid":
            fed = self.front + fed
        frozen = [parameter for parameter in self.of_connected if parameter.requires_grad]
        handles = [model.register_forward_pre_hook(lambda *_: seen.clear())]
        for name in fed:
            hook = partial(cut_input, seen, name)
            handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
        for name, layer in self.connected.items():
            cut_own_output = partial(cut_output, seen, name)
            handles.append(layer.register_forward_hook(cut_own_output))
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            yield seen
        finally:
            for handle in handles:
                handle.remove()
            seen.clear()
            for parameter in frozen:
                parameter.requires_grad_(True)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Re⟨a, b⟩ of each example, [B, *] -> [B]; its `.grad` in a is b, also if both are complex."""
    product = a * b.detach().conj()
    return product.real.flatten(1).sum(dim=1)


def _seed(seed: int, layer: str) -> int:
    feedback = stream(seed, "feedback", layer)
    (state,) = feedback.generate_state(1, np.uint64)
    return int(state >> np.uint64(1))


# ------------------------------------------------------------------------- a chain of layers, cut


@dataclass
class Seen:
    """One forward pass, cut in front of every layer that learns by feedback."""

    # layer -> its input, with the graph that leads back to the layer before
    arrived: dict[str, Tensor] = field(default_factory=dict)
    # fully connected layer -> its output z, a leaf [B, n]
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget the pass."""
        self.arrived.clear()
        self.outputs.clear()


def cut_input(
    seen: Seen,
    name: str,
    layer: nn.Module,
    arguments: tuple[Any, ...],
) -> tuple[Tensor]:
    """Hook before a layer: keep its input, and give it a copy without a graph."""
    if name in seen.arrived:
        raise UserError(
            f"{_named()}: layer '{name}' is called twice; feedback alignment needs a chain "
            "of layers."
        )
    (arrived,) = arguments
    is_map_linear = isinstance(layer, nn.Linear)  # which takes whole maps
    seen.arrived[name] = arrived.flatten(1) if is_map_linear else arrived
    return (arrived.detach(),)


def cut_output(
    seen: Seen,
    name: str,
    layer: nn.Module,
    arguments: tuple[Any, ...],
    output: Tensor,
) -> Tensor:
    """Hook after a fully connected layer: its output becomes a leaf."""
    if output.dim() != 2:
        raise UserError(
            f"{_named()}: layer '{name}' answers with {output.dim() - 1} dimensions a "
            "example; it must be one."
        )
    seen.outputs[name] = output.detach().requires_grad_()
    return seen.outputs[name]


def split_chain(model: nn.Module) -> tuple[list[str], dict[str, nn.Linear]]:
    """Return the names of the layers in front of the fully connected ones, and these by name."""
    front: list[str] = []
    connected: dict[str, nn.Linear] = {}
    for names in layers(model):
        name, _, _ = names[0].rpartition(".")
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            connected[name] = layer
        elif not connected:
            front.append(name)
        else:
            raise UserError(
                f"{_named()}: layer '{name}' ({type(layer).__name__}) follows a fully "
                "connected layer, and feedback has no rule for it. Use a network that ends in "
                "linear layers, with activations without parameters."
            )
    if not connected:
        raise UserError(
            f"{_named()}: the network has no fully connected layer, so there is nothing to "
            "carry the error to."
        )
    return front, connected


def _named() -> str:
    """Return this algorithm as a user chooses it."""
    return setting("algorithm", "dp_dfa")
