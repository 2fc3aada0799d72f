"""What commands print: a validated recipe, a finished run and the data root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zdp_bench.data.files import Card, card, has_files, missing
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Privacy, Record
from zdp_bench.report.number_format import duration, interval, name_one
from zdp_bench.report.sheet import Sheet

# -------------------------------------------------------------------------------- a recipe, not run


def show_validation(report: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a `validate.Report`: the facts, the layers, and those replaced."""
    layers = [
        [layer["name"], layer["kind"], f"{layer['parameters']:,}", layer["rule"]]
        for layer in report["layers"]
    ]
    columns = ("layer", "kind", "parameters", "an example's gradient is bounded by")
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
    data, model, privacy = report["data"], report["model"], report["privacy"]
    lacking = "MISSING: the counts are those of the release; see `zdp-bench data`"
    found = "found" if data["found"] else lacking
    unit, protected = privacy["unit"], privacy["epsilon_of"]
    owned = data["examples_per_patient"]
    owner = f"{name_one(unit)} with {owned} example{'s' if owned > 1 else ''}"
    facts = {
        "data": f"{data['name']}: {found}",
        "examples": f"{data['train']:,} for training, {data['test']:,} for testing, "
        f"each {data['input']}",
    }
    if data["validation"]:
        facts["validation"] = f"{data['validation']:,} examples, not protected"
    if data["owners"]:
        facts["owners"] = f"{data['owners']:,} own the training examples"
    classes = []
    for number, (name, count) in enumerate(data["classes"].items()):
        classes.append(f"{number} {name}: {count:,}")
    if classes:
        facts["classes"] = f"{', '.join(classes)} for training; not in the record"
    claimed, tight = (
        show_epsilon(privacy["epsilon_claimed"]),
        show_epsilon(privacy["epsilon_tight"]),
    )
    sigma, z = privacy["noise_multiplier"], privacy["z"]
    facts |= {
        "model": f"{model['name']}: {model['parameters_real']:,} trainable real parameters",
        "sampling": _describe_sampling(report["sampling"], protected),
        "noise": f"σ = {sigma:.4g}, z = {z:.4g} (in the weakest direction)",
        "claimed ε": f"{claimed}  (accountant {privacy['claimed_by']})",
        "tight ε": f"{tight} per {protected} at δ = {privacy['delta']:g}",
        f"ε per {unit}": f"{show_epsilon(privacy['epsilon_patient'])}, for {owner}",
    }
    part = privacy["epsilon_part"]
    if part is not None and owned > 1:  # without its only example, an owner is not there
        facts["ε per example"] = f"{show_epsilon(part)}, for one of {name_one(unit)}'s examples"
    if privacy["max_epsilon"]:
        facts["budget"] = f"stops before a tight ε of {privacy['max_epsilon']:g}"
    cost = report["cost"]
    if cost:
        facts["cost"] = (
            f"{duration(cost['seconds'])} and {size(cost['bytes'])} "
            f"({cost['measured_on']}), without evaluation"
        )
    return [list(fact) for fact in facts.items()]


def _describe_sampling(sampling: dict[str, Any], unit: str) -> str:
    """Return how a step draws units, how many steps there are, and which neighbours ε compares."""
    batch = sampling["expected_batch_size"]
    cycle = f" in one step of {sampling['cycle']}" if "cycle" in sampling else ""
    kind = {
        "poisson": f"Poisson, each {unit} with probability {sampling['sample_rate']:.4g}{cycle}, "
        f"{batch:.4g} expected",
        "uniform": f"{batch:.0f} of {sampling['records']:,} {unit}s, without replacement",
        "shuffled": f"shuffled, {batch:.0f} at a time; not private",
        "full": f"every {unit} at every step",
    }[sampling["scheme"]]
    steps = f"{sampling['steps']:,} steps in {sampling['epochs']} epochs"
    neighbours = sampling["adjacency"].replace("_", " ")
    return f"{kind}; {steps}; neighbours: {neighbours}"


