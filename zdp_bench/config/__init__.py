"""A run's configuration: composed by Hydra from the command line's words and our YAML, and checked before anything runs.

`compose` gives what the words say, `parse` turns it into the frozen dataclasses of `schema.py`. Plug-in groups (dataset, model,
task, algorithm, optimizer) take the options their builder declares as keyword-only parameters; anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from zdp_bench.config.compose import hydra_session
from zdp_bench.config.constraints import check_typed, check_values
from zdp_bench.config.messages import readable, typed_keys
from zdp_bench.config.plugins import plugin, typed, without_strangers
from zdp_bench.config.schema import (
    FEDERATED_RESULT,
    GROUPS,
    PLUGINS,
    Claims,
    Execution,
    Federated,
    Paths,
    Privacy,
    Run,
    Scalars,
    Trainer,
)
from zdp_bench.errors import UserError
from zdp_bench.registry import lookup


def compose(overrides: list[str]) -> DictConfig:
    """The composed configuration for command-line overrides.

    Raises:
        UserError: an override or YAML file is wrong; see `words.py`.
    """
    from hydra import compose as hydra_compose

    with hydra_session(), readable(overrides):
        return hydra_compose("config", overrides=overrides)


def configured(overrides: Sequence[str]) -> Run:
    """The run that the words of a command line describe, checked.

    Raises:
        UserError: see `compose` and `parse`.
    """
    return parse(compose(list(overrides)), overrides)


def parse(config: DictConfig, overrides: Sequence[str] = ()) -> Run:
    """Check every key of a composed configuration and freeze it.

    Args:
        overrides: what the user typed of it: of no effect it may not be, while what a recipe says may be overruled.

    Raises:
        UserError: a key is unknown, missing or of the wrong type, a plug-in has no such name, or values contradict each other.
    """
    with readable([]):
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    assert isinstance(resolved, dict)
    plain: dict[str, Any] = {
        str(key): value for key, value in resolved.items() if key not in ("hydra", "launcher")
    }

    sections = {
        "trainer": Trainer,
        "privacy": Privacy,
        "claims": Claims,
        "execution": Execution,
        "federated": Federated,
        "paths": Paths,
    }
    scalars = {
        key: value for key, value in plain.items() if key not in sections and key not in GROUPS
    }
    checked: dict[str, Any] = {
        name: typed(schema, plain.get(name) or {}, name) for name, schema in sections.items()
    }
    top = typed(Scalars, scalars, "")

    accountant = str((plain.get("accountant") or {}).get("name"))
    lookup("accountant", accountant)
    said = typed_keys(overrides)
    for kind in (*PLUGINS, "accountant"):
        if not isinstance(plain.get(kind) or {}, dict):
            raise UserError(
                f"{kind}={plain[kind]}: name one with {kind}=NAME, or set one of its keys."
            )
    for kind in PLUGINS:
        plain[kind] = without_strangers(str(plain.get("recipe")), kind, plain.get(kind) or {}, said)
    found: dict[str, Any] = {
        kind: plugin(kind, plain[kind]) for kind in PLUGINS if not _off(kind, plain[kind])
    }
    found.setdefault("scheduler", None)
    found["replace_batchnorm"] = plain["model"].get("replace_batchnorm")
    plain = {key: value for key, value in plain.items() if key != "federated"} | _of_the_result(
        checked["federated"]
    )
    run = Run(**vars(top), **checked, **found, accountant=accountant, resolved=plain)
    check_values(run)
    check_typed(run, said)
    return run


def _of_the_result(federated: Federated) -> dict[str, Any]:
    """The section with the keys that change what is computed; nothing of a central run, whose digest it must not enter."""
    if federated.nodes is None:
        return {}
    said = {key: getattr(federated, key) for key in FEDERATED_RESULT}
    return {
        "federated": {
            key: value
            for key, value in said.items()
            if key != "local_lr" or federated.local_steps > 1
        }
    }


def _off(kind: str, node: dict[str, Any]) -> bool:
    """A run may do without a scheduler, and without nothing else."""
    return (
        kind == "scheduler"
        and node.get("name") is None
        and not any(value is not None for value in node.values())
    )
