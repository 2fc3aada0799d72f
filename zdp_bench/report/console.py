"""The console that tables and progress are printed on."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from zdp_bench.errors import printable


class PlainText(Console):
    """A console that prints plain text, without control characters or markup."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment._replace(text=text)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Return the text that is written; no line of a pipe or file ends in blanks."""
        text = super()._render_buffer(buffer)
        return text if self.is_terminal else re.sub(r" +$", "", text, flags=re.MULTILINE)

    def on_broken_pipe(self) -> None:
        """Stop printing: a run continues when its reader has gone."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """Return standard output; as wide as COLUMNS or, if piped, wide enough for any row."""
    told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return PlainText(width=None if told else 10_000, markup=False)
