"""Deaths in intensive care, from the PhysioNet/CinC Challenge 2012 (Silva et al. 2012).

    physionet2012/set-a/132539.txt, ...     48 hours of one patient; train on set-a, test on set-b
    physionet2012/Outcomes-a.txt, ...       who died in hospital

Each patient has one record, with up to 37 variables at irregular times. The features of a variable
are its mean, minimum, maximum, last value, mean after 24 hours and standard deviation, and whether
it was measured. Values are standardised with public ranges (`RANGES`), and missing values become
the middle of the range. So the features of a patient depend on this patient only.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval

from zdp_bench.data import Dataset, DatasetInfo, Examples, PublicFraction, Splits
from zdp_bench.data.cache import load_or_make
from zdp_bench.data.files import absent, digest, list_files, sha256
from zdp_bench.data.owners import hold_out_owners
from zdp_bench.errors import UserError, require
from zdp_bench.foreign_files import expect, read_text, reading
from zdp_bench.registry import register

FOLDER = Path("physionet2012")
SETS = ("a", "b")
NUM_PATIENTS = 4000  # in each published set
NUM_DEATHS = {"a": 554, "b": 568}  # deaths in hospital in each published set
HEADER = "Time,Parameter,Value"
OUTCOMES = ["RecordID", "SAPS-I", "SOFA", "Length_of_stay", "Survival", "In-hospital_death"]
TIME = re.compile(r"(\d\d):([0-5]\d)")
MAX_HOURS = 48  # length of a record
MINUTES_PER_DAY = 24 * 60
LIMIT = 2.0  # maximum absolute value of a standardised value
MAX_VALUE = 1e6  # maximum of any variable; a RecordID may be larger
DESCRIPTORS = ("RecordID", "Age", "Gender", "Height", "ICUType")
ICU_TYPES = (1, 2, 3, 4)  # ICUType: coronary, cardiac surgery, medical, surgical
CODES = {"Gender": (0, 1), "ICUType": ICU_TYPES}  # a negative code means unknown
STATISTICS = ("mean", "minimum", "maximum", "last", "mean after 24 h", "deviation", "measured")
FEATURES_VERSION = 1  # increment when features change; part of the cache key


@dataclass(frozen=True)
class Range:
    """The usual range of a variable in intensive care, which becomes [−½, ½].

    Attributes:
        low, high: ends of the range.
        is_log: use the logarithm, for variables whose ratios matter, such as enzymes.
    """

    low: float
    high: float
    is_log: bool = False

    def standardise(self, values: np.ndarray) -> np.ndarray:
        """Return (values − middle) / width of the range, clipped to ±`LIMIT`."""
        low, high = self.low, self.high
        if self.is_log:
            with np.errstate(divide="ignore"):
                values = np.log(values)  # 0 becomes −∞, which is clipped
            low, high = math.log(low), math.log(high)
        middle = (low + high) / 2
        return np.clip((values - middle) / (high - low), -LIMIT, LIMIT)


# Where the ranges come from. No range was computed from the records, and no clinician has reviewed
# any. Most were chosen first, and their sources looked up afterwards. A comment names the source of
# the lower end, then of the upper end, or a single source of both. "Points from 40" means that a
# score begins or rises there; "no points" means that it gives none inside the range.
# - Scores, by the points that they give: SOFA (Vincent et al. 1996, in Singer et al. 2016), SAPS II
#   (Le Gall et al. 1993), APACHE II (Knaus et al. 1985) and APACHE III (Knaus et al. 1991, as in
#   MIMIC's code). SIRS: the criteria of Bone et al. 1992.
# - Guidelines: ACG (Kwo et al. 2017), ARDS Network (2008), BTS (British Thoracic Society 2017), SSC
#   (Surviving Sepsis Campaign, Dellinger et al. 2013), WHO (hypertension, 2021).
# - Reference ranges of adults: ACCP (American College of Clinical Pharmacy, Pharmacotherapy
#   Self-Assessment Program), AHA (American Heart Association), MSD (MSD Manual), NBME (National
#   Board of Medical Examiners), and Mayo Clinic.
RANGES = {
    "Albumin": Range(2.5, 4.4),  # g/dL; APACHE III: no points
    "ALP": Range(30, 120, is_log=True),  # IU/L; ACCP
    "ALT": Range(7, 205, is_log=True),  # IU/L; Mayo Clinic; ACG: "mild" up to 5 times 41
    "AST": Range(12, 190, is_log=True),  # IU/L; Penttilä et al. 1975; ACG: 5 times 38
    "Bilirubin": Range(0.3, 2, is_log=True),  # mg/dL; ACCP; SOFA: two points from 2
    "BUN": Range(7, 40, is_log=True),  # mg/dL; Mayo Clinic; APACHE III: more points from 40
    "Cholesterol": Range(120, 200),  # mg/dL; MSD: low below 120, desirable below 200
    "Creatinine": Range(0.5, 2, is_log=True),  # mg/dL; APACHE III: below 0.5; SOFA: from 2
    "DiasABP": Range(52, 80),  # mmHg; (3 · MAP − SysABP) / 2 at the ends of their ranges, rounded
    "FiO2": Range(0.21, 0.6),  # room air; Jackson 2020 (Medscape): at most 0.6 after 24 hours
    "GCS": Range(10, 15),  # SOFA: two points for 10 to 12, none for 15
    "Glucose": Range(70, 180, is_log=True),  # mg/dL; MSD: fasting; NICE-SUGAR 2009: usual target
    "HCO3": Range(20, 28),  # mmol/L; SAPS II: points below 20; NBME
    "HCT": Range(21, 36),  # %; TRICC (Hébert et al. 1999): 3 · haemoglobin, 7 to 12 g/dL
    "HR": Range(60, 110),  # bpm; AHA; APACHE II: points from 110
    "K": Range(3.5, 5),  # mmol/L; APACHE II: points below 3.5; SAPS II: points from 5
    "Lactate": Range(0.5, 4, is_log=True),  # mmol/L; MSD; SSC: tissue is short of oxygen from 4
    "Mg": Range(1.5, 2.3),  # mg/dL; StatPearls, Electrolytes; Costello et al. 2016 (0.95 mmol/L)
    "MAP": Range(65, 100),  # mmHg; SSC: the target is 65 at least; APACHE III: points from 100
    "MechVent": Range(0, 1),  # 1 where it is recorded
    "Na": Range(135, 145),  # mmol/L; APACHE III: points below 135; SAPS II: points from 145
    "NIDiasABP": Range(52, 80),  # mmHg; as DiasABP
    "NIMAP": Range(65, 100),  # mmHg; as MAP
    "NISysABP": Range(90, 140),  # mmHg; as SysABP
    "PaCO2": Range(35, 45),  # mmHg; MSD
    "PaO2": Range(60, 300, is_log=True),  # mmHg; Kilgannon et al. 2010: hypoxia, hyperoxia
    "pH": Range(7.30, 7.45),  # ARDS Network: the target
    "Platelets": Range(100, 400, is_log=True),  # 1000/µL; SOFA: two points below 100; NBME
    "RespRate": Range(12, 24),  # per minute; APACHE II: no points
    "SaO2": Range(94, 100),  # %; BTS: the target is 94 at least; 100 is the maximum
    "SysABP": Range(90, 140),  # mmHg; SSC: hypotension below 90; WHO: hypertension from 140
    "Temp": Range(36, 38.4),  # °C; APACHE II: no points
    "TroponinI": Range(0.04, 4, is_log=True),  # µg/L; Apple & Collinson 2012; 100 times 0.04
    "TroponinT": Range(0.01, 1, is_log=True),  # µg/L; Apple & Collinson 2012; 100 times 0.01
    "Urine": Range(35, 140, is_log=True),  # mL; SSC: 0.5 mL/kg per hour at 70 kg; 4 times 35
    "WBC": Range(4, 20, is_log=True),  # 1000/µL; SIRS: below 4; SAPS II: points from 20
    "Weight": Range(50, 100),  # kg; round numbers
}
AGE = Range(50, 80)  # years; round numbers
HEIGHT = Range(160, 180)  # cm; round numbers
NUM_DESCRIPTOR_FEATURES = 3 + len(ICU_TYPES)  # age, sex and height; the types of ICU
NUM_FEATURES = len(RANGES) * len(STATISTICS) + NUM_DESCRIPTOR_FEATURES

Record = dict[str, tuple[np.ndarray, np.ndarray]]  # variable -> minutes, values


@dataclass(frozen=True)
class Patient:
    """The record of a patient, and the patient's outcome.

    Attributes:
        path: path of the record, below the folder of the data set.
        record_id: RecordID of the patient.
        died: whether the patient died in hospital.
    """

    path: Path
    record_id: str
    died: bool


@register("dataset", "physionet2012")
@dataclass(frozen=True, kw_only=True)
class Physionet2012(Dataset):
    """Features of patients, float32 [NUM_FEATURES]; label 1 is death in hospital.

    Args:
        validation_share: fraction of the patients in set-a to validate on. Default: 0.
        split_seed: seed that draws the validation patients. Default: 0.
        norm: L2 norm to which the features of each patient are scaled. None: no scaling. Default:
            5.
    """

    validation_share: PublicFraction = 0.0
    split_seed: int = 0
    norm: Annotated[float, Interval(ge=1e-12, le=1e12)] | None = 5.0

    def load(self, root: Path) -> Splits:
        """Load the records.

        No checksums are published. Records with the published numbers of patients and deaths count
        as 'official'.
        """
        home = root / FOLDER
        sets = {name: list_patients(home, name) for name in SETS}
        patients = [*sets["a"], *sets["b"]]
        contents = [f"{patient.path}:{sha256(home / patient.path)}" for patient in patients]
        feature_rules = f"{RANGES!r}:{AGE!r}:{HEIGHT!r}:{LIMIT}:{FEATURES_VERSION}"
        cache_key = f"{digest(''.join(contents))}:{feature_rules}"
        inputs = self._load_features([home / patient.path for patient in patients], cache_key)
        targets = torch.tensor([int(patient.died) for patient in patients])
        record_ids = [patient.record_id for patient in patients]
        owner_names, owner_of_example = np.unique(record_ids, return_inverse=True)
        all_examples = Examples(inputs, targets, groups=torch.from_numpy(owner_of_example))
        # The first `num_a` examples are those of set-a. Set-b is for tests.
        num_a = len(sets["a"])
        is_validation = self.hold_out(record_ids[:num_a])
        train = take(all_examples, np.flatnonzero(~is_validation))
        validation = take(all_examples, np.flatnonzero(is_validation))
        test = take(all_examples, np.arange(num_a, len(patients)))
        deaths = {name: sum(patient.died for patient in sets[name]) for name in SETS}
        counts = {name: len(sets[name]) for name in SETS}
        is_complete = deaths == NUM_DEATHS and counts == dict.fromkeys(SETS, NUM_PATIENTS)
        outcomes = ":".join(sha256(home / f"Outcomes-{name}.txt") for name in SETS)
        options = (self.validation_share, self.split_seed, self.norm)
        return Splits(
            train,
            test,
            input_shape=(NUM_FEATURES,),
            outputs=1,
            provenance="official" if is_complete else "derived",
            digest=digest(f"{cache_key}:{outcomes}:{options!r}"),
            # "public": the validation patients are not protected by ε.
            notes=f"one record per patient: {len(train):,} patients to train, {len(validation):,} "
            f"to validate (public), {len(test):,} to test",
            validation=validation if len(validation) else None,
            owner_names=owner_names.tolist(),
        )

    def _load_features(self, paths: list[Path], cache_key: str) -> torch.Tensor:
        """Return the features of records, scaled to `norm`, float32 [n, NUM_FEATURES].

        The cache holds them unscaled.

        Args:
            paths: paths of the records.
            cache_key: text that identifies records, ranges and version.
        """
        shape = (len(paths), NUM_FEATURES)
        rows_to_make = (make_features(path)[None] for path in paths)  # read only if not cached
        kind = "stays"  # stays in intensive care: the name of the folder in the cache
        features = load_or_make(kind, digest(cache_key), shape, np.float32, rows_to_make)
        rows = torch.from_numpy(features)
        if self.norm is None:
            return rows
        return rows * (self.norm / rows.norm(dim=1, keepdim=True).clamp(min=1e-6))

    def hold_out(self, record_ids: list[str]) -> np.ndarray:
        """Return which patients of set-a are drawn for validation, a mask [n].

        Args:
            record_ids: RecordID of each patient.
        """
        is_validation = hold_out_owners(record_ids, self.validation_share, self.split_seed)
        fault = f"leaves none of {len(record_ids)} patients to train on"
        require(not is_validation.all(), "dataset.validation_share", self.validation_share, fault)
        return is_validation

    def published_info(self, root: Path) -> DatasetInfo | None:
        """Return the published counts and shapes; None if the files are there to be counted."""
        if (root / FOLDER).is_dir():
            return None
        # The number of patients that are held out depends only on how many RecordIDs there are.
        record_ids = [str(number) for number in range(NUM_PATIENTS)]
        num_validation = int(self.hold_out(record_ids).sum())
        return DatasetInfo(
            train=NUM_PATIENTS - num_validation,
            test=NUM_PATIENTS,
            validation=num_validation,
            input_shape=(NUM_FEATURES,),
            outputs=1,
            owners=NUM_PATIENTS - num_validation,  # of the training examples
        )


def take(examples: Examples, rows: np.ndarray) -> Examples:
    """Return a copy of the examples with these indices."""
    assert examples.groups is not None
    indices = torch.from_numpy(rows)
    return Examples(examples.inputs[indices], examples.targets[indices], examples.groups[indices])


def list_patients(home: Path, name: str) -> list[Patient]:
    """List the patients of a set, sorted by name, without opening their records.

    Raises:
        UserError: the folder or the outcomes are missing, or belong to different patients.
    """
    folder, table = home / f"set-{name}", home / f"Outcomes-{name}.txt"
    for path in (folder, table):
        if not path.exists():
            raise absent(path, "physionet2012")
    died = read_outcomes(table)
    paths = list_files(
        folder,
        home,
        is_expected=lambda path: path.suffix == ".txt" and path.stem in died,
        fault=f"is not the record of a patient in {table.name}",
    )
    record_ids = {path.stem for path in paths}
    for record_id in died:
        if record_id not in record_ids:
            raise UserError(
                f"{folder / record_id}.txt: is missing, but {table.name} has its outcome; unpack "
                "the whole set."
            )
    return [Patient(path.relative_to(home), path.stem, died[path.stem]) for path in paths]


def read_outcomes(table: Path) -> dict[str, bool]:
    """Return whether each patient died in hospital, by RecordID."""
    rows = csv.reader(read_text(table, encoding="utf-8-sig").splitlines(), strict=True)
    died: dict[str, bool] = {}
    with reading(table):  # names the file in the errors of `expect` and of the CSV reader
        header = next(rows, [])
        fault = f"does not begin with {','.join(OUTCOMES)}"
        expect(header == OUTCOMES, fault)
        for cells in rows:
            where = f"in line {rows.line_num}"
            expect(len(cells) == len(OUTCOMES), f"has {len(cells)} cells {where}")
            record_id, death = cells[0], cells[-1]
            expect(bool(re.fullmatch(r"\d{1,9}", record_id)), f"has no RecordID {where}")
            expect(death in ("0", "1"), f"has the outcome '{death}' {where}, neither 0 nor 1")
            expect(record_id not in died, f"names patient {record_id} a second time {where}")
            died[record_id] = death == "1"
        expect(bool(died), "names no patient")
    return died


def make_features(path: Path) -> np.ndarray:
    """Return the features of a patient, float32 [NUM_FEATURES]."""
    record = read_record(path)
    parts = [summarise(record.get(name), range_) for name, range_ in RANGES.items()]
    return np.concatenate([*parts, describe(record)]).astype(np.float32)


def summarise(series: tuple[np.ndarray, np.ndarray] | None, usual: Range) -> np.ndarray:
    """Return the `STATISTICS` of a variable.

    "measured" is ½ if the variable was measured, and −½ otherwise. All other statistics are 0 if
    the variable was not measured. If it was measured, but not after 24 hours, the last value stands
    for the mean after 24 hours.

    Args:
        series: minutes and values; None if the variable was not measured.
        usual: range of the variable.
    """
    if series is None:
        return np.array([0, 0, 0, 0, 0, 0, -0.5])
    minutes, values = series
    scaled = usual.standardise(values)
    late = scaled[minutes >= MINUTES_PER_DAY]
    return np.array(
        [
            scaled.mean(),
            scaled.min(),
            scaled.max(),
            scaled[-1],
            late.mean() if len(late) else scaled[-1],
            scaled.std(),
            0.5,
        ]
    )


def describe(record: Record) -> np.ndarray:
    """Return age, sex, height and type of ICU, float64 [NUM_DESCRIPTOR_FEATURES], 0 if unknown.

    The published records state −1 for an unknown value, which `read_record` leaves out.
    """
    known = {}
    for name in DESCRIPTORS:
        if name in record:
            _, values = record[name]
            known[name] = values[0]
    age = AGE.standardise(known["Age"]) if "Age" in known else 0
    height = HEIGHT.standardise(known["Height"]) if "Height" in known else 0
    sex = known["Gender"] - 0.5 if "Gender" in known else 0
    is_icu_type = [known.get("ICUType") == icu_type for icu_type in ICU_TYPES]
    return np.array([age, sex, height, *is_icu_type])


def read_record(path: Path) -> Record:
    """Read minutes and values of each variable, sorted by time.

    Negative values are left out, because they mean that the value is unknown.

    Raises:
        UserError: a line is damaged, or the record is not that of the patient in its name.
    """
    lines = read_text(path, encoding="utf-8-sig").splitlines()
    minutes: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    with reading(path):  # names the file in the errors of `expect`
        expect(bool(lines) and lines[0] == HEADER, f"does not begin with {HEADER}")
        for line_number, minute, name, value in parse_lines(lines):
            if name == "RecordID":
                fault = f"has the RecordID {value:.10g} in line {line_number}, but not in its name"
                expect(value == int(path.stem), fault)
            if value < 0:
                continue
            minutes.setdefault(name, []).append(minute)
            values.setdefault(name, []).append(value)
        expect(len(values.get("RecordID", ())) == 1, "does not have exactly one RecordID")
        for name, allowed in CODES.items():
            fault = f"has a value of {name} other than {', '.join(map(str, allowed))}"
            expect(set(values.get(name, ())) <= set(allowed), fault)
    record = {}
    for name, measured in values.items():
        order = np.argsort(minutes[name], kind="stable")
        record[name] = (np.array(minutes[name])[order], np.array(measured)[order])
    return record


def parse_lines(lines: Sequence[str]) -> Iterator[tuple[int, int, str, float]]:
    """Yield number, minute, variable and value of each line of a record below its header."""
    for line_number, line in enumerate(lines[1:], start=2):
        where = f"in line {line_number}"
        cells = line.split(",")
        expect(len(cells) == 3, f"has {len(cells)} cells {where}")
        time, name, value = cells
        clock = TIME.fullmatch(time)
        minute = 60 * int(clock[1]) + int(clock[2]) if clock else -1
        expect(0 <= minute <= 60 * MAX_HOURS, f"has the time '{time}' {where}, not 00:00 to 48:00")
        expect(name in RANGES or name in DESCRIPTORS, f"has the unknown variable '{name}' {where}")
        try:
            measured = float(value)
        except ValueError:
            measured = math.nan
        expect(math.isfinite(measured), f"has the value '{value}' {where}, not a number")
        is_in_range = name == "RecordID" or abs(measured) <= MAX_VALUE
        expect(is_in_range, f"has the value '{value}' {where}, outside ±{MAX_VALUE:,.0f}")
        yield line_number, minute, name, measured
