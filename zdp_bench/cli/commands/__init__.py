"""The commands of `zdp-bench`, one module each.

The docstring of a module is the description in the help of its command. HELP is its line in
`zdp-bench --help`, in the section that GROUP names. `add_arguments(parser)` declares its arguments.
`run(options)` runs it and returns the exit code; slow imports belong there. To add a command, write
the module and add it to the lists below. The commands of extras are in the extras' folders.
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

# The sections of `zdp-bench --help`, in order.
GROUPS: dict[str, str] = {
    "run": "run a recipe",
    "understand": "understand a recipe, a run, an ε",
    "reproduce": "reproduce the papers",
    "share": "share results and models",
}

# All verbs, in the order of the help. Those of extras that are not installed are left out.
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
_MODULES = {module.__name__.rpartition(".")[2].replace("_", "-"): module for module in _CORE}
_MODULES |= {verb: resolve(path) for verb, path in of_extras("command").items()}
# The verbs of extras that ORDER lacks come last.
COMMANDS: dict[str, ModuleType] = {
    verb: _MODULES[verb] for verb in dict.fromkeys((*ORDER, *_MODULES)) if verb in _MODULES
}
