"""The command line, `zdp-bench`. Nothing heavy is imported before a verb needs it, so `--help` answers at once.

A mistake of the user ends in one sentence and exit code 2; a failed job of a sweep in its sentence and exit code 2 at the end;
an audit with a verdict that was not expected in exit code 1; a run that SIGTERM stopped, saved, in exit code 75 (survival.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from zdp_bench.cli import doing, showing
from zdp_bench.cli.parser import arguments
from zdp_bench.errors import UserError
from zdp_bench.survival import Stopped, between_runs

VERBS = doing.VERBS | showing.VERBS


def main(said: Sequence[str] | None = None) -> NoReturn:
    """Carry out one command line; exits with 0, or with 2 after one sentence."""
    code = _carry_out(list(sys.argv[1:] if said is None else said))
    if "WORLD_SIZE" in os.environ:
        from zdp_bench.distributed import leave

        leave(code)
    raise SystemExit(code)


def _carry_out(words: list[str]) -> int:
    """The exit code; what went wrong is said."""
    options = arguments(words)
    try:
        with between_runs():
            return VERBS[options.verb](options)
    except UserError as error:
        print(f"zdp-bench: {error}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"zdp-bench: {stop}.", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("zdp-bench: interrupted; the same command goes on from the last checkpoint.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
