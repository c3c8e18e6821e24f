"""Open run of one box, registered with the coordinator, and watched by a thread of this process.

The watch thread reports progress, renews the box's lease, and receives the slots' views: worker, address and condition.
It communicates with the training thread by replacing values as a whole (`views`, `error`, `ended_boxes`, times of
replies) and then incrementing `version`, by the fence (StepFence), and by `wake_fd`. It retries an unreachable
coordinator while the run is open; batches do not pass through it, so its restart affects only a loop that waits for a
slot.

The thread does not refer to the loader. The finalizer of a dropped loader sets `abandoned` and closes the lanes,
without a call, because it may run inside the garbage collector; the thread then closes the run."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Final, TypeVar

from penstock.client.states.saved_state import BoxStart
from penstock.client.stream.box_progress import BoxProgress
from penstock.client.stream.streams import StreamRun
from penstock.client.stream.wait_notice import WaitNotice
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
from penstock.proto.lane.frames import LANE_PROTOCOL, connect_local
from penstock.proto.rpc.bounds.polling import PollPace, intervals
from penstock.proto.rpc.calls import CoordinatorClient, FetchedState
from penstock.proto.state.counts import by_source, imbalance_of
from penstock.proto.state.position import MOST
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.runtime.process import forks
from penstock.runtime.telemetry.logs import LONGEST, plain

LINGER_S = 1.0
"""Seconds between two checks, after an error ended the run, of whether its loader was garbage-collected."""
CLOSE_S = 5.0
"""Deadline of the call that closes a run. Without it the box's lease expires, later."""
DIAL_S = 10.0
AWAY = (CoordinatorUnavailableError, DeadlineError, JournalError)
"""Errors after which a call is tried again: the coordinator is unreachable, or its disk is full."""
SHORTEST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
RETRY_S = 0.3
"""Smallest deadline of one call that fetches a state or closes the run."""
OFFER_EVERY_S = 5.0
"""Fewest seconds between two saved states that are sent to the coordinator for restarts."""
ABANDONED_SENT = 4096
"""In one report; equal to the coordinator's limit (Limits.abandoned_at_once)."""
AWAY_S = 3600.0
"""Seconds for which a save or a loop waits for the coordinator, which keeps a silent attempt as long
(Limits.abandoned_s)."""
AWAY_WARN_S = 30.0
"""Seconds until a waiting save's first warning. Each later one comes when the time waited has doubled."""
NEVER: Final = 1 << 63
"""Step number that no box ever comes to."""

_Result = TypeVar("_Result")
_TEXTS = ("note", "doing", "stack", "worker", "target_worker", "host_id", "tcp_address", "ticket")
_log = logging.getLogger("penstock.client")


def _plain(view: pb.SlotView) -> pb.SlotView:
    """Shorten and escape the texts in a slot's view, because warnings and errors print them."""
    for name in _TEXTS:
        text = getattr(view, name)
        if not text.isprintable() or len(text) > LONGEST:
            setattr(view, name, plain(text))
    return view


class StepFence:
    """Fence of a box: the step that it must not take while the coordinator decides whether a mixture changes from it
    on.

    The training thread writes `taken` before it reads `step`; the watch thread the reverse, so one always sees what the
    other wrote. A box that reported the step as not taken does not take it until the fence is removed."""

    __slots__ = ("answer", "step", "taken")

    def __init__(self) -> None:
        self.step = NEVER
        self.taken = 0
        """Last step that the training thread has taken, or is taking now."""
        self.answer = ("", 0)
        """Key of the newest fence, and the value of `taken` when it was set."""

    def set(self, key: str, step: int) -> None:
        self.step = step
        if self.answer[0] != key:
            self.answer = (key, self.taken)

    def clear(self) -> None:
        self.step = NEVER


@dataclass(frozen=True)
class RunLink:
    client: Callable[[], CoordinatorClient]
    receiver: Callable[[], str]
    """Returns the address of this process's receiver for batches from other hosts, which it starts if none runs."""
    host: str
    """By which workers on the same host are recognised; see penstock.proto.rpc.addresses.host_id."""
    folder: Path | None
    """Folder of the coordinator's Unix socket, in which workers' lanes are too; None if it has none."""
    force_tcp: bool
    compression: str | None
    embedded: bool
    gone: Callable[[], PenstockError | None]
    """Returns an error once the coordinator has ended for good, as an embedded one does: it is never restarted."""
    began: float
    """By time.monotonic(), when the process began that is this rank to its launcher."""


