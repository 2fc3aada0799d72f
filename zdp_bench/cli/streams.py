"""Standard output that outlives its reader, and a table on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from zdp_bench.report.sheet import Sheet


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


def print_sheet(sheet: Sheet, form: str) -> None:
    """Print a table as --format says: "rich", or one of `sheet.FORMS`."""
    from zdp_bench.training.progress import console

    if form == "rich":
        console().print(sheet.as_rich())
    else:
        print(sheet.as_text(form))
