"""The command line, `zdp-bench`.

Exit codes: 0; 2 after a user's mistake (one sentence) or a failed job of a sweep; 1 after an audit
with an unexpected verdict or a failed check of `verify`; 75 or 130 after a run that SIGTERM or
ctrl-C stopped, its state saved.
Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO, cast

from zdp_bench.cli.arguments import hide_environment
from zdp_bench.cli.commands import COMMANDS
from zdp_bench.cli.parser import complete, parse_arguments
from zdp_bench.errors import UserError
from zdp_bench.training.interrupts import Stopped, explain, stop_on_sigterm


class LastingStream:
    """A stream that drops all further output once a write fails, so that no run ends by it.

    Its reader may leave (`| head -1`), or its disk be full.

    Attributes:
        failed: the first error; None while all is well.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failed: OSError | None = None

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, do: Callable[[], object]) -> None:
        if self.failed is not None:
            return
        try:
            do()
        except OSError as error:
            self.failed = error
            # What Python still buffers for the stream must not fail again at exit.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def lasting_output() -> Iterator[LastingStream]:
    """Make standard output a `LastingStream`, and replace closed streams by the null device.

    Both streams write `?` for characters that their encoding lacks.
    """
    before = sys.stdout, sys.stderr
    # The number of a closed stream would go to the next file opened, and prints into that file.
    out, err = (stream or open(os.devnull, "w", encoding="utf-8") for stream in before)  # noqa: SIM115
    for stream in (out, err):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    lasting = LastingStream(out)
    sys.stdout, sys.stderr = cast(TextIO, lasting), err
    try:
        yield lasting
    finally:
        lasting.flush()
        sys.stdout, sys.stderr = before


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Carry out one command line, `sys.argv` by default, and exit."""
    with lasting_output() as output:
        code = _carry_out(list(sys.argv[1:] if words is None else words))
        if words is None:  # a process that only ends has nothing to interrupt
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        output.flush()
        # A reader that has left has read enough.
        if output.failed and output.failed.errno != errno.EPIPE:
            reason = output.failed.strerror
            _say(f"standard output: {reason}; what was made is kept.")
            code = code or 2
        if "WORLD_SIZE" in os.environ:
            from zdp_bench.training.distributed import leave

            leave(code)
    raise SystemExit(code)


def _carry_out(words: list[str]) -> int:
    """Run the command and return its exit code; print what went wrong."""
    if words[:1] == ["--complete"]:
        print("\n".join(complete(words[1:])))
        return 0
    options = parse_arguments(words)
    overrides = getattr(options, "overrides", [])
    if hasattr(options, "overrides") and sys.stderr.isatty():  # libraries take seconds to load
        _say(f"{options.verb} {' '.join(overrides)} ...")
    try:
        with stop_on_sigterm():
            return COMMANDS[options.verb].run(options)
    except UserError as error:
        _say(hide_environment(str(error), overrides))
        return 2
    except Stopped as stop:
        _say(f"{stop}.")
        return stop.exit_code
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on from the last checkpoint.")
        return 130
    except (ImportError, MemoryError, RuntimeError, OSError) as error:
        if (explained := explain(error)) is None:
            raise
        _say(hide_environment(str(explained), overrides))
        return 2


def _say(sentence: str) -> None:
    print(f"zdp-bench: {sentence}", file=sys.stderr)
