"""DP-DFA: private direct feedback alignment (Lee & Kifer 2020, Algorithm 1), and its hybrid.

A fully connected layer ℓ learns from the error e at the output, which a fixed random matrix feeds
back instead of the weights:

    δ_ℓ = (B_ℓ e) ⊙ φ′(z_ℓ)   in hidden layers,   δ_L = e   in the output layer   (eq. 5)
    one example's share: δ_ℓ · clip(h_{ℓ−1}, τ_h)ᴴ for the weight, δ_ℓ for the bias (lines 11 to 16)

Here ‖e‖ ≤ τ_e by clipping, ‖B_ℓ‖ = β by scaling, and |φ′| ≤ γ, so ‖δ_ℓ‖ ≤ γβτ_e. All clipping comes
after the forward pass: the output does not depend on τ_h, and φ′ is evaluated at the network's true
activations. No per-sample gradient is formed, because the sum over a batch is one matrix product
per layer.

Layers in front of the first fully connected one (convolutions, norms) learn in one of two ways.
Each layer's weight and bias are clipped JOINTLY at C/√L:

    convolutions: hybrid    back-propagation from δ of the first fully connected layer, without
                            gradients of that layer (section 4.2)
                  dfa       a matrix B for each layer feeds e back to the layer's output, as the
                            next layer receives it (our choice: the paper leaves the details to a
                            supplement)

We add the following to the paper. The INPUT is an activation too, and is clipped: otherwise an
input with ‖x‖ = 1000 exceeds the bound 3.6-fold. δ is clipped at γβτ_e, which has no effect if γ is
right and keeps the bound if it is not. In complex networks, B is complex, the adjoint of the
derivative replaces ⊙ φ′, and the real and imaginary parts get noise.

What C means. The paper sets 'the sensitivity of each iteration' to C, and its section 4.2 computes
it for a REPLACED example, which changes the sum by two shares. `max_grad_norm` bounds one example's
share, as in DP-SGD, so it is C/2. The noise_multiplier is σ·m/(C/2) with the paper's σ, the noise
on the MEAN of m examples. The tight ε of fixed-size batches is that of a replaced example, so
z = σ·m/C, as in the paper. (The paper also sets C to the clipping bound of DP-BP 'following [1]',
which bounds one example's share. Its values of ε do not follow from that.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
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
from zdp_bench.gradients.program.autograd import find_sources
from zdp_bench.gradients.rules import NoRule
from zdp_bench.gradients.tape import unsafe_view
from zdp_bench.nn.memory_format import MapLinear, arrange
from zdp_bench.nn.unchanged import computes_as
from zdp_bench.privacy.mechanism import Mechanism, NoiseKind
from zdp_bench.privacy.noise import stream
from zdp_bench.registry import register

HALF_DTYPES = (torch.float16, torch.bfloat16)  # sums are computed in float32, as these may round up
Clipped = tuple[Tensor, Tensor]  # signals [B, n] before clipping, and their clipping factors [B]


@register("algorithm", "dp_dfa")
class DPDFA(Algorithm):
    """DP-DFA on a chain of layers that ends in fully connected ones, real or complex.

    Formal guarantees: the norm of an example's share is at most `max_grad_norm` for any inputs,
    weights and targets, NaN and ∞ included (such an example contributes nothing).
    z = noise_multiplier under Poisson sampling. With `as_published`, the norm of a share may exceed
    `max_grad_norm`, and z is smaller.

    Args:
        problem: model, loss, sampling and the seed of the feedback matrices.
        noise_multiplier: σ, in units of `max_grad_norm`.
        max_grad_norm: bound on an example's share.
        error_clip: τ_e.
        feedback_norm: β.
        slope: γ, the largest slope of the activation.
        convolutions: how the layers in front learn. See the module's docstring.
        as_published: compute τ_h by the formula of section 4.2, which uses γβτ_e for the output
            layer too, although the norm of its signal may be τ_e. Fully connected networks only.

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
        self.connected_parameters: list[nn.Parameter] = []
        for layer in self.connected.values():
            self.connected_parameters += layer.parameters()
        # Bound on ‖δ‖ of each fully connected layer: γβτ_e, and τ_e at the output.
        self.hidden_signal = slope * feedback_norm * error_clip
        hidden_layers = len(self.connected) - 1
        self.signals = [self.hidden_signal] * hidden_layers + [error_clip]
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
            device=next(problem.model.parameters()).device,
        )
        self.parameters = set(trainable(problem.model))
        self._feedback: dict[str, Tensor] = {}
        self._is_checked = False
        self._mechanism = self._build_mechanism()

    def _activation_clips(self, as_published: bool) -> list[float]:
        """Solve for τ_h of each fully connected layer, so that a share is at most C.

        A fully connected network has a common τ_h, with C² = Σ_ℓ ‖δ_ℓ‖²(τ_h² + 1). With other
        layers in front, each of the L layers has its own τ_h and is bounded by C/√L. The term 1 is
        that of the bias; a layer without bias does not have it.
        """
        squares = [signal**2 for signal in self.signals]
        if as_published:
            squares[-1] = self.hidden_signal**2
        pairs = list(zip(squares, self._biases(), strict=True))
        squared_bound = self.max_grad_norm**2
        if self.front:
            squared_layer_bound = squared_bound / len(layers(self.problem.model))
            squared_clips = [squared_layer_bound / square - bias for square, bias in pairs]
        else:
            squared_bias_bound = sum(square * bias for square, bias in pairs)
            common = (squared_bound - squared_bias_bound) / sum(squares)
            squared_clips = [common] * len(squares)
        require(
            min(squared_clips) > 0,
            "algorithm.max_grad_norm",
            self.max_grad_norm,
            "is too small for this error_clip: biases alone exceed it",
        )
        return [math.sqrt(square) for square in squared_clips]

    def _bound_share(self) -> float:
        """Return the largest norm of one example's share in a fully connected network."""
        limits = zip(self.signals, self.activation_clips, self._biases(), strict=True)
        squares = [signal**2 * (clip**2 + bias) for signal, clip, bias in limits]
        return math.sqrt(sum(squares))

    def _biases(self) -> list[float]:
        """Return the squared factor on δ in each layer's bias gradient: 1, or 0 without a bias."""
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
        inputs, _ = batch
        if not len(inputs):
            return
        reason = state_of(self.problem.model, inputs).alone
        if reason:
            raise UserError(f"{reason}: this algorithm cannot process examples one at a time.")
        if not self._is_checked:
            self._require_chain(batch)
            self._is_checked = True
        add_up(total, self._sums(batch))

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        inputs, _ = batch
        rows = zero_rows(self.problem.model, len(inputs))
        for index, example in enumerate(split_batch(batch)):
            for name, share in self._sums(example).items():
                rows[name][index] = share
        return rows

    def _sums(self, batch: Batch) -> dict[str, Tensor]:
        """Return Σᵢ uᵢ by parameter name."""
        model, loss = self.problem.model, self.problem.loss
        if not self.front:
            inputs, targets = batch
            with self._cut() as forward, torch.enable_grad():
                outputs = model(arrange(model, inputs))
                sums, _, _ = self._connected_sums(forward, loss(outputs, targets))
                return sums
        connected_sums: dict[str, Tensor] = {}

        def objective(outputs: Tensor, targets: Tensor) -> Tensor:
            """Return the loss of the layers in front, [B], and update `connected_sums`.

            The engine calls it again without the examples whose gradients are not finite. The sums
            of the last call are kept.
            """
            sums, first, error = self._connected_sums(forward, loss(outputs, targets))
            connected_sums.update(sums)
            return self._front_objective(forward, apply_factors(*first), apply_factors(*error))

        with self._cut() as forward:
            layers_in_front = len(layers(model))  # `_cut` freezes the fully connected layers
            fraction = layers_in_front / (layers_in_front + len(self.connected))
            bound = self.max_grad_norm * math.sqrt(fraction)  # each layer: C/√L
            # Each example's objective depends on this example only, as the shares are independent.
            front_loss = PerExample(objective, proved=True)
            try:
                clipped = fast.clipped_sum(model, front_loss, batch, bound, per_layer=True)
            except NoRule as error:
                raise UserError(f"{_named()}: does not support {error}.") from None
        # If no example has finite gradients, `objective` was not called again, and the sums of its
        # first call must not be used.
        is_finite = torch.isfinite(clipped.norms).all(dim=1)
        for value in connected_sums.values():
            value.mul_(is_finite.any())
        return clipped.sums | connected_sums

    def _connected_sums(
        self,
        forward: Forward,
        losses: Tensor,
    ) -> tuple[dict[str, Tensor], Clipped, Clipped]:
        """Sum the shares of the fully connected layers.

        An example's δ is linear in its error. So all δ are computed from unclipped errors, measured
        together, and scaled in the sum.

        Returns:
            The sums by parameter name; δ of the first fully connected layer, [B, n]; and the error,
            [B, K]. The last two come with their clipping factors.
        """
        names = list(self.connected)
        deltas = self._deltas(forward, losses)
        activations = [forward.inputs[name].detach() for name in names]
        signals = [*deltas, *activations]  # 2L tensors [B, n]
        if any(rows.dtype in HALF_DTYPES for rows in signals):
            signals = [rows.float() for rows in signals]
        squares = [squared_norms(rows) for rows in signals]
        norms = torch.stack(squares).sqrt_()  # [2L, B], float64
        factors = clip_factors(norms, self.limits)
        delta_factors, activation_factors = factors.chunk(2)  # [L, B] each
        error_factors = delta_factors[-1]
        # A δ scales with its error. It is clipped further if it is still too long.
        delta_factors = torch.minimum(delta_factors, error_factors)
        product_factors = flush_factors(delta_factors * activation_factors)
        # A factor of 0 does not remove a signal that is not finite, because 0 · NaN is NaN. On a
        # GPU, signals are always replaced, which avoids waiting for it.
        if not (norms.is_cpu and all_finite(norms)):
            is_finite = torch.isfinite(norms).all(dim=0)  # [B]
            signals = [torch.where(is_finite.unsqueeze(1), rows, 0) for rows in signals]
        deltas, activations = signals[: len(names)], signals[len(names) :]
        sums = {}
        for i, (name, layer) in enumerate(self.connected.items()):
            clipped_deltas = apply_factors(deltas[i], product_factors[i])
            weight_sum = matrix_sum(clipped_deltas, activations[i])
            sums[_parameter_name(name, "weight")] = weight_sum.to(layer.weight.dtype)
            if layer.bias is not None:
                bias_sum = contract(deltas[i], delta_factors[i])
                sums[_parameter_name(name, "bias")] = bias_sum.to(layer.bias.dtype)
        trainable_sums = {name: value for name, value in sums.items() if name in self.parameters}
        return trainable_sums, (deltas[0], delta_factors[0]), (deltas[-1], error_factors)

    def _deltas(
        self,
        forward: Forward,
        losses: Tensor,
    ) -> list[Tensor]:
        """Return δ of each fully connected layer before clipping, [B, n]; the last is the error."""
        *hidden, last = self.connected
        ones = torch.ones_like(losses)
        (error,) = torch.autograd.grad(losses, forward.outputs[last], ones)
        if not hidden:
            return [error]
        activations = [forward.inputs[following] for following in [*hidden[1:], last]]
        pairs = zip(hidden, activations, strict=True)
        feedback = [self._feed_back(name, error, activation) for name, activation in pairs]
        outputs = [forward.outputs[name] for name in hidden]
        deltas = torch.autograd.grad(activations, outputs, feedback)  # ⊙ φ′
        return [*deltas, error]

    def _front_objective(
        self,
        forward: Forward,
        delta: Tensor,
        error: Tensor,
    ) -> Tensor:
        """Return the loss of the layers in front, [B], whose gradient is the feedback.

        hybrid: ⟨z, δ⟩ of the first fully connected layer; as z = W h, this is ⟨h, Wᴴδ⟩.
        dfa: Σ ⟨h, B e⟩ over the outputs h of the layers in front.
        """
        first, layer = next(iter(self.connected.items()))
        if self.convolutions == "hybrid":
            return _inner_product(forward.inputs[first], delta @ layer.weight.conj())
        products = []
        for name, following in pairwise([*self.front, first]):
            output = forward.inputs[following]
            products.append(_inner_product(output, self._feed_back(name, error, output)))
        return reduce(torch.add, products)

    def _feed_back(
        self,
        name: str,
        error: Tensor,
        like: Tensor,
    ) -> Tensor:
        """Return B e for the named layer, in the shape [B, *] and data type of `like`.

        B is Gaussian, scaled to ‖B‖ = β, and drawn in the first call.
        """
        rows = math.prod(like.shape[1:])
        if name not in self._feedback:
            dtype = torch.promote_types(like.dtype, error.dtype)
            wide = torch.complex128 if dtype.is_complex else torch.float64
            generator = torch.Generator().manual_seed(_seed(self.problem.seed, name))
            columns = error.shape[1]
            matrix = torch.randn(rows, columns, dtype=wide, generator=generator)
            matrix *= self.feedback_norm / torch.linalg.matrix_norm(matrix, 2)
            self._feedback[name] = matrix.to(error.device, dtype)
        matrix = self._feedback[name]
        feedback = error.to(matrix.dtype) @ matrix.T
        if not like.is_complex():
            feedback = feedback.real
        return feedback.to(like.dtype).view_as(like)

    def _require_chain(self, batch: Batch) -> None:
        """Reject a model whose layers do not form a chain, as far as feedback requires it.

        A parameter that feedback does not reach would be trained on noise alone.
        """
        inputs, targets = batch
        model = self.problem.model
        devices = [inputs.device] if inputs.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            self._cut(freezes=False) as forward,
            torch.enable_grad(),
        ):
            outputs = model(arrange(model, inputs))
            losses = self.problem.loss(outputs, targets)
        _require_order(self._fed_layers(), list(forward.inputs))
        parameters = trainable(model)
        reached: set[str] = set()
        for name in self._fed_in_front():
            reached |= find_sources(forward.inputs[name], parameters)
        own_names = {
            _parameter_name(name, key)
            for name, layer in self.connected.items()
            for key, _ in layer.named_parameters()
        }
        strays = reached & own_names
        _, *others = self.connected
        behind = {f"layer '{name}'": forward.inputs[name] for name in others}
        behind["the loss"] = losses
        for previous, (place, tensor) in zip(self.connected, behind.items(), strict=True):
            if find_sources(tensor, forward.outputs) != {previous}:
                raise UserError(
                    f"{_named()}: {place} does not depend on the output of layer '{previous}' "
                    "alone; feedback alignment needs a chain of layers."
                )
            strays |= find_sources(tensor, parameters)
        if strays:
            raise UserError(
                f"{_named()}: parameter '{min(strays)}' is used outside the chain of layers, "
                "where feedback has no rule for it: set requires_grad=False, or remove that use."
            )
        missed = parameters.keys() - own_names - reached
        if missed:
            raise UserError(
                f"{_named()}: feedback does not reach parameter '{min(missed)}', so it would be "
                "trained on noise alone: set requires_grad=False, or remove it."
            )

    def _fed_layers(self) -> list[str]:
        """Return the names of the layers that learn by feedback, in model order."""
        if self.convolutions == "hybrid":
            return list(self.connected)
        return [*self.front, *self.connected]

    def _fed_in_front(self) -> list[str]:
        """Return the names of the layers whose inputs get the feedback for layers in front."""
        first = next(iter(self.connected))
        return [first] if self.convolutions == "hybrid" else [*self.front[1:], first]

    @contextmanager
    def _cut(self, freezes: bool = True) -> Iterator[Forward]:
        """Cut autograd's graph in front of each layer that learns by feedback, inside the context.

        Args:
            freezes: freeze the fully connected layers meanwhile, because no gradient of their
                parameters is needed.
        """
        forward = Forward()
        model = self.problem.model
        frozen = []
        if freezes:
            frozen = [value for value in self.connected_parameters if value.requires_grad]
        handles = [model.register_forward_pre_hook(lambda *_: forward.inputs.clear())]
        for name in self._fed_layers():
            hook = partial(cut_input, forward, name)
            handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
        for name, layer in self.connected.items():
            output_hook = partial(cut_output, forward, name)
            handles.append(layer.register_forward_hook(output_hook))
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            yield forward
        finally:
            for handle in handles:
                handle.remove()
            for parameter in frozen:
                parameter.requires_grad_(True)


