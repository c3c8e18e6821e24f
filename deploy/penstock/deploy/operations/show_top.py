"""Implementation of `penstock top`: shows the coordinator's state repeatedly.

On a terminal the output is a screen that is refreshed. Elsewhere it is lines to read or to grep, or JSON objects. If
the coordinator cannot be reached at the start, that is an error. If it cannot be reached later, the command waits for
it, because training continues meanwhile, and the screen reports that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from penstock.deploy.console.coordinator_options import Peer
from penstock.deploy.console.signals import signals_as_errors
from penstock.deploy.operations.top_screen import Screen, plain
from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.runtime.telemetry.cluster_view import ClusterView, as_dict, view
from penstock.runtime.telemetry.units import clock, seconds

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["has_quit_key", "run_top"]

DEADLINE_S = 5.0
"""Longest time in seconds to wait for one answer of the coordinator. A later answer would not show the present."""
ESCAPE_S = 0.05
"""Seconds within which the rest of an escape sequence must follow its first byte. If nothing follows in this time, the
byte is the key Esc."""
_SEQUENCE = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|O.|[^\x1b])", re.DOTALL)
AWAY = (CoordinatorUnavailableError, DeadlineError)


def run_top(
    peer: Peer,
    *,
    interval_s: float,
    count: int | None,
    as_json: bool,
) -> None:
    """Run `penstock top`. `count`: number of updates to show; None: no limit."""
    with peer.client() as client:
        watch = _Watch(client, peer.address)
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual end
            if as_json:
                _repeat(watch, interval_s, count, _print_json)
            elif count is None and (console := _terminal()) is not None:
                _live(watch, interval_s, console)
            else:
                _repeat(watch, interval_s, count, _Printer().show)


class _Watch:
    """Repeated question to the coordinator for its state. The last answer is kept."""

    def __init__(self, client: CoordinatorClient, address: str) -> None:
        self._client, self._address = client, address
        self._found: ClusterView | None = None
        self.away_s = 0.0
        """Seconds since the coordinator's last answer; 0 if the last question was answered."""
        self._answered_at = 0.0

    def ask(self) -> None:
        """Ask the coordinator for its state and keep the answer. If the coordinator cannot be reached, keep the last
        answer, or raise the error if there is none yet. Raises every other error of the call."""
        try:
            self._found = view(self._client.status(deadline_s=DEADLINE_S), self._address)
        except AWAY:
            if self._found is None:
                raise
            self.away_s = time.monotonic() - self._answered_at
            self._client.reach(0.2)  # gives the channel time to reconnect
            return
        self._answered_at, self.away_s = time.monotonic(), 0.0

    @property
    def found(self) -> ClusterView:
        assert self._found is not None, "it was never queried"
        return self._found

    @property
    def away(self) -> str:
        if not self.away_s:
            return ""
        return (
            f"the coordinator at {self._address} has not answered for {seconds(self.away_s)}; training continues, and "
            "the last answer is shown"
        )


def _repeat(watch: _Watch, interval_s: float, count: int | None, show: Callable[[_Watch], None]) -> None:
    looks = 0
    while True:
        began = time.monotonic()
        watch.ask()
        show(watch)
        looks += 1
        if looks == count:
            return
        time.sleep(max(0.0, began + interval_s - time.monotonic()))


def _print_json(watch: _Watch) -> None:
    found = {**as_dict(watch.found), "at": round(time.time(), 3), "away_s": round(watch.away_s, 3)}
    print(json.dumps(found, default=as_dict), flush=True)


class _Printer:
    """Printer of the state as lines. It prints each event once."""

    def __init__(self) -> None:
        self._since = 0.0

    def show(self, watch: _Watch) -> None:
        if watch.away_s:
            print(f"{clock(time.time())} {watch.away}", flush=True)
            return
        for line in plain(watch.found, self._since):
            print(line, flush=True)
        self._since = max((event.at for event in watch.found.events), default=self._since)


def _terminal() -> Console | None:
    """Return a rich console for standard output; None if standard output is not a terminal whose cursor can be
    moved."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    console = Console()
    return None if console.is_dumb_terminal else console


def _live(watch: _Watch, interval_s: float, console: Console) -> None:
    """Show the screen until q, Esc or Ctrl-C. A signal that ends the process raises SystemExit."""
    from rich.live import Live

    watch.ask()  # the first query's error is raised before the screen starts

    with (
        signals_as_errors(lambda number: SystemExit(128 + number)) as check,  # so that the terminal is restored
        _keys() as quits,
        Live(Screen(watch.found, watch.away), console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            until = time.monotonic() + interval_s
            while (left := until - time.monotonic()) > 0:
                check()
                if quits(left):
                    return
            if not _ask(watch.ask, quits):
                return
            live.update(Screen(watch.found, watch.away), refresh=True)


def _ask(ask: Callable[[], None], quits: Callable[[float], bool]) -> bool:
    """Ask the coordinator in a thread and watch the keys meanwhile, because the call may hang. Return False if a key
    ends the command. The call then ends when its client is closed."""
    pool = ThreadPoolExecutor(1, "penstock-top")
    query = pool.submit(ask)
    pool.shutdown(wait=False)
    while not query.done():
        if quits(ESCAPE_S):
            return False
    query.result()
    return True


def has_quit_key(keys: bytes) -> bool:
    """Return True if the key q or Esc is in the terminal's input. The byte of Esc also begins the sequences of other
    keys, such as arrow keys: these do not count."""
    plain_keys = _SEQUENCE.sub(b"", keys)
    return any(key in plain_keys for key in (b"q", b"Q", b"\x1b"))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for keys for a number of seconds, and returns True if one of them ends the command.
    If standard input is not a terminal, the function only waits."""

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    if not sys.stdin.isatty():
        yield wait
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def has_keys(seconds: float) -> bool:
        return bool(select.select([fd], [], [], seconds)[0])

    def pressed(seconds: float) -> bool:
        if not has_keys(seconds):
            return False
        try:
            keys = os.read(fd, 1024)
            if keys.endswith(b"\x1b") and has_keys(ESCAPE_S):
                keys += os.read(fd, 1024)
        except OSError:  # the terminal is gone
            return True
        return not keys or has_quit_key(keys)

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
