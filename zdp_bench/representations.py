"""Representations: a public, fixed transform of one example in front of the head that trains.

It is a function of one example alone: it learns nothing from the training set, so it costs no ε.
So few weights are left to train that the noise of a small ε hides little of them. What it makes of
a data set is computed once, kept in the user's cache folder and mapped (`data/cache.py`).

A builder takes an example's shape and its options, and returns a module: [B, *shape] -> [B, ...].
The module may say in `facts` what it is made of; its `version` changes when its numbers do. One
that takes only pictures with pixels in [0, 1] has `takes_unit_pixels = True`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
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
from zdp_bench.registry import lookup

AT_ONCE = 8  # examples on a CPU: their maps stay in its cache
TRIED = AT_ONCE + 1  # examples that show whether a transform mixes them
BLOCK = 128  # examples that are read and written at once
NUMPY = {torch.float32: np.float32, torch.complex64: np.complex64}
NO_FILE = ("package", "pretrained", "untrained")  # what an option `weights` names beside a path
CLOSE = 1e-4  # relative to the largest number: what rounding does in a deep network
SLACK = 1e-3  # by which a resized picture's pixels may leave [0, 1]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Representation:
    """A transform that is built for examples of one shape.

    Attributes:
        takes, gives: shapes of an example, before and after.
        takes_dtype, dtype: of its numbers, before and after.
        digest: SHA-256 of its name, options, version, shape and facts.
        facts: where its numbers come from, for the record: weights, licence, what trained them.
        parts: factors and the representations that they multiply, if it is these side by side. The
            cache keeps each part, so that another combination takes no time.
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
        """Transform examples [B, *takes] into [B, *gives], a few at a time."""
        if not len(inputs):
            return torch.empty(0, *self.gives, dtype=self.dtype)
        at_once = getattr(self.module, "at_once", AT_ONCE) if inputs.is_cpu else BLOCK
        return torch.cat([self.module(part) for part in inputs.split(at_once)])

    def note(self) -> str:
        """Return it in words, for the notes under a table."""
        parts = "; ".join(_in_words(part) for part in self.facts.get("parts", []))
        whole = f"{self.name} ({parts})" if parts else _in_words({"name": self.name, **self.facts})
        return f"behind the public representation {whole}"

    def described(self) -> dict[str, Any]:
        """Return its description for a record."""
        return {
            "name": self.name,
            "digest": self.digest,
            "input_shape": list(self.takes),
            "input_dtype": str(self.takes_dtype).removeprefix("torch."),
            **self.facts,
        }


def _in_words(facts: dict[str, Any]) -> str:
    """Return the name of a representation, with its weights if it has any."""
    name = str(facts["name"])
    if not facts.get("weights"):
        return name
    trained_on = facts["trained_on"]
    return f"{name} ({facts['network']}, weights {facts['weights']}, trained on {trained_on})"


class Represented(nn.Module):
    """A model behind its representation: raw examples [B, *takes] -> the model's outputs."""

    def __init__(
        self,
        representation: Representation,
        model: nn.Module,
    ) -> None:
        super().__init__()
        self.representation, self.model = representation.module, model
        self._apply_to = representation

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(self._apply_to(inputs))
        return outputs


