"""The schema of every key, and the check that nothing runs before it holds.

Hydra composes the YAML; `parse` turns the result into the frozen dataclasses below. Plug-in groups (dataset, model, task,
algorithm, optimizer) take the options their builder declares as keyword-only parameters; anything else is refused by name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zdp_bench import assets
from zdp_bench.errors import UserError, require, suggestion, unknown
from zdp_bench.registry import lookup, names


@dataclass(frozen=True)
class Trainer:
    """How records are sampled and for how long.

    Attributes:
        sampling: poisson, uniform (fixed size, without replacement) or shuffled (non-private only).
        sample_rate: probability of a record (poisson); batch size / records otherwise. Or null, and `batch_size` says it.
        batch_size: of uniform and shuffled batches; the expected one of Poisson's, whose rate is then batch_size / records.
        epochs: passes over the data: epochs / sample_rate steps.
        micro_batch: records processed at once; memory only, never the result, so it enters no digest. null: 2048; auto: as many
            as fit. Where memory runs out it is halved.
        checkpoint_epochs: epochs between checkpoints.
    """

    sampling: str = MISSING
    sample_rate: float | None = MISSING
    batch_size: int | None = MISSING
    epochs: int = MISSING
    micro_batch: int | str | None = MISSING
    checkpoint_epochs: int = MISSING


@dataclass(frozen=True)
class Privacy:
    """How ε is stated and kept.

    Attributes:
        delta: the δ at which ε is stated.
        max_epsilon: the budget: training stops before the step whose tight ε would exceed it. null: none.
        target_epsilon: replace `algorithm.noise_multiplier` by the one whose whole run has this tight ε; inf: by 0. null: as
            configured.
        claimed_epsilon: replace it by the one for which the accountant claims this ε; inf: by 0. null: as configured.
        range_test_steps: steps of a learning-rate range test that was made on the same records: every ε counts them. null: none.
        secure: sampling and noise from the operating system's cryptographic randomness instead of the seed.
    """

    delta: float = MISSING
    max_epsilon: float | None = MISSING
    target_epsilon: float | None = MISSING
    claimed_epsilon: float | None = MISSING
    range_test_steps: int | None = MISSING
    secure: bool = MISSING


@dataclass(frozen=True)
class Claims:
    """Which cell of which paper a recipe's runs fill: `table` PAPER/N, its `row`; a `variant` is ours, a row of its own."""

    table: str | None = MISSING
    row: str | None = MISSING
    variant: str | None = MISSING


@dataclass(frozen=True)
class Paths:
    """Where data is read and results are written."""

    data: str = MISSING
    results: str = MISSING


@dataclass(frozen=True)
class Execution:
    """How a run is carried out: no key of it changes a result, but for the last bits on a GPU.

    Attributes:
        checkpoint_steps: also save every so many steps, beside `trainer.checkpoint_epochs`. null: not.
        deterministic: refuse operations whose result differs from call to call (CUDA has some).
        prefetch: micro-batches read ahead by another thread. null: 1 for a GPU, 0 for a CPU.
        tensorboard: also write TensorBoard's event files; needs the extra `tensorboard`.
    """

    checkpoint_steps: int | None = MISSING
    deterministic: bool = MISSING
    prefetch: int | None = MISSING
    tensorboard: bool = MISSING


@dataclass(frozen=True)
class Federated:
    """Nodes that keep their patients to themselves and train one model together; see `zdp_bench.federated`.

    Attributes:
        nodes: how many. `trainer.batch_size` is then each node's, and the optimiser the server's. null: one central run.
        patients: split (the training set is dealt out, whole patients, by the seed) or own (each node trains on all that its own
            data root holds; for `zdp-bench federate`).
        local_steps: private steps of a node in a round.
        local_lr: the rate of SGD between a node's steps of one round; of no meaning where there is one.
        min_nodes: how many must answer for a round to count. null: all.
        backend: serial (one node after the other, in this process) or ray (Flower's own simulation). From here on, no key changes
            what is computed.
        patience: seconds that a round waits for its answers, and a client for its server.
        address: HOST:PORT, where the server of `zdp-bench federate` listens and its clients find it.
        certificate, key: the server's certificate (PEM, with its chain) and private key.
        authority: the certificate of who signed the server's; the clients trust no other.
        node: which node this client is, from 0.
    """

    nodes: int | None = MISSING
    patients: str = MISSING
    local_steps: int = MISSING
    local_lr: float = MISSING
    min_nodes: int | None = MISSING
    backend: str = MISSING
    patience: float = MISSING
    address: str = MISSING
    certificate: str | None = MISSING
    key: str | None = MISSING
    authority: str | None = MISSING
    node: int | None = MISSING


