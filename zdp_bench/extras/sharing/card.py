"""The model card: Markdown with the YAML head that model hubs read.

All of it is from a run's record, or from the report of a loop of one's own.
"""

from __future__ import annotations

import math
from typing import Any

import yaml

from zdp_bench.data.files import card as data_card
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.folder import Report
from zdp_bench.library.keys import kind_of
from zdp_bench.records import Record, is_of_unit, shares_of_one, to_json
from zdp_bench.report.number_format import epsilon, interval, name_one

HUB_TASKS = {
    ("classification", 3): "image-classification",
    ("binary_classification", 3): "image-classification",
    ("segmentation", 3): "image-segmentation",
    ("reconstruction", 3): "image-to-image",
}  # (task, dimensions of an input) -> the hub's name for it
VERDICTS = {
    "seeded": "**Not for release to an adversary.** Noise and batches follow from the seed: "
    "whoever knows it, the configuration or code, and all of the data but one example can test "
    "guesses of that one. For a model that you give away, train with `privacy.secure=true`, or "
    "`secure=True` in a loop of your own.",
    "keyed": "Noise and batches of each step follow from a key that the operating system drew and "
    "nobody kept. For a model that you give to an adversary, train with `secure=True`: every "
    "number is drawn from it.",
    "cryptographic": "Noise and batches come from the operating system's cryptographic randomness.",
}  # by where the randomness comes from
NOT_PRIVATE = "**Not private.** Some direction of a release got no noise: ε is ∞."
UNKNOWN_LICENCE = "its owner's"
NAMED = 8  # buffers and frozen parameters that a card names


def card(record: Record) -> str:
    """Return the model card of a run's record."""
    task, data, privacy = record["config"]["task"]["name"], record["data"], record["privacy"]
    example, model, start = data["example"], record["config"]["model"], record.get("start")
    algorithm = record["config"]["algorithm"]["name"]
    kind = HUB_TASKS.get((task, len(example["input_shape"])))
    name = f"{record['recipe']}-{record['run'][:12]}"
    head = _hub_head(name, algorithm, data["name"], record["metrics"], task, kind) | {
        "data": {key: data[key] for key in ("name", "provenance", "digest", "train", "test")},
        "differential_privacy": {key: privacy[key] for key in files.PRIVACY}
        | {"public_start": start["recipe"] if start else None},
        "run": {key: record[key] for key in ("recipe", "run", "seed")} | _origin(record),
    }
    notes = f": {data['notes']}" if data["notes"] else ""
    shape, dtype = files.raw_example(record)
    takes = f"`{dtype} {['n', *shape]}`".replace("'", "")
    behind = record.get("representation")
    seen = f" It sees them through the public transform `{behind['name']}`." if behind else ""
    return _write(
        record,
        head,
        title=f"{model['name']} on {data['name']}",
        randomness="cryptographic" if privacy["randomness"] == "cryptographic" else "seeded",
        rows=[
            *_epsilon_rows(privacy),
            *_sampling_rows(privacy),
            ("randomness", privacy["randomness"]),
            (
                "public start",
                f"weights of recipe {start['recipe']} on {start['data']['name']}"
                if start
                else "none",
            ),
        ],
        uncovered=_uncovered(record),
        model=f"Trained with {algorithm} (recipe {record['recipe']}, seed {record['seed']}), "
        f"{record['model']['parameters_real']:,} real parameters. It takes {takes}, prepared as "
        f"its training data was (`dataset` in `{files.RECIPE}`), and returns {example['outputs']} "
        f"numbers.{seen} Without Python: `zdp-bench predict FOLDER inputs.npy --out outputs.npy`.",
        load="FOLDER",
        results="Results on the test set",
        data=f"{data['name']}, {data['provenance']}{notes}. {data['train']:,} examples to train, "
        f"{data['validation']:,} to validate, {data['test']:,} to test. Licence of the data: "
        f"{_licence(data['name'])}.",
    )


def own_card(report: Report) -> str:
    """Return the model card of the report of a loop of one's own."""
    privacy, data, taken = report["privacy"], report["data"], report["privacy"].get("steps_taken")
    head = _hub_head(report["name"], report["algorithm"], data["name"], report["metrics"]) | {
        "data": data,
        "differential_privacy": {key: privacy[key] for key in files.PRIVACY_OF_OWN},
        "run": _origin(report),
    }
    many = "a private number of" if data["train"] is None else f"{data['train']:,}"
    rows = [*_own_epsilon_rows(report), *_sampling_rows(privacy)]
    if taken is not None:  # an older export does not say
        rows.append(("steps that made these weights", f"{taken:,}; ε counts all steps above"))
    return _write(
        report,
        head,
        title=f"{report['name']} on {data['name']}",
        randomness=kind_of(privacy["randomness_from"]),
        rows=[*rows, ("randomness from", privacy["randomness_from"])],
        uncovered=_uncovered_of_own(privacy),
        model=f"Trained with {report['algorithm']} in a loop of its owner's, "
        f"{report['parameters_real']:,} real parameters. It takes `{report['inputs']}`. Its code "
        "is not in this folder: build the network, then",
        load="FOLDER, model=network",
        results="Results, as the loop's owner measured them",
        data=f"{data['name']}: {many} examples to train, which nobody else can check.",
    )


