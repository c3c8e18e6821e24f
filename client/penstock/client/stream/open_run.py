"""One open run of one box: its place at the coordinator, kept up by a thread that watches it.

The thread reports progress, renews the box's lease, and learns where the slots are. It talks to the training thread in
two ways only: it replaces `views` as a whole and then raises `version`, and it makes `wake_fd` readable. When the
coordinator is away it tries again for as long as the run is open: batches do not pass through the coordinator, so its
restart disturbs nobody who is not waiting for a slot.

The thread holds the run but not the loader. A loader that is dropped without being closed sets `abandoned` from its
finalizer, which may run inside the garbage collector and therefore does nothing else; the thread then closes the run.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from penstock.client.stream.stream_interfaces import StreamRun
from penstock.proto.batch.digest import cover_of
from penstock.proto.errors import (
    CoordinatorUnavailableError,
    DeadlineError,
    JournalError,
    LaneClosedError,
    PenstockError,
    UnknownRunError,
)
from penstock.proto.lane.compression import require
from penstock.proto.lane.endpoints import LANE_PROTOCOL, connect_local
from penstock.proto.rpc.calls import CoordinatorClient, FetchedState
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.runtime.process import forks

__all__ = ["BoxProgress", "OpenRun", "RunLink"]

HOLD_S = 1.0
"""Seconds of a long poll until the coordinator says how long; it is also how often progress is reported."""
CLOSE_S = 5.0
"""Seconds that leaving may take at most; a coordinator that does not answer finds out by the lease."""
DIAL_S = 10.0
AWAY = (CoordinatorUnavailableError, DeadlineError, JournalError)
"""What passes: batches do not go through the coordinator, also not one that cannot write for want of disk."""
SHORTEST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
RETRY_S = 0.3
"""Deadline of the last try of a state query, whatever is left."""
AWAY_S = 3600.0
"""Seconds that a state query waits for a coordinator that is away: as long as it keeps an attempt of which no box is
heard (Limits.abandoned_s). Training goes on without it, so that it is away is no reason to fail a save."""
AWAY_WARN_S = 30.0
"""Seconds of it after which the log says so, and again each time that it has doubled."""

_Result = TypeVar("_Result")
_log = logging.getLogger("penstock.client")


class RunLink(Protocol):
    """What a run needs of its appliance."""

    host: str
    """See penstock.proto.rpc.channel.host_id."""
    force_tcp: bool
    compression: str | None
    """Of batches over TCP: see penstock.proto.lane.compression.NAMES."""
    embedded: bool

    def client(self) -> CoordinatorClient:
        """A new client of the coordinator."""

    def receiver(self) -> str:
        """The address of the receiver, which is started if need be."""


@dataclass
class BoxProgress:
    """What the training thread tells the coordinator. The thread replaces values, never changes them in place."""

    position: Callable[[], records_pb2.BoxPosition | None] = lambda: None
    waiting_for: int = 0
    """Slot + 1; 0 = none."""
    waiting_since: float = 0.0
    """time.monotonic(), with `waiting_for`."""
    waited_by_slot: list[float] = field(default_factory=list)
    """Seconds; a new list starts anew."""
    epoch_ended: bool = False
    unreachable: Callable[[], list[tuple[int, int, str]]] = list
    """(slot, generation, why) of workers that this host cannot reach."""
    abandoned: tuple[tuple[int, int], ...] = field(default=())
    """(epoch, last step) of the epochs left by `break`."""
    _told: tuple[list[float], list[float]] = field(default=([], []))

    def waits(self) -> list[float]:
        """Seconds waited so far, by slot, with the wait that is under way: one that lasts is told while it does.

        Never less than before, although the training thread may be between the end of a wait and its entry.
        """
        counted = self.waited_by_slot
        seconds, slot = list(counted), self.waiting_for - 1
        if 0 <= slot < len(seconds):
            seconds[slot] += max(0.0, time.monotonic() - self.waiting_since)
        of, before = self._told
        if of is counted:
            seconds = [max(pair) for pair in zip(before, seconds, strict=True)]
        self._told = (counted, seconds)
        return seconds


class OpenRun:
    """An open run. `close` may be called from any thread, the rest belongs to the training thread."""

    def __init__(self, link: RunLink, request: pb.OpenRunRequest, on_closed: Callable[[OpenRun], None]) -> None:
        self.link = link
        self.box = request.box
        self.num_slots = request.num_workers_per_box
        self.num_workers = request.num_boxes * request.num_workers_per_box
        """Of all boxes."""
        self.cover = cover_of(request.loader.options)
        self.name = f"{request.job}/{request.ordinal}"
        self.attempt = 0
        self.seed = 0
        self._lease_s = 0.0
        """That the coordinator has granted; it follows the number of boxes."""
        self._commit_mark = b""
        """The coordinator's journal was at least as far, as the next coordinator on it is told."""
        self.ended_boxes: dict[int, int] = {}
        """Other boxes that take no further step -> their last one."""
        self.views: list[pb.SlotView] = [pb.SlotView(slot=slot) for slot in range(self.num_slots)]
        self._taken = 0
        """The version of the reply that `views` are of; the coordinator's rise over everything."""
        self._take_lock = threading.Lock()
        self.version = 0
        """Raised whenever `views` or `error` was replaced."""
        self.error: PenstockError | None = None
        """Why the run cannot go on: it was superseded, say."""
        self.away_since: float | None = None
        """Since when (monotonic) the coordinator has not answered; None = it does."""
        self.heard_at = 0.0
        """When (monotonic) the coordinator answered last."""
        self._reporting: threading.Thread | None = None
        self.away_because = ""
        """What it, or the network, said the last time."""
        self.progress = BoxProgress()
        self.abandoned = False
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._on_closed = on_closed
        self._request = request
        self._client = link.client()
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._owner = forks.OwnerProcess()
        forks.keep(self)

    def forked(self) -> None:
        """See penstock.runtime.process.forks: here the run is over, with an error that names the fork."""
        self.error = self._owner.error(f"run {self.name}, box {self.box}")
        self._closed = True
        self.version += 1  # whoever reads it looks at `error` first
        forks.silence(self.wake_fd)

    # ---- opening

    def open(self) -> None:
        """Take the box's place. Raises what the coordinator answers."""
        reply = self._client.open_run(self._request)
        self.name, self.attempt, self.seed = reply.run, reply.attempt, reply.seed
        self._lease_s = reply.lease_s
        self._thread = threading.Thread(
            target=self._watch, args=(reply.heartbeat_s or HOLD_S,), name=f"penstock-watch-{self.name}", daemon=True
        )
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    # ---- the watch

    def _watch_request(self, seen: int, hold_s: float) -> pb.WatchRunRequest:
        progress = self.progress
        waits = progress.waits()
        return pb.WatchRunRequest(
            run=self.name,
            attempt=self.attempt,
            box=self.box,
            client_id=self._request.client_id,
            seen_version=seen,
            hold_s=hold_s,
            delivered=progress.position(),
            waiting_for=progress.waiting_for,
            waited_s=sum(waits),
            waited_by_slot_s=waits,
            epoch_ended=progress.epoch_ended,
            abandoned=[pb.AbandonedEpoch(epoch=epoch, step=step) for epoch, step in progress.abandoned],
            lease_s=self._lease_s,
            commit_mark=self._commit_mark,
            unreachable=[pb.LaneTrouble(slot=s, generation=g, why=why) for s, g, why in progress.unreachable()],
        )

    def _watch(self, hold_s: float) -> None:
        seen, backoff = 0, SHORTEST_BACKOFF_S
        while not self._closing.is_set():
            if self.abandoned:
                self.close()
                return
            asked = time.monotonic()
            try:
                reply = self._client.watch_run(self._watch_request(seen, hold_s))
            except AWAY as error:
                self.away_because = error.message
                if self.away_since is None:
                    self.away_since = asked
                self.reach(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)
                continue
            except LaneClosedError:
                return
            except PenstockError as error:
                if not self._closing.is_set():  # else it is the answer to our own CloseRun
                    self.fail(error)
                self._linger()
                return
            self.away_since, self.heard_at, backoff = None, time.monotonic(), SHORTEST_BACKOFF_S
            hold_s, self._lease_s = reply.heartbeat_s or HOLD_S, reply.lease_s
            self._commit_mark = reply.commit_mark
            self.ended_boxes = {end.box: end.step for end in reply.ended}
            seen = reply.version
            self._take(reply)

    def reach(self, seconds: float) -> None:
        """Wait until the coordinator can be reached, for so long at most; never for no time at all, for one that can be
        reached may still not do what it is asked for. From any thread."""
        self._closing.wait(SHORTEST_BACKOFF_S)
        if not self._closing.is_set():
            self._client.reach(seconds)

    def _linger(self) -> None:
        """The run is over for the coordinator, but the loader still holds it."""
        while not self._closing.wait(HOLD_S):
            if self.abandoned:
                self.close()
                return

    def _take(self, reply: pb.WatchRunReply) -> None:
        """Take a reply's views, unless a newer one was quicker: the thread asks, and `report` does beside it."""
        with self._take_lock:
            if reply.version <= self._taken:
                return
            self._taken = reply.version
            views = list(self.views)
            for view in reply.slots:
                if view.slot < len(views):
                    views[view.slot] = view
            self.views = views
        self._notify()

    def _notify(self) -> None:
        self.version += 1
        try:
            os.eventfd_write(self.wake_fd, 1)
        except OSError:
            pass  # full, so it is readable; or closed meanwhile

    def fail(self, error: PenstockError) -> None:
        """The run cannot go on; tells the training thread. From any thread."""
        self.error = error
        self._notify()

    def wait_for(self, ready: Callable[[StreamRun], bool], timeout_s: float) -> bool:
        """Wait until the slots' views are as wanted. False if the time ran out. Raises the run's error."""
        until = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self.wake_fd, select.POLLIN)
        while not ready(self):
            if self.error is not None:
                raise self.error
            left = until - time.monotonic()
            if left <= 0 or self._closed:
                return False
            if poll.poll(left * 1000 + 0.5):
                os.eventfd_read(self.wake_fd)
        return True

    def report(self) -> None:
        """Report progress now instead of within HOLD_S. If the coordinator is away, the thread does it later."""
        try:
            reply = self._client.watch_run(self._watch_request(0, 0.0))
        except PenstockError:
            return
        self.heard_at = time.monotonic()
        self._take(reply)

    def report_soon(self) -> None:
        """Report progress now, in a thread of its own: of one that is under way the next tells more."""
        if self._reporting is None or not self._reporting.is_alive():
            self._reporting = threading.Thread(target=self.report, name=f"penstock-report-{self.name}", daemon=True)
            self._reporting.start()

    # ---- calls of the training thread

    def dial(self, view: pb.SlotView, hello: lane_pb2.Hello) -> socket.socket:
        """A connection to the slot's runner, or to the receiver that connects to it, with the hello sent.

        Raises OSError, or LaneLostError, if nobody is there.
        """
        hello.protocol = LANE_PROTOCOL
        hello.run, hello.attempt, hello.box = self.name, self.attempt, self.box
        hello.slot, hello.generation, hello.ticket = view.slot, view.generation, view.ticket
        if self.is_remote(view):
            hello.target = view.tcp_address
            if self.link.compression is not None:
                hello.codecs.append(require(self.link.compression))  # type: ignore[arg-type]
            address = self.link.receiver()
        else:
            address = view.local_address
        sock = connect_local(address, DIAL_S)
        try:
            sock.send(hello.SerializeToString())
        except BaseException:
            sock.close()
            raise
        return sock

    def is_remote(self, view: pb.SlotView) -> bool:
        """The slot's batches come over TCP."""
        return self.link.force_tcp or view.host_id != self.link.host or not view.local_address

    def fetch_state(self, step: int, deadline_s: float) -> FetchedState:
        """The records of all workers at a step."""
        request = pb.FetchStateRequest(run=self.name, attempt=self.attempt, step=step, deadline_s=deadline_s)
        request.progress.CopyFrom(self._watch_request(0, 0.0))
        return self._fetched(request)

    def _fetched(self, request: pb.FetchStateRequest) -> FetchedState:
        until = time.monotonic() + request.deadline_s

        def fetch(away_s: float) -> FetchedState:
            request.deadline_s = max(until + away_s - time.monotonic(), RETRY_S)
            return self._client.fetch_state(request)

        return self._when_back(fetch, f"the state of step {request.step}", request.deadline_s)

    def _when_back(self, call: Callable[[float], _Result], what: str, deadline_s: float) -> _Result:
        """`call`, made again while the coordinator is away, for AWAY_S or `deadline_s` at most; it may just be
        restarting, or moving. `call` is told how many seconds it was away for so far: they do not count."""
        away_s, since, warn_at = 0.0, 0.0, AWAY_WARN_S
        while True:
            asked = time.monotonic()
            try:
                return call(away_s)
            except (CoordinatorUnavailableError, JournalError) as error:
                since = since or asked
                if self._closing.is_set() or asked - since > max(AWAY_S, deadline_s):
                    raise
                if asked - since > warn_at:
                    warn_at *= 2
                    waited = asked - since
                    _log.warning("%s waits for the coordinator, away for %.0f s: %s", what, waited, error.message)
                self.reach(MAX_BACKOFF_S)
                away_s += time.monotonic() - asked

    def aggregate(self, states: bytes, deadline_s: float) -> bytes:
        """The loader's aggregate_state_dict on a worker: envelopes of the list of states and of what it returned."""
        request = pb.FetchStateRequest(run=self.name, attempt=self.attempt, deadline_s=deadline_s)
        request.progress.CopyFrom(self._watch_request(0, 0.0))
        put = self._client.put_blob
        request.aggregate_blob = self._when_back(lambda _: put(states, self.name), "an aggregation", deadline_s)
        return self._fetched(request).records[0][1]

    # ---- the end

    def close(self, *, forget: bool = True) -> None:
        """Give the box's place back. Never raises for a coordinator that is gone; safe to call again.

        forget: nobody will open the run again; looked at only where the coordinator dies with this process.
        """
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._closing.set()
        try:
            if self.attempt and not isinstance(self.error, UnknownRunError):
                self._client.close_run(
                    pb.CloseRunRequest(
                        run=self.name,
                        attempt=self.attempt,
                        box=self.box,
                        client_id=self._request.client_id,
                        forget=forget and self.link.embedded,
                        progress=self._watch_request(0, 0.0),
                    ),
                    deadline_s=CLOSE_S,
                )
        except PenstockError:
            pass  # superseded, or the coordinator is gone: then there is nothing to give back
        self._client.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)
        self.version += 1
        os.eventfd_write(self.wake_fd, 1)
        self._on_closed(self)

    def __del__(self) -> None:
        try:
            os.close(self.wake_fd)
        except (OSError, AttributeError):
            pass