FEDERATED_RESULT = ("nodes", "patients", "local_steps", "local_lr", "min_nodes")  # the keys that change what is computed


@dataclass(frozen=True)
class Scalars:
    """The keys that belong to no group."""

    recipe: str = MISSING
    seed: int = MISSING
    device: str = MISSING
    threads: int | None = MISSING
    precision: str | None = MISSING
    force: bool = MISSING


@dataclass(frozen=True)
class Plugin:
    """A plug-in by name, with its checked options."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run, fully specified and checked; `resolved` is the same as plain values, for the record."""

    recipe: str
    seed: int
    device: str
    threads: int | None
    precision: str | None
    force: bool
    dataset: Plugin
    model: Plugin
    task: Plugin
    replace_batchnorm: Literal["group", "instance", "frozen"] | None  # model.replace_batchnorm, for any model
    algorithm: Plugin
    optimizer: Plugin
    complex_second_moment: Literal["per_component", "magnitude"]  # optimizer.complex_second_moment
    scheduler: Plugin | None
    accountant: str
    trainer: Trainer
    privacy: Privacy
    claims: Claims
    execution: Execution
    federated: Federated
    paths: Paths
    resolved: dict[str, Any]

    @property
    def data_root(self) -> Path:
        return Path(self.paths.data).expanduser()

    @property
    def results(self) -> Path:
        return Path(self.paths.results).expanduser()


PLUGINS = ("dataset", "model", "task", "algorithm", "optimizer", "scheduler")
PLUGIN_KINDS = ("dataset", "model", "task", "algorithm")  # those that other packages may add to
GROUPS = (*PLUGINS, "accountant", "trainer")
REPLACEMENTS = ("group", "instance", "frozen")  # of BatchNorm, for private training; see `checks.replace_batchnorm`
# Keys that say where and how a run is executed, not what it computes: they change no result and enter no digest.
OPERATIONAL = ("paths", "force", "device", "threads", "execution", "claims")


# ------------------------------------------------------------------------------------------------------- composing


# Hydra copies its sources at every composition, and with them all that is stored. There is one store, and it gives out copies.
ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def register_yaml() -> None:
    """Enter `recipes/*.yaml` and `datasets/*.yaml` (without their cards) into Hydra's ConfigStore as config groups."""
    for name, path in assets.group(assets.RECIPES).items():
        _store("recipe", name, path, {**assets.read_yaml(path), "recipe": name}, "_global_")
    for name, path in assets.group(assets.DATASETS).items():
        options = {key: value for key, value in assets.read_yaml(path).items() if key != "card"}
        _store("dataset", name, path, options, "dataset")
    if entry_points(group="zdp_bench.plugins"):
        for kind in PLUGIN_KINDS:
            for name in set(names(kind)) - set(_files(kind)):
                builder = lookup(kind, name)
                _store(kind, name, builder, {"name": name} | _defaults(builder), kind)


_STORED: dict[tuple[str, str], Any] = {}  # (group, name) -> what it was made of: Hydra takes 10 ms to store what it has already


def _store(group: str, name: str, source: Any, node: dict[str, Any], package: str) -> None:
    if _STORED.get((group, name)) != source:
        ConfigStore.instance().store(group=group, name=name, node=node, package=package)
        _STORED[group, name] = source


def _defaults(builder: Callable[..., Any]) -> dict[str, Any]:
    """The YAML that a plug-in of another package would have: its options, with their defaults."""
    options = (p for p in inspect.signature(builder).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY)
    return {p.name: MISSING if p.default is inspect.Parameter.empty else p.default for p in options}


