"""Checks of the numbers and names in requests.

Protobuf accepts values that harm every peer: a long poll of NaN seconds is a loop without a pause, a total of 2**64 - 1
overflows the next message, and SQLite's integers are signed. An unprintable name could look like another one in a log.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.proto.errors import SAME_RELEASE, InvalidArgumentError
from penstock.proto.state.counts import MOST_GROUPS, MOST_NAME
from penstock.proto.state.position import MOST
from penstock.proto.v1 import coordinator_pb2 as pb

LONGEST_S = 1e9
"""Largest duration in a request, in seconds: thirty years."""
REPORTS_PER_SLOT = 2
"""Slot reports in a heartbeat per slot of the worker: it reports those that it runs, and that it could not start."""
LONGEST_NAME = 200
"""Longest name of a job or worker in characters: names appear in logs and metrics."""

REGISTRATION_MAX = 16 << 10
"""Largest registration in bytes: kept in memory, and in every status reply."""
CAPABILITIES_MAX = 16 << 10
"""Largest capabilities of a slot (what its loader can do) in bytes: kept in memory and in the journal."""
WORKER_SLOTS_MAX = 1024
"""Most slots of a worker: sending, draining or removing all takes some 20 us each, in which heartbeats wait, and no
machine runs more such processes."""
ABANDONED_AT_ONCE = 4096
"""Most abandoned epochs in one report: 15 ms in the journal. A box repeats them until they are confirmed."""
EPOCH_STARTS_AT_ONCE = 256
"""Most epoch starts in one report. A box reports each once, and all again after a restart."""
ANSWER_ENDS_MAX = 4096
"""Most ends of epochs in a worker's answer to a state request; a worker remembers 1,024."""


def _check(name: str, value: float, most: float) -> None:
    if not 0 <= value <= most:  # also false for NaN
        raise InvalidArgumentError(
            f"{name} in a request to the coordinator must be 0 to {most}, got {value}. {SAME_RELEASE}"
        )


def check_measures(**values: float) -> None:
    for name, value in values.items():
        _check(name, value, LONGEST_S)


def check_counts(**values: int) -> None:
    for name, value in values.items():
        _check(name, value, MOST)


def check_reports(reports: Sequence[pb.SlotReport], capacity: int) -> None:
    _check("slots in a heartbeat", len(reports), REPORTS_PER_SLOT * capacity)
    for report in reports:
        check_capabilities(report)
        check_measures(
            batches_per_s=report.batches_per_s,
            batch_s=report.batch_s,
            batch_cpu_s=report.batch_cpu_s,
            batch_delay_s=report.batch_delay_s,
        )


def check_capabilities(report: pb.SlotReport | pb.StateAnswer) -> None:
    if report.HasField("capabilities"):
        _check("bytes of a loader's capabilities", report.capabilities.ByteSize(), CAPABILITIES_MAX)


def check_registration(request: pb.RegisterWorkerRequest) -> None:
    if not request.worker or not request.session or request.slots < 1:
        raise InvalidArgumentError(
            f"a worker must register with a name, a session and slots, got worker={request.worker!r} and slots="
            f"{request.slots}: start the worker with --name and --slots"
        )
    if request.slots > WORKER_SLOTS_MAX:
        raise InvalidArgumentError(
            f"slots of one worker must be at most {WORKER_SLOTS_MAX}, got {request.slots}: start several workers"
        )
    if (size := request.ByteSize()) > REGISTRATION_MAX:
        raise InvalidArgumentError(
            f"a worker's registration must have at most {REGISTRATION_MAX} bytes, got {size}: shorten --allow"
        )


def check_progress(request: pb.WatchRunRequest, num_workers: int) -> None:
    check_measures(hold_s=request.hold_s, lease_s=request.lease_s, imbalance=request.imbalance)
    check_measures(waited_s=request.waited_s, waited_by_slot_s=sum(request.waited_by_slot_s))
    _check("unreachable slots", len(request.unreachable), num_workers)
    _check("sources in a report", len(request.sources), MOST_GROUPS)
    for count in request.sources:
        _check("characters of a source's name", len(count.source), MOST_NAME)
        check_counts(samples=count.samples, tokens=count.tokens)
        check_measures(wanted=count.wanted)
    check_counts(fence_taken=request.fence_taken)
    _check("characters of a fence's key", len(request.fence_key), LONGEST_NAME)
    _check("abandoned epochs in a report", len(request.abandoned), ABANDONED_AT_ONCE)
    for abandoned_epoch in request.abandoned:
        check_counts(epoch=abandoned_epoch.epoch, step=abandoned_epoch.step)
    _check("epoch starts in a report", len(request.epoch_starts), EPOCH_STARTS_AT_ONCE)
    entries = {len(start.slots) for start in request.epoch_starts} | ({len(request.delivered.slots)} - {0})
    if entries - {num_workers}:
        raise InvalidArgumentError(
            f"a reported position must have {num_workers} entries, got {min(entries - {num_workers})}. {SAME_RELEASE}"
        )


def check_state_query(request: pb.FetchStateRequest) -> None:
    check_measures(deadline_s=request.deadline_s)
    check_counts(step=request.step)
    progress = request.progress
    if request.HasField("progress") and (progress.run, progress.attempt) != (request.run, request.attempt):
        raise InvalidArgumentError(
            f"progress in a request for a state of {request.run} ({request.attempt}) must be of this attempt, got "
            f"{progress.run} ({progress.attempt}). {SAME_RELEASE}"
        )


def check_answer(answer: pb.StateAnswer) -> None:
    _check("ends of epochs in an answer", len(answer.ends), ANSWER_ENDS_MAX)
    check_capabilities(answer)
    check_counts(ended_epoch=answer.ended_epoch, ended_total=answer.ended_total)
    for end in answer.ends:
        check_counts(epoch=end.epoch, total=end.total)


def check_name(what: str, name: str) -> None:
    """Raise InvalidArgumentError for a name that is too long, not one printable line, or has a blank at an end."""
    if len(name) > LONGEST_NAME:
        raise InvalidArgumentError(f"the name of a {what} must have at most {LONGEST_NAME} characters, got {len(name)}")
    if name != name.strip() or not name.isprintable():
        raise InvalidArgumentError(
            f"the name of a {what} must be printable text without blanks at its ends, got {name!a}"
        )
