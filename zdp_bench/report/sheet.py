"""`Sheet`, a table that can be shown in a terminal or as Markdown, CSV or JSON."""

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
MAX_TERMINAL_WIDTH = 1_000  # characters; wider output goes to a pipe or file (`console`)
MIN_WIDTH_OF_WORDS = 10  # characters to which a column of words may be folded
DIGEST = re.compile(r"[0-9a-f]{8}")
# A cell that must stay on one line: '97.97', '1e-05', '≥ 3 %', '0.53 / 1.52', '97.97 ± 0.09'
NUMBER = re.compile(r"(?:[-+±≥≤≈~]?\s?(?:\d[\d.,:]*(?:e[-+]?\d+)?|∞|inf|nan)\s?%?[\s/]*)*")


@dataclass(frozen=True)
class Sheet:
    """A table as it is shown, and the numbers behind it.

    Attributes:
        title: title above the table.
        columns: headings. If empty, the table is shown without a heading.
        rows: cells as they are shown.
        notes: sentences below the table.
        origin: sentence below the title of the Markdown page, which says what generated it.
        numbers: contents of CSV and JSON, one mapping per row.
        important: names of columns in order of importance. Other columns are less important, and
            rank in the order in which they are shown.
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
        """Return a sheet whose CSV and JSON contain the cells as they are shown."""
        numbers = [dict(zip(columns, row, strict=True)) for row in rows]
        return cls(title, columns, rows, numbers=numbers)

    def as_rich(self, width: int | None = None) -> RichTable:
        """Return the table for a terminal.

        Numbers stay on one line. If the table is too wide, headings and words are folded. If it is
        still too wide, the least important columns are left out, and the caption names them.

        Args:
            width: number of characters in a line of the terminal. Default: no limit.
        """
        columns = self._columns()
        shown = list(range(len(columns)))
        if width is not None:
            if _width_of([column.full_width for column in columns]) > width:
                columns = [column.with_folded_heading() for column in columns]
            shown = self._select_columns(columns, width)
        table = RichTable(show_header=bool(self.columns))
        left_out = [name for index, name in enumerate(self.columns) if index not in shown]
        if left_out:
            names = ", ".join(left_out)
            table.caption = f"No room for {names}: use a wider terminal or --format csv."
        for index in shown:
            column = columns[index]
            if column.is_numeric:
                table.add_column(column.heading, no_wrap=True)
            else:
                table.add_column(column.title, overflow="fold", min_width=column.min_width)
        for row in self.rows:
            table.add_row(*(row[index] for index in shown))
        return table

    def _select_columns(self, columns: Sequence[_Column], width: int) -> list[int]:
        """Return the indices of the most important columns that fit in a width, at least two."""
        selected = list(range(len(columns)))
        by_importance = sorted(selected, key=self._rank)
        while len(selected) > 2:
            if _width_of([columns[index].min_width for index in selected]) <= width:
                break
            selected.remove(by_importance.pop())
        return selected

    def _columns(self) -> list[_Column]:
        """Return the columns with their cells, even if there are no rows or no headings."""
        cells_by_column = list(zip(*self.rows, strict=False)) or [()] * len(self.columns)
        pairs = zip_longest(self.columns, cells_by_column, fillvalue="")
        return [_Column(title, title, tuple(cells)) for title, cells in pairs]

    def _rank(self, index: int) -> int:
        """Return the rank of a column by importance; the most important one has the lowest."""
        name = self.columns[index] if self.columns else ""
        if name in self.important:
            return self.important.index(name)
        return len(self.important) + index

    def as_facts(self) -> str:
        """Return rows of a label and a value as lines of text, for a file or another program."""
        width = max(len(label) for label, _ in self.rows)
        return "\n".join(f"{label:{width}}   {value}" for label, value in self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.as_rich(options.max_width)
        notes, table.caption = [*self.notes, table.caption], None
        if self.title:
            yield Text(self.title, "table.title")
        if self.columns:
            yield table
        elif self.rows:
            is_piped = options.max_width >= MAX_TERMINAL_WIDTH
            yield Text(self.as_facts()) if is_piped else table
        caption = "\n".join(str(note) for note in notes if note)
        if caption:
            yield Text(caption, "table.caption")

    def as_markdown(self) -> str:
        """Return a Markdown page with title and notes or, without notes, only the table."""
        lines = markdown_table(self.columns, self.rows)
        if self.notes:
            head = [f"# {self.title}", ""]
            if self.origin:
                head += [self.origin, ""]
            lines = [*head, *lines, "", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def as_text(self, form: str) -> str:
        """Return the sheet as Markdown, CSV or JSON, without a newline at the end.

        Args:
            form: one of `FORMS`.
        """
        if form == "md":
            return printable(self.as_markdown().rstrip())
        if form == "csv":
            return to_csv(self.numbers).rstrip()
        return printable(to_json(self.numbers))

    def write(self, stem: Path) -> list[Path]:
        """Write the sheet as `stem`.md and `stem`.csv, unless the files are up to date.

        Returns:
            The paths of both files.
        """
        markdown_path, csv_path = stem.with_suffix(".md"), stem.with_suffix(".csv")
        write_changed(markdown_path, printable(self.as_markdown()).encode())
        write_changed(csv_path, to_csv(self.numbers).encode())
        return [markdown_path, csv_path]


@dataclass(frozen=True)
class _Column:
    """A column of a table in a terminal.

    Attributes:
        title: title of the column.
        heading: the title, possibly folded into several lines.
        cells: cells of the column.
    """

    title: str
    heading: str
    cells: tuple[str, ...]

    @property
    def is_numeric(self) -> bool:
        """True if the column has only numbers and digests, which are not folded."""
        if not any(self.cells):
            return False
        return all(NUMBER.fullmatch(cell) or DIGEST.fullmatch(cell) for cell in self.cells)

    @property
    def full_width(self) -> int:
        """Width in characters if no cell is folded."""
        return max(map(len, (*self.heading.split("\n"), *self.cells)))

    @property
    def min_width(self) -> int:
        """Width in characters if cells are folded as far as possible."""
        return self.full_width if self.is_numeric else min(MIN_WIDTH_OF_WORDS, self.full_width)

    def with_folded_heading(self) -> _Column:
        """Return the column with its heading folded after underscores and at spaces."""
        return replace(self, heading=re.sub(r"(?<=_)|(?<=\w) (?=\w)", "\n", self.heading))


def _width_of(widths: Sequence[int]) -> int:
    """Return the width of a table in characters, with a border around each column."""
    return 1 + sum(3 + width for width in widths)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with the words of each cell on one line."""
    lines = [[_markdown_cell(cell) for cell in row] for row in (columns, *rows)]
    lines.insert(1, ["---"] * len(columns))
    return [f"| {' | '.join(line)} |" for line in lines]


def _markdown_cell(cell: str) -> str:
    return " ".join(cell.splitlines()).replace("|", "\\|")


def to_csv(numbers: Sequence[Numbers], columns: Sequence[str] = ()) -> str:
    """Return rows of numbers as CSV.

    Args:
        numbers: the rows; the CSV has a column for each of their keys.
        columns: columns of the CSV if there is no row.
    """
    keys = dict.fromkeys(key for row in numbers for key in row) or columns
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(plain_cell, keys))
    writer.writerows([plain_cell(row.get(key, "")) for key in keys] for row in numbers)
    return out.getvalue()


def to_json(value: object) -> str:
    """Return what `--format json` prints: JSON with ∞ as "inf" and NaN as null."""

    def replace_not_finite(value: object) -> object:
        if isinstance(value, Mapping):
            return {key: replace_not_finite(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [replace_not_finite(entry) for entry in value]
        if not isinstance(value, float) or math.isfinite(value):
            return value
        return None if math.isnan(value) else str(value)

    return json.dumps(replace_not_finite(value), indent=1, ensure_ascii=False, allow_nan=False)