class OpenRun(StreamRun):
    """Open run of one box, with its watch thread. Methods are for the training thread, unless their docstring says
    otherwise; any thread may call `close`."""

    def __init__(
        self,
        link: RunLink,
        request: pb.OpenRunRequest,
        on_closed: Callable[[OpenRun], None],
        notice: WaitNotice | None = None,
    ) -> None:
        name, cover = f"{request.job}/{request.ordinal}", cover_of(request.loader.options)
        super().__init__(name, request.box, request.num_boxes, request.num_workers_per_box, cover)
        self.link = link
        self.notice = notice or WaitNotice()
        """Says on stderr what the loop waits for before its first batch."""
        self._lease_s = 0.0
        """Seconds of silence after which the coordinator takes this box for dead, by its last reply."""
        self._confirmed_epoch = -1
        """Newest abandoned epoch in the coordinator's journal, -1: none. It and earlier ones are not reported again."""
        self._commit_mark = b""
        """Signed number of the journal's last commit, returned in each report: an older journal is noticed."""
        self._taken = 0
        """Version of the newest reply in `views`. The coordinator's versions only increase."""
        self._take_lock = threading.Lock()
        self.version = 0
        """Increased after each change of `views` or `error`, for the training thread."""
        self.replied_at = 0.0
        """Time of time.monotonic() of the last reply to a report; 0 before the first."""
        self._reporting: threading.Thread | None = None
        self._offering: threading.Thread | None = None
        self._offered_at = 0.0
        self._restarts: list[records_pb2.Restart] = []
        """Newest saved state from which all slots may restart, one entry for each box."""
        self._restarts_known: list[records_pb2.Restart] = []
        """`_restarts` that the coordinator has got. A restarted one gets it again."""
        self._been_away_s = 0.0
        """Seconds of earlier outages."""
        self.fence = StepFence()
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._on_closed = on_closed
        self._request = request
        self._client = link.client()
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._owner = forks.OwnerProcess()
        forks.keep(self)

    def forked(self) -> None:
        """Make the run unusable in a fork: its methods raise an error that names the fork."""
        self.error = self._owner.error(f"run {self.name}, box {self.box}")
        self.closed = True
        self.version += 1  # readers of the run check `error` first
        forks.silence(self.wake_fd)

    # ---- opening

    def open(self, start: BoxStart) -> None:
        if start.blob:
            self._request.resume.CopyFrom(start.resume(self._client.put_blob(start.blob, self.name)))
        self._request.process_age_s = time.monotonic() - self.link.began
        reply = self._client.open_run(self._request)
        self.name, self.attempt, self.seed = reply.run, reply.attempt, reply.seed
        hold_s, self._lease_s = intervals(reply)
        thread = threading.Thread(target=self._watch, args=(hold_s,), name=f"penstock-watch-{self.name}", daemon=True)
        thread.start()
        self._thread = thread

    # ---- the watch

    def _watch_request(self, seen: int, hold_s: float) -> pb.WatchRunRequest:
        progress = self.progress
        waits = progress.waits()
        fence_key, fence_taken = self.fence.answer
        request = pb.WatchRunRequest(
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
            abandoned=[
                pb.AbandonedEpoch(epoch=epoch, step=step) for epoch, step in self._unconfirmed()[:ABANDONED_SENT]
            ],
            lease_s=self._lease_s,
            commit_mark=self._commit_mark,
            unreachable=[pb.LaneTrouble(slot=s, generation=g, why=why) for s, g, why in progress.unreachable()],
            fence_key=fence_key,
            fence_taken=fence_taken,
            first_digest=progress.first_digest,
            sources=_sources(progress),
            imbalance=imbalance_of(progress.counts.rows()) or 0.0 if progress.counts is not None else 0.0,
        )
        progress.epoch_starts.put_into(request)
        if self._restarts is not self._restarts_known:
            request.restarts.extend(self._restarts)
        return request

    def _report(self, seen: int, hold_s: float) -> pb.WatchRunReply:
        """Report progress; the reply shows that the abandoned epochs are in the journal. It may be held back for
        `hold_s` if nothing is newer than version `seen`."""
        request = self._watch_request(seen, hold_s)
        reply = self._client.watch_run(request)
        self.progress.epoch_starts.answered(request, reply)
        if reply.wants_epoch_starts:  # the coordinator was restarted
            self._restarts_known = []
        elif request.restarts and request.restarts[0].start.step == self._restarts[0].start.step:
            self._restarts_known = self._restarts
        if request.abandoned:
            self._confirmed_epoch = max(self._confirmed_epoch, request.abandoned[-1].epoch)
        return reply

    def _unconfirmed(self) -> tuple[tuple[int, int], ...]:
        abandoned = self.progress.abandoned
        return abandoned[bisect_right(abandoned, self._confirmed_epoch, key=itemgetter(0)) :]

    def _report_abandoned(self) -> None:
        """Report abandoned epochs until the rest fits in one report: after a long outage there may be more."""
        while len(self._unconfirmed()) > ABANDONED_SENT:
            self._report(0, 0.0)

    def _watch(self, hold_s: float) -> None:
        seen, backoff, pace = 0, SHORTEST_BACKOFF_S, PollPace()
        while not self._closing.wait(pace.delay_s()):
            if self.abandoned:
                self.close()
                return
            called_at = time.monotonic()
            try:
                reply = self._report(seen, hold_s)
            except AWAY as error:
                if (gone := self.link.gone()) is not None:
                    self.fail(gone, gone=True)
                    self._linger()
                    return
                self.away_because = error.message
                if self.away_since is None:
                    self.away_since = called_at
                self.reach(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)
                continue
            except LaneClosedError:
                return
            except PenstockError as error:
                if not self._closing.is_set():  # while closing, the error is a consequence of this box's CloseRun
                    self.fail(error)
                self._linger()
                return
            self._been_away_s = self.away_s(time.monotonic())
            self.away_since, self.replied_at, backoff = None, time.monotonic(), SHORTEST_BACKOFF_S
            hold_s, self._lease_s = intervals(reply)
            self._commit_mark = reply.commit_mark
            self.unplaced_because = reply.unplaced_because
            self.ended_boxes = {end.box: end.step for end in reply.ended if not end.goes_on}
            self.box_apart = next((end for end in reply.ended if end.goes_on), None)
            seen = reply.version
            if reply.HasField("twin") and self.twin is None:
                self.twin = reply.twin
                self._notify()
            self._take(reply)

    def away_s(self, now: float) -> float:
        """Return the seconds for which the coordinator has not answered since the run was opened. Any thread."""
        since = self.away_since
        return self._been_away_s + (0.0 if since is None else max(0.0, now - since))

    def reach(self, seconds: float) -> None:
        """Wait until the coordinator can be reached, at least SHORTEST_BACKOFF_S: it may still refuse calls. Any
        thread."""
        self._closing.wait(SHORTEST_BACKOFF_S)
        if not self._closing.is_set():
            self._client.reach(seconds)

    def _linger(self) -> None:
        """After an error ended the run, wait until it is closed, or must be closed here, because its loader is gone."""
        while not self._closing.wait(LINGER_S):
            if self.abandoned:
                self.close()
                return

    def _take(self, reply: pb.WatchRunReply) -> None:
        """Apply a reply's views unless newer ones were: `report` and the watch thread may get them in another order."""
        with self._take_lock:
            if reply.version <= self._taken:
                return
            self._taken = reply.version
            views = list(self.views)
            for view in reply.slots:
                if view.slot < len(views):
                    views[view.slot] = _plain(view)
            self.views = views
            if reply.HasField("fence"):
                self.fence.set(reply.fence.key, reply.fence.step)
            elif self.fence.step != NEVER:
                self.version += 1  # before the fence is gone: the reader must not use the lanes of older generations
                self.fence.clear()
        self._notify()

    def _notify(self) -> None:
        self.version += 1
        try:
            os.eventfd_write(self.wake_fd, 1)
        except OSError:
            pass  # the eventfd's counter is full, so wake_fd is readable already; or the run was closed meanwhile

    def fail(self, error: PenstockError, *, gone: bool = False) -> None:
        super().fail(error, gone=gone)
        if gone:
            self._client.fail(error)
        self._notify()

    def wait_for(self, ready: Callable[[StreamRun], bool], timeout_s: float) -> bool:
        began = time.monotonic()
        away_before_s = self.away_s(began)
        poll = select.poll()
        poll.register(self.wake_fd, select.POLLIN)
        while not ready(self):
            if self.error is not None:
                raise self.error
            now = time.monotonic()
            left = began + timeout_s + min(AWAY_S, self.away_s(now) - away_before_s) - now
            if left <= 0 or self.closed:
                return False
            if poll.poll(left * 1000 + 0.5):
                os.eventfd_read(self.wake_fd)
        return True

    def hold(self, step: int, timeout_s: float) -> None:
        """Wait at a StepFence until the box may take `step`. Raises DeadlineError."""
        if not self.wait_for(lambda run: step < self.fence.step, timeout_s) and not self.closed:
            raise DeadlineError(
                f"run {self.name}, box {self.box} waited {timeout_s:.0f} s before step {step} for the coordinator to "
                "decide about a change of the mixture: see `penstock status`"
            )

    def report(self) -> None:
        # If the coordinator is unreachable, the watch thread reports the progress later.
        try:
            reply = self._report(0, 0.0)
        except PenstockError:
            return
        self.replied_at = time.monotonic()
        self._take(reply)

    def report_soon(self) -> None:
        """Report progress in a thread of its own, unless one is at work already."""
        if self._reporting is None or not self._reporting.is_alive():
            self._reporting = threading.Thread(target=self.report, name=f"penstock-report-{self.name}", daemon=True)
            self._reporting.start()

    # ---- calls of the training thread

    def dial(self, view: pb.SlotView, hello: lane_pb2.Hello) -> socket.socket:
        """Connect to the daemon of the slot's runner, or over TCP to the receiver, and send the Hello. Raises OSError
        or LaneLostError if nothing listens, PenstockError if no receiver can be started."""
        hello.protocol = LANE_PROTOCOL
        hello.run, hello.attempt, hello.box = self.name, self.attempt, self.box
        hello.slot, hello.generation, hello.ticket = view.slot, view.generation, view.ticket
        if self.is_remote(view):
            hello.target = view.tcp_address
            if self.link.compression is not None:
                hello.codecs.append(require(self.link.compression))  # type: ignore[arg-type]
            sock = connect_local(self.link.receiver(), DIAL_S)
        else:
            sock = connect_local(view.local_address, DIAL_S, self.link.folder)
        try:
            sock.send(hello.SerializeToString())
        except BaseException:
            sock.close()
            raise
        return sock

    def is_remote(self, view: pb.SlotView) -> bool:
        is_near = self.link.folder is not None or view.host_id == self.link.host
        return self.link.force_tcp or not is_near or not view.local_address

    def fetch_state(self, step: int, deadline_s: float) -> FetchedState:
        request = pb.FetchStateRequest(run=self.name, attempt=self.attempt, step=step, deadline_s=deadline_s)
        return self._fetched(request)

    def _fetched(self, request: pb.FetchStateRequest) -> FetchedState:
        until = time.monotonic() + request.deadline_s

        def fetch(away_s: float) -> FetchedState:
            self._report_abandoned()
            request.progress.CopyFrom(self._watch_request(0, 0.0))
            request.deadline_s = max(until + away_s - time.monotonic(), RETRY_S)
            return self._client.fetch_state(request)

        return self._when_back(fetch, f"the state of step {request.step}", request.deadline_s)

    def _when_back(self, call: Callable[[float], _Result], what: str, deadline_s: float) -> _Result:
        """Repeat `call` while the coordinator is unreachable, for AWAY_S or `deadline_s`, whichever is longer. It gets
        the seconds of the outage so far, to add to its deadline. `what`: operation, for warnings."""
        away_s, since, warn_at = 0.0, 0.0, AWAY_WARN_S
        while True:
            called_at = time.monotonic()
            try:
                return call(away_s)
            except (CoordinatorUnavailableError, JournalError) as error:
                if self.error is not None:
                    raise self.error from None
                since = since or called_at
                if self._closing.is_set() or called_at - since > max(AWAY_S, deadline_s):
                    raise
                if called_at - since > warn_at:
                    warn_at *= 2
                    waited = called_at - since
                    _log.warning(
                        "waiting for %s: the coordinator has not answered for %.0f s: %s", what, waited, error.message
                    )
                self.reach(MAX_BACKOFF_S)
                away_s += time.monotonic() - called_at

    def aggregate(self, states: bytes, deadline_s: float) -> bytes:
        request = pb.FetchStateRequest(run=self.name, attempt=self.attempt, deadline_s=deadline_s)
        put = self._client.put_blob
        request.aggregate_blob = self._when_back(lambda _: put(states, self.name), "an aggregation", deadline_s)
        return self._fetched(request).records[0][1]

    def offer(self, starts: Callable[[], list[BoxStart]]) -> None:
        """Send a saved state in the background: a slot that is lost later need not replay the launch
        (appliance/core/launch_restarts.py). Only box 0 sends it, for all, at most every OFFER_EVERY_S seconds."""
        now = time.monotonic()
        busy = self._offering is not None and self._offering.is_alive()
        if self.box or busy or now - self._offered_at < OFFER_EVERY_S:
            return
        self._offered_at = now
        name = f"penstock-offer-{self.name}"
        self._offering = threading.Thread(target=self._offer, args=(starts,), name=name, daemon=True)
        self._offering.start()

    def _offer(self, starts: Callable[[], list[BoxStart]]) -> None:
        restarts = []
        try:
            for start in starts():
                resume = records_pb2.Resume(same_topology=start.same_topology)
                resume.blob = self._client.put_blob(start.blob, self.name)
                restarts.append(records_pb2.Restart(start=start.position, resume=resume))
        except PenstockError as error:
            _log.info("%s: a saved state was not sent to the coordinator for restarts: %s", self.name, error.message)
            return
        self._restarts = restarts
        self.report()

    # ---- closing

    def close(self, *, forget: bool = True) -> None:
        # Raises no error if the coordinator is unreachable.
        with self._close_lock:
            if self.closed:
                return
            self.closed = True
        self._closing.set()
        try:
            if self.attempt and not isinstance(self.error, UnknownRunError):
                self._tell_end(forget=forget)
        except PenstockError:
            pass  # superseded, or the coordinator has ended: there is nothing to close
        self._client.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)
        self.version += 1
        os.eventfd_write(self.wake_fd, 1)
        self._on_closed(self)

    def _tell_end(self, *, forget: bool) -> None:
        """Report that this box has left the run, again for up to CLOSE_S: a restarting coordinator would wait for this
        box in each state query. An embedded one is called only once, because it is never restarted."""
        until = time.monotonic() + CLOSE_S
        while True:
            left = max(RETRY_S, until - time.monotonic())
            try:
                self._report_abandoned()
                request = pb.CloseRunRequest(
                    run=self.name,
                    attempt=self.attempt,
                    box=self.box,
                    client_id=self._request.client_id,
                    forget=forget and self.link.embedded,
                    progress=self._watch_request(0, 0.0),
                    finished=self.progress.finished,
                )
                error, step = self.progress.error, request.progress.delivered.step
                if error is not None and self.progress.failed_at == step:  # else the loop has gone on since
                    request.error.CopyFrom(error)
                self._client.close_run(request, deadline_s=left)
                return
            except AWAY:
                if self.link.embedded or time.monotonic() >= until:
                    return
            time.sleep(SHORTEST_BACKOFF_S)
            self._client.reach(max(0.0, until - time.monotonic()))

    def __del__(self) -> None:
        try:
            os.close(self.wake_fd)
        except (OSError, AttributeError):
            pass


def _sources(progress: BoxProgress) -> list[pb.SourceCount]:
    if progress.counts is None:
        return []
    return [
        pb.SourceCount(
            source=name,
            samples=min(counts.samples, MOST),
            tokens=min(counts.tokens, MOST),
            wanted=counts.wanted[0] if counts.wanted is not None else 0.0,
            wanted_of_tokens=counts.wanted is not None and counts.wanted[1] == "tokens",
        )
        for name, counts in by_source(progress.counts.rows()).items()
    ]
