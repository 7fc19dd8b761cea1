"""Tables as text and as HTML, drawn from plain descriptions."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

MOST_ROWS = 30
"""A table shows this many rows, and says how many more there are."""


@dataclass(frozen=True)
class Table:
    """What is drawn under one title.

    Attributes:
      title: a line.
      columns: a heading each.
      rows: the cells of each row, as many as there are columns. Numbers stand to the right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]

    @property
    def cells(self) -> list[list[str]]:
        """The cells that are shown, as text, numbers with separators: ``407,080``."""
        return [
            [f"{cell:,}" if isinstance(cell, int) else cell for cell in row]
            for row in self.rows[:MOST_ROWS]
        ]

    @property
    def rest(self) -> str:
        """What stands below the rows, if there are more."""
        more = len(self.rows) - MOST_ROWS
        return f"and {more:,} more" if more > 0 else ""

    def is_number(self, column: int) -> bool:
        """Tell whether a column holds numbers."""
        return all(isinstance(row[column], int) for row in self.rows)


def as_text(heading: str, tables: Sequence[Table]) -> str:
    """Draw tables as lines of text.

    >>> print(as_text("step", [Table("reads", ("variable", "bytes"), (("w", 4000), ("bias", 40)))]))
    step
    <BLANKLINE>
    reads
      variable  bytes
      w         4,000
      bias         40
    """
    lines = [heading]
    for table in tables:
        lines += ["", table.title]
        rows = [list(table.columns), *table.cells] if table.rows else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            padded = [
                cell.rjust(width) if table.is_number(i) else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append(f"  {'  '.join(padded)}".rstrip())
        if table.rest:
            lines.append(f"  {table.rest}")
    return "\n".join(lines)


def as_html(heading: str, tables: Sequence[Table]) -> str:
    """Draw tables as HTML, without any style but the side on which numbers stand.

    >>> as_html("a < b", [])
    '<div><p><b>a &lt; b</b></p></div>'
    """
    parts = [f"<div><p><b>{html.escape(heading)}</b></p>"]
    for table in tables:
        parts.append(f"<p>{html.escape(table.title)}</p>")
        if not table.rows:
            continue
        sides = ["right" if table.is_number(i) else "left" for i in range(len(table.columns))]
        head = _row("th", table.columns, sides)
        body = "".join(_row("td", row, sides) for row in table.cells)
        parts.append(f"<table><thead>{head}</thead><tbody>{body}</tbody></table>")
        if table.rest:
            parts.append(f"<p>{table.rest}</p>")
    return "".join([*parts, "</div>"])


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    shown = "".join(
        f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{shown}</tr>"
