"""What commands print: a validated recipe, a finished run and the data root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zdp_bench.data.files import Card, card, has_files, missing
from zdp_bench.records import Privacy, Record
from zdp_bench.report.number_format import duration, epsilon, interval, name_one
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
    data, model, privacy, cost = (report[key] for key in ("data", "model", "privacy", "cost"))
    lacking = "MISSING: the counts are those of the release; see `zdp-bench data`"
    many, unit, of = data["examples_per_patient"], privacy["unit"], privacy["epsilon_of"]
    owner = f"{name_one(unit)} with {many} example{'s' if many > 1 else ''}"
    held_out = data["validation"]
    classes = [f"{n} {name}: {count:,}" for n, (name, count) in enumerate(data["classes"].items())]
    facts = {
        "data": f"{data['name']}: {'found' if data['found'] else lacking}",
        "examples": f"{data['train']:,} for training, {data['test']:,} for testing, "
        f"each {data['input']}",
        **({"validation": f"{held_out:,} examples, not protected"} if held_out else {}),
        **({"owners": f"{data['owners']:,} own the training examples"} if data["owners"] else {}),
        **({"classes": f"{', '.join(classes)} for training; not in the record"} if classes else {}),
        "model": f"{model['name']}: {model['parameters_real']:,} trainable real parameters",
        "sampling": _sampling(report["sampling"], of),
        "noise": f"σ = {privacy['noise_multiplier']:.4g}, z = {privacy['z']:.4g} "
        "(in the weakest direction)",
        "claimed ε": f"{epsilon(privacy['epsilon_claimed'])}  (accountant {privacy['claimed_by']})",
        "tight ε": f"{epsilon(privacy['epsilon_tight'])} per {of} at δ = {privacy['delta']:g}",
        f"ε per {unit}": f"{epsilon(privacy['epsilon_patient'])}, for {owner}",
    }
    part = privacy["epsilon_part"]
    if part is not None and many > 1:  # without its only example, an owner is not there
        facts["ε per example"] = f"{epsilon(part)}, for one of {name_one(unit)}'s examples"
    if privacy["max_epsilon"]:
        facts["budget"] = f"stops before a tight ε of {privacy['max_epsilon']:g}"
    if cost:
        facts["cost"] = (
            f"{duration(cost['seconds'])} and {size(cost['bytes'])} "
            f"({cost['measured_on']}), without evaluation"
        )
    return [list(fact) for fact in facts.items()]


def _sampling(of: dict[str, Any], unit: str) -> str:
    batch = of["expected_batch_size"]
    cycle = f" in one step of {of['cycle']}" if "cycle" in of else ""
    kind = {
        "poisson": f"Poisson, each {unit} with probability {of['sample_rate']:.4g}{cycle}, "
        f"{batch:.4g} expected",
        "uniform": f"{batch:.0f} of {of['records']:,} {unit}s, without replacement",
        "shuffled": f"shuffled, {batch:.0f} at a time; not private",
        "full": f"every {unit} at every step",
    }[of["scheme"]]
    neighbours = of["adjacency"].replace("_", " ")
    return f"{kind}; {of['steps']:,} steps in {of['epochs']} epochs; neighbours: {neighbours}"


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
            f"{epsilon(privacy.epsilon_claimed)}  (accountant {privacy.claimed_by})",
        ],
        ["tight ε", f"{tight}  (PLD of what ran, z = {privacy.z:.4g})"],
    ]
    many, unit = privacy.examples_per_patient, privacy.unit
    if many > 1:
        together = interval(privacy.epsilon_patient_at_least, privacy.epsilon_patient)
        whose = f"covers its {many:,} training examples"
        if privacy.is_of_unit:
            whose = "its examples are drawn and clipped as one"
        rows.append([f"ε per {unit}", f"{together}  (tight, {whose})"])
        if privacy.epsilon_part is not None:
            part = f"{epsilon(privacy.epsilon_part)}  (tight, one of {name_one(unit)}'s)"
            rows.append(["ε per example", part])
    bound = privacy.clipping
    if bound:
        without = f"tight ε {epsilon(bound.epsilon_without_count)} without their count"
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
    rows = [[of.name, of.provenance, say_state(root, of), of.source, of.licence] for of in cards]
    return Sheet.of_words(
        f"data root: {root}", ("data set", "provenance", "state", "from", "licence"), rows
    )


def say_state(root: Path, of: Card) -> str:
    """Return bundled, generated, present, or what is missing and how to get it."""
    needs = card(of.uses) if of.uses else of
    if needs.holds:
        lacks = f"missing: {needs.holds}; `zdp-bench data fetch {of.name}` shows how"
        return "present" if has_files(root, needs) else lacks
    if needs.provenance == "own":
        return "your own files, at dataset.path"
    if not needs.files:
        return "generated" if needs.provenance == "synthetic" else "bundled"
    lacking = [Path(file.path).name for file in missing(root, needs)]
    if not lacking:
        return "present"
    listed = "all files" if len(lacking) == len(needs.files) else ", ".join(lacking)
    return f"missing: {listed}; `zdp-bench data fetch {of.name}`"
