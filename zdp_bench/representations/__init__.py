"""Representations: a public, fixed transform of one example in front of the head that trains.

It is a function of one example alone: it learns nothing from the training set, so it costs no ε.
So few weights are left to train that the noise of a small ε hides little of them. What it makes of
a data set is computed once, kept in the user's cache folder and mapped (`data/cache.py`).

A builder takes an example's shape and its options, and returns a module: [B, *shape] -> [B, ...].
The module may say in `facts` what it is made of; its `version` changes when its numbers do.
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
from zdp_bench.errors import UserError
from zdp_bench.registry import lookup

AT_ONCE = 8  # examples: their maps stay in a CPU's cache
BLOCK = 128  # examples that are read and written at once
NUMPY = {torch.float32: np.float32, torch.complex64: np.complex64}
CLOSE = 1e-4  # relative to the largest number: what rounding does in a deep network

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Representation:
    """A transform that is built for examples of one shape.

    Attributes:
        takes, gives: shapes of an example, before and after.
        takes_dtype, dtype: of its numbers, before and after.
        digest: SHA-256 of its name, options, version, shape and facts.
        facts: where its numbers come from, for the record: weights, licence, what trained them.
    """

    name: str
    module: nn.Module
    takes: tuple[int, ...]
    takes_dtype: torch.dtype
    gives: tuple[int, ...]
    dtype: torch.dtype
    digest: str
    facts: dict[str, Any]

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """Transform examples [B, *takes] into [B, *gives], a few at a time."""
        if not len(inputs):
            return torch.empty(0, *self.gives, dtype=self.dtype)
        return torch.cat([self.module(part) for part in inputs.split(AT_ONCE)])

    def note(self) -> str:
        """Return it in words, for the notes under a table."""
        weights, of = self.facts.get("weights"), self.facts.get("trained_on")
        return f"behind the public representation {self.name}" + (
            f" ({self.facts['network']}, weights {weights}, trained on {of})" if weights else ""
        )

    def described(self) -> dict[str, Any]:
        """Return what a record says of it."""
        return {
            "name": self.name,
            "digest": self.digest,
            "input_shape": list(self.takes),
            "input_dtype": str(self.takes_dtype).removeprefix("torch."),
            **self.facts,
        }


class Represented(nn.Module):
    """A model behind its representation: raw examples [B, *takes] -> the model's outputs."""

    def __init__(self, representation: Representation, model: nn.Module) -> None:
        super().__init__()
        self.representation, self.model = representation.module, model
        self._apply_to = representation

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(self._apply_to(inputs))
        return outputs