def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Return Re⟨a, b⟩ of each example, [B, *] -> [B], for a b that requires no gradient.

    Its `.grad` with respect to a is b, even if both are complex.
    """
    product = a * b.conj()
    return product.real.flatten(1).sum(dim=1)


def _seed(seed: int, layer: str) -> int:
    """Return the seed of a layer's feedback matrix."""
    feedback = stream(seed, "feedback", layer)
    (state,) = feedback.generate_state(1, np.uint64)
    return int(state >> np.uint64(1))


# ------------------------------------------------------------------------- a chain of layers, cut


@dataclass
class Forward:
    """Tensors of one forward pass, which is cut in front of each layer that learns by feedback.

    Attributes:
        inputs: input of each such layer, by the layer's name, with the graph back to the previous
            layer.
        outputs: output z of each fully connected layer, by the layer's name: a leaf [B, n].
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


def cut_input(
    forward: Forward,
    name: str,
    layer: nn.Module,
    arguments: tuple[Any, ...],
) -> tuple[Tensor]:
    """Save a layer's input and detach it. A forward pre-hook."""
    if name in forward.inputs:
        raise UserError(
            f"{_named()}: layer '{name}' is called twice; feedback alignment needs a chain "
            "of layers."
        )
    if len(arguments) != 1:  # it is called by keyword, or on several tensors
        raise UserError(
            f"{_named()}: layer '{name}' is not called on one tensor, as layer(x), which feedback "
            "alignment needs."
        )
    (x,) = arguments
    # A `MapLinear` takes maps [B, C, H, W], which are flattened as in the layer.
    forward.inputs[name] = x.flatten(1) if isinstance(layer, nn.Linear) else x
    return (x.detach(),)


