"""The model card of a run's record, or of your own loop's report.

`templates/card.md` is its text; its YAML head is what model hubs read.
"""

from __future__ import annotations

import math
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader

from zdp_bench.data.files import card as data_card
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.folder import Source
from zdp_bench.library.keys import kind_of
from zdp_bench.records import to_json
from zdp_bench.report.number_format import epsilon, interval, name_one

HUB_TASKS = {
    ("classification", 3): "image-classification",
    ("binary_classification", 3): "image-classification",
    ("segmentation", 3): "image-segmentation",
    ("reconstruction", 3): "image-to-image",
}  # (task, dimensions of an input) -> the hub's name for it
VERDICTS = {
    "seeded": "**Not for release to an adversary.** Noise and batches follow from the seed: "
    "anyone who knows it, the configuration or code, and all data but one example can test "
    "guesses of that example. Train models that you publish with `privacy.secure=true`, or "
    "`secure=True` in your own loop.",
    "keyed": "Noise and batches of each step follow from a key of the operating system that was "
    "not stored. Train models that you publish with `secure=True`, which draws every number from "
    "the operating system.",
    "cryptographic": "Noise and batches come from the operating system's cryptographic randomness.",
}  # by where the randomness comes from
NOT_PRIVATE = "**Not private.** Some direction of a release has no noise: ε is ∞."
# What the head states of the section on privacy, in this order.
STATED = (
    *("unit", "epsilon_of", "examples_per_patient", "adjacency", "delta", "epsilon_claimed"),
    *("claimed_by", "epsilon_tight", "epsilon_tight_at_least", "epsilon_patient"),
    *("epsilon_patient_at_least", "epsilon_rdp", "noise_multiplier", "z", "steps", "sampling"),
    *("randomness", "randomness_from", "ledger"),
)


_TEMPLATES = Environment(
    loader=PackageLoader("zdp_bench.extras.sharing"),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def card(source: Source) -> str:
    """Return the model card of a record, or of your own loop's report."""
    own, privacy = files.is_report(source), source["privacy"]
    about = _of_loop(source) if own else _of_run(source)
    verdict = NOT_PRIVATE if math.isinf(privacy["epsilon_tight"]) else VERDICTS[about["kind"]]
    head = yaml.safe_dump(to_json(_head(source, about)), sort_keys=False, allow_unicode=True)
    given = {"source": source, "own": own, "head": head, "verdict": verdict, **about}
    return _TEMPLATES.get_template("card.md").render(given, epsilon=epsilon, interval=interval)


def _of_loop(report: Source) -> dict[str, Any]:
    """Return the card's text on your own loop."""
    most = report["privacy"]["examples_per_owner"] if report["owners"] else 0
    owner = f"one owner with {_counted(most)} or fewer in a step"
    return {
        "name": report["name"],
        "title": report["name"],
        "algorithm": report["algorithm"],
        "task": "other",
        "pipeline": None,
        "whose": owner if report["owners"] else "one example",
        "kind": kind_of(report["privacy"]["randomness_from"]),
        "takes": report["inputs"],
    }


def _of_run(record: Source) -> dict[str, Any]:
    """Return the card's text on a run."""
    privacy, config = record["privacy"], record["config"]
    task, (shape, dtype) = config["task"]["name"], files.raw_example(record)
    one = name_one(privacy["unit"])
    owner = f"{one} with {_counted(privacy['examples_per_patient'])}"
    return {
        "name": f"{record['recipe']}-{record['run'][:12]}",
        "title": config["model"]["name"],
        "algorithm": config["algorithm"]["name"],
        "task": task,
        "pipeline": HUB_TASKS.get((task, len(record["data"]["example"]["input_shape"]))),
        "one": one,
        "owner": owner,
        "whose": owner if privacy["epsilon_of"] != "example" else "one example",
        "kind": "cryptographic" if privacy["randomness"] == "cryptographic" else "seeded",
        "takes": f"{dtype} {['n', *shape]}".replace("'", ""),
        "licence": _licence(record["data"]["name"]),
    }


def _head(source: Source, about: dict[str, Any]) -> dict[str, Any]:
    """Return the head, without results that have no number: hubs reject those."""
    privacy, metrics, data = source["privacy"], source["metrics"], source["data"]
    task, pipeline, made = about["task"], about["pipeline"], source["environment"]
    result = {
        "task": {"type": pipeline or task, "name": task.replace("_", " ")},
        "dataset": {"type": data["name"], "name": data["name"]},
        "metrics": [{"type": k, "name": f"test {k}", "value": v} for k, v in metrics.items()],
    }
    return {
        "library_name": "zdp-bench",
        **({"pipeline_tag": pipeline} if pipeline else {}),
        "tags": ["differential-privacy", about["algorithm"]],
        "datasets": [data["name"]],
        "metrics": list(metrics),
        **({"model-index": [{"name": about["name"], "results": [result]}]} if metrics else {}),
        "data": {key: value for key, value in data.items() if not isinstance(value, dict)},
        "differential_privacy": {key: privacy[key] for key in STATED if key in privacy},
        "run": {
            **{key: source[key] for key in ("recipe", "run", "seed") if key in source},
            "weights_sha256": source["measured"]["weights"]["digest"],
            "commit": made["commit"],
            "versions": made["versions"],
        },
    }


def _counted(many: int) -> str:
    return f"{many} example{'' if many == 1 else 's'}"


def _licence(name: str) -> str:
    try:
        return data_card(name).licence
    except UserError:  # of another package, without a card
        return "its owner's"
