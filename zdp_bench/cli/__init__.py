"""The command line, `zdp-bench`.

Exit codes:
    0   success
    1   an audit with an unexpected verdict, or a failed check of `verify`
    2   invalid input, explained in one sentence, or a failed job of a sweep
    75  a run that SIGTERM stopped, after it saved its state
    130 a run that Ctrl-C stopped, after it saved its state
    141 a command whose output's reader, such as `head`, ended before it

No slow import happens before a command needs it.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from zdp_bench.cli.arguments import hide_environment
from zdp_bench.cli.commands import COMMANDS
from zdp_bench.cli.parser import parse_arguments
from zdp_bench.errors import UserError, discard, print_message, show_warnings
from zdp_bench.training.interrupts import CONTINUING, Stopped, explain, stop_on_sigterm

RESUMABLE = ("run", "search", "reproduce")  # verbs that continue when they are given again
# Verbs that only read records or configurations, and print.
READ_ONLY = ("validate", "list", "results", "table", "report", "budget", "compare", "coverage")


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run one command line and exit.

    Args:
        words: the command line without the program's name. Default: `sys.argv[1:]`, after which
            the process ends.
    """
    # A closed standard stream frees its file descriptor. The next file that is opened would get it,
    # and everything printed would go into that file.
    sys.stdout, sys.stderr = (
        stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr)
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # some encodings lack ε
    if os.environ.get("ZDP_DATA") == "":
        del os.environ["ZDP_DATA"]  # to Hydra, an empty variable is not an unset one
    try:
        code = _run_command(list(sys.argv[1:] if words is None else words))
    except BrokenPipeError:  # what it would have found is unknown, so this is no success
        code = 141
    finally:
        if words is not None:  # the calling process continues
            gc.enable()
    code = _flush_output(code)
    try:
        sys.stderr.flush()  # what a warning could not write would change the exit code
    except (OSError, ValueError):
        discard(sys.stderr)
    if words is None:  # the process only has to end, which Ctrl-C must not interrupt
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "WORLD_SIZE" in os.environ:
        from zdp_bench.training.distributed import leave

        leave(code)
    raise SystemExit(code)


def _flush_output(code: int) -> int:
    """Flush standard output. Return `code`, or 2 if a full disk loses the output of a success."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        if not code:  # otherwise, an error has been printed already
            print_message(str(explain(error) or error))
        return code or 2
    return code


def _run_command(words: list[str]) -> int:
    """Run a command and return its exit code. Print its error, if any."""
    if not _has_working_folder():
        print_message("the working folder no longer exists; change to another one.")
        return 2
    options = parse_arguments(words)
    show_warnings()
    if options.verb in READ_ONLY:
        gc.disable()  # a fifth of the time, and the process ends before memory runs short
    is_resumable = options.verb in RESUMABLE and not getattr(options, "plan", False)
    # Show at once that the command was understood: its libraries take seconds to load.
    if hasattr(options, "overrides") and sys.stderr.isatty():
        print_message(" ".join([options.verb, *options.overrides, "..."]))
    try:
        with stop_on_sigterm():
            return COMMANDS[options.verb].run(options)
    except UserError as error:
        print_message(hide_environment(str(error), words))
        return 2
    except Stopped as stop:
        advice = f"; {CONTINUING} from the last checkpoint"
        if stop.has_saved:
            advice = f"; everything is saved, and {CONTINUING} from here"
        print_message(f"{stop}{advice if is_resumable else ''}.")
        return stop.exit_code
    except KeyboardInterrupt:
        advice = f"; {CONTINUING} from the last checkpoint"
        print_message(f"interrupted{advice if is_resumable else ''}.")
        return 130
    except BrokenPipeError:
        raise
    except (ImportError, MemoryError, RuntimeError, OSError) as error:
        if (explained := explain(error)) is None:
            raise
        print_message(hide_environment(str(explained), words))
        return 2


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
