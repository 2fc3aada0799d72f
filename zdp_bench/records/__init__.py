"""Records of runs: JSON files, each written once and atomically, from which all reports are made.

    results/runs/<recipe>/<digest of configuration and data>/record.json

Except for `environment` and `measured`, a record is a function of configuration, data and seed, so
two runs with the same seed write the same values. `records.csv` has one row per record and is
updated after each run.

record          typed records and their checks
index           reads all records of a folder
files           writes records, scores and `records.csv`
json_numbers    ∞ and NaN in JSON
"""

# ruff: noqa: F401  # its names are those of its modules

from zdp_bench.records.files import (
    COLUMNS,
    DELETED,
    flatten,
    folder,
    frame,
    group_by,
    is_deleted,
    is_named,
    list_deleted,
    plain_cell,
    read_scores,
    rebuild_csv,
    renew_csv,
    write,
    write_arrays,
    write_scores,
    write_text,
)
from zdp_bench.records.index import read_all, warn_left_out
from zdp_bench.records.json_numbers import format_json, from_json, to_json
from zdp_bench.records.record import (
    NUMBER,
    Data,
    Document,
    Epoch,
    Privacy,
    Record,
    Released,
    get,
    name_owner,
    read,
    read_document,
    require_record,
)
