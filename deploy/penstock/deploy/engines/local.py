"""Local engine, detached: a supervisor process that outlives this one, with all data in the fleet's folder."""

from __future__ import annotations

import os
import signal
import time

from penstock.deploy.console.exit_codes import BUG, INTERRUPTED, USAGE, CommandError
from penstock.deploy.engines.engine import Fleet, FleetPlan, Scaling
from penstock.deploy.engines.fleet_folder import FleetFolder, open_log
from penstock.deploy.engines.keeper import COORDINATOR_GRACE_S, WORKER_GRACE_S, log_end
from penstock.deploy.engines.supervisor import SCALE
from penstock.proto.errors import DeadlineError
from penstock.runtime.process.identity import Identity
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import module, spawn

KILLED_S = 10.0
"""Longest time in seconds until a killed supervisor has ended."""
SCALE_POLL_S = 0.2
POLL_S = 0.05
"""Seconds between two attempts to end a fleet that is being started."""


def up(plan: FleetPlan, folder: FleetFolder, *, ends_with_us: bool = False) -> Fleet:
    """Start the fleet. `ends_with_us`: the supervisor ends with this process. Raises CommandError. An exception that a
    signal handler raises meanwhile ends the fleet again."""
    if folder.supervised:
        raise CommandError(f"a fleet already runs in {folder.path}. End it by `penstock down`", USAGE)
    command = module("penstock.deploy.engines.supervisor", str(folder.path), plan.model_dump_json())
    if ends_with_us:
        command += ["--parent-pid", str(os.getpid())]
    log = folder.logs / "supervisor.log"
    with LinePipe() as ready:
        process = spawn(command, stdout=ready.theirs, stderr=open_log(log))
        try:
            line = ready.line(plan.timeout + 60)  # the supervisor's own deadline comes first
        except BaseException:
            process.send(signal.SIGTERM)
            process.wait(WORKER_GRACE_S + COORDINATOR_GRACE_S)
            raise
    fleet = folder.fleet() if line is not None else None
    if fleet is not None:
        process.let_go()
        return fleet
    code = process.result()
    if code == -signal.SIGTERM:  # before the supervisor could handle it
        raise CommandError(f"the fleet in {folder.path} was ended while it was starting. Start it again", INTERRUPTED)
    raise CommandError(log_end(log), code if code > 1 else BUG)


def scale(folder: FleetFolder, scaling: Scaling, timeout_s: float) -> Fleet:
    """Let the supervisor bring the fleet to a new size, and return it when all its workers are ready. Raises
    DeadlineError if they are not in time, CommandError if the supervisor has ended, or another size was asked for."""
    folder.ask(scaling)
    supervisor = folder.holder()
    if supervisor is None or not supervisor.send(SCALE):
        raise CommandError(f"the fleet in {folder.path} has just ended. Start it again", USAGE)
    deadline = time.monotonic() + timeout_s
    while (fleet := folder.fleet()) is not None and supervisor.send(0):
        asked = folder.asked()
        if asked.workers != scaling.workers:
            raise CommandError(
                f"another command has asked for {asked.workers} workers of the fleet in {folder.path} meanwhile", USAGE
            )
        if fleet.scaled == asked.request:
            workers = {daemon.name: daemon.state for daemon in fleet.daemons if daemon.name != "coordinator"}
            if len(workers) == scaling.workers and {*workers.values()} == {"ready"}:
                return fleet
            if failed := [name for name, state in workers.items() if state == "failed"]:
                raise CommandError(f"worker {failed[0]}: {log_end(folder.logs / f'{failed[0]}.log')}", BUG)
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the fleet in {folder.path} does not have {scaling.workers} workers ready after {timeout_s:g} s. See "
                f"the logs in {folder.logs}, or raise --timeout"
            )
        time.sleep(SCALE_POLL_S)
    raise CommandError(f"the fleet in {folder.path} ended meanwhile. See the logs in {folder.logs}", BUG)


def down(folder: FleetFolder, timeout_s: float) -> list[str]:
    """End the fleet by SIGTERM to the supervisor, or kill it after `timeout_s`; daemons of a killed one end by
    themselves. Return a text for each ended process. Raises DeadlineError if the fleet still starts then."""
    deadline = time.monotonic() + timeout_s
    fleet = folder.fleet()
    ended = []
    while folder.supervised:
        holder = folder.holder()
        if holder is not None and _end(holder, deadline):
            ended = [f"supervisor (pid {holder.pid})"]
        elif time.monotonic() > deadline:
            raise DeadlineError(
                f"a fleet is being started in {folder.path}, and did not end within {timeout_s:g} s. Try again"
            )
        else:
            time.sleep(POLL_S)
    for daemon in fleet.daemons if fleet is not None else ():
        if daemon.identity is not None:
            # A live supervisor has ended its daemons; those of a killed one detect its death and end.
            _end(daemon.identity, deadline)
            ended.append(f"{daemon.name} (pid {daemon.identity.pid})")
    folder.forget()
    return ended


def _end(identity: Identity, deadline: float) -> bool:
    """End a process, or kill it at `deadline` (monotonic). Return False if it had ended before."""
    process = identity.open()
    if process is None:
        return False
    with process:
        process.end(deadline - time.monotonic(), KILLED_S)
    return True