def build(
    name: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Representation:
    """Return a representation for examples of this shape and dtype.

    Raises:
        UserError: there is none of this name, or it does not take such examples or options.
    """
    module: nn.Module = lookup("representation", name)(tuple(shape), **options)
    module = module.eval().requires_grad_(False)
    if not all(is_finite(tensor) for tensor in module.state_dict().values()):
        raise UserError(f"representation={name}: its weights contain values that are not finite.")
    output = _try(name, module, options, torch.zeros(1, *shape, dtype=dtype))
    if output.dtype not in NUMPY:
        raise UserError(f"representation={name}: gives {output.dtype}, no float32 or complex64.")
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


def _named_options(options: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the options that enter the digest; one that is off is as if it were not there."""
    # Which file holds the weights makes no difference, and facts say the stage.
    left_out = ("weights", "stage") if "sha256" in facts else ()
    return {
        key: value for key, value in options.items() if value is not False and key not in left_out
    }


def _named_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that enter the digest: all but a file's name."""
    if "file" not in facts:
        return facts
    return {key: value for key, value in facts.items() if key != "weights"}


def _try(
    name: str,
    module: nn.Module,
    options: dict[str, Any],
    example: Tensor,
) -> Tensor:
    """Return what a module makes of one example; reject one that it does not take."""
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
        raise UserError(f"representation={name}: of one example it gives no [1, ...] tensor.")
    return output


def is_finite(x: Tensor) -> bool:
    """True if no number of x is infinite or NaN."""
    return bool(torch.isfinite(x).all())


def represent_splits(
    representation: Representation,
    data: Splits,
    key: str,
    device: torch.device | None = None,
) -> Splits:
    """Return the data set with each example's representation in its place, from the cache.

    Args:
        key: the digest of everything the examples follow from.
        device: where the transform is computed; what it makes is kept on the disk.

    Raises:
        UserError: examples change as they are drawn, or the transform looks at several at once.
    """
    if data.augment or data.train.is_stochastic:
        raise refuse_changing(representation.name)
    device = device or torch.device("cpu")
    representation.module.to(device)
    few = torch.arange(min(TRIED, len(data.test)))
    inputs, _ = data.test.batch(few)  # nothing of the training set
    if data.provenance != "synthetic":  # a stand-in's examples are noise, not pictures
        require_pixels(representation, inputs)
    require_apart(representation, inputs, device)
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
    """Return counts and shapes of the data set as its representation."""
    return replace(info, input_shape=representation.gives, dtype=representation.dtype)


def require_pixels(representation: Representation, inputs: Tensor) -> None:
    """Reject pictures with pixels outside [0, 1], if the transform takes only those.

    Raises:
        UserError: some pixel is outside.
    """
    if not getattr(representation.module, "takes_unit_pixels", False) or not len(inputs):
        return
    low, high = inputs.aminmax()
    if low < -SLACK or high > 1 + SLACK:
        raise UserError(
            f"representation={representation.name}: takes pictures with pixels in [0, 1], and "
            "these have others. Set dataset.normalise=unit, or scale pictures of your own."
        )


def require_apart(
    representation: Representation, inputs: Tensor, device: torch.device | None = None
) -> None:
    """Reject a transform in which one example changes the output of another.

    Args:
        inputs: some examples [n, *takes], at best `TRIED`.

    Raises:
        UserError: they give something else alone, together, in another order or a second time, or
            the transform keeps something of them.
    """
    inputs = inputs.to(device or torch.device("cpu"))
    module = representation.module
    before = state_of(module)
    reversed_inputs = inputs.flip(0)

    def apply(inputs: Tensor, size: int) -> Tensor:
        return torch.cat([module(part) for part in inputs.split(size)])

    # A GPU's TF32 rounds by 1e-3, and otherwise for another number of examples.
    with torch.no_grad(), float32_products():
        alone = apply(inputs, 1)
        others = [
            module(inputs),
            apply(inputs, AT_ONCE),
            module(reversed_inputs).flip(0),
            apply(reversed_inputs, 3).flip(0),
            apply(inputs, 1),
        ]
    if not is_finite(alone):
        raise UserError(
            f"representation={representation.name}: returns values that are not finite."
        )
    tolerance = CLOSE * (1 + alone.abs().max())
    for other in others:
        if other.shape != alone.shape or (other - alone).abs().max() > tolerance:
            raise UserError(
                f"representation={representation.name}: its output for an example depends on "
                "other examples or on earlier calls. It must look at one example only."
            )
    if not _is_equal(before, state_of(module)):
        raise UserError(
            f"representation={representation.name}: keeps state from the examples it has seen, so "
            "one would affect another. It must not change its state."
        )


def state_of(module: nn.Module) -> list[Any]:
    """Return copies of all tensors and plain values that a module and those inside it hold."""
    return [_copy({**vars(inner), "_modules": None}) for inner in module.modules()]


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        is_numeric = value.dtype.kind in "biufc"
        return torch.from_numpy(value.copy()) if is_numeric else None
    if isinstance(value, dict):
        return {repr(key): _copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | deque):
        return [_copy(inner) for inner in value]
    return value if isinstance(value, bool | int | float | complex | str | bytes) else None


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    is_nan = a != a
    return type(a) is type(b) and bool(a == b or is_nan)


def represent(
    dataset: Any,
    name: str,
    **options: Any,
) -> torch.utils.data.TensorDataset:
    """Return a dataset of your own with each input's representation, for `make_private`.

    Made once and mapped from the cache folder, whose key is the examples' content.

    Args:
        dataset: map-style, with items (input, target); inputs are tensors of one shape, float32,
            complex64 or integers (of double precision they are made single).
        options: of the representation, as in the configuration: `J=2, L=8`.

    Raises:
        UserError: an option is wrong, the inputs are not of one shape or no finite numbers, or the
            transform looks at several at once.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or not len(dataset):
        raise UserError(
            f"dataset={type(dataset).__name__}: must be map-style and hold examples: give one with "
            "len(dataset) above 0 and dataset[i] = (input, target)."
        )
    first, _ = _collate(dataset, range(min(TRIED, len(dataset))))
    checked = check_plugin("representation", {"name": name, **options})
    representation = build(name, checked.options, tuple(first.shape[1:]), first.dtype)
    require_pixels(representation, first)
    require_apart(representation, first)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(dataset), BLOCK):
            stop = min(start + BLOCK, len(dataset))
            yield _collate(dataset, range(start, stop))

    chain, targets = hashlib.sha256(), list[Tensor]()
    for inputs, labels in batches():
        if inputs.shape[1:] != first.shape[1:] or inputs.dtype != first.dtype:
            raise UserError(f"{_UNEVEN}.")
        chain.update(inputs.contiguous().numpy().tobytes())
        targets.append(labels)
    blocks = (representation(inputs).numpy() for inputs, _ in batches())
    features = _keep(representation, chain.hexdigest(), len(dataset), blocks)
    try:
        return torch.utils.data.TensorDataset(features, torch.cat(targets))
    except RuntimeError as error:
        raise UserError(f"dataset: targets must be of one shape ({in_one_line(error)}).") from None


_UNEVEN = "dataset: items must be pairs (input, target), with float32 inputs of one shape"
SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def _collate(dataset: Any, rows: range) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of some items, in single precision."""
    try:
        inputs, targets = torch.utils.data.default_collate([dataset[row] for row in rows])
        inputs = inputs.to(SINGLE.get(inputs.dtype, inputs.dtype)).detach().cpu()
        targets = torch.as_tensor(targets)
        finite = is_finite(inputs)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{_UNEVEN} ({in_one_line(error)}).") from None
    if inputs.dim() < 2 or (inputs.is_floating_point() and inputs.dtype != torch.float32):
        raise UserError(f"{_UNEVEN}, and these are {inputs.dtype} {list(inputs.shape[1:])}.")
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
        log.info("%s of %d examples, made once", representation.name, len(source))
        for rows in torch.arange(len(source)).split(BLOCK):
            if weighted:
                features = torch.cat([factor * part[rows] for factor, part in weighted], dim=1)
            else:
                inputs, _ = source.batch(rows)
                features = representation(inputs.to(device))
            yield features.cpu().numpy()

    return _keep(representation, key, len(source), blocks())


def _keep(
    representation: Representation,
    key: str,
    count: int,
    blocks: Iterator[np.ndarray],
) -> Tensor:
    """Return representations [count, *gives] from the cache, or from blocks of them."""
    digest = hashlib.sha256(f"{key}:{representation.digest}".encode()).hexdigest()
    shape = (count, *representation.gives)
    dtype = NUMPY[representation.dtype]
    return torch.from_numpy(load_or_make("representations", digest, shape, dtype, blocks))


def targets_of(source: Source) -> Tensor:
    """Return the targets of all examples, [n, ...]."""
    if isinstance(source, Examples):
        return source.targets
    if isinstance(source, Part):
        return targets_of(source.whole)[source.rows]
    targets = []
    for rows in torch.arange(len(source)).split(BLOCK):
        _, labels = source.batch(rows)
        targets.append(labels)
    return torch.cat(targets)
