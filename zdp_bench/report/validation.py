"""A recipe's validation as tables: the facts, the layers, and the layers that were replaced."""

from __future__ import annotations

from typing import Any

from zdp_bench.report.number_format import epsilon, name_one
from zdp_bench.report.sheet import Sheet


def sheets(report: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a `validate.Report`, given as plain values."""
    layers = [
        [layer["name"], layer["kind"], f"{layer['parameters']:,}", layer["rule"]]
        for layer in report["layers"]
    ]
    columns = ("layer", "kind", "parameters", "a record's gradient is bounded by")
    made = [
        Sheet(f"recipe {report['recipe']}, not run", (), _facts(report)),
        Sheet("layers", columns, layers),
    ]
    if report["surgery"]:
        columns = ("layer", "was", "is", "why")
        replaced = [[line[column] for column in columns] for line in report["surgery"]]
        made.append(Sheet("replaced layers", columns, replaced))
    return made


def _facts(report: dict[str, Any]) -> list[list[str]]:
    data, model, privacy, cost = (report[key] for key in ("data", "model", "privacy", "cost"))
    lacking = "MISSING, so the counts are the release's; `zdp-bench data` says where it belongs"
    many, unit, of = data["records_per_patient"], privacy["unit"], privacy["epsilon_of"]
    owner = f"{name_one(unit)} with {many} record{'s' if many > 1 else ''}"
    facts = {
        "data": f"{data['name']}: {'found' if data['found'] else lacking}",
        "records": f"{data['train']:,} to train, {data['test']:,} to test, each {data['input']}",
        **({"owners": f"{data['owners']:,} {unit}s to train"} if data["owners"] else {}),
        **({"classes": _classes(data["classes"])} if data["classes"] else {}),
        "model": f"{model['name']}: {model['parameters_real']:,} real parameters that train",
        "sampling": _sampling(report["sampling"], of),
        "noise": f"σ = {privacy['noise_multiplier']:.4g}, z = {privacy['z']:.4g} "
        "(of the weakest direction)",
        "claimed ε": f"{epsilon(privacy['epsilon_claimed'])}  (accountant {privacy['claimed_by']})",
        "tight ε": f"{epsilon(privacy['epsilon_tight'])} of {name_one(of)} "
        f"at δ = {privacy['delta']:g}",
        f"{unit} ε": f"{epsilon(privacy['epsilon_patient'])} of {owner}",
    }
    if privacy["max_epsilon"]:
        facts["budget"] = f"stops before a tight ε of {privacy['max_epsilon']:g}"
    if cost:
        facts["cost"] = (
            f"about {duration(cost['seconds'])} and {size(cost['bytes'])} "
            f"({cost['measured_on']}), evaluation apart"
        )
    return [list(fact) for fact in facts.items()]


def _classes(counts: dict[str, int]) -> str:
    """Return '0 NORMAL: 40, 1 PNEUMONIA: 35 to train ...': the number of a class, and its size."""
    listed = [f"{n} {name}: {count:,}" for n, (name, count) in enumerate(counts.items())]
    return f"{', '.join(listed)} to train; not in the record"


def _sampling(of: dict[str, Any], unit: str) -> str:
    batch = of["expected_batch_size"]
    kind = {
        "poisson": f"Poisson, each {unit} with probability {of['sample_rate']:.4g}, "
        f"{batch:.4g} expected",
        "uniform": f"{batch:.0f} of {of['records']:,} {unit}s, without replacement",
        "shuffled": f"shuffled, {batch:.0f} at a time; carries no ε",
        "full": f"every {unit} at every step",
    }[of["scheme"]]
    neighbours = of["adjacency"].replace("_", " ")
    return f"{kind}; {of['steps']:,} steps in {of['epochs']} epochs; neighbours: {neighbours}"


def duration(seconds: float) -> str:
    """'45 s', '12 min', '3.4 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(count: int) -> str:
    """'350 MiB', '2.1 GiB'."""
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
