"""Ends of runs: a training job closes its boxes one by one, and an operator ends a whole run (`penstock run close`).

An operator ends a run whose training job is dead or hangs, so as not to wait until the coordinator ends it. The
coordinator cannot tell a hanging job from a live one, so it ends the run in any case. The next call of a job that still
lives gets SupersededError with the reason. The run itself remains, and the next launch opens it again.
"""

from __future__ import annotations

from penstock.appliance.core.cluster_state import ClusterState
from penstock.appliance.model.entities import Attempt, AttemptState, Box, BoxPresence, Run
from penstock.appliance.model.request_checks import check_name
from penstock.proto.errors import UnknownRunError
from penstock.proto.v1 import coordinator_pb2 as pb


def close_box(cluster: ClusterState, attempt: Attempt, box: Box, now: float, *, forget: bool) -> None:
    """Close a box at its client's request. If no other box of the attempt is live, end the attempt. `forget`: when the
    attempt ends, also remove the run from the coordinator's memory and journal."""
    attempt.set_presence(box, BoxPresence.CLOSED)
    attempt.set_ended(box, True)
    if attempt.any_live():
        box.lingers_until = now + cluster.limits.linger_s
        for slot in box.slots:
            cluster.waiting.pop(slot.key, None)
        cluster.save_box(attempt, box)
        cluster.save_history(attempt, box)
        cluster.touch(attempt, box)
    else:
        cluster.end(attempt, AttemptState.ENDED, f"attempt {attempt.number} of run {attempt.run} was closed")
        if forget:
            cluster.forget(cluster.runs[attempt.run])


def end_runs(cluster: ClusterState, name: str) -> pb.EndRunReply:
    """End the open attempt of a run (JOB/N), or those of all runs of a job (JOB). Attempts that are over stay as they
    are. Raises UnknownRunError, InvalidArgumentError."""
    check_name("run", name)
    reply = pb.EndRunReply()
    for run in _named(cluster, name):
        attempt = run.current
        reply.runs.add(run=run.name, attempt=run.attempt, was_open=attempt is not None)
        if attempt is not None:
            why = f"attempt {attempt.number} of run {run.name} was ended by an operator (`penstock run close`)"
            cluster.end(attempt, AttemptState.ENDED, why)
    return reply


def _named(cluster: ClusterState, name: str) -> list[Run]:
    if name in cluster.runs:
        return [cluster.runs[name]]
    found = [run for run in cluster.runs.values() if run.name.rpartition("/")[0] == name]
    if not found:
        raise UnknownRunError(
            f"the coordinator has no run or job {name!r}: give a run (JOB/0) or a job (JOB) of `penstock status --all`"
        )
    return found
