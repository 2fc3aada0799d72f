"""The commands of `zdp-bench`, one module each.

A command's docstring is its description. HELP is its line in `zdp-bench --help`, in the part
that GROUP names; `add_arguments(parser)` declares its arguments, and `run(options)` carries it out
and returns the exit code. To add one, write the module and enter it below, in the order of the
help; heavy imports belong inside `run`. The extras' verbs are in their own folders.
"""

from types import ModuleType

from zdp_bench.cli.commands import (
    budget,
    compare,
    coverage,
    data,
    delete,
    epsilon,
    list,
    new,
    reproduce,
    results,
    run,
    table,
    validate,
)
from zdp_bench.registry import of_extras, resolve

# The parts of `zdp-bench --help`, in order.
GROUPS: dict[str, str] = {
    "run": "run a recipe",
    "understand": "understand a recipe, a run, an ε",
    "reproduce": "reproduce the papers",
    "share": "share results and models",
}

# In the order of the help. A verb of an extra that is not here is left out.
ORDER = (
    "run",
    "search",
    "list",
    "new",
    "data",
    "validate",
    "epsilon",
    "audit",
    "bench",
    "results",
    "compare",
    "budget",
    "delete",
    "reproduce",
    "table",
    "coverage",
    "figure",
    "report",
    "export",
    "predict",
    "verify",
)

_CORE = [run, list, new, data, validate, epsilon, results, compare, budget]
_CORE += [delete, reproduce, table, coverage]
_FOUND = {one.__name__.rpartition(".")[2].replace("_", "-"): one for one in _CORE}
_FOUND |= {verb: resolve(where) for verb, where in of_extras("command").items()}
COMMANDS: dict[str, ModuleType] = {
    verb: _FOUND[verb] for verb in dict.fromkeys((*ORDER, *_FOUND)) if verb in _FOUND
}
