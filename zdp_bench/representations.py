"""Representations: public, fixed transforms of single examples, in front of the trained model.

A representation is a function of one example alone and learns nothing from the training set, so it
costs no ε. The model behind it has few weights, so the noise that a small ε needs hides little of
the gradient. The transformed data set is computed once, kept in the user's cache folder and
memory-mapped (`data/cache.py`).

A builder takes the shape of an example and its options, and returns a module:
[B, *shape] -> [B, ...]. Optional attributes of the module:

    facts              where its numbers come from, for the record
    version            incremented when its outputs change, so that the digests of records change
    takes_unit_pixels  True if it accepts only pictures with pixels in [0, 1]
    at_once            the number of examples to transform at once on a CPU
    joins              see `Representation.parts`
    fit                computes its weights from public or generated examples. Until then they are
                       zeros, so that shapes can be described at once
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.config.plugins import check_plugin
from zdp_bench.data import DatasetInfo, Examples, Part, Source, Splits
from zdp_bench.data.cache import load_or_make
from zdp_bench.errors import UserError, in_one_line
from zdp_bench.nn.precision import float32_products
from zdp_bench.nn.state import state_digest
from zdp_bench.registry import lookup

CPU_BATCH = 8  # examples that a CPU transforms at once: their feature maps fit in its cache
NUM_PROBES = CPU_BATCH + 1  # examples that test whether a transform mixes examples
NUM_COMPARED = 4  # examples whose cached representation is compared with a new one
BLOCK = 128  # examples that are read and written at once
NUMPY_TYPES = {torch.float32: np.float32, torch.complex64: np.complex64}
NO_FILE = ("package", "pretrained", "untrained")  # values of an option `weights` that are no paths
# Tolerance for rounding errors of a deep network, relative to 1 + the largest output
TOLERANCE = 1e-4
# Relative difference of cached features that another device may have computed, a GPU with TF32
CACHE_TOLERANCE = 5e-3
PIXEL_TOLERANCE = 1e-3  # resizing a picture may move pixels this far out of [0, 1]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Representation:
    """A transform built for examples of one shape.

    Attributes:
        name: registered name.
        module: [B, *takes] -> [B, *gives].
        takes, gives: shape of an example before and after the transform.
        takes_dtype, dtype: its type before and after the transform.
        digest: SHA-256 of name, options, version, input shape and type, and facts.
        facts: where its numbers come from, for the record: weights, licence, training data.
        parts: (factor, representation) pairs, if it concatenates other representations, each
            multiplied by its factor. The cache keeps each part, so that other combinations of the
            same parts need no recomputation.
    """

    name: str
    module: nn.Module
    takes: tuple[int, ...]
    takes_dtype: torch.dtype
    gives: tuple[int, ...]
    dtype: torch.dtype
    digest: str
    facts: dict[str, Any]
    parts: tuple[tuple[float, Representation], ...] = ()

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """Transform examples [B, *takes] to [B, *gives], a few at a time."""
        if not len(inputs):
            return torch.empty(0, *self.gives, dtype=self.dtype)
        batch_size = getattr(self.module, "at_once", CPU_BATCH) if inputs.is_cpu else BLOCK
        return torch.cat([self.module(part) for part in inputs.split(batch_size)])

    def note(self) -> str:
        """Describe the representation in words, for the notes under a table."""
        parts = "; ".join(_in_words(part) for part in self.facts.get("parts", []))
        whole = f"{self.name} ({parts})" if parts else _in_words({"name": self.name, **self.facts})
        return f"behind the public representation {whole}"

    def described(self) -> dict[str, Any]:
        """Describe the representation as plain values, for a record."""
        return {
            "name": self.name,
            "digest": self.digest,
            "input_shape": list(self.takes),
            "input_dtype": str(self.takes_dtype).removeprefix("torch."),
            **self.facts,
        }


def _in_words(facts: dict[str, Any]) -> str:
    """Return the name of a representation, followed by its weights if it has any."""
    name = str(facts["name"])
    if not facts.get("weights"):
        return name
    trained_on = facts["trained_on"]
    return f"{name} ({facts['network']}, weights {facts['weights']}, trained on {trained_on})"


class Represented(nn.Module):
    """A representation followed by a model: examples [B, *takes] -> the model's outputs."""

    def __init__(
        self,
        representation: Representation,
        model: nn.Module,
    ) -> None:
        super().__init__()
        self.representation = representation.module  # registers the module's weights
        self.model = model
        self._transform = representation

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(self._transform(inputs))
        return outputs


