"""Supervisor of the local engine: one process whose children are a coordinator and its workers.

    python -m penstock.deploy.engines.supervisor FOLDER PLAN    (started by `up --detach`)

It holds the lock of the fleet's folder and keeps the record up to date. SIGTERM and Ctrl-C end the workers, which
migrate their slots, then the coordinator. SIGUSR1 brings the fleet to the size that `penstock up --workers` wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from penstock.deploy.console.exit_codes import BUG, INTERRUPTED, USAGE, CommandError, exit_code
from penstock.deploy.engines.engine import Daemon, Fleet, FleetPlan, new_names
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.engines.keeper import COORDINATOR_GRACE_S, WORKER_GRACE_S, FleetKeeper
from penstock.proto.errors import DeadlineError, PenstockError
from penstock.proto.rpc.addresses import loopback, socket_path
from penstock.runtime.files.private_folders import PrivateFolder
from penstock.runtime.process.identity import Identity
from penstock.runtime.process.machine_needs import require
from penstock.runtime.process.watch import Process

if TYPE_CHECKING:
    from penstock.deploy.engines.authority import Authority

_log = logging.getLogger("penstock.deploy.engines")

SCALE = signal.SIGUSR1
"""Signal that the folder has a new size of the fleet."""
GONE = ("failed", "left", "ended")
"""States of a worker that does not come back."""
SOCKET_MAX = 107
"""Longest path of a Unix socket in bytes."""
LANES_MORE = 24
"""Bytes by which the path of a worker's socket for lanes, in the same folder, is longer at most."""
LEFTOVERS_S = 30.0
"""Longest time in seconds until the daemons of a killed supervisor have ended."""


def supervise(
    plan: FleetPlan,
    folder: FleetFolder,
    ready: Callable[[Fleet], None],
    *,
    parent_pid: int | None = None,
    life: timedelta | None = None,
) -> None:
    """Run the fleet until a signal, the end of `parent_pid`, or the stop of the last worker on request. `ready`: called
    once; `life`: of certificates, if they are the fleet's own (None: the authority's default). Raises DeadlineError
    if the fleet is not ready in time; CommandError if a daemon fails before that, or the coordinator or last worker
    is given up."""
    require("penstock up", "coordinator", "worker", slots=plan.slots or 0)
    lock = folder.lock()
    if lock is None:
        raise CommandError(f"a fleet already runs in {folder.path}. End it by `penstock down`", USAGE)
    try:
        folder.hold(lock, Identity.of(os.getpid()))
        _end_leftovers(folder)
        _remove_sockets(folder)
        try:
            authority = _authority(plan, folder, life) if plan.credentials == str(folder.credentials) else None
            asyncio.run(_Supervisor(plan, folder, ready, authority).run(parent_pid))
        finally:
            folder.forget()
    finally:
        os.close(lock)


def _authority(plan: FleetPlan, folder: FleetFolder, life: timedelta | None) -> Authority:
    try:
        from penstock.deploy.engines.authority import LIFE, Authority
    except ImportError as error:
        raise CommandError(
            f"a fleet that other machines reach ({plan.listen}) needs the package cryptography, to make certificates: "
            "pip install 'penstock[tls]'. Or give TLS files (--tls-ca), or --insecure on a network that you trust",
            USAGE,
        ) from error
    return Authority(folder.authority, folder.credentials, plan.token_file, life or LIFE)


