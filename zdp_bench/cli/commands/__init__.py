"""The commands of `zdp-bench`, one module each.

A command's docstring is its description. HELP is its line in `zdp-bench --help`,
`add_arguments(parser)` declares its arguments, and `run(options)` carries it out and returns the
exit code. To add one, write the module and enter it below; heavy imports belong inside `run`.
"""

from types import ModuleType

from zdp_bench.cli.commands import (
    audit,
    bench,
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
    table,
    validate,
    verify,
)

COMMANDS: dict[str, ModuleType] = {
    "run": run,
    "federate": federate,
    "table": table,
    "coverage": coverage,
    "reproduce": reproduce,
    "validate": validate,
    "find-lr": find_lr,
    "audit": audit,
    "list": list,
    "new": new,
    "data": data,
    "bench": bench,
    "figure": figure,
    "report": report,
    "results": results,
    "epsilon": epsilon,
    "export": export,
    "predict": predict,
    "verify": verify,
}
