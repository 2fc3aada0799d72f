"""The sheets that commands print: a validated recipe, a finished run and the data root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zdp_bench.data import EXAMPLE
from zdp_bench.data.files import Card, card, has_files, missing
from zdp_bench.privacy.statement import round_up, show_epsilon
from zdp_bench.records import Privacy, Record
from zdp_bench.report.number_format import duration, interval, name_one
from zdp_bench.report.sheet import Sheet

# -------------------------------------------------------------------------------- a recipe, not run


def show_validation(report: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a `validate.Report`: facts, layers and replaced layers."""
    layers = [
        [layer["name"], layer["kind"], f"{layer['parameters']:,}", layer["rule"]]
        for layer in report["layers"]
    ]
    columns = ("layer", "kind", "parameters", "an example's gradient is bounded by")
    sheets = [
        Sheet(f"recipe {report['recipe']}, not run", (), _facts(report)),
        Sheet("layers", columns, layers),
    ]
    if report["surgery"]:
        columns = ("layer", "was", "is", "why")
        replaced = [[line[column] for column in columns] for line in report["surgery"]]
        sheets.append(Sheet("replaced layers", columns, replaced))
    return sheets


def _facts(report: dict[str, Any]) -> list[list[str]]:
    """Return the facts of a report as rows of a label and a value."""
    model = report["model"]
    facts = {
        **_data_facts(report["data"]),
        "model": f"{model['name']}: {model['parameters_real']:,} trainable real parameters",
        "sampling": _describe_sampling(report["sampling"], report["privacy"]["epsilon_of"]),
        **_privacy_facts(report["privacy"], report["data"]["examples_per_patient"]),
    }
    cost = report["cost"]
    if cost:
        facts["cost"] = (
            f"{duration(cost['seconds'])} and {size(cost['bytes'])} "
            f"({cost['measured_on']}), without evaluation"
        )
    return [list(fact) for fact in facts.items()]


def _data_facts(data: dict[str, Any]) -> dict[str, str]:
    state = "found"
    if not data["found"]:
        state = "MISSING: the counts are estimated from the release; see `zdp-bench data`"
    facts = {
        "data": f"{data['name']}: {state}",
        "examples": f"{data['train']:,} for training, {data['test']:,} for testing, "
        f"each {data['input']}",
    }
    if data["validation"]:
        facts["validation"] = f"{data['validation']:,} examples, not protected"
    if data["owners"]:
        facts["owners"] = f"{data['owners']:,} own the training examples"
    classes = []
    for index, (name, count) in enumerate(data["classes"].items()):
        classes.append(f"{index} {name}: {count:,}")
    if classes:
        facts["classes"] = f"{', '.join(classes)} for training; not in the record"
    return facts


def _privacy_facts(privacy: dict[str, Any], owned: int | None) -> dict[str, str]:
    """Return the facts about ε.

    Args:
        privacy: the section of the report.
        owned: largest number of examples of one owner. None: unknown.
    """
    unit, protected = privacy["unit"], privacy["epsilon_of"]
    sigma, z = privacy["noise_multiplier"], privacy["z"]
    claimed = show_epsilon(privacy["epsilon_claimed"])
    tight = show_epsilon(privacy["epsilon_tight"])
    owner = name_one(unit)
    if owned:
        owner += f" with {owned} example{'s' if owned > 1 else ''}"
    of_owner = f"unknown without the files, as is the largest number of examples of {owner}"
    if privacy["epsilon_patient"] is not None:
        of_owner = f"{show_epsilon(privacy['epsilon_patient'])}, for {owner}"
    facts = {
        "noise": f"σ = {round_up(sigma, 4):.4g}, z = {z:.4g} (in the weakest direction)",
        "claimed ε": f"{claimed}  (accountant {privacy['claimed_by']})",
        "tight ε": f"{tight} per {protected} at δ = {privacy['delta']:g}",
    }
    if unit != EXAMPLE:
        facts[f"ε per {unit}"] = of_owner
    part = privacy["epsilon_part"]
    if part is not None and owned != 1:  # to remove an owner's only example is to remove the owner
        facts["ε per example"] = f"{show_epsilon(part)}, for one of {name_one(unit)}'s examples"
    if privacy["max_epsilon"]:
        facts["budget"] = f"stops before a tight ε of {privacy['max_epsilon']:g}"
    return facts


