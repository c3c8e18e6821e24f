"""View of a cluster: the coordinator's status as plain values, and as text for people.

All displays use it: `penstock status`, `penstock doctor cluster`, the dashboard, Prometheus. It decides remarks, losses
and formats; they only the layout. All functions are pure. Scripts rely on the fields of these classes in --json and
/api/status.json (docs/cli.md). Protobuf's own JSON would write every 64-bit number as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from penstock.proto.errors import UnknownRunError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.units import INPUT_BOUND, percent, rate, seconds

LATELY_S = 600.0
"""Seconds for which a fault is counted, and a failed run shown, after it has happened."""
PHASES = ("waiting", "starting", "ready", "failed")

Alarm = Literal["", "info", "warn", "bad"]
"""Urgency of a row in a display, from "" (none) to "bad". "info" is for a condition that ends by itself."""
_View = TypeVar("_View")


# Digits to which a figure is rounded: further digits are noise, and make JSON longer.
PerSecond = Annotated[float, 3]
Seconds = Annotated[float, 3]
Share = Annotated[float, 4]


# ------------------------------------------------------------------------------------------------------------ the views


@dataclass(frozen=True, slots=True)
class SlotView:
    run: str
    box: int
    slot: int
    worker: str | None
    target_worker: str | None
    generation: int
    phase: str
    queued: int
    batches_per_s: PerSecond
    batch_s: Annotated[float, 6] | None
    wait_share: Share
    snapshot_age_s: Seconds | None
    restarts: int
    note: str | None
    doing: str | None
    skipped: int
    error: Mapping[str, str] | None

    @property
    def state(self) -> str:
        return self.phase.lower()

    @property
    def remark(self) -> str:
        """Remark about the slot: its error; else what its runner is doing for long; else why it moved or could not."""
        said = f"{self.error['name']}: {self.error['message']}" if self.error else self.doing or self.note or ""
        return " ".join(said.split())

    @property
    def saved(self) -> str:
        return "" if self.snapshot_age_s is None else f"{seconds(self.snapshot_age_s)} ago"

    @property
    def alarm(self) -> Alarm:
        if self.error or self.phase == "FAILED":
            return "bad"
        return "warn" if self.wait_share > INPUT_BOUND or self.phase != "READY" else ""

    @property
    def urgency(self) -> tuple[int, float]:
        return {"READY": 0, "FAILED": 2}.get(self.phase, 1), self.wait_share


@dataclass(frozen=True, slots=True)
class BoxView:
    run: str
    box: int
    live: bool
    closed: bool
    step: int
    epoch: int
    epoch_ended: bool
    steps_per_s: PerSecond
    waited_s: Seconds
    waited_share: Share
    wait_share: Share
    waiting_for: str | None
    slots: tuple[SlotView, ...]

    @property
    def going(self) -> bool:
        return self.live and not self.epoch_ended

    @property
    def state(self) -> str:
        if self.closed:
            return "closed"
        return "lost" if not self.live else "epoch ended" if self.epoch_ended else "live"

    @property
    def alarm(self) -> Alarm:
        if self.closed:
            return ""
        return "bad" if not self.live else "warn" if self.wait_share > INPUT_BOUND else ""


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    input_bound: bool
    text: str
    wait_share: Share
    box: int | None
    slot: int | None
    worker: str | None
    blame: Share

    @property
    def title(self) -> str:
        return _KINDS.get(self.kind, self.kind)

    @property
    def alarm(self) -> Alarm:
        if self.kind == "failed":
            return "bad"
        return "warn" if self.input_bound else "info" if self.kind in ("starting", "epoch ended", "") else ""


@dataclass(frozen=True, slots=True)
class EndView:
    """How an attempt of a run has ended. The coordinator's `--on-end` command gets all but `age_s`."""

    run: str
    attempt: int
    reason: str
    fault: bool
    text: str
    error: str | None
    box: int | None
    step: int
    at: float
    age_s: Seconds

    @property
    def when(self) -> str:
        return f"{seconds(self.age_s)} ago"

    @property
    def said(self) -> str:
        return f"{self.error}: {self.text}" if self.error else self.text


_KINDS = {
    "failed": "Failed",
    "stalled": "Stalled",
    "loop": "Loop-bound",
    "starting": "Starting",
    "straggler": "Straggler",
    "workers": "Too few workers",
    "network": "Batches arrive late",
    "unplaced": "Slots without a worker",
    "recovering": "Recovering",
    "epoch ended": "Epoch ended",
    "": "No box is live",
}
_NOBODY = (0.0, None, None, None, 0.0)
_BETWEEN_EPOCHS = Finding("epoch ended", False, "No live box has begun another epoch.", *_NOBODY)
_NO_BOX = Finding("", False, "Its training job has ended, or has not reported.", *_NOBODY)