def choose(key: Any, options: dict[Any, Any]) -> Any:
    """What stands for `key` among `options`: one key of a recipe follows another, `${choose:${model.name},{lenet5: 1, ...}}`.

    Raises:
        KeyError: nothing does; the sentence says what does.
    """
    found = {str(name): value for name, value in options.items()}
    if str(key) not in found:
        raise KeyError(f"the recipe says nothing of {key}, only of {', '.join(found)}")
    return found[str(key)]


OmegaConf.register_new_resolver("choose", choose, replace=True)


@contextmanager
def hydra_session() -> Iterator[Any]:
    """Hydra, set up on our config folder; yields hydra's own driver object (`compose_config`, `run`, `multirun`)."""
    from hydra import initialize_config_dir

    register_yaml()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(assets.CONF), job_name="zdp-bench", version_base="1.3"):
        driver = GlobalHydra.instance().hydra
        assert driver is not None
        yield driver


def compose(overrides: list[str]) -> DictConfig:
    """The composed configuration for command-line overrides.

    Raises:
        UserError: an override or YAML file is wrong; see `sentence`.
    """
    from hydra import compose as hydra_compose

    with hydra_session(), readable(overrides):
        return hydra_compose("config", overrides=overrides)


# -------------------------------------------------------------------------------------------------------- checking


def parse(config: DictConfig) -> Run:
    """Check every key of a composed configuration and freeze it.

    Raises:
        UserError: a key is unknown, missing or of the wrong type, a plug-in has no such name, or values contradict each other.
    """
    with readable([]):
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    assert isinstance(resolved, dict)
    plain: dict[str, Any] = {str(key): value for key, value in resolved.items() if key not in ("hydra", "launcher")}

    sections = {
        "trainer": Trainer,
        "privacy": Privacy,
        "claims": Claims,
        "execution": Execution,
        "federated": Federated,
        "paths": Paths,
    }
    scalars = {key: value for key, value in plain.items() if key not in sections and key not in GROUPS}
    checked: dict[str, Any] = {name: _typed(schema, plain.get(name) or {}, name) for name, schema in sections.items()}
    top = _typed(Scalars, scalars, "")

    from zdp_bench.privacy.accounting import ACCOUNTANTS

    accountant = str((plain.get("accountant") or {}).get("name"))
    if accountant not in ACCOUNTANTS:
        raise unknown("accountant", accountant, ACCOUNTANTS)
    for kind in (*PLUGINS, "accountant"):
        if not isinstance(plain.get(kind) or {}, dict):
            raise UserError(f"{kind}={plain[kind]}: name one with {kind}=NAME, or set one of its keys.")
    for kind in PLUGINS:
        plain[kind] = _without_strangers(str(plain.get("recipe")), kind, plain.get(kind) or {})
    found: dict[str, Any] = {kind: _plugin(kind, plain[kind]) for kind in PLUGINS if not _off(kind, plain[kind])}
    found.setdefault("scheduler", None)
    # Keys of every model and of every optimiser, beside the plug-in's own options
    found["replace_batchnorm"] = plain["model"].get("replace_batchnorm")
    found["complex_second_moment"] = plain["optimizer"].get("complex_second_moment") or "per_component"
    if found["complex_second_moment"] == "per_component":  # one experiment, one digest, however it is said
        plain["optimizer"] = {key: value for key, value in plain["optimizer"].items() if key != "complex_second_moment"}
    plain = {key: value for key, value in plain.items() if key != "federated"} | _of_the_result(checked["federated"])
    run = Run(**vars(top), **checked, **found, accountant=accountant, resolved=plain)
    _check_values(run)
    return run


def _of_the_result(federated: Federated) -> dict[str, Any]:
    """The section with the keys that change what is computed; nothing of a central run, whose digest it must not enter."""
    if federated.nodes is None:
        return {}
    said = {key: getattr(federated, key) for key in FEDERATED_RESULT}
    return {"federated": {key: value for key, value in said.items() if key != "local_lr" or federated.local_steps > 1}}


