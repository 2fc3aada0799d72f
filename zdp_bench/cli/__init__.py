"""The command line, `zdp-bench`. Nothing heavy is imported before a verb needs it, so `--help` answers at once.

A mistake of the user ends in one sentence and exit code 2; a failed job of a sweep in its sentence and exit code 2 at the end;
an audit with a verdict that was not expected in exit code 1; a run that SIGTERM stopped, saved, in exit code 75 (survival.py).
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from zdp_bench.cli import doing, showing
from zdp_bench.cli.parser import RESULTS, arguments
from zdp_bench.errors import UserError
from zdp_bench.training.interrupts import Stopped, between_runs, lasting_output, probe, refused

VERBS = doing.VERBS | showing.VERBS


def main(said: Sequence[str] | None = None) -> NoReturn:
    """Carry out one command line; exits with 0, or with 2 after one sentence."""
    with lasting_output() as output:
        code = _carry_out(list(sys.argv[1:] if said is None else said))
        output.flush()
        if (
            output.failed and output.failed.errno != errno.EPIPE
        ):  # a reader that has gone has read enough
            print(
                f"zdp-bench: standard output: {output.failed.strerror}; what was made is kept.",
                file=sys.stderr,
            )
            code = code or 2
        if "WORLD_SIZE" in os.environ:
            from zdp_bench.training.distributed import leave

            leave(code)
    raise SystemExit(code)


def _carry_out(words: list[str]) -> int:
    """The exit code; what went wrong is said."""
    options = arguments(words)
    try:
        _refuse_launcher(options)
        _try_results(options)
        with between_runs():
            return VERBS[options.verb](options)
    except UserError as error:
        print(f"zdp-bench: {error}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"zdp-bench: {stop}.", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print(
            "zdp-bench: interrupted; the same command goes on from the last checkpoint.",
            file=sys.stderr,
        )
        return 130
    except OSError as error:
        if (told := refused(error)) is None:
            raise
        print(f"zdp-bench: {told}", file=sys.stderr)
        return 2


def _refuse_launcher(options: argparse.Namespace) -> None:
    """Hydra and its launchers carry out `run`; what else is said to them is read by nobody.

    Raises:
        UserError: another verb is told to use one.
    """
    if options.verb == "run":
        return
    first = str(
        getattr(options, "table", "")
    )  # of `reproduce`, where an override may stand in a table's place
    for word in (first, *getattr(options, "overrides", [])):
        group = word.lstrip("+~").partition("=")[0].partition(".")[0].partition("/")[0]
        if group in ("launcher", "hydra") and word != "launcher=local":
            raise UserError(
                f"{word}: only `zdp-bench run` reads it; leave it out of `zdp-bench {options.verb}`."
            )


def _try_results(options: argparse.Namespace) -> None:
    """Whether the results folder is there to be read, and can be written to by a verb that will: before its work, not after.

    Raises:
        UserError: it is not.
    """
    folder = getattr(options, "results", None)
    if folder is None:
        return
    if (
        options.verb in ("table", "figure", "report", "results")
        and folder != RESULTS
        and not folder.exists()
    ):
        raise UserError(
            f"{folder}: there is no such folder, so there are no records. Name the results folder of your runs."
        )
    if options.verb == "results" and folder.exists() and not folder.is_dir():
        raise UserError(
            f"{folder}: is a file and no folder, so there are no records. Name the results folder of your runs."
        )
    own = options.verb == "epsilon" and (
        options.sigma is not None or options.target_epsilon is not None
    )
    kept = options.verb == "audit" and options.cases == "all"
    if kept or (
        options.verb in ("table", "figure", "report", "reproduce", "bench", "epsilon") and not own
    ):
        probe(folder)
    if output := getattr(options, "output", None):
        probe(output.parent)