@dataclass(frozen=True, slots=True)
class StateView:
    """Request for a run's state, or several for the same step: a checkpoint of the job, or an operator's request."""

    step: int
    asker: str
    askers: int
    at: float
    seconds: Annotated[float, 4]
    bytes: int
    error: str | None


@dataclass(frozen=True, slots=True)
class RunView:
    """Run of a job. Its rates are those of its live boxes whose epoch has not ended."""

    run: str
    attempt: int
    open: bool
    input_fn: str | None
    num_boxes: int
    num_workers_per_box: int
    recommended_workers_per_box: int | None
    recoveries: int
    steps_per_s: PerSecond
    batches_per_s: PerSecond
    wait_share: Share
    bottleneck: Finding | None
    boxes: tuple[BoxView, ...]
    states: tuple[StateView, ...]
    end: EndView | None
    """Of the newest attempt that has ended, or of which a box has failed."""

    @property
    def state(self) -> str:
        ended = self.end is not None and self.end.attempt == self.attempt
        if self.open:
            return "failed" if ended else "open"
        return self.end.reason if self.end is not None and ended else "closed"

    @property
    def finding(self) -> Finding:
        if self.end is not None and self.state == "failed":
            return Finding("failed", False, f"Box {self.end.box} has closed: {self.end.said}", *_NOBODY)
        return self.bottleneck or (_BETWEEN_EPOCHS if any(box.live for box in self.boxes) else _NO_BOX)

    @property
    def slots(self) -> list[SlotView]:
        return [slot for box in self.boxes for slot in box.slots]

    @property
    def figures(self) -> list[str]:
        step, slots = min((box.step for box in self.boxes), default=0), self.slots
        queued = sum(slot.queued for slot in slots) / max(1, len(slots))
        return [
            f"step {step}",
            f"{rate(self.steps_per_s)} steps/s",
            f"waits {percent(self.wait_share)}",
            f"makes {rate(self.batches_per_s)} batches/s",
            f"queued {rate(queued)}",
            f"recoveries {self.recoveries}",
        ]


@dataclass(frozen=True, slots=True)
class WorkerView:
    worker: str
    live: bool
    draining: bool
    slots: int
    slots_used: int
    seen_s_ago: Seconds
    batches_per_s: PerSecond
    wait_share: Share
    host_id: str
    tcp_address: str | None
    version: str | None
    allow: tuple[str, ...]

    @property
    def state(self) -> str:
        return "lost" if not self.live else "draining" if self.draining else "live"

    @property
    def heard_of(self) -> str:
        return f"{seconds(self.seen_s_ago)} ago"

    @property
    def alarm(self) -> Alarm:
        return "" if self.state == "live" else "warn"


@dataclass(frozen=True, slots=True)
class EventView:
    kind: str
    fault: bool
    at: float
    age_s: Seconds
    text: str
    run: str | None
    worker: str | None
    count: int

    @property
    def when(self) -> str:
        return f"{seconds(self.age_s)} ago"

    @property
    def title(self) -> str:
        return f"{self.kind} x{self.count}" if self.count > 1 else self.kind

    @property
    def what(self) -> str:
        return f"{self.run}: {self.text}" if self.run else self.text

    @property
    def alarm(self) -> Alarm:
        return "bad" if self.fault else ""


@dataclass(frozen=True, slots=True)
class CoordinatorView:
    address: str
    version: str
    uptime_s: Seconds
    dashboard: str | None

    @property
    def about(self) -> str:
        return f"{self.address} (Penstock {self.version}, up {seconds(self.uptime_s)})"


@dataclass(frozen=True, slots=True)
class ClusterView:
    coordinator: CoordinatorView
    recommended_workers: int
    runs: tuple[RunView, ...]
    """Those with a live training job, then other open runs, then ended runs."""
    workers: tuple[WorkerView, ...]
    events: tuple[EventView, ...]
    """Latest events, oldest first."""

    def only(self, name: str) -> ClusterView:
        """Return what concerns one run, "JOB/ORDINAL", or all runs of a "JOB". Raises UnknownRunError."""
        runs = tuple(run for run in self.runs if name in (run.run, run.run.rpartition("/")[0]))
        if not runs:
            raise UnknownRunError(f"the coordinator has no run {name!r}: see `penstock status --all`")
        names = {run.run for run in runs}
        used = {worker for run in runs for slot in run.slots for worker in (slot.worker, slot.target_worker) if worker}
        return replace(
            self,
            runs=runs,
            # all of them, if the run has none: one may have room for it
            workers=tuple(worker for worker in self.workers if worker.worker in used or not used),
            events=tuple(event for event in self.events if event.run in names or event.worker in used),
        )

    @property
    def open_runs(self) -> list[RunView]:
        return [run for run in self.runs if run.open]

    @property
    def ends(self) -> list[EndView]:
        """Ends of runs, the newest first."""
        return sorted((run.end for run in self.runs if run.end), key=lambda end: end.age_s)

    @property
    def ended(self) -> str:
        count = len(self.runs) - len(self.open_runs)
        return f"{count} {'run has' if count == 1 else 'runs have'} ended" if count else ""

    @property
    def workers_by_state(self) -> Counter[str]:
        return Counter(worker.state for worker in self.workers)

    @property
    def totals(self) -> list[tuple[str, str, str, Alarm]]:
        """Rows of all open runs: (name, count, text after the count, alarm): ("Boxes live", "3", "of 4", "")."""
        boxes = [box for run in self.open_runs for box in run.boxes]
        slots = Counter(slot.state for box in boxes for slot in box.slots)
        live = [box for box in boxes if box.live]
        faults = sum(event.count for event in self.events if event.fault and event.age_s < LATELY_S)
        return [
            ("Open runs", str(len(self.open_runs)), "", ""),
            ("Boxes live", str(len(live)), f"of {len(boxes)}", ""),
            ("Slots ready", str(slots["ready"]), f"of {slots.total()}", ""),
            ("Workers", str(sum(worker.live for worker in self.workers)), "", ""),
            ("Batches/s delivered", rate(sum(box.steps_per_s for box in live)), "", ""),
            (f"Faults, {seconds(LATELY_S)}", str(faults), "", "bad" if faults else ""),
        ]


