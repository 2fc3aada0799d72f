"""The model card of a loop of one's own, all of it from its report."""

from __future__ import annotations

import math
from typing import Any

from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.card import (
    NOT_PRIVATE,
    SECURE,
    hub_head,
    ledger_rows,
    metric_rows,
    privacy_section,
    sampling_rows,
    with_head,
)
from zdp_bench.extras.sharing.folder import Report
from zdp_bench.library.keys import kind_of
from zdp_bench.records import to_json
from zdp_bench.report.number_format import epsilon, interval

SEEDED = (
    "**Not for release to an adversary.** Noise and batches follow from the seed: whoever knows "
    "it, the code and all of the data but one example can test guesses of that one. For a model "
    "that you give away, train with `secure=True`."
)
KEYED = (
    "Noise and batches of each step follow from a key that the operating system drew and nobody "
    "kept. For a model that you give to an adversary, train with `secure=True`: every number is "
    "drawn from it."
)
_SENTENCES = {"cryptographic": SECURE, "keyed": KEYED, "seeded": SEEDED}


def card(report: Report) -> str:
    """Return the model card of a report."""
    return with_head(head_of(report), _body(report))


def head_of(report: Report) -> dict[str, Any]:
    """Return the card's YAML head; its `differential_privacy` holds what `verify` recomputes."""
    stated = {key: report["privacy"][key] for key in files.PRIVACY_OF_OWN}
    return to_json(
        hub_head(report["name"], report["algorithm"], report["data"]["name"], report["metrics"])
        | {
            "data": report["data"],
            "differential_privacy": stated,
            "run": {
                "weights_sha256": report["measured"]["weights"]["digest"],
                "commit": report["environment"]["commit"],
                "versions": report["environment"]["versions"],
            },
        }
    )


def _body(report: Report) -> list[str]:
    """Return the lines of the card's text."""
    privacy, data = report["privacy"], report["data"]
    many = "a private number of" if data["train"] is None else f"{data['train']:,}"
    measured = metric_rows(report["metrics"]) or ["None was given.", ""]
    return [
        f"# {report['name']} on {data['name']}",
        "",
        *privacy_section(
            NOT_PRIVATE
            if math.isinf(privacy["epsilon_tight"])
            else _SENTENCES[kind_of(privacy["randomness_from"])],
            _privacy_rows(report),
            "This ε does not cover:",
            _not_covered(privacy),
        ),
        "## Model",
        "",
        f"Trained with {report['algorithm']} in a loop of its owner's, "
        f"{report['parameters_real']:,} real parameters. It takes `{report['inputs']}`. Its code "
        "is not in this folder: build the network, then",
        "",
        "```python",
        "import zdp_bench",
        "",
        "model = zdp_bench.load(FOLDER, model=network)  # in eval mode",
        "```",
        "",
        "`zdp-bench verify FOLDER` recomputes ε from mechanism and ledger.",
        "",
        "## Results, as the loop's owner measured them",
        "",
        *measured,
        "## Data",
        "",
        f"{data['name']}: {many} examples to train, which nobody else can check.",
        "",
    ]


def _privacy_rows(report: Report) -> list[tuple[str, str]]:
    privacy = report["privacy"]
    whose = "one example"
    if report["owners"]:
        many = privacy["records_per_owner"]
        whose = f"one owner with {many} example{'' if many == 1 else 's'} or fewer in a step"
    tight = interval(privacy["epsilon_tight_at_least"], privacy["epsilon_tight"])
    return [
        (f"ε of {whose}, tight", tight),
        ("ε by Rényi divergences", epsilon(privacy["epsilon_rdp"])),
        *sampling_rows(privacy),
        *_steps_rows(privacy.get("steps_taken")),
        ("randomness from", privacy["randomness_from"]),
        *ledger_rows(privacy, report["environment"]),
    ]


def _not_covered(privacy: dict[str, Any]) -> list[str]:
    """Return what the ε of a report leaves out."""
    found = ["tuning: other trainings on the same examples, of which this may be the best"]
    found += ["what the loop did with the examples outside of `private.step`"]
    if privacy["epsilon_of"] == "record":
        found.append("a person who owns several examples")
    if privacy["fixed_state"]:
        names = ", ".join(f"`{name}`" for name in privacy["fixed_state"][:8])
        more = "" if len(privacy["fixed_state"]) <= 8 else " and others"
        found.append(f"what was not trained here: {names}{more}")
    if kind_of(privacy["randomness_from"]) == "seeded":
        found.append("an adversary who knows the seed and nearly all of the data")
    return found


def _steps_rows(taken: int | None) -> list[tuple[str, str]]:
    """Return the row on the steps of these weights; none of an export that does not say."""
    if taken is None:
        return []
    return [("steps that made these weights", f"{taken:,}; ε counts all steps above")]
