"""Supervisor of the local engine: one process whose children are a coordinator and its workers.

    python -m penstock.deploy.engines.supervisor FOLDER PLAN    (started by `up --detach`)

It holds the lock of the fleet's folder and keeps the record up to date. On SIGUSR1 it reads the plan again, and adjusts
the workers. SIGTERM and Ctrl-C end the workers, which migrate their slots, then the coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.deploy.console.exit_codes import BUG, INTERRUPTED, PORT_TAKEN, USAGE, CommandError, exit_code
from penstock.deploy.console.signals import ending_signals
from penstock.deploy.engines.engine import Fleet, FleetPlan, worker_name
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.engines.keeper import COORDINATOR_GRACE_S, WORKER_GRACE_S, FleetKeeper
from penstock.proto.errors import DeadlineError, PenstockError
from penstock.runtime.process.identity import Identity
from penstock.runtime.process.watch import Process

__all__ = ["supervise"]

_log = logging.getLogger("penstock.deploy.engines")

LEFTOVERS_S = 30.0
"""Longest time in seconds until the daemons of a killed supervisor have ended."""
RECORD_AGAIN_S = 2.0
"""Seconds between two attempts to write the record after a failure."""


def supervise(
    plan: FleetPlan,
    folder: FleetFolder,
    ready: Callable[[Fleet], None],
    *,
    parent_pid: int | None = None,
) -> None:
    """Run the fleet until a signal, the end of `parent_pid`, or the stop of the last worker on request. `ready`:
    called once. Raises DeadlineError if the fleet is not ready in time; CommandError if a daemon fails before that,
    or the coordinator or last worker is given up."""
    lock = folder.lock()
    if lock is None:
        raise CommandError(f"a fleet already runs in {folder.path}. End it by `penstock down`", USAGE)
    try:
        folder.hold(lock, Identity.of(os.getpid()))
        folder.save_plan(plan)
        _end_leftovers(folder)
        try:
            asyncio.run(_Supervisor(plan, folder, ready).run(parent_pid))
        finally:
            folder.forget()
    finally:
        os.close(lock)


def _end_leftovers(folder: FleetFolder) -> None:
    """Wait until the daemons of a killed supervisor have ended; kill those that do not."""
    fleet = folder.fleet()
    deadline = time.monotonic() + LEFTOVERS_S
    for daemon in fleet.about["daemons"] if fleet is not None else ():
        process = Identity(**daemon["identity"]).open() if daemon["identity"] else None
        if process is None:
            continue
        with process:
            _log.info("waiting for %s of the fleet before this one to end", daemon["name"])
            if not process.wait(deadline - time.monotonic()):
                process.kill()
                process.wait(LEFTOVERS_S)


class _Supervisor:
    def __init__(self, plan: FleetPlan, folder: FleetFolder, ready: Callable[[Fleet], None]) -> None:
        self._plan, self._folder, self._announce = plan, folder, ready
        self._plan_changed = asyncio.Event()
        self._up = False
        self._adjusted = 0
        self._unwritten: asyncio.TimerHandle | None = None
        """Next attempt to write the record after a failure."""
        self._workers: dict[str, FleetKeeper] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._tasks: dict[asyncio.Task[None], FleetKeeper] = {}
        # With port 0: the address that training jobs already use is tried before a new one.
        before = folder.address
        host, _, port = plan.listen.rpartition(":")
        self._again = before if port == "0" and before.rpartition(":")[0] == host else ""
        self._coordinator = self._make_coordinator()

    def _make_coordinator(self) -> FleetKeeper:
        def command(line: str) -> list[str]:
            return self._plan.coordinator_command(str(self._folder.state_dir), line or self._again or self._plan.listen)

        log = self._folder.logs / "coordinator.log"
        return FleetKeeper("coordinator", command, log, restart_always=True, changed=self._record)

    async def run(self, parent_pid: int | None) -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        if parent_pid is not None:
            try:
                Process(parent_pid).on_end(stop.set)
            except ProcessLookupError:
                return
        for number in (signal.SIGINT, *ending_signals()):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, self._plan_changed.set)
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
            for task in (stopped, living):
                task.cancel()
            await self._end()
            await asyncio.gather(stopped, living, return_exceptions=True)

    async def _live(self) -> None:
        """Start all daemons, call `ready`, and watch them until the last worker was stopped on request."""
        try:
            async with asyncio.timeout(self._plan.timeout):
                await self._start_coordinator()
                self._folder.address = self._coordinator.line
                self._adjust()
                await self._until_ready(list(self._workers.values()))
        except TimeoutError:
            waits = [kept.title for kept in (self._coordinator, *self._workers.values()) if not kept.ready.is_set()]
            raise DeadlineError(
                f"the fleet in {self._folder.path} is not ready after {self._plan.timeout:g} s: it waits for "
                f"{', '.join(waits)}. See the logs in {self._folder.logs}, or raise --timeout"
            ) from None
        self._up = True
        self._record()
        self._announce(self._fleet())
        while True:
            plan_changed = asyncio.ensure_future(self._plan_changed.wait())
            await asyncio.wait([plan_changed, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            plan_changed.cancel()
            if self._plan_changed.is_set():
                self._plan_changed.clear()
                self._plan = self._folder.plan() or self._plan
                _log.info("changing the number of workers to %d", self._plan.workers)
                self._adjusted += 1
                self._adjust()
            for task in [task for task in self._tasks if task.done()]:
                self._ended(task)
            if all(worker.state in ("failed", "left") for worker in self._workers.values()):
                _log.info("the last worker stopped on request: the fleet ends")
                return

    async def _start_coordinator(self) -> None:
        self._keep(self._coordinator)
        try:
            await self._until_ready([self._coordinator])
        except CommandError as error:
            if not self._again or error.code != PORT_TAKEN:
                raise
            _log.warning("the coordinator's former address %s is not available; using a free one", self._again)
            self._again = ""
            self._tasks.clear()
            self._coordinator = self._make_coordinator()
            self._keep(self._coordinator)
            await self._until_ready([self._coordinator])

    async def _until_ready(self, kept: list[FleetKeeper]) -> None:
        """Raises the error of a daemon that is given up, or CommandError for one that was stopped before."""
        waits = [asyncio.ensure_future(daemon.ready.wait()) for daemon in kept]
        try:
            while not all(wait.done() for wait in waits):
                pending = [wait for wait in waits if not wait.done()]
                await asyncio.wait([*pending, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in self._tasks if task.done()]:
                    task.result()
                    if not (ended := self._tasks.pop(task)).ready.is_set():
                        raise CommandError(f"the {ended.title} was stopped before it was ready. Try again", BUG)
        finally:
            for wait in waits:
                wait.cancel()

    def _keep(self, kept: FleetKeeper) -> None:
        self._tasks[asyncio.ensure_future(kept.run())] = kept

    def _adjust(self) -> None:
        """Start or end workers until their number is the plan's; start failed or stopped ones again."""
        wanted = [worker_name(self._plan.name, number) for number in range(1, self._plan.workers + 1)]
        for name in [name for name in self._workers if name not in wanted]:
            leaving = asyncio.ensure_future(self._workers.pop(name).stop(WORKER_GRACE_S))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        host = self._coordinator.line.rpartition(":")[0]
        for name in wanted:
            if name in self._workers and self._workers[name].state not in ("left", "failed"):
                continue
            self._workers[name] = kept = FleetKeeper(
                f"worker {name}",
                lambda _, name=name: self._plan.worker_command(name, self._coordinator.line, f"{host}:0"),  # type: ignore[misc]
                self._folder.logs / f"{name}.log",
                restart_always=False,
                changed=self._record,
            )
            self._keep(kept)
        self._record()

    def _ended(self, task: asyncio.Task[None]) -> None:
        kept = self._tasks.pop(task)
        try:
            task.result()
        except CommandError as error:
            if kept is self._coordinator:
                raise
            _log.error("%s. The worker is not started again; to retry, run the same `penstock up`", error)
            if all(worker.state in ("failed", "left") for worker in self._workers.values()):
                raise CommandError(
                    f"the fleet ends because no worker is left; the last one failed: {error}", error.code
                ) from error

    async def _end(self) -> None:
        workers = [kept for kept in self._tasks.values() if kept is not self._coordinator]
        await asyncio.gather(*(kept.stop(WORKER_GRACE_S) for kept in workers), *self._leaving)
        await self._coordinator.stop(COORDINATOR_GRACE_S)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- record

    def _fleet(self) -> Fleet:
        return Fleet(
            engine="local",
            name=self._plan.name,
            folder=str(self._folder.path),
            coordinator=self._coordinator.line,
            token_file=self._plan.token_file,
            tls=self._plan.tls_files,
            about={
                "supervisor": asdict(Identity.of(os.getpid())),
                "ready": self._up,
                "adjusted": self._adjusted,
                "daemons": [
                    _daemon(name, kept) for name, kept in {"coordinator": self._coordinator, **self._workers}.items()
                ],
            },
        )

    def _record(self) -> None:
        """Write the record. If that fails (a full disk), the fleet keeps running and the write is retried."""
        if self._unwritten is not None:
            self._unwritten.cancel()
        try:
            self._folder.save(self._fleet())
        except CommandError as error:
            if self._unwritten is None:
                _log.error("%s; the fleet keeps running, and the write is retried every %g s", error, RECORD_AGAIN_S)
            self._unwritten = asyncio.get_running_loop().call_later(RECORD_AGAIN_S, self._record)
        else:
            if self._unwritten is not None:
                _log.info("the record of the fleet is up to date again")
            self._unwritten = None


def _daemon(name: str, kept: FleetKeeper) -> dict[str, Any]:
    identity = None
    if kept.pid:
        with contextlib.suppress(ProcessLookupError):
            identity = asdict(Identity.of(kept.pid))
    return {"name": name, "state": kept.state, "restarts": kept.restarts, "identity": identity}


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