# ----------------------------------------------------------------------------------------------------- from the message


def view(reply: pb.StatusReply, address: str = "") -> ClusterView:
    return ClusterView(
        coordinator=_read(CoordinatorView, reply, address=address),
        recommended_workers=reply.recommended_workers,
        runs=tuple(sorted((_run(run, reply.wall_s) for run in reply.runs), key=_rank)),
        workers=tuple(worker_view(worker) for worker in reply.workers),
        events=tuple(_read(EventView, event, at=round(event.wall_s, 3)) for event in reply.events),
    )


def _rank(run: RunView) -> int:
    return 2 if not run.open else 0 if any(box.live for box in run.boxes) else 1


def worker_view(worker: pb.WorkerStatus) -> WorkerView:
    return _read(WorkerView, worker, allow=tuple(worker.allow))


def _run(run: pb.RunStatus, now_s: float) -> RunView:
    return _read(
        RunView,
        run,
        bottleneck=_read(Finding, run.bottleneck) if run.HasField("bottleneck") else None,
        boxes=tuple(
            _read(BoxView, box, run=run.run, slots=tuple(_slot(run.run, box.box, slot) for slot in box.slots))
            for box in run.boxes
        ),
        states=tuple(_read(StateView, state, at=round(state.wall_s, 3)) for state in run.states),
        end=_end(run.run, run.end, now_s) if run.HasField("end") else None,
    )


def _end(run: str, end: pb.RunEnd, now_s: float) -> EndView:
    return _read(EndView, end, run=run, at=round(end.wall_s, 3), age_s=round(max(0.0, now_s - end.wall_s), 3))


def end_record(run: str, end: pb.RunEnd) -> dict[str, Any]:
    """Return the end of a run that has just ended, as plain values."""
    record = as_dict(_end(run, end, end.wall_s))
    del record["age_s"]
    return record


_PHASES = {number: name for name, number in pb.SlotPhase.items()}


def _slot(run: str, box: int, slot: pb.SlotView) -> SlotView:
    doing = slot.doing or None
    if not doing and slot.start_queue_position:
        doing = f"number {slot.start_queue_position} of {slot.start_queue_length} that wait to be started there"
    error = {"name": slot.error.name, "message": slot.error.message} if slot.error.name else None
    return _read(SlotView, slot, run=run, box=box, phase=_PHASES[slot.phase], doing=doing, error=error)


def _read(cls: type[_View], message: Any, **own: Any) -> _View:
    """Make a view of the message's fields of the same names, and `own`. An empty field is None where allowed."""
    kind: Any = cls
    for name, digits, optional, presence in _plan(kind, message.DESCRIPTOR):
        if name in own:
            continue
        value = getattr(message, name)
        if digits is not None:
            value = round(value, digits)
        if optional and not (message.HasField(name) if presence else value):
            value = None
        own[name] = value
    return cls(**own)


@cache
def _plan(kind: Any, descriptor: Any) -> Sequence[tuple[str, int | None, bool, bool]]:
    """(name, digits to round to, whether None is allowed, whether presence is recorded) of each shared field."""
    there, plan = descriptor.fields_by_name, []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name in there:
            facts = [fact for part in (hint, *get_args(hint)) for fact in getattr(part, "__metadata__", ())]
            digits = next((fact for fact in facts if isinstance(fact, int)), None)
            plan.append((name, digits, type(None) in get_args(hint), there[name].has_presence))
    return plan


def as_dict(shown: Any) -> dict[str, Any]:
    """Return a view as a dict, for `--json`: json.dumps(..., default=as_dict) applies it to the views inside too."""
    return {name: getattr(shown, name) for name in shown.__slots__}