def require_central(run: Run, verb: str) -> None:
    """Refuse a federation where only central training is meant.

    Raises:
        UserError: the run has nodes.
    """
    if run.federated.nodes is not None:
        raise UserError(
            f"zdp-bench {verb} takes one training set: add federated.nodes=null. A node of a federation takes the same steps, "
            "with the same mechanism, on its own."
        )


def _check_federated(run: Run) -> None:
    federated = run.federated
    if federated.nodes is None:
        return
    nodes, least = federated.nodes, federated.min_nodes
    require(nodes > 0, "federated.nodes", nodes, "must be at least 1")
    require(least is None or 1 <= least <= nodes, "federated.min_nodes", least, f"must lie between 1 and the {nodes} nodes")
    require(federated.local_steps > 0, "federated.local_steps", federated.local_steps, "must be at least 1")
    require(federated.local_lr > 0, "federated.local_lr", federated.local_lr, "must be positive")
    require(federated.patience > 0, "federated.patience", federated.patience, "must be positive: it is in seconds")
    for key, value, allowed in (
        ("patients", federated.patients, ("split", "own")),
        ("backend", federated.backend, ("serial", "ray")),
    ):
        if value not in allowed:
            raise unknown(f"federated.{key}", value, allowed)
    which = f"must lie between 0 and {nodes - 1}"
    require(federated.node is None or 0 <= federated.node < nodes, "federated.node", federated.node, which)
    shuffled = "a node's steps are Poisson or uniform samples: use trainer=poisson or trainer=uniform"
    require(run.trainer.sampling != "shuffled", "trainer.sampling", run.trainer.sampling, shuffled)


def _check_values(run: Run) -> None:
    trainer = run.trainer
    schemes = ("poisson", "uniform", "shuffled")
    if trainer.sampling not in schemes:
        raise unknown("trainer.sampling", trainer.sampling, schemes)
    if trainer.sampling == "poisson":
        one = trainer.sample_rate is not None or trainer.batch_size is not None
        require(one, "trainer.sample_rate", None, "Poisson sampling needs a rate, such as 0.01, or trainer.batch_size")
    one = (trainer.batch_size is None) != (trainer.sample_rate is None)
    rule = f"{trainer.sampling} sampling needs batch_size or sample_rate, and not both"
    require(one, "trainer.batch_size", trainer.batch_size, rule)
    rate = trainer.sample_rate
    require(rate is None or 0 < rate <= 1, "trainer.sample_rate", rate, "must lie in (0, 1]")
    require(trainer.batch_size is None or trainer.batch_size > 0, "trainer.batch_size", trainer.batch_size, "must be at least 1")
    require(trainer.epochs > 0, "trainer.epochs", trainer.epochs, "must be at least 1")
    micro_batch = trainer.micro_batch
    if isinstance(micro_batch, str) and micro_batch != "auto":
        raise UserError(f"trainer.micro_batch={micro_batch}: must be a number of records, auto or null.")
    require(not isinstance(micro_batch, int) or micro_batch > 0, "trainer.micro_batch", micro_batch, "must be at least 1")
    require(trainer.checkpoint_epochs > 0, "trainer.checkpoint_epochs", trainer.checkpoint_epochs, "must be at least 1")
    tested = run.privacy.range_test_steps
    require(tested is None or tested >= 0, "privacy.range_test_steps", tested, "must be 0 or more")
    require(0 < run.privacy.delta < 1, "privacy.delta", run.privacy.delta, "must lie in (0, 1)")
    for key in ("max_epsilon", "target_epsilon", "claimed_epsilon"):
        value = getattr(run.privacy, key)
        require(value is None or value > 0, f"privacy.{key}", value, "must be positive")
    _check_calibration(run)
    _check_federated(run)
    replacement = run.replace_batchnorm
    if replacement not in (None, *REPLACEMENTS):
        raise unknown("model.replace_batchnorm", str(replacement), [*REPLACEMENTS, "null"])
    if run.complex_second_moment not in ("per_component", "magnitude"):
        raise unknown("optimizer.complex_second_moment", str(run.complex_second_moment), ["per_component", "magnitude"])
    if run.complex_second_moment == "magnitude" and run.optimizer.name not in HAS_SECOND_MOMENT:
        which = ", ".join(HAS_SECOND_MOMENT)
        raise UserError(f"optimizer.complex_second_moment=magnitude: is for {which}, and not for {run.optimizer.name}.")
    require(run.seed >= 0, "seed", run.seed, "must be 0 or more")
    require(run.threads is None or run.threads > 0, "threads", run.threads, "must be at least 1")
    private = getattr(lookup("algorithm", run.algorithm.name), "private", True)
    if private and trainer.sampling == "shuffled":
        raise UserError(
            f"trainer.sampling=shuffled with algorithm={run.algorithm.name}: shuffled batches carry no ε here. "
            "Use trainer=poisson or trainer=uniform."
        )
    every, prefetch = run.execution.checkpoint_steps, run.execution.prefetch
    require(every is None or every > 0, "execution.checkpoint_steps", every, "must be at least 1")
    require(prefetch is None or prefetch >= 0, "execution.prefetch", prefetch, "must be 0 or more")
    if run.precision not in (None, "tf32", "bf16"):
        raise unknown("precision", str(run.precision), ("tf32", "bf16", "null"))
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", run.device):
        raise unknown("device", run.device, ("auto", "cpu", "cuda", "cuda:0"))


