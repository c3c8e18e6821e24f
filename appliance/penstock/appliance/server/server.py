"""Coordinator process, from the loading of its cluster state to its end.

It ends in order by SIGTERM or SIGINT, or by the event `stop`; below a parent process only with that, or when it asks
(lifetime.py): workers that migrate, and jobs that save, still need it. At an orderly end health reports NOT_SERVING,
long polls are answered, and calls get a moment; peers keep running and connect to the next coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from secrets import randbits

from penstock.appliance.core.state_machine import StateMachine
from penstock.appliance.journal.journal import Journal, StateDir
from penstock.appliance.journal.snapshot_index import SnapshotIndex
from penstock.appliance.journal.snapshot_store import Store
from penstock.appliance.limits import Limits, default_budget
from penstock.appliance.server.end_hook import EndHook, parsed
from penstock.appliance.server.queue_probe import QueueProbe
from penstock.appliance.server.service import Service
from penstock.appliance.server.topic_signals import TopicSignals
from penstock.proto.errors import JournalError
from penstock.proto.rpc.addresses import host_id, loopback
from penstock.proto.rpc.channel import RunningServer, server_aio
from penstock.proto.rpc.tls import Tls
from penstock.proto.v1.coordinator_pb2_grpc import add_CoordinatorServicer_to_server
from penstock.runtime.files.private_folders import PrivateFolder
from penstock.runtime.process.lifetime import Parent
from penstock.runtime.process.machine_needs import require
from penstock.runtime.process.open_files import raise_file_limit
from penstock.runtime.process.spare_memory import give_back_spare_memory
from penstock.runtime.telemetry.counters import CallCounters

log = logging.getLogger("penstock.appliance")

STOP_GRACE_S = 1.0
"""Longest time for calls under way when the coordinator stops, in seconds."""
COLLECT_EVERY_S = 60.0
"""Shortest time between two full collections of garbage, in seconds."""
IN_MEMORY = ":memory:"
"""`state_dir` of a coordinator that keeps its cluster state in memory."""
COLLECT_SHARE = 0.005
"""Largest share of the time in full collections: they delay fewer than one heartbeat in a hundred."""


async def serve(
    listen: str,
    state_dir: str | os.PathLike[str],
    tokens: str,
    *,
    tls: Tls | None = None,
    insecure: bool = False,
    parent_pid: int | None = None,
    ready: Callable[[str], None] = lambda address: None,
    limits: Limits | None = None,
    stop: asyncio.Event | None = None,
    http: str = "",
    http_any_port: bool = False,
    http_on_demand: bool = False,
    on_end: str = "",
) -> None:
    """Run a coordinator until it is stopped.

    Args:
        listen: "host:port" (port 0 takes a free one) or "unix:/path", in a folder of this user alone.
        state_dir: a directory on a local disk, made if it is missing; ":memory:" keeps the cluster state in memory.
        tokens: credential tokens of callers, one bare token or lines "role:token".
        tls: certificate of the coordinator; with a CA file, callers must present certificates too.
        insecure: allows an address that other machines can reach without TLS.
        parent_pid: id of the parent process, with which or by whose wish the coordinator ends; None: the parent is not
            watched. If the parent has ended already, return without a coordinator.
        ready: called with the coordinator's address, once calls are accepted.
        limits: leases, budgets and other limits; None: the defaults.
        stop: event that stops the coordinator, for a process that runs other code too. None: SIGTERM and SIGINT do,
            or the parent.
        http: "host:port" of the dashboard (see pages.py); "" = none. On loopback it is plain HTTP, `tls` or not.
        http_any_port: use a free port if that of `http` is in use.
        on_end: command that gets the end of each run (end_hook.py); "" = none.
        http_on_demand: without `http`, start the dashboard on loopback once an operator asks for it (OpenDashboard).

    Raises JournalError, PortTakenError, InvalidArgumentError, AuthenticationError, TlsError before `ready` is called,
    and JournalError later if a peer's report shows that commits are missing in the journal.
    """
    loop = asyncio.get_running_loop()
    own_process = stop is None
    stop = stop or asyncio.Event()
    in_memory = os.fspath(state_dir) == IN_MEMORY
    limits = limits or Limits(budget=0)
    with contextlib.ExitStack() as closing:
        if own_process:
            require("the coordinator", "coordinator")
            closing.enter_context(_paced(loop))
            raise_file_limit()
        ending = [signal.SIGTERM, signal.SIGINT] if own_process else []
        if parent_pid is not None:
            try:
                parent = Parent(parent_pid)
            except ProcessLookupError:
                return
            closing.callback(parent.close)
            parent.on_end(stop.set)
            ending = [] if parent.can_ask else [signal.SIGTERM]
        for number in ending:
            loop.add_signal_handler(number, stop.set)
            closing.callback(loop.remove_signal_handler, number)
        directory = None
        if not in_memory:
            directory = StateDir(Path(state_dir))
            closing.callback(directory.close)
        if not limits.budget:
            limits = replace(limits, budget=default_budget(directory.path if directory is not None else None))
        journal = Journal(directory)
        closing.callback(journal.close)
        store = Store(directory)
        closing.callback(store.close)
        snapshot_index = SnapshotIndex(limits.budget)
        snapshot_index.load(*store.index(), time.monotonic())
        store.reserve()
        signals = TopicSignals()
        state_machine = StateMachine(
            journal,
            snapshot_index,
            limits,
            clock=time.monotonic,
            wall=time.time,
            fresh_seed=lambda: randbits(63),
            changed=signals.changed,
            host=host_id(),
        )
        calls = CallCounters()
        pressure = CallPressure(state_machine, calls)
        probe = _queue_probe(pressure.is_high, closing) if own_process else None
        service = Service(state_machine, store, signals, probe.unreceived_s if probe else lambda: 0.0)
        closing.callback(service.close)
        hook = EndHook(parsed(on_end)) if on_end else None
        if hook is not None:
            service.on_end = hook.add
        served: RunningServer | None = None

        def open_dashboard(address: str, *, any_port: bool = False) -> None:
            # imported here: without these modules an embedded coordinator starts about 0.1 s sooner
            from penstock.appliance.server.dashboard import serve_dashboard

            service.dashboard = serve_dashboard(
                service,
                address,
                tokens,
                any_port=any_port,
                tls=tls,
                insecure=insecure,
                calls=calls,
                address=lambda: served.address if served is not None else "",
                tls_files=lambda: served.files if served is not None else None,
                closing=closing,
            )

        if http:
            open_dashboard(http, any_port=http_any_port)
        elif http_on_demand:
            service.open_dashboard = lambda: open_dashboard(f"{loopback()}:0")
        served = await server_aio(
            listen,
            tokens,
            lambda server: add_CoordinatorServicer_to_server(service, server),
            tls=tls,
            insecure=insecure,
            calls=calls,
            inner=probe.address if probe else None,
        )
        ticker = loop.create_task(service.run_ticker())
        # the ticker ends only by an exception, which must end the process
        ticker.add_done_callback(lambda _: stop.set())
        try:
            ready(served.address)
            await stop.wait()
        finally:
            service.wind_down()
            await served.stop(STOP_GRACE_S)
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker
            if probe is not None:
                await probe.close()
            with contextlib.suppress(JournalError):  # the disk may be full; only `penstock replay` needs these rows
                await service.save_histories()
            if hook is not None:
                service.tell_ends()
                hook.close()


@contextlib.contextmanager
def _paced(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let only the event loop start full collections of garbage, at most one every COLLECT_EVERY_S seconds.

    Long polls are held for seconds, so their objects count as old, and by default every few seconds a full collection
    of 0.4 s (4,000 workers) kept out heartbeats, a seventh of the coordinator's time. Only reference cycles need one.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], 1 << 30)
    works = [loop.create_task(_collect()), loop.create_task(give_back_spare_memory(collect=lambda: None))]
    try:
        yield
    finally:
        for work in works:
            work.cancel()
        gc.set_threshold(*before)


async def _collect() -> None:
    took_s = 0.0
    while True:
        await asyncio.sleep(max(COLLECT_EVERY_S, took_s / COLLECT_SHARE))
        began = time.monotonic()
        gc.collect()
        took_s = time.monotonic() - began


class CallPressure:
    """Whether calls come so fast, or so late, that some may wait in gRPC's queue."""

    FAST = 20
    """In one period of the ticker, 0.3 s: below, the calls take less than 2% of a core."""

    def __init__(self, state_machine: StateMachine, calls: CallCounters) -> None:
        self._state_machine, self._calls = state_machine, calls
        self._counted = 0

    def is_high(self) -> bool:
        """Return whether more than FAST calls were answered since this was asked, or a peer's lease is half over."""
        answered = self._calls.answered.total()
        came, self._counted = answered - self._counted, answered
        return came > self.FAST or self._state_machine.misses_peers()


def _queue_probe(is_due: Callable[[], bool], closing: contextlib.ExitStack) -> QueueProbe | None:
    try:
        folder = PrivateFolder()
    except OSError as error:
        log.warning(
            "the delay of queued calls cannot be measured, so an overloaded coordinator may count live workers and "
            "training jobs as dead: a temporary folder for a socket cannot be made: %s",
            error,
        )
        return None
    closing.callback(folder.close)
    return QueueProbe(f"unix:{folder.path}/own", is_due)


def announcer(ready_fd: int | None) -> Callable[[str], None]:
    """Return the `ready` of `serve`, which writes the address to descriptor `ready_fd`; None: standard output."""

    def ready(address: str) -> None:
        os.write(1 if ready_fd is None else ready_fd, f"{address}\n".encode())
        if ready_fd is not None:
            os.close(ready_fd)

    return ready
