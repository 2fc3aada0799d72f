"""The model card of a run's record, or of the report of a loop of one's own: Markdown with the YAML
head that model hubs read.
"""

from __future__ import annotations

import math
from typing import Any

import yaml

from zdp_bench.data.files import card as data_card
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.folder import Source
from zdp_bench.library.keys import kind_of
from zdp_bench.records import is_of_unit, shares_of_one, to_json
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
NAMED = 8  # buffers and frozen parameters that a card names
TEXT = """---
{head}---

# {title}

{verdict}

## Privacy

| | |
| --- | --- |
{rows}

Not covered by any ε:

{uncovered}

## Model

{model}

```python
import zdp_bench

model = zdp_bench.load({load})  # in eval mode
```

`zdp-bench verify FOLDER` recomputes every ε from mechanism and ledger.

## {results}

{metrics}

## Data

{data}
"""


def card(source: Source) -> str:
    """Return the model card of a record, or of the report of a loop of one's own."""
    own = _of_loop(source) if files.is_report(source) else _of_run(source)
    privacy, metrics = source["privacy"], source["metrics"]
    measured = [
        {"type": name, "name": f"test {name}", "value": value} for name, value in metrics.items()
    ]
    task, kind, data = own["task"], own["kind"], source["data"]
    result = {
        "task": {"type": kind or task, "name": task.replace("_", " ")},
        "dataset": {"type": data["name"], "name": data["name"]},
        "metrics": measured,
    }
    made = source["environment"]
    head: dict[str, Any] = {
        "library_name": "zdp-bench",
        **({"pipeline_tag": kind} if kind else {}),
        "tags": ["differential-privacy", own["algorithm"]],
        "datasets": [data["name"]],
        "metrics": list(metrics),
        # A hub refuses results without a number.
        **({"model-index": [{"name": own["name"], "results": [result]}]} if metrics else {}),
        "data": {key: value for key, value in data.items() if not isinstance(value, dict)},
        "differential_privacy": {key: privacy[key] for key in files.STATED if key in privacy},
        "run": {
            **{key: source[key] for key in ("recipe", "run", "seed") if key in source},
            "weights_sha256": source["measured"]["weights"]["digest"],
            "commit": made["commit"],
            "versions": made["versions"],
        },
    }
    table = [f"| {name} | {value:.4f} |" for name, value in metrics.items()]
    rows = [*own["epsilons"], *_common_rows(privacy), *own["rows"]]
    rows.append(("zdp-bench", made["versions"]["zdp-bench"]))
    return TEXT.format(
        head=yaml.safe_dump(to_json(head), sort_keys=False, allow_unicode=True),
        title=f"{own['model_name']} on {data['name']}",
        verdict=NOT_PRIVATE
        if math.isinf(privacy["epsilon_tight"])
        else VERDICTS[own["randomness"]],
        rows="\n".join(f"| {name} | {value} |" for name, value in rows),
        uncovered="\n".join(f"- {what}" for what in own["uncovered"]),
        model=own["model"],
        load=own["load"],
        results=own["results"],
        metrics="\n".join(["| metric | value |", "| --- | --- |", *table] if table else ["None."]),
        data=own["about_data"],
    )