def cut_output(
    forward: Forward,
    name: str,
    layer: nn.Module,
    arguments: tuple[Any, ...],
    output: Tensor,
) -> Tensor:
    """Replace the output of a fully connected layer by a leaf, and save it. A forward hook."""
    if output.dim() != 2:
        raise UserError(
            f"{_named()}: the output of layer '{name}' has {output.dim() - 1} dimensions per "
            "example; it must have one."
        )
    leaf = output.detach().requires_grad_()
    forward.outputs[name] = leaf
    # The activation may overwrite it, which torch does not allow for a leaf or a view of one.
    return unsafe_view(leaf, leaf.shape)


def _parameter_name(layer: str, key: str) -> str:
    """Return the model's name for a layer's parameter; the layer may be the model itself."""
    return f"{layer}.{key}" if layer else key


def _require_order(defined: list[str], called: list[str]) -> None:
    """Reject layers that are not called, or not in the order in which the model defines them."""
    for name in defined:
        if name not in called:
            raise UserError(
                f"{_named()}: the model does not call layer '{name}'; feedback alignment needs a "
                "chain of layers."
            )
    for first, second in zip(called, defined, strict=True):
        if first != second:
            raise UserError(
                f"{_named()}: the model calls layer '{first}' before layer '{second}', which it "
                "defines first: define layers in the order in which forward() calls them."
            )