def size(count: int) -> str:
    """'350 MiB', '2.1 GiB'."""
    if count < 2**20:
        return "under 1 MiB"
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


# ----------------------------------------------------------------------------------- a finished run


def show_run(record: Record, path: Path, found: bool) -> Sheet:
    """Return a record's main numbers; `found` states that the run was done before."""
    privacy, data, headline = record.privacy, record.data, record.headline
    before = " (done before; force=true runs it again)" if found else ""
    tight = interval(privacy.epsilon_tight_at_least, privacy.epsilon_tight)
    held_out = data.validation
    rows = [
        [f"test {headline.name.replace('_', ' ')}", f"{headline.value:.4f}"],
        ["ε protects", _protected(privacy)],
        *([["not protected", f"{held_out:,} validation examples"]] if held_out else []),
        [
            "claimed ε",
            f"{show_epsilon(privacy.epsilon_claimed)}  (accountant {privacy.claimed_by})",
        ],
        ["tight ε", f"{tight}  (PLD of what ran, z = {privacy.z:.4g})"],
    ]
    owned, unit = privacy.examples_per_patient, privacy.unit
    if owned > 1:
        together = interval(privacy.epsilon_patient_at_least, privacy.epsilon_patient)
        whose = f"covers its {owned:,} training examples"
        if privacy.is_of_unit:
            whose = "its examples are drawn and clipped as one"
        rows.append([f"ε per {unit}", f"{together}  (tight, {whose})"])
        if privacy.epsilon_part is not None:
            part = f"{show_epsilon(privacy.epsilon_part)}  (tight, one of {name_one(unit)}'s)"
            rows.append(["ε per example", part])
    bound = privacy.clipping
    if bound:
        without = f"tight ε {show_epsilon(bound.epsilon_without_count)} without their count"
        quantile = f"{bound.quantile:g} of gradients not clipped"
        rows.append(["last bound", f"{bound.last_bound:.3g}  ({quantile}; {without})"])
    stopped = "" if record.stopped_by == "epochs" else "  (stopped by the budget)"
    notes = f": {data.notes}" if data.notes else ""
    rows += [
        ["δ", f"{privacy.delta:g}"],
        ["steps", f"{privacy.steps:,}{stopped}"],
        ["data", f"{data.shown}{notes}"],
        ["record", str(path)],
        *([["warning", record.warning]] if record.warning else []),
    ]
    return Sheet(f"{record.recipe}, seed {record.seed}{before}", (), rows)


def _protected(privacy: Privacy) -> str:
    """Return whose presence the tight ε hides: 'a patient, with all its examples'."""
    protected = name_one(privacy.epsilon_of)
    has_several = privacy.examples_per_patient > 1
    if privacy.is_of_unit:
        return f"{protected}, with all its examples" if has_several else protected
    return protected if has_several else f"{protected} (each {privacy.unit} has one)"


# ------------------------------------------------------------------------------------ the data root


def show_data_root(root: Path, cards: list[Card]) -> Sheet:
    """Return one row per data set."""
    rows = []
    for data_card in cards:
        state = describe_state(root, data_card)
        rows.append(
            [data_card.name, data_card.provenance, state, data_card.source, data_card.licence]
        )
    return Sheet.of_words(
        f"data root: {root}", ("data set", "provenance", "state", "from", "licence"), rows
    )


def describe_state(root: Path, data_card: Card) -> str:
    """Return bundled, generated, present, or what is missing and how to get it."""
    needed = card(data_card.uses) if data_card.uses else data_card
    if needed.holds:
        if has_files(root, needed):
            return "present"
        return f"missing: {needed.holds}; `zdp-bench data fetch {data_card.name}` shows how"
    if needed.provenance == "own":
        return "your own files, at dataset.path"
    if not needed.files:
        return "generated" if needed.provenance == "synthetic" else "bundled"
    lacking = [Path(file.path).name for file in missing(root, needed)]
    if not lacking:
        return "present"
    listed = "all files" if len(lacking) == len(needed.files) else ", ".join(lacking)
    return f"missing: {listed}; `zdp-bench data fetch {data_card.name}`"
