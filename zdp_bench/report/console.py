"""The console on which tables and progress are printed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from zdp_bench.errors import discard, printable


class PlainText(Console):
    """A console that prints plain text, without control characters or markup."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment._replace(text=text)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Return the text to write. In a pipe or file, lines have no trailing spaces."""
        text = super()._render_buffer(buffer)
        return text if self.is_terminal else re.sub(r" +$", "", text, flags=re.MULTILINE)

    def on_broken_pipe(self) -> None:
        """Stop printing, so that a run continues if the reader of its output has ended."""
        self.quiet = True
        discard(sys.stdout)


def console() -> Console:
    """Return a console on standard output.

    It is as wide as the terminal or COLUMNS. If neither is known, it is wide enough for any row.
    """
    has_known_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return PlainText(width=None if has_known_width else 10_000, markup=False)
