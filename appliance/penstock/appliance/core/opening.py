"""Decision about an OpenRun request: it repeats an earlier one, a box joins the open attempt, or the next one begins.

Does the sender belong to the launch that holds the run? An attempt key in the request says so. Without a key, a request
for a free box while all boxes are alive comes from the same launch. If a box is lost or closed, it comes from the next
launch, because no process can rejoin one whose slots have moved. A request for a box of a live client is an error,
because it may be a mistake; but in a run with one box it opens the next attempt, so that a job that is started again
need not wait for the dead launch's lease. Pure: the cluster state is read, not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.appliance.core.entities import Attempt, AttemptState, Box, BoxPresence, Run, attempt_over, client_of
from penstock.appliance.journal.snapshot_index import SnapshotIndex
from penstock.proto.errors import (
    BoxOutOfRangeError,
    BoxTakenError,
    InvalidArgumentError,
    OverloadedError,
    StateMismatchError,
    SupersededError,
    TopologyError,
)
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.units import topology

RUNS_MAX = 100_000
"""Most runs in the journal, open or not. Each is kept for its seed and takes about 1 KB."""
SLOTS_MAX = 16_384
"""Most slots of a run, and of all open runs of one credential token: makes a mistyped number an error, and bounds the
end of an attempt, which takes up to 1 us per slot without a pause."""
SLOTS_OPEN_MAX = 65_536
"""Most slots of all open runs; each takes some 5 KB."""
BOX_SLOTS_MAX = 256
"""Most slots of a box: opening it or sending its view takes 20 us per slot, in which heartbeats wait."""
OPENING_MAX = 256 << 10
"""Largest request in bytes, kept in memory and the journal. Larger arguments become a blob (`Limits.budget`)."""


@dataclass(frozen=True)
class RepeatedOpening:
    """Decision that the request repeats an earlier one, whose reply did not reach the client."""

    box: Box


@dataclass(frozen=True)
class JoinAttempt:
    attempt: Attempt


@dataclass(frozen=True)
class OpenAttempt:
    """Decision to open the next attempt; an open one is superseded."""


def run_name(request: pb.OpenRunRequest) -> str:
    return f"{request.job}/{request.ordinal}"


def validate(request: pb.OpenRunRequest) -> Position:
    """Check the request by itself and return the box's start. Raises InvalidArgumentError, BoxOutOfRangeError."""
    if not request.job or not request.loader.input_fn:
        raise InvalidArgumentError(
            f"job and input_fn must not be empty, got job={request.job!r}, input_fn={request.loader.input_fn!r}: pass "
            "both"
        )
    if request.num_boxes < 1 or request.num_workers_per_box < 1:
        raise InvalidArgumentError(
            f"num_boxes and num_workers_per_box must be >= 1, got {request.num_boxes} and "
            f"{request.num_workers_per_box}: pass at least 1 for each"
        )
    if request.num_boxes * request.num_workers_per_box > SLOTS_MAX:
        raise InvalidArgumentError(
            f"a run must have at most {SLOTS_MAX} workers in all, got "
            f"{topology(request.num_boxes, request.num_workers_per_box)}: lower num_workers_per_box"
        )
    if request.box >= request.num_boxes:
        raise BoxOutOfRangeError(
            f"box of run {run_name(request)} must be 0 to {request.num_boxes - 1} with num_boxes={request.num_boxes}, "
            f"got {request.box}: number the boxes from 0"
        )
    given, count = len(request.start.slots), request.num_workers_per_box
    live = len(request.start.live)
    if given not in (0, count) or live > given:
        raise InvalidArgumentError(
            f"the start position must have one entry for each of the box's {count} workers, got {given} entries, of "
            f"which {live} are live: load a state that was saved with {count} workers per box"
        )
    return start_of(request)


def start_of(request: pb.OpenRunRequest) -> Position:
    start = request.start
    if start.slots:
        return Position.received(start, InvalidArgumentError)
    return Position.start(request.num_workers_per_box, step=start.step, epoch=start.epoch)


