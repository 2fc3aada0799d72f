"""The model card: Markdown with the YAML head that model hubs read, all of it from the record."""

from __future__ import annotations

import math
from typing import Any

import yaml

from zdp_bench.data.files import card as data_card
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.records import Record, is_of_unit, shares_of_one, to_json
from zdp_bench.report.number_format import epsilon, interval, name_one

HUB_TASKS = {
    ("classification", 3): "image-classification",
    ("binary_classification", 3): "image-classification",
    ("segmentation", 3): "image-segmentation",
    ("reconstruction", 3): "image-to-image",
}  # (task, dimensions of an input) -> the hub's name for it
SEEDED = (
    "**Not for release to an adversary.** Noise and batches follow from the seed, so whoever knows "
    "seed, configuration and all of the data but one example can test guesses of that one. For a "
    "model that you give away, train with `privacy.secure=true`."
)
SECURE = "Noise and batches come from the operating system's cryptographic randomness."
NOT_PRIVATE = "**Not private.** Some direction of a release got no noise: ε is ∞."
UNKNOWN_LICENCE = "its owner's"


def card(record: Record) -> str:
    """Return the model card of a record."""
    return with_head(head_of(record), _body(record))


def card_or_nothing(record: Record) -> str:
    """Return the model card of a run, or nothing for one whose model cannot be handed on."""
    return "" if files.missing_keys(record) else card(record)


def with_head(head: dict[str, Any], body: list[str]) -> str:
    """Return a card's text."""
    written = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    return f"---\n{written}---\n\n" + "\n".join(body)


def head_of(record: Record) -> dict[str, Any]:
    """Return the card's YAML head; its `differential_privacy` holds what `verify` recomputes."""
    task, data = record["config"]["task"]["name"], record["data"]
    kind = HUB_TASKS.get((task, len(data["example"]["input_shape"])))
    name, algorithm = f"{record['recipe']}-{record['run'][:12]}", record["config"]["algorithm"]
    return to_json(
        hub_head(name, algorithm["name"], data["name"], record["metrics"], task, kind)
        | {
            "data": {key: data[key] for key in ("name", "provenance", "digest", "train", "test")},
            "differential_privacy": privacy_of(record),
            "run": {
                **{key: record[key] for key in ("recipe", "run", "seed")},
                "weights_sha256": record["measured"]["weights"]["digest"],
                "commit": record["environment"]["commit"],
                "versions": record["environment"]["versions"],
            },
        }
    )


def hub_head(
    name: str,
    algorithm: str,
    data: str,
    metrics: dict[str, float],
    task: str = "other",
    kind: str | None = None,
) -> dict[str, Any]:
    """Return what model hubs read of a head; `kind` is the hub's name for the task, if any."""
    measured = [
        {"type": metric, "name": f"test {metric}", "value": value}
        for metric, value in metrics.items()
    ]
    result = {
        "task": {"type": kind or task, "name": task.replace("_", " ")},
        "dataset": {"type": data, "name": data},
        "metrics": measured,
    }
    return {
        "library_name": "zdp-bench",
        **({"pipeline_tag": kind} if kind else {}),
        "tags": ["differential-privacy", algorithm],
        "datasets": [data],
        "metrics": list(metrics),
        # A hub refuses results without a number.
        **({"model-index": [{"name": name, "results": [result]}]} if metrics else {}),
    }


def privacy_of(record: Record) -> dict[str, Any]:
    """Return the numbers on privacy that the card's head states."""
    privacy = record["privacy"]
    start = record.get("start")
    return {key: privacy[key] for key in files.PRIVACY} | {
        "public_start": start["recipe"] if start else None
    }