def _describe_sampling(sampling: dict[str, Any], unit: str) -> str:
    """Describe how a step draws units, the number of steps, and the neighbours that ε compares."""
    batch_size = sampling["expected_batch_size"]
    cycle = f" in one step of {sampling['cycle']}" if "cycle" in sampling else ""
    schemes = {
        "poisson": f"Poisson, each {unit} with probability {sampling['sample_rate']:.4g}{cycle}, "
        f"{batch_size:.4g} expected",
        "uniform": f"{batch_size:.0f} of {sampling['records']:,} {unit}s, without replacement",
        "shuffled": f"shuffled, {batch_size:.0f} at a time; not private",
        "full": f"every {unit} at every step",
    }
    scheme = schemes[sampling["scheme"]]
    steps = f"{sampling['steps']:,} steps in {sampling['epochs']} epochs"
    neighbours = sampling["adjacency"].replace("_", " ")
    return f"{scheme}; {steps}; neighbours: {neighbours}"


def size(nbytes: int) -> str:
    """Format a number of bytes: 'under 1 MiB', '350 MiB' or '2.1 GiB'."""
    if nbytes < 2**20:
        return "under 1 MiB"
    if nbytes < 2**30:
        return f"{nbytes / 2**20:.0f} MiB"
    return f"{nbytes / 2**30:.1f} GiB"


# ----------------------------------------------------------------------------------- a finished run


def show_run(record: Record, path: Path, was_recorded: bool) -> Sheet:
    """Return a record's main numbers.

    Args:
        record: the record.
        path: path of its file.
        was_recorded: whether the run had finished before, so that nothing was trained.
    """
    data, headline = record.data, record.headline
    rows = [
        [f"test {headline.name.replace('_', ' ')}", f"{headline.value:.4f}"],
        ["ε protects", _protected(record.privacy)],
    ]
    if data.validation:
        rows.append(["not protected", f"{data.validation:,} validation examples"])
    rows += _rows_of_privacy(record.privacy)
    stopped = "" if record.stopped_by == "epochs" else "  (stopped by the budget)"
    notes = f": {data.notes}" if data.notes else ""
    rows += [
        ["δ", f"{record.privacy.delta:g}"],
        ["steps", f"{record.privacy.steps:,}{stopped}"],
        ["data", f"{data.shown}{notes}"],
        ["record", str(path)],
    ]
    if record.warning:
        rows.append(["warning", record.warning])
    done_before = " (done before; force=true runs it again)" if was_recorded else ""
    return Sheet(f"{record.recipe}, seed {record.seed}{done_before}", (), rows)


def _rows_of_privacy(privacy: Privacy) -> list[list[str]]:
    """Return the rows of a run's ε, and of its clipping bound if that is adapted."""
    claimed = show_epsilon(privacy.epsilon_claimed)
    tight = interval(privacy.epsilon_tight_at_least, privacy.epsilon_tight)
    rows = [
        ["claimed ε", f"{claimed}  (accountant {privacy.claimed_by})"],
        ["tight ε", f"{tight}  (PLD of what ran, z = {privacy.z:.4g})"],
    ]
    owned, unit = privacy.examples_per_patient, privacy.unit
    if owned > 1:
        of_owner = interval(privacy.epsilon_patient_at_least, privacy.epsilon_patient)
        remark = f"covers its {owned:,} training examples"
        if privacy.by_owner:
            remark = "its examples are drawn and clipped as one"
        rows.append([f"ε per {unit}", f"{of_owner}  (tight, {remark})"])
        if privacy.epsilon_part is not None:
            part = show_epsilon(privacy.epsilon_part)
            rows.append(["ε per example", f"{part}  (tight, one of {name_one(unit)}'s)"])
    clipping = privacy.clipping
    if clipping:
        without = f"tight ε {show_epsilon(clipping.epsilon_without_count)} without their count"
        quantile = f"{clipping.quantile:g} of gradients not clipped"
        rows.append(["last bound", f"{clipping.last_bound:.3g}  ({quantile}; {without})"])
    return rows


def _protected(privacy: Privacy) -> str:
    """Return whose participation the tight ε protects: 'a patient, with all its examples'."""
    protected = name_one(privacy.epsilon_of)
    has_several = privacy.examples_per_patient > 1
    if privacy.by_owner:
        return f"{protected}, with all its examples" if has_several else protected
    if has_several or privacy.unit == EXAMPLE:
        return protected
    return f"{protected} (each {privacy.unit} has one)"


# ------------------------------------------------------------------------------------ the data root


def show_data_root(root: Path, cards: list[Card]) -> Sheet:
    """Return a table of all data sets, with one row each."""
    rows = []
    for data_card in cards:
        state = describe_state(root, data_card)
        rows.append(
            [data_card.name, data_card.provenance, state, data_card.source, data_card.licence]
        )
    columns = ("data set", "provenance", "state", "from", "licence")
    return Sheet.of_words(f"data root: {root}", columns, rows)


def describe_state(root: Path, data_card: Card) -> str:
    """Describe whether a data set is present; if not, what is missing and how to get it."""
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