def resumes(request: pb.OpenRunRequest) -> bool:
    return bool(request.resume.blob) or request.start.step > 0


def without_secret(request: pb.OpenRunRequest) -> tuple[str, pb.OpenRunRequest]:
    """Return the digest of the client's secret, and a copy without the secret (client_id), which is never stored."""
    if not request.client_id:
        raise InvalidArgumentError("client_id must not be empty: set it to the client's secret, a random string")
    kept = pb.OpenRunRequest()
    kept.CopyFrom(request)
    kept.ClearField("client_id")
    kept.ClearField("restart")
    return client_of(request.client_id), kept


def check_limits(request: pb.OpenRunRequest, run: Run | None, runs: int, snapshot_index: SnapshotIndex) -> None:
    """Check a new request, not one in the journal, which another release may have accepted: above a limit it would
    delay all other calls. Raises OverloadedError for too many runs; InvalidArgumentError for its size, its slots
    per box, or an unknown blob."""
    if run is None and runs >= RUNS_MAX:
        raise OverloadedError(
            f"a coordinator must keep at most {RUNS_MAX} runs, got {runs} and one more: start the coordinator "
            "with another --state-dir"
        )
    for what, blob in (
        ("state to resume from", request.resume.blob),
        ("arguments of input_fn", request.loader.arguments_blob),
    ):
        if blob and not snapshot_index.has_blob(blob):
            raise InvalidArgumentError(
                f"the coordinator does not have the {what} (blob {blob}): start the job again (gRPC clients: send "
                "the data by PutBlob first)"
            )
    if request.num_workers_per_box > BOX_SLOTS_MAX:
        raise InvalidArgumentError(
            f"num_workers_per_box must be at most {BOX_SLOTS_MAX}, got {request.num_workers_per_box}: spread "
            "the workers over more boxes"
        )
    size = request.ByteSize()
    if size > OPENING_MAX:
        raise InvalidArgumentError(
            f"a request to open a run must have at most {OPENING_MAX} bytes, got {size}: give input_fn shorter "
            "arguments, or keep large data in files (gRPC clients: send them by PutBlob first)"
        )


def check_capacity(
    request: pb.OpenRunRequest, credential: str, superseded: Attempt | None, slots_held: Counter[str]
) -> None:
    """Raise OverloadedError if one more box would exceed a limit on slots of open runs. `superseded`: attempt that
    ends before; `slots_held`: digest of a token -> slots of the boxes that it opened."""
    count, held, all_held = request.num_workers_per_box, slots_held[credential], slots_held.total()
    if superseded is not None:
        all_held -= len(superseded.boxes) * superseded.num_workers
        held -= superseded.credentials[credential] * superseded.num_workers
    for what, open_slots, limit in (
        ("with this token", held, SLOTS_MAX),
        ("of the whole cluster", all_held, SLOTS_OPEN_MAX),
    ):
        if open_slots + count > limit:
            raise OverloadedError(
                f"the open runs {what} must have at most {limit} workers in all, got {open_slots} and {count} more: "
                "end other jobs, or lower num_workers_per_box"
            )


