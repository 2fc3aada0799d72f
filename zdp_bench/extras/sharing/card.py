"""Write the model card of a run's record, or of your own loop's report.

The text is in the template `templates/card.md`. Model hubs read the YAML head.
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
from zdp_bench.library.keys import randomness_kind
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import to_json
from zdp_bench.report.number_format import interval, name_one

# (task, number of dimensions of an example) -> the task's name on model hubs
HUB_TASKS = {
    ("classification", 3): "image-classification",
    ("binary_classification", 3): "image-classification",
    ("segmentation", 3): "image-segmentation",
    ("reconstruction", 3): "image-to-image",
}
# source of the randomness -> what the card says about it
VERDICTS = {
    "seeded": "**Not for release to an adversary.** Noise and batches follow from the seed: "
    "anyone who knows it, the configuration or code, and all data but one example can test "
    "guesses of that example. Train models that you publish with `privacy.secure=true`, or "
    "`secure=True` in your own loop.",
    "keyed": "Noise and batches of each step follow from a key of the operating system that was "
    "not stored. Train models that you publish with `secure=True`, which draws every number from "
    "the operating system.",
    "cryptographic": "Noise and batches come from the operating system's cryptographic randomness.",
}
NOT_PRIVATE = "**Not private.** Some direction of a release has no noise: ε is ∞."
# Keys of a record's `privacy` section that the head states, in this order.
HEAD_KEYS = (
    "unit",
    "epsilon_of",
    "examples_per_patient",
    "adjacency",
    "delta",
    "epsilon_claimed",
    "claimed_by",
    "epsilon_tight",
    "epsilon_tight_at_least",
    "epsilon_patient",
    "epsilon_patient_at_least",
    "epsilon_rdp",
    "noise_multiplier",
    "z",
    "steps",
    "sampling",
    "randomness",
    "randomness_from",
    "ledger",
)


_TEMPLATES = Environment(
    loader=PackageLoader("zdp_bench.extras.sharing"),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def card(source: Source) -> str:
    """Return the model card of a record, or of your own loop's report."""
    is_own = files.is_report(source)
    about = _describe_loop(source) if is_own else _describe_run(source)
    verdict = VERDICTS[about["kind"]]
    if math.isinf(source["privacy"]["epsilon_tight"]):
        verdict = NOT_PRIVATE
    head = yaml.safe_dump(to_json(_head(source, about)), sort_keys=False, allow_unicode=True)
    return _TEMPLATES.get_template("card.md").render(
        about,
        source=source,
        own=is_own,
        head=head,
        verdict=verdict,
        epsilon=show_epsilon,
        interval=interval,
    )


def _describe_loop(report: Source) -> dict[str, Any]:
    """Return the template's values for the report of your own loop."""
    unit = "one example"
    if report["owners"]:
        max_examples = _count_examples(report["privacy"]["examples_per_owner"])
        unit = f"one owner with {max_examples} or fewer in a step"
    return {
        "name": report["name"],
        "title": report["name"],
        "algorithm": report["algorithm"],
        "task": "other",
        "pipeline": None,
        "protected": unit,
        "kind": randomness_kind(report["privacy"]["randomness_from"]),
        "takes": report["inputs"],
    }


def _describe_run(record: Source) -> dict[str, Any]:
    """Return the template's values for the record of a run."""
    privacy, config = record["privacy"], record["config"]
    task = config["task"]["name"]
    shape, dtype = files.raw_example(record)
    dimensions = len(record["data"]["example"]["input_shape"])
    one_owner = name_one(privacy["unit"])
    owner = f"{one_owner} with {_count_examples(privacy['examples_per_patient'])}"
    return {
        "name": f"{record['recipe']}-{record['run'][:12]}",
        "title": config["model"]["name"],
        "algorithm": config["algorithm"]["name"],
        "task": task,
        "pipeline": HUB_TASKS.get((task, dimensions)),
        "one_owner": one_owner,
        "owner": owner,
        "protected": "one example" if privacy["epsilon_of"] == "example" else owner,
        "kind": "cryptographic" if privacy["randomness"] == "cryptographic" else "seeded",
        "takes": f"{dtype} [{', '.join(map(str, ('n', *shape)))}]",
        "licence": _licence(record["data"]["name"]),
    }


def _head(source: Source, about: dict[str, Any]) -> dict[str, Any]:
    """Return the YAML head. It lacks the list of results if it would be empty: hubs reject that."""
    privacy, data, environment = source["privacy"], source["data"], source["environment"]
    head: dict[str, Any] = {"library_name": "zdp-bench"}
    if about["pipeline"]:
        head["pipeline_tag"] = about["pipeline"]
    head["tags"] = ["differential-privacy", about["algorithm"]]
    head["datasets"] = [data["name"]]
    head["metrics"] = list(source["metrics"])
    if source["metrics"]:
        results = [_results(source, about)]
        head["model-index"] = [{"name": about["name"], "results": results}]
    head["data"] = {key: value for key, value in data.items() if not isinstance(value, dict)}
    stated = {key: privacy[key] for key in HEAD_KEYS if key in privacy}
    start = privacy.get("start") or {}
    if start.get("trainings"):
        stated["epsilon_tight_with_earlier_trainings"] = start["epsilon_tight"]
    head["differential_privacy"] = stated
    head["run"] = {
        **{key: source[key] for key in ("recipe", "run", "seed") if key in source},
        "weights_sha256": source["measured"]["weights"]["digest"],
        "commit": environment["commit"],
        "versions": environment["versions"],
    }
    return head


def _results(source: Source, about: dict[str, Any]) -> dict[str, Any]:
    """Return the test results in the form that model hubs read."""
    task, data = about["task"], source["data"]
    return {
        "task": {"type": about["pipeline"] or task, "name": task.replace("_", " ")},
        "dataset": {"type": data["name"], "name": data.get("title") or data["name"]},
        "metrics": [
            {"type": metric, "name": f"test {metric}", "value": value}
            for metric, value in source["metrics"].items()
        ],
    }


def _count_examples(count: int) -> str:
    return "1 example" if count == 1 else f"{count} examples"


def _licence(name: str) -> str:
    try:
        return data_card(name).licence
    except UserError:  # a data set of another package, without a card
        return "its owner's"
