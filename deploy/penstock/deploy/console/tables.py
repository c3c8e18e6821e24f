"""Tables: drawn by rich on a terminal, aligned text otherwise.

Cells hold what peers said of themselves: nothing in them moves the cursor or colours the screen.

Text is for grep, awk and bug reports: the title as a line, a head, one line a row, columns two blanks apart, nothing
cut off. A cell that is empty is a "-", so that columns can be counted. It is not rich's: that takes six seconds for the
10,000 slots of a fleet, and a tenth of a second to be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.runtime.telemetry.logs import printable

__all__ = ["Table", "show"]


@dataclass(frozen=True)
class Table:
    """What to show. A heading that ends with ">" stands over a column of numbers, aligned to the right."""

    title: str
    headings: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    empty: str = ""
    """A line to show instead when there are no rows; "" = show nothing."""


def show(tables: Iterable[Table]) -> None:
    """Print the tables that have rows, or something to say without."""
    draw = _draw if sys.stdout.isatty() else _write
    first = True
    for table in tables:
        if not table.rows and not table.empty:
            continue
        if not first:
            print()
        first = False
        if table.rows:
            draw(table)
        else:
            print(table.empty)


def _draw(table: Table) -> None:
    import rich.box
    import rich.console
    import rich.table
    from rich.text import Text

    drawn = rich.table.Table(title=table.title, title_justify="left", box=rich.box.SIMPLE_HEAD, title_style="bold")
    for heading in table.headings:
        right = heading.endswith(">")
        drawn.add_column(heading.rstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))  # Text: nothing that a peer sent is taken for markup
    rich.console.Console().print(drawn)


def _write(table: Table) -> None:
    print(table.title)
    rows = [
        [heading.rstrip(">") for heading in table.headings],
        *([printable(cell) or "-" for cell in row] for row in table.rows),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.headings))]
    for row in rows:
        cells = [
            cell.rjust(width) if heading.endswith(">") else cell.ljust(width)
            for cell, width, heading in zip(row, widths, table.headings, strict=True)
        ]
        print("  ".join(cells).rstrip())
