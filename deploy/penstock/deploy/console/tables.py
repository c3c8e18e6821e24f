"""Tables as aligned text, for people, grep, awk and bug reports: no cell is cut, and an empty one is a "-". Control
characters from peers are replaced. Not by rich, which takes six seconds for the 10,000 slots of a fleet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.runtime.telemetry.logs import printable


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
    first = True
    for table in tables:
        if not table.rows and not table.empty:
            continue
        if not first:
            print()
        first = False
        if table.rows:
            _write(table)
            if table.note:
                print(table.note)
        else:
            print(table.empty)


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
