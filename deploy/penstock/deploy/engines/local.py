"""The local engine: real daemons on this machine, under a supervisor in the foreground or, detached, of its own.

All that is known of a detached one is in its folder (penstock.deploy.engines.fleet_folder), so that another shell finds
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from penstock.deploy.console.exit_codes import BUG, INTERRUPTED, USAGE, CommandError
from penstock.deploy.engines.engine import Fleet, FleetPlan
from penstock.deploy.engines.fleet_folder import FleetFolder, FleetIdentity, open_log
from penstock.deploy.engines.keeper import COORDINATOR_GRACE_S, WORKER_GRACE_S, last_words
from penstock.proto.errors import DeadlineError

__all__ = ["LocalEngine"]

GONE = {"failed", "left"}
"""States of workers that do not come back by themselves."""
POLL_S = 0.05
"""Between two looks at a record that a supervisor is about to change."""


class LocalEngine:
    """`up` starts a supervisor that outlives this process. The foreground is penstock.deploy.engines.supervisor."""

    def up(self, plan: FleetPlan, folder: Path, *, ends_with_us: bool = False) -> Fleet:
        """Start it, or tell the one that is up to have another number of workers. CommandError, DeadlineError.

        ends_with_us: it does not outlive this process after all, however that ends.
        """
        where = FleetFolder(folder)
        lock = where.lock()
        if lock is None:
            return _adjust(plan, where)
        read, write = os.pipe()
        log = where.logs / "supervisor.log"
        try:
            where.hold(lock, FleetIdentity.of(os.getpid()))
            where.save_plan(plan)
            process = _begin(where, log, write, lock, ends_with_us)
        finally:  # it has the lock now, if it is there
            os.close(write)
            os.close(lock)
        with open(read, "rb") as pipe:
            try:
                in_time = select.select([pipe], [], [], plan.timeout_s + 60)[0]
                said = pipe.readline() if in_time else b""
            except BaseException:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(WORKER_GRACE_S + COORDINATOR_GRACE_S)
                raise
        if not said:
            told = bool(in_time) and process.wait() == -signal.SIGTERM
            process.terminate()
            if told:  # before it could hear of it
                raise CommandError(f"the fleet in {where.path} was told to end while it was starting", INTERRUPTED)
            raise CommandError(f"the supervisor did not start: {last_words(log)}", BUG)
        answer = json.loads(said)
        if "error" in answer:
            process.wait(plan.timeout_s)
            raise CommandError(answer["error"], answer["code"])
        process.returncode = 0  # it stays: nobody here waits for it
        return Fleet(**answer["fleet"])

    def down(self, folder: Path, timeout_s: float) -> list[str]:
        """End the supervisor, also one that is being started; it ends the rest. And daemons of one that was killed, if
        there are any left. DeadlineError."""
        where = FleetFolder(folder)
        deadline = time.monotonic() + timeout_s
        fleet = where.fleet()
        ended = []
        while where.supervised:
            holder = where.holder()
            if holder is not None and _end(holder, deadline):
                ended = [f"supervisor (pid {holder.pid})"]  # the last, if one began while we ended who began it
            elif time.monotonic() > deadline:
                raise DeadlineError(f"a fleet in {where.path} is being started, and did not end in {timeout_s:g} s")
            else:
                time.sleep(POLL_S)
        for daemon in fleet.about["daemons"] if fleet is not None else ():
            if daemon["identity"] is None:
                continue
            # Those of a supervisor that lived have ended with it; of one that was killed they end by themselves.
            _end(FleetIdentity(**daemon["identity"]), deadline)
            ended.append(f"{daemon['name']} (pid {daemon['identity']['pid']})")
        where.forget()
        return ended


def _begin(where: FleetFolder, log: Path, ready: int, lock: int, ends_with_us: bool) -> subprocess.Popen[bytes]:
    with open_log(log) as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "penstock.deploy.engines.supervisor"),
                *(str(where.path), "--ready-fd", str(ready), "--lock-fd", str(lock)),
                *(["--parent-pid", str(os.getpid())] if ends_with_us else []),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=[ready, lock],
            start_new_session=True,
        )
    try:
        where.hold(lock, FleetIdentity.of(process.pid))
    except BaseException:
        process.terminate()
        raise
    return process


def _adjust(plan: FleetPlan, where: FleetFolder) -> Fleet:
    current, fleet = where.plan(), where.fleet()
    if current is None or fleet is None or not fleet.about["ready"]:
        raise CommandError(f"a fleet is being started in {where.path} by another `penstock up`", USAGE)
    others = [name for name in current.differences(plan) if name != "--workers"]
    if others or (current.workers == plan.workers and not set(_states(fleet)) & GONE):
        what = f" (another {', '.join(others)} was given)" if others else ""
        raise CommandError(
            f"a fleet is up in {where.path} already{what}: `penstock down` ends it; --workers with another number, and "
            "all else as it was, adjusts it",
            USAGE,
        )
    where.save_plan(replace(current, workers=plan.workers))
    if not FleetIdentity(**fleet.about["supervisor"]).send(signal.SIGUSR1):
        raise CommandError(f"the supervisor in {where.path} has just ended: try again", USAGE)
    before = fleet.about.get("adjusted", 0)
    deadline = time.monotonic() + plan.timeout_s
    while time.monotonic() < deadline:
        fleet = where.fleet()
        if fleet is None:
            raise CommandError(f"the supervisor ended: {last_words(where.logs / 'supervisor.log')}", BUG)
        states = _states(fleet)
        if fleet.about.get("adjusted", 0) > before and len(states) == plan.workers and set(states) <= GONE | {"ready"}:
            return fleet
        time.sleep(POLL_S)
    raise DeadlineError(f"{where.path} has not {plan.workers} workers ready after {plan.timeout_s:g} s")


def _states(fleet: Fleet) -> list[str]:
    """Of its workers."""
    return [daemon["state"] for daemon in fleet.about["daemons"] if daemon["name"] != "coordinator"]


def _end(process: FleetIdentity, deadline: float) -> bool:
    """SIGTERM, SIGKILL at the deadline; returns when it has ended. False if it had before."""
    fd = process.open()
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [], 10)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)
    return True
