"""The command line, `zdp-bench`. Nothing heavy is imported before a verb needs it, so `--help` answers at once.

A mistake of the user ends in one sentence and exit code 2; a failed job of a sweep in its sentence and exit code 2 at the end;
an audit with a verdict that was not expected in exit code 1; a run that SIGTERM stopped, saved, in exit code 75 (survival.py).
"""

from __future__ import annotations

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
    options = arguments(list(sys.argv[1:] if said is None else said))
    try:
        with between_runs():
            raise SystemExit(VERBS[options.verb](options))
    except UserError as error:
        print(f"zdp-bench: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Stopped as stop:
        print(f"zdp-bench: {stop}.", file=sys.stderr)
        raise SystemExit(stop.exit_code) from None
    except KeyboardInterrupt:
        print("zdp-bench: interrupted; the same command goes on from the last checkpoint.", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(0) from None
