"""Decision about an OpenRun request: it repeats an earlier one, a box joins the open attempt, or the next one begins.

Does the sender belong to the launch that holds the run? Another attempt key says no. The same key, or none, does not
say yes: launchers restart all ranks with the variables that they had, and count restarts on each machine apart. But
they end all processes of a launch before they start the next one's. So a box is of the sender's launch if it has
reported since the sender's process was started (`process_age_s`); if its connection or its lease ended before, its
launch is over. As long as neither is known, the request is refused and comes again. A request for a box of a live
client is an error, because it may be a mistake; but in a run with one box it opens the next attempt, so that a job that
is started again need not wait for the dead launch's lease. Pure: the cluster state is read, not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

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
from penstock.proto.state.loader_names import name_of
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.units import topology

RUNS_MAX = 100_000
"""Most runs in the journal, open or not. Each is kept for its seed and takes about 1 KB."""
SLOTS_MAX = 16_384
"""Most slots of a run, and of all open runs of one credential token: makes a mistyped number an error, and bounds the
end of an attempt, in which heartbeats wait: 0.04 s with 64 boxes, 0.35 s with 16,384."""
SLOTS_OPEN_MAX = 65_536
"""Most slots of all open runs; each takes some 5 KB."""
BOX_SLOTS_MAX = 256
"""Most slots of a box: opening it or sending its view takes 20 us per slot, in which heartbeats wait."""
OPENING_MAX = 256 << 10
"""Largest request in bytes, kept in memory and the journal. Larger arguments become a blob (`Limits.budget`)."""


def run_name(request: pb.OpenRunRequest) -> str:
    return f"{request.job}/{request.ordinal}"


def validate(request: pb.OpenRunRequest) -> Position:
    """Check the request by itself and return the box's start. Raises InvalidArgumentError, BoxOutOfRangeError."""
    if not request.job or not request.loader.input_fn:
        raise InvalidArgumentError(
            f"job and input_fn must not be empty, got job={request.job!r}, input_fn={request.loader.input_fn!r}"
        )
    if request.num_boxes < 1 or request.num_workers_per_box < 1:
        raise InvalidArgumentError(
            f"num_boxes and num_workers_per_box must be >= 1, got {request.num_boxes} and {request.num_workers_per_box}"
        )
    if request.num_boxes * request.num_workers_per_box > SLOTS_MAX:
        asked = topology(request.num_boxes, request.num_workers_per_box)
        raise InvalidArgumentError(f"a run must have at most {SLOTS_MAX} workers in all, got {asked}")
    if request.box >= request.num_boxes:
        raise BoxOutOfRangeError(
            f"box of run {run_name(request)} must be below num_boxes={request.num_boxes}, got {request.box}"
        )
    given, live, count = len(request.start.slots), len(request.start.live), request.num_workers_per_box
    if given not in (0, count) or live > given:
        raise InvalidArgumentError(
            f"the start must have {count} workers per box, got {given}, of which {live} are live: load another state"
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
        raise InvalidArgumentError("client_id must not be empty: set it to a random string")
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
        raise OverloadedError(f"a coordinator keeps at most {RUNS_MAX} runs: start one with another --state-dir")
    for blob in (request.resume.blob, request.loader.arguments_blob):
        if blob and not snapshot_index.has_blob(blob):
            raise InvalidArgumentError(f"the coordinator does not have the value {blob}: start the job again")
    if request.num_workers_per_box > BOX_SLOTS_MAX:
        raise InvalidArgumentError(
            f"num_workers_per_box must be at most {BOX_SLOTS_MAX}, got {request.num_workers_per_box}"
        )
    if (size := request.ByteSize()) > OPENING_MAX:
        raise InvalidArgumentError(
            f"a request to open a run must have at most {OPENING_MAX} bytes, got {size}: shorten input_fn's arguments"
        )


def check_capacity(
    request: pb.OpenRunRequest, credential: str, superseded: Attempt | None, slots_held: Counter[str]
) -> None:
    """Raise OverloadedError if one more box would exceed a limit on slots of open runs. `superseded`: attempt that
    ends before; `slots_held`: name or digest of a token -> slots of the boxes that it opened."""
    count, held, all_held = request.num_workers_per_box, slots_held[credential], slots_held.total()
    if superseded is not None:
        all_held -= len(superseded.boxes) * superseded.num_workers
        ours = sum(box.credential == credential for box in superseded.boxes.values())
        held -= ours * superseded.num_workers
    whole = ("of the whole cluster", all_held, SLOTS_OPEN_MAX)
    for what, open_slots, limit in (("with this token", held, SLOTS_MAX), whole):
        if open_slots + count > limit:
            raise OverloadedError(
                f"the open runs {what} must have at most {limit} workers in all, got {open_slots} and {count} more: "
                "end other jobs"
            )


def decide(run: Run | None, request: pb.OpenRunRequest, client: str, now: float) -> Box | Attempt | None:
    """Return what the request opens: the box if it repeats an earlier request, whose reply did not reach the client;
    the attempt that it joins; None for the next attempt, which supersedes an open one. Raises BoxTakenError,
    SupersededError, TopologyError, StateMismatchError, InvalidArgumentError."""
    if run is None:
        return None
    for past in run.past.values():
        if past.clients.get(request.box) == client:
            raise attempt_over(past)  # a delayed duplicate of an old request
    current = run.current
    if current is None:
        _check_topology(run, request)
        return None
    held = current.boxes.get(request.box)
    if held is not None and held.client == client:
        if held.presence is BoxPresence.CLOSED:
            raise SupersededError(
                f"box {held.number} of run {run.name} was closed by this process: open it with a new Appliance"
            )
        return held

    key = request.attempt_key
    if key and key != current.key:
        earlier = [past for past in run.past.values() if past.key == key and past.state is AttemptState.SUPERSEDED]
        since = now - request.process_age_s if request.process_age_s else 0.0
        if current.live and any(past.reported_at >= since for past in earlier):
            raise SupersededError(f"{earlier[-1].why}: give each launch a new attempt key, got {key!r} again")
        joins = False
    elif held is not None:
        _check_free(run, held, request, now)
        joins = False
    else:
        joins = (bool(key) or request.num_boxes > 1) and _is_same_launch(current, request, now)
    if joins:
        return _join(current, request)
    _check_topology(run, request)
    return None


def _overlaps(box: Box, request: pb.OpenRunRequest, now: float) -> bool | None:
    """Return whether the box's client and the sender's process have lived at the same time; None: not known yet."""
    live = box.presence is BoxPresence.LIVE
    if not request.process_age_s:
        return live
    if box.reported and box.reported_at >= now - request.process_age_s:
        return True
    return None if live and not box.hung_up else False


def _check_free(run: Run, held: Box, request: pb.OpenRunRequest, now: float) -> None:
    """Raise BoxTakenError if the box's client may be alive, and the sender is no later launch."""
    live = held.presence is BoxPresence.LIVE
    overlaps = _overlaps(held, request, now)
    alone = request.num_boxes == 1 and (not request.attempt_key or overlaps is None)
    if live and overlaps is not False and not alone:
        raise BoxTakenError(
            f"box {held.number} of run {run.name} (attempt {run.attempt}) is held by {held.who()}, which reported "
            f"{max(0.0, now - held.reported_at):.1f} s ago: give each process its own box. For a new launch, give all "
            f"its boxes a new attempt key (PENSTOCK_ATTEMPT), or retry in {held.lease_until - now:.0f} s"
        )


def _is_same_launch(attempt: Attempt, request: pb.OpenRunRequest, now: float) -> bool:
    """Return whether all boxes of the attempt are of the sender's launch. Raises BoxTakenError if that is not known."""
    if not request.process_age_s:
        return bool(attempt.live) if request.attempt_key else len(attempt.live) == len(attempt.boxes)
    overlaps = {number: _overlaps(box, request, now) for number, box in attempt.boxes.items()}
    if False in overlaps.values():
        return False  # of an earlier launch, and so are all that it shares the attempt with
    for number, known in overlaps.items():
        if known is None:
            box = attempt.boxes[number]
            raise BoxTakenError(
                f"run {attempt.run} (attempt {attempt.number}) may be of an earlier launch: box {number}, of "
                f"{box.who()}, has not reported for {now - box.reported_at:.1f} s. Retry in "
                f"{box.lease_until - now:.0f} s"
            )
    return True


def _join(attempt: Attempt, request: pb.OpenRunRequest) -> Attempt:
    """Join, if the box agrees with the others. Raises TopologyError, InvalidArgumentError, StateMismatchError."""
    where = f"box {request.box} of run {attempt.run} (attempt {attempt.number})"
    asked = topology(request.num_boxes, request.num_workers_per_box)
    if asked != attempt.topology:
        raise TopologyError(f"{where} asks for {asked}, the other boxes have {attempt.topology}: give all the same")
    if request.has_seed and request.seed != attempt.seed:
        raise InvalidArgumentError(f"{where} has seed {request.seed}, the other boxes have {attempt.seed}")
    for other in list(attempt.boxes.values())[:1]:  # it has the same loaders as all others
        if other.opening.loader.input_fn != request.loader.input_fn:
            raise TopologyError(
                f"{where} has the loader {name_of(request.loader)}, box {other.number} has "
                f"{name_of(other.opening.loader)}: make the same loaders in order"
            )
        if resumes(other.opening) != resumes(request):
            says = ["starts anew", "resumes from a state"]
            raise StateMismatchError(
                f"{where} {says[resumes(request)]}, box {other.number} {says[resumes(other.opening)]}: load one state"
            )
    return attempt


def _check_topology(run: Run, request: pb.OpenRunRequest) -> None:
    """Raise TopologyError if the run would start anew on another topology and so lose its position, if it has
    delivered something."""
    before, asked = topology(run.num_boxes, run.num_workers), topology(request.num_boxes, request.num_workers_per_box)
    if before != asked and not resumes(request) and not run.unused:
        raise TopologyError(
            f"run {run.name} had {before} and is opened with {asked}: load a state, or choose another job name"
        )


def seed_of(run: Run | None, request: pb.OpenRunRequest, fresh: Callable[[], int]) -> int:
    """Return the requested seed, else the run's, else one from `fresh`. Raises InvalidArgumentError if a known run
    would start anew with another seed."""
    if request.has_seed:
        if run is not None and request.seed != run.seed and not resumes(request):
            raise InvalidArgumentError(
                f"seed of run {run.name} must be {run.seed}, as in its last launch, got {request.seed}: leave it out"
            )
        return request.seed
    return run.seed if run is not None else fresh()