def _body(record: Record) -> list[str]:
    """Return the lines of the card's text."""
    data, privacy, example = record["data"], record["privacy"], record["data"]["example"]
    model, algorithm = record["config"]["model"], record["config"]["algorithm"]["name"]
    secure = privacy["randomness"] == "cryptographic"
    licence = _licence(data["name"])
    notes = f": {data['notes']}" if data["notes"] else ""
    shape, dtype = files.raw_example(record)
    takes = f"`{dtype} {['n', *shape]}`".replace("'", "")
    behind = record.get("representation")
    seen = f" It sees them through the public transform `{behind['name']}`." if behind else ""
    return [
        f"# {model['name']} on {data['name']}",
        "",
        *privacy_section(
            NOT_PRIVATE if math.isinf(privacy["epsilon_tight"]) else SECURE if secure else SEEDED,
            _privacy_rows(record),
            "These ε do not cover:",
            _not_covered(record),
        ),
        "## Model",
        "",
        f"Trained with {algorithm} (recipe {record['recipe']}, seed {record['seed']}), "
        f"{record['model']['parameters_real']:,} real parameters. It takes {takes}, prepared as "
        f"its training data was (`dataset` in `{files.RECIPE}`), and returns {example['outputs']} "
        f"numbers.{seen}",
        "",
        "```python",
        "import zdp_bench",
        "",
        "model = zdp_bench.load(FOLDER)  # in eval mode",
        "```",
        "",
        "Without Python: `zdp-bench predict FOLDER inputs.npy --out outputs.npy`. "
        "`zdp-bench verify FOLDER` recomputes every ε from mechanism and ledger.",
        "",
        "## Results on the test set",
        "",
        *metric_rows(record["metrics"]),
        "## Data",
        "",
        f"{data['name']}, {data['provenance']}{notes}. {data['train']:,} examples to train, "
        f"{data['validation']:,} to validate, {data['test']:,} to test. Licence of the data: "
        f"{licence}.",
        "",
    ]


def privacy_section(
    verdict: str, rows: list[tuple[str, str]], heading: str, not_covered: list[str]
) -> list[str]:
    """Return the card's lines on privacy: verdict, numbers, and what no ε covers."""
    *others, last = not_covered
    return [
        verdict,
        "",
        "## Privacy",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        heading,
        "",
        *(f"- {what};" for what in others),
        f"- {last}.",
        "",
    ]


def _privacy_rows(record: Record) -> list[tuple[str, str]]:
    privacy, start = record["privacy"], record.get("start")
    many = privacy["records_per_patient"]
    tight = interval(privacy["epsilon_tight_at_least"], privacy["epsilon_tight"])
    owner = interval(privacy["epsilon_patient_at_least"], privacy["epsilon_patient"])
    owned = f"ε of {name_one(privacy['unit'])} with {many} example{'' if many == 1 else 's'}"
    found = [("ε of one example, tight", tight), (owned, owner)]
    if is_of_unit(privacy):
        found = [(f"{owned}, tight", tight)]
    began = f"weights of recipe {start['recipe']} on {start['data']['name']}" if start else "none"
    return [
        *found,
        (
            "ε claimed",
            f"{epsilon(privacy['epsilon_claimed'])} (accountant {privacy['claimed_by']})",
        ),
        *sampling_rows(privacy),
        ("randomness", privacy["randomness"]),
        ("public start", began),
        *ledger_rows(privacy, record["environment"]),
    ]


def sampling_rows(privacy: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows on δ, neighbours, sampling and noise."""
    sampling = privacy["sampling"]
    of = f"{sampling['records']:,}" if sampling["records"] else "a private number"
    return [
        ("δ", f"{privacy['delta']:g}"),
        ("neighbours", privacy["adjacency"].replace("_", " ")),
        (
            "sampling",
            f"{sampling['scheme']}, rate {sampling['sample_rate']:.4g} of {of}, "
            f"{privacy['steps']:,} steps",
        ),
        ("noise", f"σ {privacy['noise_multiplier']:.4g}, z {privacy['z']:.4g} where it is least"),
    ]


def ledger_rows(privacy: dict[str, Any], environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows on the ledger and the version that wrote it."""
    ledger = privacy["ledger"]
    return [
        ("ledger", f"{ledger['entries']:,} entries, {ledger['digest']}"),
        ("zdp-bench", f"{environment['versions']['zdp-bench']}"),
    ]


def metric_rows(metrics: dict[str, float]) -> list[str]:
    """Return the lines of a table of metrics; none without a metric."""
    rows = [f"| {name} | {value:.4f} |" for name, value in metrics.items()]
    return ["| metric | value |", "| --- | --- |", *rows, ""] if rows else []


def _not_covered(record: Record) -> list[str]:
    """Return what the ε of a record leaves out."""
    privacy, many = record["privacy"], shares_of_one(record["privacy"])
    found = ["tuning: other runs on the same examples, of which this may be the best"]
    found += ["the test set, and validation examples if there are any: they count as public"]
    if many > 1:
        found.append(
            f"{name_one(privacy['unit'])} by the ε of one example: the larger one above is for "
            f"up to {many} together"
        )
    if privacy["randomness"] != "cryptographic":
        found.append("an adversary who knows the seed and nearly all of the data")
    if (record.get("representation") or {}).get("trained_on"):
        found.append("the data that trained the public network in front of the model")
    if record.get("start"):
        found.append("the data of the public start")
    return found


def _licence(name: str) -> str:
    try:
        return data_card(name).licence
    except UserError:  # of another package, without a card
        return UNKNOWN_LICENCE