def _hub_head(
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


def _origin(source: Record | Report) -> dict[str, Any]:
    """Return which weights they are, and the code that made them."""
    return {
        "weights_sha256": source["measured"]["weights"]["digest"],
        "commit": source["environment"]["commit"],
        "versions": source["environment"]["versions"],
    }


def _write(
    source: Record | Report,
    head: dict[str, Any],
    title: str,
    randomness: str,
    rows: list[tuple[str, str]],
    uncovered: list[str],
    model: str,
    load: str,
    results: str,
    data: str,
) -> str:
    """Return a card's text.

    Args:
        source: the record, or report.
        randomness: a key of `VERDICTS`.
        rows: of the table on privacy: name and value.
        uncovered: what no ε covers.
        model: where it comes from, and what it takes.
        load: the arguments of `zdp_bench.load`.
        results: the heading above the metrics.
    """
    privacy, ledger = source["privacy"], source["privacy"]["ledger"]
    written = yaml.safe_dump(to_json(head), sort_keys=False, allow_unicode=True)
    is_private = not math.isinf(privacy["epsilon_tight"])
    version = source["environment"]["versions"]["zdp-bench"]
    rows = [
        *rows,
        ("ledger", f"{ledger['entries']:,} entries, {ledger['digest']}"),
        ("zdp-bench", version),
    ]
    metrics = [f"| {name} | {value:.4f} |" for name, value in source["metrics"].items()]
    table = ["| metric | value |", "| --- | --- |", *metrics] if metrics else ["None was given."]
    lines = [
        f"# {title}",
        "",
        VERDICTS[randomness] if is_private else NOT_PRIVATE,
        "",
        "## Privacy",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        "No ε here covers:",
        "",
        *(f"- {what}" for what in uncovered),
        "",
        "## Model",
        "",
        model,
        "",
        "```python",
        "import zdp_bench",
        "",
        f"model = zdp_bench.load({load})  # in eval mode",
        "```",
        "",
        "`zdp-bench verify FOLDER` recomputes every ε from mechanism and ledger.",
        "",
        f"## {results}",
        "",
        *table,
        "",
        "## Data",
        "",
        data,
        "",
    ]
    return f"---\n{written}---\n\n" + "\n".join(lines)


def _epsilon_rows(privacy: dict[str, Any]) -> list[tuple[str, str]]:
    many = privacy["examples_per_patient"]
    tight = interval(privacy["epsilon_tight_at_least"], privacy["epsilon_tight"])
    owner = interval(privacy["epsilon_patient_at_least"], privacy["epsilon_patient"])
    owned = f"ε of {name_one(privacy['unit'])} with {many} example{'' if many == 1 else 's'}"
    found = [("ε of one example, tight", tight), (owned, owner)]
    if is_of_unit(privacy):
        found = [(f"{owned}, tight", tight), *_part_row(privacy)]
    claimed = f"{epsilon(privacy['epsilon_claimed'])} (accountant {privacy['claimed_by']})"
    return [*found, ("ε claimed", claimed)]


def _own_epsilon_rows(report: Report) -> list[tuple[str, str]]:
    privacy, whose = report["privacy"], "one example"
    if report["owners"]:
        many = privacy["examples_per_owner"]
        whose = f"one owner with {many} example{'' if many == 1 else 's'} or fewer in a step"
    tight = interval(privacy["epsilon_tight_at_least"], privacy["epsilon_tight"])
    return [
        (f"ε of {whose}, tight", tight),
        *_part_row(privacy),
        ("ε by Rényi divergences", epsilon(privacy["epsilon_rdp"])),
    ]


def _part_row(privacy: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the row on one of an owner's examples; none where an older version wrote it."""
    if "epsilon_part" not in privacy:
        return []
    return [("ε of one of its examples, tight", epsilon(privacy["epsilon_part"]))]


def _sampling_rows(privacy: dict[str, Any]) -> list[tuple[str, str]]:
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


def _uncovered(record: Record) -> list[str]:
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


def _uncovered_of_own(privacy: dict[str, Any]) -> list[str]:
    """Return what the ε of a report leaves out."""
    found = ["tuning: other trainings on the same examples, of which this may be the best"]
    found += ["what the loop did with the examples outside of `private.step`"]
    if privacy["epsilon_of"] == "example":
        found.append("a person who owns several examples")
    if fixed := privacy["fixed_state"]:
        names = ", ".join(f"`{name}`" for name in fixed[:NAMED])
        more = " and others" if len(fixed) > NAMED else ""
        found.append(f"what was not trained here: {names}{more}")
    if kind_of(privacy["randomness_from"]) == "seeded":
        found.append("an adversary who knows the seed and nearly all of the data")
    return found


def _licence(name: str) -> str:
    try:
        return data_card(name).licence
    except UserError:  # of another package, without a card
        return UNKNOWN_LICENCE
