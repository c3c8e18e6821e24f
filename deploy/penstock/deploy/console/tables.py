"""Tables: drawn by rich on a terminal, as aligned text otherwise. Control characters from peers are replaced.

The text is for grep, awk and bug reports: no cell is cut, and an empty one is a "-". It is not made by rich, which
takes six seconds for the 10,000 slots of a fleet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from penstock.runtime.telemetry.logs import printable

if TYPE_CHECKING:
    import rich.table


@dataclass(frozen=True)
class Table:
    """Table that a command prints. A heading that ends with ">" aligns its column to the right."""

    title: str
    headings: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    empty: str = ""
    """Line that is shown instead of no rows, if any."""
    note: str = ""
    """Line below the rows, if any."""


def show(tables: Iterable[Table]) -> None:
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
            if table.note:
                print(table.note)
        else:
            print(table.empty)


def drawn(table: Table, styles: Iterable[str] = (), *, no_wrap: bool = False, **look: Any) -> rich.table.Table:
    """Return the table as rich's. `styles`: of each row; `look`: arguments of rich's table."""
    import rich.table
    from rich.text import Text

    made = rich.table.Table(title=table.title or None, title_justify="left", title_style="bold", **look)
    for heading in table.headings:
        right = heading.endswith(">")
        made.add_column(heading.rstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=no_wrap)
    for row, style in zip_longest(table.rows, styles):
        # Text(), so that rich does not interpret text from a peer as markup.
        made.add_row(*(Text(printable(cell) or "-") for cell in row), style=style)
    return made


def _draw(table: Table) -> None:
    import rich.box
    import rich.console

    rich.console.Console().print(drawn(table, box=rich.box.SIMPLE_HEAD))


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
