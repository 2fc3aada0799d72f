"""`Sheet`, a table ready to show, and its forms: terminal, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from zdp_bench.disk import write_changed
from zdp_bench.errors import printable
from zdp_bench.records import plain_cell

Numbers = Mapping[str, object]
FORMS = ("md", "csv", "json")
PIPED = 1_000  # columns, which no terminal has
LEAST = 10  # characters to which a column of words may be folded
DIGEST = re.compile(r"[0-9a-f]{8}")
# '97.97', '1e-05', '≥ 3 %', '0.53 / 1.52', '97.97 ± 0.09': a cell that does not wrap
NUMBER = re.compile(r"(?:[-+±≥≤≈~]?\s?(?:\d[\d.,:]*(?:e[-+]?\d+)?|∞|inf|nan)\s?%?[\s/]*)*")


@dataclass(frozen=True)
class Sheet:
    """A table as it is shown, and the numbers behind it.

    Attributes:
        columns: the headings; without any, none is shown.
        rows: cells as shown.
        notes: sentences below the table.
        origin: a sentence below the title of the Markdown page: what made it.
        numbers: what CSV and JSON hold, one mapping a row.
        important: columns in order of importance; those that are not named follow in their own.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    origin: str = ""
    numbers: Sequence[Numbers] = ()
    important: Sequence[str] = ()

    @classmethod
    def of_words(cls, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Sheet:
        """Return a sheet whose CSV and JSON hold the cells as they are shown."""
        numbers = [dict(zip(columns, row, strict=True)) for row in rows]
        return cls(title, columns, rows, numbers=numbers)

    def as_rich(self, width: int | None = None) -> RichTable:
        """Return the table for a terminal of so many columns.

        Numbers stay on one line. Headings and words fold where they must. Where that is too wide,
        the least important columns are left out, and the caption names them.
        """
        columns = self._columns()
        if width is not None and _width_of([column.widest for column in columns]) > width:
            columns = [column.with_folded_heading() for column in columns]
        kept = list(range(len(columns)))
        by_importance = sorted(kept, key=self._rank)
        if width is not None:
            least = [column.least for column in columns]
            while len(kept) > 2 and _width_of([least[place] for place in kept]) > width:
                kept.remove(by_importance.pop())
        table = RichTable(show_header=bool(self.columns))
        left_out = [name for place, name in enumerate(self.columns) if place not in kept]
        if left_out:
            names = ", ".join(left_out)
            table.caption = f"No room for {names}: use a wider terminal or --format csv."
        for column in (columns[place] for place in kept):
            if column.is_numeric:
                table.add_column(column.heading, no_wrap=True)
            else:
                table.add_column(column.title, overflow="fold", min_width=column.least)
        for row in self.rows:
            table.add_row(*(row[place] for place in kept))
        return table

    def _columns(self) -> list[_Column]:
        """Return each column with its cells."""
        cells = list(zip(*self.rows, strict=False)) or [()] * len(self.columns)
        pairs = zip_longest(self.columns, cells, fillvalue="")
        return [_Column(title, title, tuple(of)) for title, of in pairs]

    def _rank(self, place: int) -> int:
        """Return how many columns are more important than the one at a place, or as much."""
        name = self.columns[place] if self.columns else ""
        if name in self.important:
            return self.important.index(name)
        return len(self.important) + place

    def as_facts(self) -> str:
        """Return rows of a label and a value as lines, for a file or another program."""
        longest = max(len(label) for label, _ in self.rows)
        return "\n".join(f"{label:{longest}}   {value}" for label, value in self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.as_rich(options.max_width)
        notes, table.caption = [*self.notes, table.caption], None
        if self.title:
            yield Text(self.title, "table.title")
        if self.columns:
            yield table
        elif self.rows:
            is_piped = options.max_width >= PIPED
            yield Text(self.as_facts()) if is_piped else table
        caption = "\n".join(str(note) for note in notes if note)
        if caption:
            yield Text(caption, "table.caption")

    def as_markdown(self) -> str:
        """Return a page with title and notes; without notes, only the table."""
        lines = markdown_table(self.columns, self.rows)
        if self.notes:
            head = [f"# {self.title}", ""]
            if self.origin:
                head += [self.origin, ""]
            lines = [*head, *lines, "", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def as_text(self, form: str) -> str:
        """Return the sheet in one of `FORMS`, without a line break at its end."""
        if form == "md":
            return printable(self.as_markdown().rstrip())
        if form == "csv":
            return to_csv(self.numbers).rstrip()
        return printable(to_json(self.numbers))

    def write(self, stem: Path) -> list[Path]:
        """Write `stem`.md and `stem`.csv; a file that holds the same stays."""
        paths = [stem.with_suffix(".md"), stem.with_suffix(".csv")]
        write_changed(paths[0], printable(self.as_markdown()).encode())
        write_changed(paths[1], to_csv(self.numbers).encode())
        return paths


@dataclass(frozen=True)
class _Column:
    """A column for a terminal.

    Attributes:
        heading: its title, which may be folded.
    """

    title: str
    heading: str
    cells: tuple[str, ...]

    @property
    def is_numeric(self) -> bool:
        """True if no cell may be folded."""
        if not any(self.cells):
            return False
        return all(NUMBER.fullmatch(cell) or DIGEST.fullmatch(cell) for cell in self.cells)

    @property
    def widest(self) -> int:
        """Its characters if nothing is folded."""
        return max(map(len, (*self.heading.split("\n"), *self.cells)))

    @property
    def least(self) -> int:
        """Its characters if words are folded where they may be."""
        return self.widest if self.is_numeric else min(LEAST, self.widest)

    def with_folded_heading(self) -> _Column:
        return replace(self, heading=re.sub(r"(?<=_)|(?<=\w) (?=\w)", "\n", self.heading))


def _width_of(widths: Sequence[int]) -> int:
    """Return the characters of a table with columns of these widths, and lines between them."""
    return 1 + sum(3 + width for width in widths)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *cells)]


def to_csv(numbers: Sequence[Numbers], columns: Sequence[str] = ()) -> str:
    """Return numbers as CSV with the keys of all rows, or with `columns` if there is no row."""
    keys = dict.fromkeys(key for row in numbers for key in row) or columns
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(plain_cell, keys))
    writer.writerows([plain_cell(row.get(key, "")) for key in keys] for row in numbers)
    return out.getvalue()


def to_json(numbers: Sequence[Numbers]) -> str:
    """Return numbers as a JSON list; ∞ is "inf" and NaN null there."""

    def valid(value: object) -> object:
        if not isinstance(value, float) or math.isfinite(value):
            return value
        return None if math.isnan(value) else str(value)

    plain = [{key: valid(value) for key, value in row.items()} for row in numbers]
    return json.dumps(plain, indent=1, ensure_ascii=False)
