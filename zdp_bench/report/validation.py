"""How a recipe's validation is shown: one table of facts, one of layers, and the surgery."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from zdp_bench.report.number_format import epsilon, name_one


def as_rich(report: dict[str, Any]) -> list[Table]:
    """The tables of one report (see `validate.Report`), as plain values."""
    data, sampling, privacy, cost = (
        report["data"],
        report["sampling"],
        report["privacy"],
        report["cost"],
    )
    facts = Table(
        title=f"recipe {report['recipe']}, not run", show_header=False, title_justify="left"
    )
    there = (
        "found"
        if data["found"]
        else "MISSING, so the counts are the release's; `zdp-bench data` says where it belongs"
    )
    facts.add_row("data", f"{data['name']}: {there}")
    facts.add_row(
        "records", f"{data['train']:,} to train, {data['test']:,} to test, each {data['input']}"
    )
    facts.add_row(
        "model",
        f"{report['model']['name']}: {report['model']['parameters_real']:,} real parameters that train",
    )
    facts.add_row("sampling", _sampling(sampling))
    facts.add_row(
        "noise",
        f"σ = {privacy['noise_multiplier']:.4g}, z = {privacy['z']:.4g} (of the weakest direction)",
    )
    facts.add_row(
        "claimed ε", f"{epsilon(privacy['epsilon_claimed'])}  (accountant {privacy['claimed_by']})"
    )
    facts.add_row(
        "tight ε", f"{epsilon(privacy['epsilon_tight'])} of a record at δ = {privacy['delta']:g}"
    )
    many, unit = data["records_per_patient"], privacy["unit"]
    owner = f"{name_one(unit)} with {many} record{'s' if many > 1 else ''}"
    facts.add_row(f"{unit} ε", f"{epsilon(privacy['epsilon_patient'])} of {owner}")
    if privacy["max_epsilon"]:
        facts.add_row("budget", f"stops before a tight ε of {privacy['max_epsilon']:g}")
    if cost:
        facts.add_row(
            "cost",
            f"about {duration(cost['seconds'])} and {size(cost['bytes'])} ({cost['measured_on']}), evaluation apart",
        )
    layers = Table(
        "layer",
        "kind",
        "parameters",
        "a record's gradient is bounded by",
        title="layers",
        title_justify="left",
    )
    for layer in report["layers"]:
        layers.add_row(layer["name"], layer["kind"], f"{layer['parameters']:,}", layer["rule"])
    tables = [facts, layers]
    if report["surgery"]:
        surgery = Table("layer", "was", "is", "why", title="replaced layers", title_justify="left")
        for line in report["surgery"]:
            surgery.add_row(line["layer"], line["was"], line["is"], line["why"])
        tables.append(surgery)
    return tables


def _sampling(of: dict[str, Any]) -> str:
    kind = {
        "poisson": f"Poisson, each record with probability {of['sample_rate']:.4g}, {of['expected_batch_size']:.4g} expected",
        "uniform": f"{of['expected_batch_size']:.0f} of {of['records']:,} records, without replacement",
        "shuffled": f"shuffled, {of['expected_batch_size']:.0f} at a time; carries no ε",
        "full": "every record at every step",
    }[of["scheme"]]
    return f"{kind}; {of['steps']:,} steps in {of['epochs']} epochs; neighbours: {of['adjacency'].replace('_', ' ')}"


def duration(seconds: float) -> str:
    """'45 s', '12 min', '3.4 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(count: int) -> str:
    """'350 MiB', '2.1 GiB'."""
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
