"""A run's record: one JSON file, written once and atomically, from which everything is reported.

    results/runs/<recipe>/<digest of configuration and data>/record.json

Everything but `environment` and `measured` is a function of the configuration, the data and the
seed: two runs of one seed write the same. `records.csv` lists them; every run renews it.

record          what a record says, with names and types, and how it is checked
index           all records of a folder
files           how records, scores and `records.csv` are written
json_numbers    ∞ and NaN in JSON
"""

from zdp_bench.records.files import (
    COLUMNS,
    DELETED,
    flatten,
    folder,
    frame,
    is_deleted,
    is_named,
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
from zdp_bench.records.json_numbers import from_json, to_json
from zdp_bench.records.record import (
    NUMBER,
    Claims,
    Data,
    Document,
    Epoch,
    Privacy,
    Record,
    Released,
    Releases,
    get,
    read,
    read_document,
    require_record,
)

__all__ = [
    "COLUMNS",
    "DELETED",
    "NUMBER",
    "Claims",
    "Data",
    "Document",
    "Epoch",
    "Privacy",
    "Record",
    "Released",
    "Releases",
    "flatten",
    "folder",
    "frame",
    "from_json",
    "get",
    "is_deleted",
    "is_named",
    "plain_cell",
    "read",
    "read_all",
    "read_document",
    "read_scores",
    "rebuild_csv",
    "renew_csv",
    "require_record",
    "to_json",
    "warn_left_out",
    "write",
    "write_arrays",
    "write_scores",
    "write_text",
]