def _remove_sockets(folder: FleetFolder) -> None:
    """Remove sockets for lanes of workers that were killed. Others may be of workers that joined the fleet."""
    for left in folder.path.glob("penstock-lanes-*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            try:
                probe.connect(os.fspath(left))
            except ConnectionRefusedError:
                left.unlink(missing_ok=True)
            except OSError:  # it has gone, or its queue is full
                continue


def _end_leftovers(folder: FleetFolder) -> None:
    """Wait until the daemons of a killed supervisor have ended; kill those that do not."""
    fleet = folder.fleet()
    deadline = time.monotonic() + LEFTOVERS_S
    for daemon in fleet.daemons if fleet is not None else ():
        process = daemon.identity.open() if daemon.identity else None
        if process is None:
            continue
        with process:
            _log.info("waiting for %s of the fleet before this one to end", daemon.name)
            if not process.wait(deadline - time.monotonic()):
                process.kill()
                process.wait(LEFTOVERS_S)


class _Supervisor:
    def __init__(
        self, plan: FleetPlan, folder: FleetFolder, ready: Callable[[Fleet], None], authority: Authority | None
    ) -> None:
        self._plan, self._folder, self._announce, self._authority = plan, folder, ready, authority
        self._up = False
        self._scaled = ""
        self._asked = asyncio.Event()
        """Set when the folder has a new size of the fleet."""
        self._ending: set[asyncio.Task[None]] = set()
        self._workers: list[FleetKeeper] = []
        self._closing = contextlib.ExitStack()
        self._tasks: dict[asyncio.Task[None], FleetKeeper] = {}
        self._coordinator = FleetKeeper(
            "coordinator",
            # Once port 0 has chosen a port, later starts use it, because peers have its address.
            lambda line: plan.coordinator_command(str(folder.state_dir), line or plan.listen or self._own_address()),
            folder.logs / "coordinator.log",
            restart_always=True,
            changed=self._record,
        )

    def _own_address(self) -> str:
        """Return a Unix socket in the fleet's folder, or in a temporary one if that path would be too long."""
        path = self._folder.path / "socket"
        if len(os.fsencode(path)) > SOCKET_MAX - LANES_MORE:
            self._closing.callback((short := PrivateFolder()).close)
            path = short.path / "socket"
        return f"unix:{path}"

    async def run(self, parent_pid: int | None) -> None:
        with self._closing:
            await self._run(parent_pid)

    async def _run(self, parent_pid: int | None) -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        if parent_pid is not None:
            try:
                Process(parent_pid).on_end(stop.set)
            except ProcessLookupError:
                return
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as under nohup
        for number in (signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,))):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(SCALE, self._asked.set)
        renewing = asyncio.ensure_future(self._renew(self._authority.renew())) if self._authority else None
        stopped = asyncio.ensure_future(stop.wait())
        living = asyncio.ensure_future(self._live())
        try:
            await asyncio.wait([stopped, living], return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
            elif not self._up:
                raise CommandError(
                    f"the fleet in {self._folder.path} was ended while it was starting. Start it again",
                    INTERRUPTED,
                )
        finally:
            tasks = (stopped, living, *([renewing] if renewing else []))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(kept.stop(WORKER_GRACE_S) for kept in self._workers))
            await self._coordinator.stop(COORDINATOR_GRACE_S)
            await asyncio.gather(*self._tasks, *self._ending, *tasks, return_exceptions=True)

    async def _renew(self, wait_s: float) -> None:
        """Renew the certificates whenever they are due. While that fails (a full disk), the current ones stay."""
        assert self._authority is not None
        while True:
            await asyncio.sleep(wait_s)
            try:
                wait_s = self._authority.renew()
            except (CommandError, PenstockError) as error:
                _log.error("%s", error)

    async def _live(self) -> None:
        """Start all daemons, call `ready`, and watch them until the last worker was stopped on request."""
        plan, logs = self._plan, self._folder.logs
        try:
            async with asyncio.timeout(plan.timeout):
                await self._start([self._coordinator])
                await self._start(self._add(plan.workers))
        except TimeoutError:
            waits = [kept.title for kept in (self._coordinator, *self._workers) if not kept.ready.is_set()]
            raise DeadlineError(
                f"the fleet in {self._folder.path} is not ready after {plan.timeout:g} s: it waits for "
                f"{', '.join(waits)}. See the logs in {logs}, or raise --timeout"
            ) from None
        self._up = True
        self._record()
        self._announce(self._fleet())
        while not all(worker.state in GONE for worker in self._workers):
            asked = asyncio.ensure_future(self._asked.wait())
            await asyncio.wait([asked, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            for task in [task for task in self._tasks if task.done()]:
                self._ended(task)
            if self._asked.is_set():
                self._asked.clear()
                self._scale()
        _log.info("the last worker stopped on request: the fleet ends")

    def _add(self, count: int) -> list[FleetKeeper]:
        """Add workers, which are not started yet."""
        plan, address = self._plan, self._coordinator.line
        added = []
        for name in new_names(plan.name, count, {_name(worker) for worker in self._workers}):
            host = loopback() if socket_path(address) is not None else address.rpartition(":")[0]
            command = plan.worker_command(name, address, f"{host}:0")
            added.append(
                FleetKeeper(
                    f"worker {name}",
                    lambda _, command=command: command,  # type: ignore[misc]
                    self._folder.logs / f"{name}.log",
                    restart_always=False,
                    changed=self._record,
                )
            )
        self._workers += added
        return added

    def _scale(self) -> None:
        """Bring the fleet to the size in its folder."""
        try:
            scaling = self._folder.asked()
        except (OSError, ValidationError) as error:
            _log.error("the new size of the fleet cannot be read: %s", error)
            return
        self._plan, self._scaled = self._plan.model_copy(update={"workers": scaling.workers}), scaling.request
        self._workers = [worker for worker in self._workers if worker.state not in ("failed", "left")]
        able = {_name(worker): worker for worker in self._workers if not worker.is_ending}
        ending, missing = scaling.split(list(able))
        _log.info("%d workers are wanted: ending %s, starting %d", scaling.workers, ending or "none", missing)
        self._ending |= {asyncio.ensure_future(self._end(able[name])) for name in ending}
        self._tasks |= {asyncio.ensure_future(worker.run()): worker for worker in self._add(missing)}
        self._record()

    async def _end(self, worker: FleetKeeper) -> None:
        await worker.stop(WORKER_GRACE_S)
        with contextlib.suppress(ValueError):  # `_scale` has removed it
            self._workers.remove(worker)
        self._record()

    async def _start(self, daemons: list[FleetKeeper]) -> None:
        """Start daemons and wait until all are ready. Raises the error of one that is given up, or CommandError for
        one that was stopped before."""
        self._tasks |= {asyncio.ensure_future(kept.run()): kept for kept in daemons}
        waits = [asyncio.ensure_future(kept.ready.wait()) for kept in daemons]
        try:
            while pending := [wait for wait in waits if not wait.done()]:
                await asyncio.wait([*pending, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in self._tasks if task.done()]:
                    task.result()
                    if not (ended := self._tasks.pop(task)).ready.is_set():
                        raise CommandError(f"the {ended.title} was stopped before it was ready. Try again", BUG)
        finally:
            for wait in waits:
                wait.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        kept = self._tasks.pop(task)
        try:
            task.result()
        except CommandError as error:
            if kept is self._coordinator:
                raise
            _log.error("%s. The worker is not started again", error)
            if all(worker.state in GONE for worker in self._workers):
                raise CommandError(
                    f"the fleet ends because no worker is left; the last one failed: {error}", error.code
                ) from error

    # ---- record

    def _fleet(self) -> Fleet:
        daemons = []
        for kept in (self._coordinator, *self._workers):
            name, identity = _name(kept), None
            if kept.pid:
                with contextlib.suppress(ProcessLookupError):
                    identity = Identity.of(kept.pid)
            daemons.append(Daemon(name=name, state=kept.state, restarts=kept.restarts, identity=identity))
        return Fleet(
            engine="local",
            name=self._plan.name,
            dir=str(self._folder.path),
            coordinator=self._coordinator.line,
            token_file=self._plan.token_file,
            tls=self._plan.for_callers,
            daemons=daemons,
            supervisor=Identity.of(os.getpid()),
            plan=self._plan.model_dump(),
            scaled=self._scaled,
        )

    def _record(self) -> None:
        """Write the record. If that fails (a full disk, no descriptor left), the fleet keeps running: whoever needs the
        record, `penstock down`, finds the supervisor by its lock too."""
        try:
            self._folder.save(self._fleet())
        except (CommandError, OSError) as error:
            _log.error("%s; the fleet keeps running", error)


def _name(kept: FleetKeeper) -> str:
    return kept.title.removeprefix("worker ")


def main() -> int:
    """Run the supervisor and return its exit status. Standard output says that the fleet is ready."""
    parser = argparse.ArgumentParser(prog="python -m penstock.deploy.engines.supervisor")
    parser.add_argument("folder", type=Path)
    parser.add_argument("plan", type=FleetPlan.model_validate_json)
    parser.add_argument("--parent-pid", type=int)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def announce(fleet: Fleet) -> None:
        with contextlib.suppress(OSError):  # the command that waits for this was interrupted
            os.write(sys.stdout.fileno(), b"ready\n")

    try:
        supervise(options.plan, FleetFolder(options.folder), announce, parent_pid=options.parent_pid)
    except (CommandError, PenstockError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return error.code if isinstance(error, CommandError) else exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
