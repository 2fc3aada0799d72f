"""The commands of `zdp-bench`, one module each.

A command's docstring is its description. HELP is its line in `zdp-bench --help`, in the part
that GROUP names; `add_arguments(parser)` declares its arguments, and `run(options)` carries it out
and returns the exit code. To add one, write the module and enter it below, in the order of the
help; heavy imports belong inside `run`.
"""

from types import ModuleType

from zdp_bench.cli.commands import (
    audit,
    bench,
    budget,
    compare,
    coverage,
    data,
    epsilon,
    export,
    federate,
    figure,
    find_lr,
    list,
    new,
    predict,
    report,
    reproduce,
    results,
    run,
    search,
    table,
    validate,
    verify,
)

# The parts of `zdp-bench --help`, in order.
GROUPS: dict[str, str] = {
    "run": "run a recipe",
    "understand": "understand a recipe, a run, an ε",
    "reproduce": "reproduce the papers",
    "share": "share what was made",
}

COMMANDS: dict[str, ModuleType] = {
    "run": run,
    "search": search,
    "federate": federate,
    "find-lr": find_lr,
    "list": list,
    "new": new,
    "data": data,
    "validate": validate,
    "epsilon": epsilon,
    "audit": audit,
    "bench": bench,
    "results": results,
    "compare": compare,
    "budget": budget,
    "reproduce": reproduce,
    "table": table,
    "coverage": coverage,
    "figure": figure,
    "report": report,
    "export": export,
    "predict": predict,
    "verify": verify,
}
