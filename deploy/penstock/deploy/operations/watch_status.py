"""Implementation of `penstock status --watch`: shows the coordinator's state on a terminal, anew each second.

If the coordinator cannot be reached at the start, that is an error. If it cannot be reached later, the command waits
for it, because training continues meanwhile, and the screen reports that.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from penstock.deploy.console.exit_codes import USAGE, CommandError
from penstock.deploy.console.peer import Peer
from penstock.deploy.console.signals import signals_as_errors
from penstock.deploy.operations.watch_screen import Screen
from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.runtime.telemetry.cluster_view import ClusterView, view
from penstock.runtime.telemetry.units import seconds

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["watch_status"]

DEADLINE_S = 5.0
"""Longest time in seconds to wait for one answer of the coordinator. A later answer would not show the present."""
INTERVAL_S = 1.0
"""Seconds between two updates."""


def watch_status(peer: Peer) -> None:
    """Show the screen until Ctrl-C. A signal that ends the process raises SystemExit."""
    from rich.live import Live

    console = _terminal()
    with peer.client() as client, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual end
        watch = _Watch(client, peer.address)
        watch.ask()  # the first query's error is raised before the screen starts
        live = Live(Screen(watch.found, watch.away), console=console, screen=True, auto_refresh=False)
        # A signal restores the terminal too, also in the middle of the first drawing.
        with signals_as_errors(lambda number: SystemExit(128 + number)) as check, contextlib.ExitStack() as leaving:
            leaving.callback(live.stop)
            live.start(refresh=True)
            while True:
                time.sleep(INTERVAL_S)
                check()
                watch.ask()
                live.update(Screen(watch.found, watch.away), refresh=True)


def _terminal() -> Console:
    """Return a rich console for standard output. Raises CommandError if standard output is not a terminal whose cursor
    can be moved."""
    from rich.console import Console

    console = Console()
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        raise CommandError(
            "--watch must be given on a terminal whose cursor can be moved, got another output. Use `penstock status`, "
            "or `penstock status --json` in a script",
            USAGE,
        )
    return console


class _Watch:
    """Repeated question to the coordinator for its state. The last answer is kept."""

    def __init__(self, client: CoordinatorClient, address: str) -> None:
        self._client, self._address = client, address
        self._found: ClusterView | None = None
        self._away_s = 0.0
        """Seconds since the coordinator's last answer; 0 if the last question was answered."""
        self._answered_at = 0.0

    def ask(self) -> None:
        """Ask the coordinator for its state and keep the answer. If the coordinator cannot be reached, keep the last
        answer, or raise the error if there is none yet. Raises every other error of the call."""
        try:
            self._found = view(self._client.status(deadline_s=DEADLINE_S), self._address)
        except (CoordinatorUnavailableError, DeadlineError):
            if self._found is None:
                raise
            self._away_s = time.monotonic() - self._answered_at
            self._client.reach(0.2)  # gives the channel time to reconnect
            return
        self._answered_at, self._away_s = time.monotonic(), 0.0

    @property
    def found(self) -> ClusterView:
        assert self._found is not None, "it was never queried"
        return self._found

    @property
    def away(self) -> str:
        if not self._away_s:
            return ""
        return (
            f"the coordinator at {self._address} has not answered for {seconds(self._away_s)}; training continues, and "
            "the last answer is shown"
        )