def build(
    name: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fit: bool = True,
) -> Representation:
    """Build a representation.

    Args:
        name: registered name.
        options: keyword arguments of its builder.
        shape: shape of one example.
        dtype: type of an example.
        fit: whether weights are computed, which may take a minute. False: only shapes, types, facts
            and digest are right.

    Raises:
        UserError: The name is unknown, or the representation does not accept the options or
            examples of this shape and type.
    """
    module: nn.Module = lookup("representation", name)(tuple(shape), **options)
    module = module.eval().requires_grad_(False)
    # First, so that a module that does not accept the examples is rejected before it is fitted.
    output = _try(name, module, options, torch.zeros(1, *shape, dtype=dtype))
    if output.dtype not in NUMPY_TYPES:
        raise UserError(
            f"representation={name}: returns {output.dtype}, but must return float32 or complex64."
        )
    if fit:
        fit_weights(module)
    if not all(is_finite(tensor) for tensor in module.state_dict().values()):
        raise UserError(f"representation={name}: its weights contain values that are not finite.")
    facts = getattr(module, "facts", {})
    identity = [
        name,
        _named_options(options, facts),
        getattr(module, "version", 1),
        list(shape),
        str(dtype),
        _named_facts(facts),
    ]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Representation(
        name=name,
        module=module,
        takes=tuple(shape),
        takes_dtype=dtype,
        gives=tuple(output.shape[1:]),
        dtype=output.dtype,
        digest=digest,
        facts=facts,
        parts=tuple(getattr(module, "joins", ())),
    )


def fit_weights(module: nn.Module) -> None:
    """Compute the weights of a representation's module, if they are computed."""
    fit = getattr(module, "fit", None)
    if fit is not None:
        fit()