def build(
    name: str, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> Representation:
    """Return a representation for examples of this shape and dtype.

    Raises:
        UserError: there is none of this name, or it does not take such examples or options.
    """
    module: nn.Module = lookup("representation", name)(tuple(shape), **options)
    module = module.eval().requires_grad_(False)
    with torch.no_grad():
        one = module(torch.zeros(1, *shape, dtype=dtype))
    if one.dtype not in NUMPY:
        raise UserError(f"representation={name}: gives {one.dtype}, no float32 or complex64.")
    facts = getattr(module, "facts", {})
    version = getattr(module, "version", 1)
    if "sha256" in facts:  # which file holds the weights makes no difference
        options = {key: value for key, value in options.items() if key != "weights"}
    named = json.dumps([name, options, version, list(shape), str(dtype), facts], sort_keys=True)
    digest = hashlib.sha256(named.encode()).hexdigest()
    return Representation(
        name, module, tuple(shape), dtype, tuple(one.shape[1:]), one.dtype, digest, facts
    )


def represent_splits(
    representation: Representation, data: Splits, key: str, device: torch.device | None = None
) -> Splits:
    """Return the data set with each example's representation in its place, from the cache.

    Args:
        key: the digest of everything the examples follow from.
        device: where the transform is computed; what it makes is kept on the disk.

    Raises:
        UserError: examples change as they are drawn, or the transform looks at several at once.
    """
    if data.augment or data.train.is_stochastic:
        raise UserError(
            f"representation={representation.name}: is computed once for each example, and this "
            "data set changes examples as they are drawn. Switch that off, such as "
            "dataset.augment=null (or false)."
        )
    device = device or torch.device("cpu")
    representation.module.to(device)
    require_apart(representation, data.test.batch(torch.arange(min(2, len(data.test))))[0], device)
    train = _represent(representation, data.train, f"{key}:train", device)
    test = _represent(representation, data.test, f"{key}:test", device)
    validation = data.validation and _represent(
        representation, data.validation, f"{key}:validation", device
    )
    representation.module.to("cpu")
    return replace(
        data,
        train=train,
        test=test,
        validation=validation,
        input_shape=representation.gives,
        notes="; ".join(filter(None, [data.notes, representation.note()])),
        representation=representation.described(),
        digest=hashlib.sha256(f"{data.digest}:{representation.digest}".encode()).hexdigest(),
    )


def represent_info(representation: Representation, info: DatasetInfo) -> DatasetInfo:
    """Return counts and shapes of the data set as its representation."""
    return replace(info, input_shape=representation.gives, dtype=representation.dtype)


def require_apart(representation: Representation, public: Tensor, device: torch.device) -> None:
    """Refuse a transform of which one example changes what comes of another.

    Args:
        public: examples of the test set: nothing of the training set is looked at.

    Raises:
        UserError: two examples together give something else than each alone.
    """
    with torch.no_grad():
        together = representation.module(public.to(device))
        alone = torch.cat([representation.module(one.to(device)) for one in public.split(1)])
    if not torch.isfinite(torch.view_as_real(alone) if alone.is_complex() else alone).all():
        raise UserError(f"representation={representation.name}: gives numbers that are not finite.")
    if (together - alone).abs().max() > CLOSE * (1 + alone.abs().max()):
        raise UserError(
            f"representation={representation.name}: two examples together give something else "
            "than each alone, so one would tell of another. It must look at one example only."
        )


def represent(dataset: Any, name: str, **options: Any) -> torch.utils.data.TensorDataset:
    """Return a dataset of your own with each input's representation, for `make_private`.

    Made once and mapped from the cache folder, whose key is the examples' content.

    Args:
        dataset: map-style, with items (input, target); inputs are tensors of one shape.
        options: of the representation, as in the configuration: `J=2, L=8`.

    Raises:
        UserError: an option is wrong, or the inputs are not of one shape.
    """
    first = torch.utils.data.default_collate([dataset[0]])[0]
    if not isinstance(first, Tensor):
        raise UserError("dataset: inputs must be tensors or arrays of one shape.")
    checked = check_plugin("representation", {"name": name, **options}).options
    found = build(name, checked, tuple(first.shape[1:]), first.dtype)
    chain, targets = hashlib.sha256(), []
    for start in range(0, len(dataset), BLOCK):
        inputs, labels = _collate(dataset, range(start, min(start + BLOCK, len(dataset))))
        chain.update(inputs.contiguous().numpy().tobytes())
        targets.append(labels)

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, len(dataset), BLOCK):
            rows = range(start, min(start + BLOCK, len(dataset)))
            yield found(_collate(dataset, rows)[0]).numpy()

    whole = _keep(found, chain.hexdigest(), len(dataset), blocks())
    return torch.utils.data.TensorDataset(whole, torch.cat(targets))


def _collate(dataset: Any, rows: range) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.utils.data.default_collate([dataset[row] for row in rows])
    return inputs, targets


def _represent(
    representation: Representation, source: Source, key: str, device: torch.device
) -> Examples:
    def blocks() -> Iterator[np.ndarray]:
        log.info("%s of %d examples, made once", representation.name, len(source))
        for rows in torch.arange(len(source)).split(BLOCK):
            yield representation(source.batch(rows)[0].to(device)).cpu().numpy()

    whole = _keep(representation, key, len(source), blocks())
    return Examples(whole, targets_of(source), source.groups)


def _keep(
    representation: Representation, key: str, count: int, blocks: Iterator[np.ndarray]
) -> Tensor:
    digest = hashlib.sha256(f"{key}:{representation.digest}".encode()).hexdigest()
    shape = (count, *representation.gives)
    return torch.from_numpy(
        load_or_make("representations", digest, shape, NUMPY[representation.dtype], blocks)
    )


def targets_of(source: Source) -> Tensor:
    """Return the targets of all examples, [n, ...]."""
    if isinstance(source, Examples):
        return source.targets
    if isinstance(source, Part):
        return targets_of(source.whole)[source.rows]
    return torch.cat([source.batch(rows)[1] for rows in torch.arange(len(source)).split(BLOCK)])