def split_chain(model: nn.Module) -> tuple[list[str], dict[str, nn.Linear]]:
    """Split a chain of layers at its first fully connected one.

    Returns:
        The names of the layers in front, and the fully connected layers by name.

    Raises:
        UserError: there is no fully connected layer, another layer follows one, or one shares a
            parameter or computes something else than torch's.
    """
    front: list[str] = []
    connected: dict[str, nn.Linear] = {}
    for parameter_name, *_ in layers(model):
        name, _, _ = parameter_name.rpartition(".")
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            _require_plain(name, layer)
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
            f"{_named()}: the network has no fully connected layer that the error could be fed "
            "back to."
        )
    _require_own_parameters(model, connected)
    return front, connected


def _require_plain(name: str, layer: nn.Linear) -> None:
    """Reject a layer whose gradient may be another than that of `nn.Linear`."""
    if not computes_as(layer, (nn.Linear, MapLinear)):
        raise UserError(
            f"{_named()}: layer '{name}' ({type(layer).__name__}) may compute something else than "
            "nn.Linear, because it has hooks, methods or a weight of its own, for which feedback "
            "has no rule: use nn.Linear itself."
        )


def _require_own_parameters(model: nn.Module, connected: Mapping[str, nn.Linear]) -> None:
    """Reject a trained parameter that a fully connected layer shares with another layer."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(name)
    for layer in connected.values():
        for parameter in layer.parameters():
            first, *others = owners[id(parameter)]
            if others and parameter.requires_grad:
                raise UserError(
                    f"{_named()}: layers '{first}' and '{others[0]}' share a parameter, of which "
                    "feedback would train one use only: give each layer its own."
                )


def _named() -> str:
    """Return how a user selects this algorithm, for errors."""
    return setting("algorithm", "dp_dfa")
