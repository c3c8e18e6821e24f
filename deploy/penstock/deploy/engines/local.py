"""Local engine: runs real daemons on this machine, under a supervisor that runs in the foreground or, detached, in a
process of its own.

All data of a detached fleet is in its folder (penstock.deploy.engines.fleet_folder), so that a command in another shell
finds the fleet.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from penstock.deploy.console.exit_codes import BUG, INTERRUPTED, USAGE, CommandError
from penstock.deploy.engines.engine import Fleet, FleetPlan
from penstock.deploy.engines.fleet_folder import FleetFolder, open_log
from penstock.deploy.engines.keeper import COORDINATOR_GRACE_S, WORKER_GRACE_S, log_end
from penstock.proto.errors import DeadlineError
from penstock.runtime.process.identity import Identity
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import Spawned, module, spawn

__all__ = ["LocalEngine"]

GONE = {"failed", "left"}
"""States of workers (FleetKeeper.state) that the supervisor does not start again by itself."""
KILLED_S = 10.0
"""Longest time in seconds that a killed supervisor may take to end."""
POLL_S = 0.05
"""Seconds between two reads of a fleet's record that a supervisor is about to change."""


class LocalEngine:
    """Engine that starts a supervisor in a process of its own, which outlives this process. A fleet in the foreground
    does not use this class, but calls supervisor.py directly."""

    def up(self, plan: FleetPlan, folder: Path, *, ends_with_us: bool = False) -> Fleet:
        """Start the fleet, or change the number of workers of a running one and start its workers again that have
        ended. `ends_with_us`: True if the supervisor must end when this process ends. Raises CommandError if the fleet
        cannot be started or changed, DeadlineError if it is not ready in time."""
        where = FleetFolder(folder)
        lock = where.lock()
        if lock is None:
            return _adjust(plan, where)
        log = where.logs / "supervisor.log"
        with LinePipe() as ready:
            try:
                where.hold(lock, Identity.of(os.getpid()))
                where.save_plan(plan)
                process = _begin(where, log, ready.theirs, lock, ends_with_us)
            finally:  # the supervisor holds the lock from here on
                os.close(lock)
            try:
                result, in_time = ready.line(plan.timeout_s + 60), True
            except TimeoutError:
                result, in_time = None, False
            except BaseException:
                process.send(signal.SIGTERM)
                process.wait(WORKER_GRACE_S + COORDINATOR_GRACE_S)
                raise
        if result is None:
            terminated = in_time and process.result() == -signal.SIGTERM
            process.send(signal.SIGTERM)
            if terminated:  # a signal arrived before the supervisor could handle it
                raise CommandError(
                    f"the fleet in {where.path} was ended while it was starting. Start it again",
                    INTERRUPTED,
                )
            raise CommandError(f"the supervisor of the fleet in {where.path} did not start: {log_end(log)}", BUG)
        answer = json.loads(result)
        if "error" in answer:
            process.wait(plan.timeout_s)
            raise CommandError(answer["error"], answer["code"])
        process.let_go()
        return Fleet(**answer["fleet"])

    def down(self, folder: Path, timeout_s: float) -> list[str]:
        """End the fleet: send SIGTERM to the supervisor, which ends its daemons, or to the process that is starting a
        supervisor. Kill this process after `timeout_s` seconds; the daemons of a killed supervisor end by themselves.
        Return a text for each process that was ended. Raises DeadlineError if the fleet is still being started at that
        time."""
        where = FleetFolder(folder)
        deadline = time.monotonic() + timeout_s
        fleet = where.fleet()
        ended = []
        while where.supervised:
            holder = where.holder()  # read again, because a starting process may have become a supervisor meanwhile
            if holder is not None and _end(holder, deadline):
                ended = [f"supervisor (pid {holder.pid})"]
            elif time.monotonic() > deadline:
                raise DeadlineError(
                    f"a fleet is being started in {where.path}, and did not end within {timeout_s:g} s. Try again"
                )
            else:
                time.sleep(POLL_S)
        for daemon in fleet.about["daemons"] if fleet is not None else ():
            if daemon["identity"] is None:
                continue
            # A live supervisor has ended its daemons; those of a killed one detect its death and end.
            _end(Identity(**daemon["identity"]), deadline)
            ended.append(f"{daemon['name']} (pid {daemon['identity']['pid']})")
        where.forget()
        return ended


def _begin(where: FleetFolder, log: Path, ready: BinaryIO, lock: int, ends_with_us: bool) -> Spawned:
    what = [str(where.path), "--ready-fd", str(ready.fileno()), "--lock-fd", str(lock)]
    if ends_with_us:
        what += ["--parent-pid", str(os.getpid())]
    out = open_log(log)
    process = spawn(module("penstock.deploy.engines.supervisor", *what), stdout=out, stderr=out, fds=[ready, lock])
    try:
        where.hold(lock, Identity.of(process.pid))
    except BaseException:
        process.send(signal.SIGTERM)
        raise
    return process


def _adjust(plan: FleetPlan, where: FleetFolder) -> Fleet:
    current, fleet = where.plan(), where.fleet()
    if current is None or fleet is None or not fleet.about["ready"]:
        raise CommandError(f"a fleet is just being started or ended in {where.path}. Try again in a moment", USAGE)
    others = [name for name in current.differences(plan) if name != "--workers"]
    if others or (current.workers == plan.workers and not set(_states(fleet)) & GONE):
        what = f", with another {', '.join(others)}" if others else ""
        raise CommandError(
            f"a fleet already runs in {where.path}{what}. End it by `penstock down`, or change only --workers",
            USAGE,
        )
    where.save_plan(replace(current, workers=plan.workers))
    if not Identity(**fleet.about["supervisor"]).send(signal.SIGUSR1):
        raise CommandError(f"the fleet in {where.path} has just ended. Try again", USAGE)
    before = fleet.about.get("adjusted", 0)
    deadline = time.monotonic() + plan.timeout_s
    while time.monotonic() < deadline:
        fleet = where.fleet()
        if fleet is None:
            raise CommandError(
                f"the supervisor of the fleet in {where.path} ended: {log_end(where.logs / 'supervisor.log')}", BUG
            )
        states = _states(fleet)
        if fleet.about.get("adjusted", 0) > before and len(states) == plan.workers and set(states) <= GONE | {"ready"}:
            return fleet
        time.sleep(POLL_S)
    raise DeadlineError(
        f"the fleet in {where.path} does not have {plan.workers} workers ready after {plan.timeout_s:g} s. See the "
        f"logs in {where.logs}"
    )


def _states(fleet: Fleet) -> list[str]:
    """Return what each worker of the fleet is doing, such as "ready", in the order of the fleet's file (fleet.json)."""
    return [daemon["state"] for daemon in fleet.about["daemons"] if daemon["name"] != "coordinator"]


def _end(identity: Identity, deadline: float) -> bool:
    """End a process; kill it if it still runs at `deadline` (monotonic clock). Return False if it had ended before."""
    process = identity.open()
    if process is None:
        return False
    with process:
        process.end(deadline - time.monotonic(), KILLED_S)
    return True
