"""`penstock status --watch`: the coordinator's state on a terminal, anew each second.

A fleet has more slots than a terminal has lines, so each table is sorted by importance and cut at the end of the
screen; the sentence that names the bottleneck never is. Rows are chosen here, because rich squeezes or wraps those that
do not fit.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.deploy.console.exit_codes import USAGE, CommandError
from penstock.deploy.console.peer import Peer
from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError
from penstock.runtime.telemetry.cluster_columns import BOXES, EVENTS, SLOTS, WORKERS, Columns, cells
from penstock.runtime.telemetry.cluster_view import ClusterView, view
from penstock.runtime.telemetry.logs import printable
from penstock.runtime.telemetry.units import seconds

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.table import Table as RichTable

DEADLINE_S = 5.0
"""Longest wait for an answer in seconds; a later one would not show the present."""
INTERVAL_S = 1.0
WIDEST = 1000
"""Width in characters of a drawn table, cut at the right edge: the first columns matter most."""
STYLES = {"": "", "info": "cyan", "warn": "yellow", "bad": "red"}


def watch_status(run: str | None, peer: Peer) -> None:
    """Show the screen until Ctrl-C or SIGTERM. Only at the start it is an error if the coordinator is out of reach:
    later training continues meanwhile."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        raise CommandError(
            "--watch must be given on a terminal whose cursor can be moved, got another output. Use `penstock status`, "
            "or `penstock status --json` in a script",
            USAGE,
        )
    with peer.client() as client, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual end
        address = peer.address

        def ask() -> tuple[ClusterView, float]:
            found = view(client.status(deadline_s=DEADLINE_S), address)
            return (found if run is None else found.only(run)), time.monotonic()

        found, answered_at = ask()
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which restores the terminal
        live = Live(Screen(found), console=console, screen=True, auto_refresh=False)
        with contextlib.ExitStack() as leaving:
            leaving.callback(live.stop)  # also in the middle of the first drawing
            live.start(refresh=True)
            while True:
                time.sleep(INTERVAL_S)
                away = ""
                try:
                    found, answered_at = ask()
                except (CoordinatorUnavailableError, DeadlineError):
                    away_s = seconds(time.monotonic() - answered_at)
                    away = (
                        f"the coordinator at {address} has not answered for {away_s}; training continues, and the last "
                        "answer is shown"
                    )
                    client.reach(0.2)  # gives the channel time to reconnect
                live.update(Screen(found, away), refresh=True)


@dataclass(frozen=True)
class Screen:
    """Screen that rich draws so that it fits the terminal. `away`: why the state is out of date."""

    found: ClusterView
    away: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment
        from rich.text import Text

        width, height = options.max_width, options.height or console.height
        parts: list[Any] = [Text(line, style) for style, line in self._head(width, height)]
        sections = [section for section in _sections(self.found) if section[2]]
        counts = fit([len(rows) for _, _, rows in sections], height - len(parts))
        for section, count in zip(sections, counts, strict=True):
            if count:
                parts += [Text(""), _table(*section, count)]
        wide = options.update(width=WIDEST, height=None)
        lines = [line for one in parts for line in console.render_lines(one, wide, pad=False)]
        for line in lines[:height]:
            yield from Segment.adjust_line_length(line, width, pad=False)
            yield Segment.line()

    def _head(self, width: int, height: int) -> list[tuple[str, str]]:
        """Return the first styled lines; of many open runs only the first, so that lines are left for the tables."""
        coordinator, runs = self.found.coordinator, self.found.open_runs
        about = coordinator.about + (f"  dashboard {coordinator.dashboard}" if coordinator.dashboard else "")
        lines = [("bold reverse", about.ljust(width))]
        if self.away:
            lines.append(("bold red", printable(self.away)))
        for run in runs[: max(1, (height - len(lines)) // 4)]:
            lines.append(("bold", printable("  ".join((run.run, *run.figures)))))
            style = STYLES[run.finding.alarm] or "green"
            text = textwrap.wrap(printable(run.finding.text), max(20, width - 4), max_lines=3)
            lines += [(style, f"  {line}") for line in text]
        if self.found.ended or not runs:
            ended = f"{self.found.ended} (`penstock status --all`)." if self.found.ended else ""
            lines.append(("dim" if runs else "", ended if runs else f"No run is open. {ended}".rstrip()))
        return lines


def fit(rows: Sequence[int], height: int) -> list[int]:
    """Return how many of each table's `rows` fit into `height`; a table takes two more lines."""
    counts = []
    for index, count in enumerate(rows):
        counts.append(max(0, min(count, height // (len(rows) - index) - 2)))
        height -= counts[-1] + 2 if counts[-1] else 0
    return counts


def _table(columns: Columns[Any], headings: Sequence[str], rows: Sequence[Any], count: int) -> RichTable:
    """Return the first `count` rows. A row's `alarm` decides its color."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    more = f" ({len(rows) - count} more)" if len(rows) > count else ""
    for number, heading in enumerate(headings, 1):
        name = heading.rstrip(">") + (more if number == len(headings) else "")
        table.add_column(name, justify="right" if heading.endswith(">") else "left", overflow="fold", no_wrap=True)
    for row, texts in zip(rows[:count], cells(columns, headings, rows[:count]), strict=True):
        # Text(), so that rich does not interpret text from a peer as markup.
        table.add_row(*(Text(printable(text) or "-") for text in texts), style=STYLES[row.alarm])
    return table


def _sections(found: ClusterView) -> list[tuple[Columns[Any], Sequence[str], Sequence[Any]]]:
    """Return the tables of the screen, with their rows sorted by importance."""
    boxes = [box for run in found.open_runs for box in run.boxes]
    slots = [slot for box in boxes for slot in box.slots]
    return [
        (
            SLOTS,
            ("slot", "waited for>", "queued>", "batches/s>", "worker", "phase", "restarts>", "saved>", "note"),
            sorted(slots, key=lambda slot: slot.urgency, reverse=True),
        ),
        (EVENTS, tuple(EVENTS), sorted(found.events, key=lambda event: (event.fault, event.at), reverse=True)),
        (
            BOXES,
            ("box", "state", "step>", "epoch>", "steps/s>", "waits>", "waits for"),
            sorted(boxes, key=lambda box: -box.wait_share),
        ),
        (
            WORKERS,
            ("worker", "state", "slots used>", "batches/s>", "waited for>", "heard of>"),
            sorted(found.workers, key=lambda worker: -worker.wait_share),
        ),
    ]