def decide(
    run: Run | None, request: pb.OpenRunRequest, client: str, now: float
) -> RepeatedOpening | JoinAttempt | OpenAttempt:
    """Decide what the request opens. Raises BoxTakenError, SupersededError, TopologyError, StateMismatchError,
    InvalidArgumentError."""
    if run is None:
        return OpenAttempt()
    for past in run.past.values():
        if past.clients.get(request.box) == client:
            raise attempt_over(past)  # a delayed duplicate of an old request
    current = run.current
    if current is None:
        return _next(run, request)
    held = current.boxes.get(request.box)
    if held is not None and held.client == client:
        if held.presence is BoxPresence.CLOSED:
            raise SupersededError(
                f"box {held.number} of run {run.name} was closed by this process: open it with a new Appliance"
            )
        return RepeatedOpening(held)

    live = held is not None and held.presence is BoxPresence.LIVE
    key = request.attempt_key
    if key and key != current.key:
        earlier = [past for past in run.past.values() if past.key == key and past.state is AttemptState.SUPERSEDED]
        if earlier and current.any_live():
            raise SupersededError(
                f"{earlier[-1].why}; the attempt key {key!r} (attempt= or PENSTOCK_ATTEMPT) belongs to the superseded "
                "launch: give each launch a new key"
            )
        return _next(run, request)
    if key:
        if held is not None and live:
            raise _taken(
                current,
                held,
                now,
                ": give each process of a launch its own box number, or a new launch a new "
                "attempt key (attempt= or PENSTOCK_ATTEMPT)",
            )
        return _join(current, request) if held is None else _next(run, request)
    if request.num_boxes == 1:
        return _next(run, request)
    if held is not None and live:
        remedy = (
            ": to replace that launch, give all boxes of the new one the same attempt key (attempt= or "
            f"PENSTOCK_ATTEMPT). If the process that holds the box is dead, retry in {held.lease_until - now:.0f} s"
        )
        raise _taken(current, held, now, remedy)
    if held is not None or not current.all_live():
        return _next(run, request)
    return _join(current, request)


def _taken(attempt: Attempt, held: Box, now: float, remedy: str) -> BoxTakenError:
    return BoxTakenError(
        f"box {held.number} of run {attempt.run} (attempt {attempt.number}) is held by {held.who()}, which reported "
        f"{max(0.0, now - held.reported_at):.1f} s ago{remedy}"
    )


def _join(attempt: Attempt, request: pb.OpenRunRequest) -> JoinAttempt:
    """Join, if the box agrees with the others. Raises TopologyError, InvalidArgumentError, StateMismatchError."""
    where = f"box {request.box} of run {attempt.run} (attempt {attempt.number})"
    asked = topology(request.num_boxes, request.num_workers_per_box)
    if asked != attempt.topology:
        raise TopologyError(
            f"{where} asks for {asked}, the other boxes have {attempt.topology}: give all boxes of a launch the same "
            "num_boxes and num_workers_per_box"
        )
    if request.has_seed and request.seed != attempt.seed:
        raise InvalidArgumentError(
            f"{where} has seed {request.seed}, the other boxes have {attempt.seed}: give all boxes the same seed"
        )
    for other in list(attempt.boxes.values())[:1]:  # it has the same loaders as all others
        running, asked_for = other.opening.loader.input_fn, request.loader.input_fn
        if running != asked_for:
            raise TopologyError(
                f"{where} has input_fn {asked_for}, box {other.number} has {running}: make the same loaders in the "
                "same order on all boxes"
            )
        if resumes(other.opening) != resumes(request):
            says = ["starts anew", "resumes from a state"]
            raise StateMismatchError(
                f"{where} {says[resumes(request)]}, box {other.number} {says[resumes(other.opening)]}: load the same "
                "state on all boxes"
            )
    return JoinAttempt(attempt)


def _next(run: Run, request: pb.OpenRunRequest) -> OpenAttempt:
    """Decide to open the next attempt. Raises TopologyError if the run would start anew on another topology and so
    lose its position, if it has delivered something."""
    before, asked = topology(run.num_boxes, run.num_workers), topology(request.num_boxes, request.num_workers_per_box)
    if before != asked and not resumes(request) and not run.unused:
        raise TopologyError(
            f"run {run.name} had {before} before, and is now opened with {asked} and without a state: load a state to "
            "continue on another topology, or choose another job name to start anew"
        )
    return OpenAttempt()


def seed_of(run: Run | None, request: pb.OpenRunRequest, fresh: Callable[[], int]) -> int:
    """Return the requested seed, else the run's, else one from `fresh`. Raises InvalidArgumentError if a known run
    would start anew with another seed."""
    if request.has_seed:
        if run is not None and request.seed != run.seed and not resumes(request):
            raise InvalidArgumentError(
                f"seed of run {run.name} must be {run.seed}, as in its last launch, got {request.seed}: leave the seed "
                "out, load a state, or choose another job name"
            )
        return request.seed
    return run.seed if run is not None else fresh()