def _named_options(options: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the options that enter the digest: all that are not switched off."""
    # With weights from a file, facts hold their digest and stage: the path makes no difference.
    excluded = ("weights", "stage") if "sha256" in facts else ()
    return {
        key: value for key, value in options.items() if value is not False and key not in excluded
    }


def _named_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that enter the digest: all but the name of a file of weights."""
    if "file" not in facts:
        return facts
    return {key: value for key, value in facts.items() if key != "weights"}


def _try(
    name: str,
    module: nn.Module,
    options: dict[str, Any],
    example: Tensor,
) -> Tensor:
    """Return a module's output for one example; reject a module that does not accept it."""
    try:
        with torch.no_grad():
            output = module(example)
    except UserError:
        raise
    except Exception as error:
        advice = " Set representation.resize=224." if options.get("resize", 0) is None else ""
        dtype = str(example.dtype).removeprefix("torch.")
        raise UserError(
            f"representation={name}: takes no examples of {dtype} {list(example.shape[1:])} "
            f"({in_one_line(error)}).{advice}"
        ) from error
    if not isinstance(output, Tensor) or output.dim() < 2 or len(output) != 1:
        raise UserError(
            f"representation={name}: for one example, it does not return a tensor [1, ...]."
        )
    return output


def is_finite(x: Tensor) -> bool:
    """Return True if x has no infinite or NaN values."""
    return bool(torch.isfinite(x).all())


def represent_splits(
    representation: Representation,
    data: Splits,
    key: str,
    device: torch.device | None = None,
) -> Splits:
    """Return the data set with every input replaced by its representation.

    Args:
        data: the data set.
        key: digest of everything that determines the examples, for the cache.
        device: device that computes the transform. Default: the CPU. The results are on disk.

    Raises:
        UserError: Examples are augmented, or the transform of one example depends on others.
    """
    if data.augment or data.train.is_stochastic:
        raise refuse_changing(representation.name)
    device = device or torch.device("cpu")
    representation.module.to(device)
    # Probes are test examples, because a check may not depend on the training set.
    probe_indices = torch.arange(min(NUM_PROBES, len(data.test)))
    probes, _ = data.test.batch(probe_indices)
    if len(probes) == 1:  # a single example cannot show that examples are mixed
        probes = torch.cat([probes, (probes / 2).to(probes.dtype)])
    if data.provenance != "synthetic":  # a stand-in's examples are noise, not pictures
        require_pixels(representation, probes)
    require_apart(representation, probes, device)
    train = _represent(representation, data.train, f"{key}:train", device)
    test = _represent(representation, data.test, f"{key}:test", device)
    validation = None
    if data.validation:
        validation = _represent(representation, data.validation, f"{key}:validation", device)
    representation.module.to("cpu")
    notes = [data.notes, representation.note()]
    return replace(
        data,
        train=train,
        test=test,
        validation=validation,
        input_shape=representation.gives,
        notes="; ".join(note for note in notes if note),
        representation=representation.described(),
        digest=hashlib.sha256(f"{data.digest}:{representation.digest}".encode()).hexdigest(),
    )


def refuse_changing(name: str) -> UserError:
    """Return the error for examples that are augmented."""
    return UserError(
        f"representation={name}: is computed once per example, but this data set changes examples "
        "as they are drawn. Switch this off, such as with dataset.augment=null (or false)."
    )


def represent_info(representation: Representation, info: DatasetInfo) -> DatasetInfo:
    """Return the counts and shapes of the represented data set."""
    return replace(info, input_shape=representation.gives, dtype=representation.dtype)


def require_pixels(representation: Representation, inputs: Tensor) -> None:
    """Reject pixels outside [0, 1] if the transform requires pixels in [0, 1].

    Raises:
        UserError: A pixel is outside.
    """
    if not getattr(representation.module, "takes_unit_pixels", False) or not len(inputs):
        return
    low, high = inputs.aminmax()
    if low < -PIXEL_TOLERANCE or high > 1 + PIXEL_TOLERANCE:
        has_option = hasattr(representation.module, "pixels")
        option = ", or their mean and deviation as representation.pixels" if has_option else ""
        raise UserError(
            f"representation={representation.name}: takes pictures with pixels in [0, 1], but "
            f"these have others. Set dataset.normalise=unit{option}, or scale your own pictures."
        )


def require_apart(
    representation: Representation, inputs: Tensor, device: torch.device | None = None
) -> None:
    """Reject a transform whose output for an example depends on other examples.

    Args:
        inputs: probe examples [n, *takes], ideally `NUM_PROBES` of them.
        device: device that computes the transform. Default: the CPU.

    Raises:
        UserError: Outputs depend on the batch, on the order of the examples or on earlier calls, or
            the transform keeps state from the examples.
    """
    inputs = inputs.to(device or torch.device("cpu"))
    module = representation.module
    before = digest_of_state(module)
    reversed_inputs = inputs.flip(0)

    def apply(inputs: Tensor, batch_size: int) -> Tensor:
        return torch.cat([module(part) for part in inputs.split(batch_size)])

    # TF32 rounds to about 1e-3, and differently for other batch sizes, so it is switched off.
    with torch.no_grad(), float32_products():
        alone = apply(inputs, 1)
        others = [
            module(inputs),
            apply(inputs, CPU_BATCH),
            module(reversed_inputs).flip(0),
            apply(reversed_inputs, 3).flip(0),
            apply(inputs, 1),
        ]
    if not is_finite(alone):
        raise UserError(
            f"representation={representation.name}: returns values that are not finite."
        )
    for other in others:
        if not _is_near(other, alone):
            raise UserError(
                f"representation={representation.name}: its output for an example depends on "
                "other examples or on earlier calls. It must look at one example only."
            )
    if digest_of_state(module) != before:
        raise UserError(
            f"representation={representation.name}: keeps state from the examples it has seen, so "
            "one example would affect another. It must not change its state."
        )


def digest_of_state(module: nn.Module) -> str:
    """Return a digest of all tensors and plain values of a module and its submodules."""
    return state_digest(*({**vars(inner), "_modules": None} for inner in module.modules()))


def represent(
    dataset: Any,
    name: str,
    **options: Any,
) -> torch.utils.data.TensorDataset:
    """Replace the inputs of a dataset by their representation, for `make_private`.

    The representation is computed once and memory-mapped from the cache folder. The cache key is
    the content of the examples.

    Args:
        dataset: map-style dataset with items (input, target). Inputs are tensors of one shape and
            type: float32, complex64 or integers. Double precision is converted to single.
        name: name of the representation.
        options: options of the representation, as in the configuration: `J=2, L=8`.

    Raises:
        UserError: An option is invalid, inputs differ in shape or type or are not finite, or the
            transform of one example depends on others.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or not len(dataset):
        raise UserError(
            f"dataset={type(dataset).__name__}: must be a map-style dataset with examples: "
            "len(dataset) above 0 and dataset[i] = (input, target)."
        )
    first, _ = _collate(dataset, range(min(NUM_PROBES, len(dataset))))
    checked = check_plugin("representation", {"name": name, **options})
    representation = build(name, checked.options, tuple(first.shape[1:]), first.dtype)
    require_pixels(representation, first)
    require_apart(representation, first)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(dataset), BLOCK):
            stop = min(start + BLOCK, len(dataset))
            yield _collate(dataset, range(start, stop))

    content = hashlib.sha256()
    targets: list[Tensor] = []
    for inputs, labels in batches():
        if inputs.shape[1:] != first.shape[1:] or inputs.dtype != first.dtype:
            raise UserError(f"{_UNEVEN}.")
        content.update(inputs.contiguous().numpy().tobytes())
        targets.append(labels)
    blocks = (_transform(representation, inputs).numpy() for inputs, _ in batches())
    key = content.hexdigest()
    features = _load_or_compute(representation, key, len(dataset), blocks, first[:NUM_COMPARED])
    try:
        return torch.utils.data.TensorDataset(features, torch.cat(targets))
    except RuntimeError as error:
        raise UserError(f"dataset: targets must be of one shape ({in_one_line(error)}).") from None


_UNEVEN = "dataset: items must be pairs (input, target), with float32 inputs of one shape"
SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def _collate(dataset: Any, rows: range) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of some items as a batch, in single precision."""
    try:
        inputs, targets = torch.utils.data.default_collate([dataset[row] for row in rows])
        inputs = inputs.to(SINGLE.get(inputs.dtype, inputs.dtype)).detach().cpu()
        targets = torch.as_tensor(targets)
        finite = is_finite(inputs)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{_UNEVEN} ({in_one_line(error)}).") from None
    if inputs.dim() < 2 or (inputs.is_floating_point() and inputs.dtype != torch.float32):
        raise UserError(f"{_UNEVEN}, but these are {inputs.dtype} {list(inputs.shape[1:])}.")
    if not finite:
        raise UserError("dataset: inputs contain values that are not finite.")
    return inputs, targets


def _represent(
    representation: Representation,
    source: Source,
    key: str,
    device: torch.device,
) -> Examples:
    features = _represent_inputs(representation, source, key, device)
    return Examples(features, targets_of(source), source.groups)


def _represent_inputs(
    representation: Representation,
    source: Source,
    key: str,
    device: torch.device,
) -> Tensor:
    def blocks() -> Iterator[np.ndarray]:
        weighted = [
            (factor, _represent_inputs(part, source, key, device))
            for factor, part in representation.parts
        ]
        log.info("computing %s of %d examples, once", representation.name, len(source))
        for rows in torch.arange(len(source)).split(BLOCK):
            if weighted:
                features = torch.cat([factor * part[rows] for factor, part in weighted], dim=1)
            else:
                inputs, _ = source.batch(rows)
                features = _transform(representation, inputs.to(device))
            yield features.numpy()

    first, _ = source.batch(torch.arange(min(NUM_COMPARED, len(source))))
    return _load_or_compute(representation, key, len(source), blocks(), first.to(device))


def _transform(representation: Representation, inputs: Tensor) -> Tensor:
    """Return the representations of examples, on the CPU; a GPU computes them as precisely."""
    with float32_products():
        return representation(inputs).cpu()


def _load_or_compute(
    representation: Representation,
    key: str,
    count: int,
    blocks: Iterator[np.ndarray],
    first: Tensor,
) -> Tensor:
    """Return representations [count, *gives] from the cache, which is filled with `blocks` first.

    The digest covers options and version, but not a plug-in's code and its own weights. So the
    first representations are computed again, and those in the cache are used only if they are the
    same.

    Args:
        key: digest of everything that determines the examples.
        count: number of examples.
        blocks: the representations, some at a time; used only if the cache lacks them.
        first: the first examples.
    """

    def is_current(array: np.ndarray) -> bool:
        expected = _transform(representation, first)
        cached = torch.from_numpy(array[: len(first)])
        # A private example may have infinite features, which are equal too.
        difference = (cached - expected).nan_to_num(0, 0, 0).norm()
        return bool(difference <= CACHE_TOLERANCE * expected.nan_to_num(0, 0, 0).norm())

    digest = hashlib.sha256(f"{key}:{representation.digest}".encode()).hexdigest()
    shape = (count, *representation.gives)
    dtype = NUMPY_TYPES[representation.dtype]
    return torch.from_numpy(
        load_or_make("representations", digest, shape, dtype, blocks, is_current)
    )


def _is_near(features: Tensor, expected: Tensor) -> bool:
    """Return True if the representations of some examples differ by rounding errors only."""
    if features.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    return bool((features - expected).abs().max() <= TOLERANCE * (1 + expected.abs().max()))


def targets_of(source: Source) -> Tensor:
    """Return the targets of all examples of a source, [n, ...]."""
    if isinstance(source, Examples):
        return source.targets
    if isinstance(source, Part):
        return targets_of(source.whole)[source.rows]
    targets = []
    for rows in torch.arange(len(source)).split(BLOCK):
        _, labels = source.batch(rows)
        targets.append(labels)
    return torch.cat(targets)