def _common_rows(privacy: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows on δ, neighbours, sampling, noise and ledger."""
    sampling, ledger = privacy["sampling"], privacy["ledger"]
    of = f"{sampling['records']:,}" if sampling["records"] else "a private number"
    turn = f" in one step of {sampling['cycle']}" if "cycle" in sampling else ""
    rate = f"{sampling['scheme']}, rate {sampling['sample_rate']:.4g} of {of}{turn}"
    return [
        ("δ", f"{privacy['delta']:g}"),
        ("neighbours", privacy["adjacency"].replace("_", " ")),
        ("sampling", f"{rate}, {privacy['steps']:,} steps"),
        ("noise", f"σ {privacy['noise_multiplier']:.4g}, z {privacy['z']:.4g} where it is least"),
        ("randomness", privacy.get("randomness_from", privacy["randomness"])),
        ("ledger", f"{ledger['entries']:,} entries, {ledger['digest']}"),
    ]


def _epsilon_rows(privacy: dict[str, Any], whose: str) -> list[tuple[str, str]]:
    """Return the rows on the tight ε of an owner, and of one of its examples if that is stated."""
    tight = interval(privacy["epsilon_tight_at_least"], privacy["epsilon_tight"])
    found = [(f"ε of {whose}, tight", tight)]
    if "epsilon_part" in privacy:
        found.append(("ε of one of its examples, tight", epsilon(privacy["epsilon_part"])))
    return found


def _counted(many: int) -> str:
    return f"{many} example{'' if many == 1 else 's'}"


def _of_run(record: Source) -> dict[str, Any]:
    """Return what the card of a run's record says and no other."""
    config, data, privacy = record["config"], record["data"], record["privacy"]
    task, model = config["task"]["name"], config["model"]["name"]
    algorithm, start, behind = (
        config["algorithm"]["name"],
        record.get("start"),
        record.get("representation"),
    )
    whose = f"{name_one(privacy['unit'])} with {_counted(privacy['examples_per_patient'])}"
    epsilons = _epsilon_rows(privacy, whose if is_of_unit(privacy) else "one example")
    if not is_of_unit(privacy):
        owned = interval(privacy["epsilon_patient_at_least"], privacy["epsilon_patient"])
        epsilons.append((f"ε of {whose}", owned))
    claimed = f"{epsilon(privacy['epsilon_claimed'])} (accountant {privacy['claimed_by']})"
    uncovered = [
        "tuning: other runs on the same examples, if this is the best of them",
        "the test set, and validation examples if there are any: they count as public",
    ]
    if (many := shares_of_one(privacy)) > 1:
        one = name_one(privacy["unit"])
        larger = f"the larger ε above covers up to {many} examples together"
        uncovered.append(f"{one}, by the ε per example: {larger}")
    if privacy["randomness"] != "cryptographic":
        uncovered.append("anyone who knows the seed and nearly all of the data")
    if (behind or {}).get("trained_on"):
        uncovered.append("the training data of the public network in front of the model")
    if start:
        uncovered.append("the data of the public start")
    shape, dtype = files.raw_example(record)
    takes = f"`{dtype} {['n', *shape]}`".replace("'", "")
    seen = f" It sees them through the public transform `{behind['name']}`." if behind else ""
    public = f"weights of recipe {start['recipe']} on {start['data']['name']}" if start else "none"
    notes = f": {data['notes']}" if data["notes"] else ""
    return {
        "name": f"{record['recipe']}-{record['run'][:12]}",
        "model_name": model,
        "algorithm": algorithm,
        "task": task,
        "kind": HUB_TASKS.get((task, len(data["example"]["input_shape"]))),
        "epsilons": [*epsilons, ("ε claimed", claimed)],
        "rows": [("public start", public)],
        "randomness": "cryptographic" if privacy["randomness"] == "cryptographic" else "seeded",
        "uncovered": uncovered,
        "model": f"Trained with {algorithm} (recipe {record['recipe']}, seed {record['seed']}), "
        f"{record['model']['parameters_real']:,} real parameters. It takes {takes}, prepared as "
        f"its training data was (`dataset` in `{files.RECIPE}`), and returns "
        f"{data['example']['outputs']} numbers.{seen} Without Python: "
        "`zdp-bench predict FOLDER inputs.npy --out outputs.npy`.",
        "load": "FOLDER",
        "results": "Results on the test set",
        "about_data": f"{data['name']}, {data['provenance']}{notes}. {data['train']:,} training "
        f"examples, {data['validation']:,} for validation, {data['test']:,} for testing. Licence "
        "of the "
        f"data: {_licence(data['name'])}.",
    }


def _of_loop(report: Source) -> dict[str, Any]:
    """Return what the card of a loop of one's own says and no other."""
    privacy, data = report["privacy"], report["data"]
    whose = "one example"
    if report["owners"]:
        whose = f"one owner with {_counted(privacy['examples_per_owner'])} or fewer in a step"
    rows = []
    if (taken := privacy.get("steps_taken")) is not None:  # an older export does not say
        rows = [("steps of these weights", f"{taken:,}; ε counts all steps above")]
    uncovered = [
        "tuning: other trainings on the same examples, if this is the best of them",
        "use of the examples outside `private.step`",
    ]
    if privacy["epsilon_of"] == "example":
        uncovered.append("a person who owns several examples")
    if fixed := privacy["fixed_state"]:
        names = ", ".join(f"`{name}`" for name in fixed[:NAMED])
        more = " and others" if len(fixed) > NAMED else ""
        uncovered.append(f"what was not trained here: {names}{more}")
    if (randomness := kind_of(privacy["randomness_from"])) == "seeded":
        uncovered.append("anyone who knows the seed and nearly all of the data")
    many = "a private number of" if data["train"] is None else f"{data['train']:,}"
    return {
        "name": report["name"],
        "model_name": report["name"],
        "algorithm": report["algorithm"],
        "task": "other",
        "kind": None,
        "epsilons": [
            *_epsilon_rows(privacy, whose),
            ("ε by Rényi divergences", epsilon(privacy["epsilon_rdp"])),
        ],
        "rows": rows,
        "randomness": randomness,
        "uncovered": uncovered,
        "model": f"Trained with {report['algorithm']} in a custom loop, "
        f"{report['parameters_real']:,} real parameters. It takes `{report['inputs']}`. Its code "
        "is not in this folder: create the network, then",
        "load": "FOLDER, model=network",
        "results": "Results, as stated by the author",
        "about_data": f"{data['name']}: {many} training examples, which nobody else can check.",
    }


def _licence(name: str) -> str:
    try:
        return data_card(name).licence
    except UserError:  # of another package, without a card
        return "its owner's"
