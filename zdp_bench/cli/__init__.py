"""The command line, `zdp-bench`.

Exit codes: 0; 2 after a user's mistake (one sentence) or a failed job of a sweep; 1 after an audit
with an unexpected verdict or a failed check of `verify`; 75 or 130 after a run that SIGTERM or
ctrl-C stopped, its state saved.
Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import gc
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from zdp_bench.cli.arguments import hide_environment
from zdp_bench.cli.commands import COMMANDS
from zdp_bench.cli.parser import parse_arguments
from zdp_bench.errors import UserError, show_warnings
from zdp_bench.training.interrupts import Stopped, explain, stop_on_sigterm

CONTINUES = ("run", "search", "reproduce")  # verbs that save what they have done
# Verbs that read records or configurations, print, and end.
READS = ("validate", "list", "results", "table", "report", "budget", "compare", "coverage")


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Carry out one command line, `sys.argv` by default, and exit."""
    # The number of a closed stream would go to the next file opened, and prints into that file.
    sys.stdout, sys.stderr = (
        stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr)
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # characters that its encoding lacks
    try:
        code = _carry_out(list(sys.argv[1:] if words is None else words))
        code = _flush_output(code)
    except BrokenPipeError:  # a reader that has left, such as `head`, has read enough
        _discard_output()
        code = 0
    finally:
        if words is not None:  # the caller's process goes on
            gc.enable()
    if words is None:  # a process that only ends has nothing to interrupt
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "WORLD_SIZE" in os.environ:
        from zdp_bench.training.distributed import leave

        leave(code)
    raise SystemExit(code)


def _flush_output(code: int) -> int:
    """Write what is still to be printed; return the exit code, which is 2 if that fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_output()
        if not code:  # else the reason has been printed
            _say(str(explain(error) or error))
        return code or 2
    return code


def _discard_output() -> None:
    """Have what is still to be printed go nowhere, so that Python's exit does not try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _carry_out(words: list[str]) -> int:
    """Run the command and return its exit code; print what went wrong."""
    if not _has_working_folder():
        _say("the working folder no longer exists; change to another one.")
        return 2
    options = parse_arguments(words)
    show_warnings()
    if options.verb in READS:
        gc.disable()  # it takes a fifth of the time, and the process ends before memory runs short
    continues = options.verb in CONTINUES and not getattr(options, "plan", False)
    overrides = getattr(options, "overrides", [])
    if hasattr(options, "overrides") and sys.stderr.isatty():  # libraries take seconds to load
        _say(" ".join([options.verb, *overrides, "..."]))
    try:
        with stop_on_sigterm():
            return COMMANDS[options.verb].run(options)
    except UserError as error:
        _say(hide_environment(f"{error}{_stand_in(str(error), words)}", overrides))
        return 2
    except Stopped as stop:
        more = "; everything is saved, and the same command continues from here"
        _say(f"{stop}{more if continues else ''}.")
        return stop.exit_code
    except KeyboardInterrupt:
        more = "; the same command continues from the last checkpoint"
        _say(f"interrupted{more if continues else ''}.")
        return 130
    except BrokenPipeError:
        raise
    except (ImportError, MemoryError, RuntimeError, OSError) as error:
        if (explained := explain(error)) is None:
            raise
        _say(hide_environment(str(explained), overrides))
        return 2


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _stand_in(sentence: str, words: list[str]) -> str:
    """Return the whole command for an error that suggests another data set, or ''."""
    found = re.search(r"\buse (dataset=\w+)[^;]*\.$", sentence)
    if not found or words[:1] != ["run"]:
        return ""
    kept = [word for word in words if not word.startswith(("dataset=", "paths.data="))]
    return f" For example: zdp-bench {shlex.join([*kept, found[1]])}"


def _say(sentence: str) -> None:
    print(f"zdp-bench: {sentence}", file=sys.stderr)