def _check_calibration(run: Run) -> None:
    """A noise multiplier is calibrated to one ε at most, and only where there is one."""
    asked = [key for key in ("target_epsilon", "claimed_epsilon") if getattr(run.privacy, key) is not None]
    if len(asked) > 1:
        raise UserError(
            "privacy.target_epsilon and privacy.claimed_epsilon each set algorithm.noise_multiplier: give one of them."
        )
    if asked and "noise_multiplier" not in run.algorithm.options:
        raise UserError(
            f"privacy.{asked[0]} with algorithm={run.algorithm.name}: it has no noise_multiplier that could reach an ε. "
            "Choose a private algorithm, or leave the key out."
        )


def _without_strangers(recipe: str, kind: str, node: dict[str, Any]) -> dict[str, Any]:
    """A plug-in's options without those that the recipe meant for another one.

    `recipe=phasemnist algorithm=sgd` puts sgd in the place of ζ-DP-SGD, but the recipe's `algorithm: {noise: circular}` is
    still merged on top. What the chosen plug-in's own YAML does not have, and the recipe has, was never meant for it.
    """
    own_file = assets.group(assets.DATASETS if kind == "dataset" else assets.CONF / kind).get(str(node.get("name")))
    recipe_file = assets.group(assets.RECIPES).get(recipe)
    known = own_file is not None or node.get("name") in (names(kind) if kind in PLUGIN_KINDS else ())
    if not known or recipe_file is None:
        return node
    body = assets.read_yaml(recipe_file)
    choices: dict[str, str] = {}
    for entry in (*assets.read_yaml(assets.CONF / "config.yaml")["defaults"], *body.get("defaults", [])):
        if isinstance(entry, dict):
            choices |= {key.removeprefix("override /"): name for key, name in entry.items()}
    if choices[kind] == node["name"]:
        return node
    own = assets.read_yaml(own_file) if own_file else _defaults(lookup(kind, str(node["name"])))
    strangers = set(body.get(kind) or {}) - set(own)
    return {key: value for key, value in node.items() if key not in strangers}


def _off(kind: str, node: dict[str, Any]) -> bool:
    """A run may do without a scheduler, and without nothing else."""
    return kind == "scheduler" and node.get("name") is None and not any(value is not None for value in node.values())


def _plugin(kind: str, node: dict[str, Any]) -> Plugin:
    """Check a plug-in's options against the keyword-only parameters of its builder."""
    options = dict(node)
    name = options.pop("name", None)
    options.pop({"model": "replace_batchnorm", "optimizer": "complex_second_moment"}.get(kind, ""), None)
    if not isinstance(name, str):
        raise UserError(f"{kind}.name is missing: say which {kind}, such as {kind}=NAME.")
    builder = TORCHS_OWN[kind](name) if kind in TORCHS_OWN else lookup(kind, name)
    return Plugin(name, check_options(kind, builder, options))


OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "nadam": "NAdam", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
HAS_SECOND_MOMENT = ("adam", "adamw", "nadam", "rmsprop")  # that `zdp_bench.optimizers` can take of |g|²


def optimizer_class(name: str) -> Callable[..., Any]:
    """torch's optimiser of that name."""
    import torch

    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    return getattr(torch.optim, OPTIMIZERS[name])


SCHEDULERS = {
    "step_lr": "StepLR",
    "multi_step_lr": "MultiStepLR",
    "exponential_lr": "ExponentialLR",
    "cosine_annealing_lr": "CosineAnnealingLR",
    "linear_lr": "LinearLR",
    "reduce_on_plateau": "ReduceLROnPlateau",
}


def scheduler_class(name: str) -> Callable[..., Any]:
    """torch's learning-rate scheduler of that name; each takes one step an epoch."""
    import torch

    if name not in SCHEDULERS:
        raise unknown("scheduler", name, ["none", *SCHEDULERS])
    return getattr(torch.optim.lr_scheduler, SCHEDULERS[name])


TORCHS_OWN: dict[str, Callable[[str], Callable[..., Any]]] = {"optimizer": optimizer_class, "scheduler": scheduler_class}


def check_options(kind: str, builder: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options with their declared types: unknown, missing and mistyped ones are refused by key."""
    if kind in TORCHS_OWN:  # their parameters are positional, and torch checks the values itself
        allowed = set(inspect.signature(builder).parameters) - {"params", "optimizer"}
        for key in options:
            if key not in allowed:
                raise unknown(f"{kind} key", f"{kind}.{key}", [f"{kind}.{a}" for a in allowed])
        return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}

    hints = get_type_hints(builder.__init__ if inspect.isclass(builder) else builder)
    fields: list[Any] = []
    choices: dict[str, tuple[Any, ...]] = {}
    for parameter in inspect.signature(builder).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        hint = hints[parameter.name]
        if get_origin(hint) is Literal:
            choices[parameter.name], hint = get_args(hint), str
        default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
        if isinstance(default, list | dict):
            raise TypeError(f"{builder}: option '{parameter.name}' needs an immutable default")
        fields.append((parameter.name, hint, default))
    checked = vars(_typed(make_dataclass("Options", fields), options, kind))
    for key, allowed_values in choices.items():
        if checked[key] not in allowed_values:
            raise unknown(f"{kind}.{key}", str(checked[key]), [str(value) for value in allowed_values])
    for key, value in checked.items():
        if (
            key.rpartition("_")[2] == "seed" and value is not None
        ):  # of a split or a pairing; more bits than this no library takes
            require(0 <= value < 2**32, f"{kind}.{key}", value, "must be 0 or more, and below 2³²")
    return checked


def _typed(schema: type, values: dict[str, Any], prefix: str) -> Any:
    """`values` as an instance of the dataclass `schema`; errors name the full key."""
    dot = f"{prefix}." if prefix else ""
    structure = OmegaConf.structured(schema)
    if not isinstance(values, dict):
        raise UserError(
            f"{prefix}={values}: is no value but a section; set one of its keys, such as {dot}{next(iter(structure))}."
        )
    known = [str(name) for name in structure]  # `in` would leave out keys that have no default
    for key in values:
        if key not in known:
            raise unknown("key", f"{dot}{key}", [f"{dot}{name}" for name in known])
    merged = structure
    for key, value in values.items():
        try:
            merged = OmegaConf.merge(merged, {key: value})
        except OmegaConfBaseException as error:
            raise UserError(f"{dot}{key}={value}: {_first_line(error)}") from None
    lacking = OmegaConf.missing_keys(merged)
    if lacking:
        raise UserError(f"{dot}{sorted(lacking)[0]} has no value: set it in the recipe or on the command line.")
    return OmegaConf.to_object(merged)


# ------------------------------------------------------------------------------------------------- errors in words


@contextmanager
def readable(overrides: list[str]) -> Iterator[None]:
    """Turn Hydra's and OmegaConf's exceptions into one sentence."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence(error, overrides)) from None
    except (ValueError, TypeError, AssertionError, AttributeError, KeyError, IndexError) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if not {"hydra", "omegaconf"} & set(Path(raised_in).parts):  # a bug of ours, and shown as one
            raise
        said = " ".join(overrides)
        raise UserError(f"'{said}' cannot be composed: {_first_line(error)} Give groups a name and keys a value.") from None


def sentence(error: Exception, overrides: list[str]) -> str:
    """What Hydra meant, in one sentence with the nearest right spelling."""
    while not str(error).strip() and isinstance(error.__cause__, Exception):
        error = error.__cause__  # Hydra wraps some of its errors in one without words
    text = str(error)
    if match := re.search(r"Could not find '([^/']+(?:/[^/']+)*)/([^/']+)'", text):
        return str(unknown(match[1], match[2], group_options(match[1])))
    if match := re.search(r"In '[^']*': Could not find '([^']+)/([^'/]+)'", text):
        return str(unknown(match[1], match[2], group_options(match[1])))
    if match := re.search(r"You must specify '(\w+)'", text):
        return f"{match[1]}=NAME is missing. Allowed: {', '.join(group_options(match[1]))}."
    if match := re.search(r"Could not override '([^']+)'", text):
        keys = known_keys(overrides)
        return f"key '{match[1]}' is not known.{suggestion(match[1], keys)} `zdp-bench list keys` shows them all."
    if match := re.search(r"Error parsing override '([^']*)'", text):
        return f"'{match[1]}' is no override: write key=value, such as seed=1 or algorithm.noise_multiplier=0.8."
    return _first_line(error)


def group_options(group: str) -> list[str]:
    """The names of a config group: its files', and those of other packages' plug-ins."""
    others = names(group) if group in PLUGIN_KINDS and entry_points(group="zdp_bench.plugins") else []
    return sorted({*_files(group), *others})


def _files(group: str) -> dict[str, Path]:
    folders = {"recipe": assets.RECIPES, "dataset": assets.DATASETS}
    return assets.group(folders.get(group, assets.CONF / group))


def known_keys(overrides: list[str]) -> list[str]:
    """Every dotted key and group there is, in the recipe the overrides name where they name one."""
    from hydra import compose as hydra_compose

    recipe = [o for o in overrides if o.startswith("recipe=") and o.removeprefix("recipe=") in assets.group(assets.RECIPES)]
    with hydra_session():
        config = hydra_compose("config", overrides=recipe[:1] or ["recipe=quickstart"])
    return [*GROUPS, *dotted(OmegaConf.to_container(config, resolve=False))]


def dotted(node: Any, prefix: str = "") -> list[str]:
    """The dotted names of a nested mapping's leaves and branches."""
    if not isinstance(node, dict):
        return []
    names = []
    for key, value in node.items():
        names += [f"{prefix}{key}", *dotted(value, f"{prefix}{key}.")]
    return names


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".") + "."


# --------------------------------------------------------------------------------------------------------- digests


def experiment_digest(run: Run) -> str:
    """SHA-256 of what is computed, but for the seed: runs with one digest are repetitions of one another.

    What is null or false says nothing and is left out, so that a new option which is off by default keeps old records valid.
    """

    def said(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        inside = {key: said(value) for key, value in node.items() if value is not None and value is not False}
        return {key: value for key, value in inside.items() if value != {}}

    content = {key: value for key, value in run.resolved.items() if key not in (*OPERATIONAL, "seed", "recipe")}
    content["trainer"] = {key: value for key, value in content["trainer"].items() if key != "micro_batch"}
    content = said(content)
    if run.privacy.target_epsilon or run.privacy.claimed_epsilon:  # what is calibrated is no choice
        content["algorithm"].pop("noise_multiplier", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def run_digest(run: Run, data_digest: str) -> str:
    """SHA-256 of the resolved configuration and the data: names the run's folder."""
    return hashlib.sha256(f"{experiment_digest(run)}:{run.seed}:{data_digest}".encode()).hexdigest()
