"""Orders to change the weights of a run's mixture from a step on (`penstock mix`). An order has three stages:

    tried      a worker makes the loader with the change, and returns the change's place in the order of samples and
               the weights of all sources (state_query.py)
    fenced     the boxes wait before the step (a fence); each answers which step it has taken last
    made       no box has taken the step: the change is in the journal; each slot gets a new generation whose runner is
               recovered as after a loss

One reply tells a box that the fence is gone and which generations its slots have. So every batch from the step on comes
from a runner that knows the change; batches made ahead are made again. The fence is not in the journal: if the order is
refused or the coordinator ends, the boxes continue. So a change is made on all boxes, or on none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Attempt, Box, Run
from penstock.appliance.core.placement import Placement
from penstock.appliance.core.request_checks import check_counts, check_measures, check_name
from penstock.appliance.core.state_queries import StateQueries
from penstock.appliance.core.state_query import MixtureTrial
from penstock.proto.errors import (
    InvalidArgumentError,
    OverloadedError,
    StateUnavailableError,
    SupersededError,
    UnknownRunError,
)
from penstock.proto.state.position import Position, advance
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

TEXTS_MAX = 256
"""Most texts in one order: names of sources, functions and weights together."""
TEXT_MAX = 200
FENCE_S = 20.0
"""Longest time in seconds for which the boxes may wait before the step."""
CHANGES_SIZE = 64 << 10
"""Largest number of bytes of a run's changes, which each assignment of a slot contains."""


AGAIN = "Run `penstock mix` again"


@dataclass
class Proposal:
    """Order whose trials have succeeded; carried out unless something has changed meanwhile."""

    run: Run
    attempt: Attempt
    change: records_pb2.MixtureChange
    epoch: int
    """Epoch that contains the step, the same on all boxes."""
    fence: str
    """Key of the fence, unique to this order."""
    shares: list[pb.MixtureShare] = field(default_factory=list)
    slots: int = 0
    batches: int = 0


class MixtureOrders:
    """Orders for all runs. Each method handles one stage; `MixtureCalls` waits between them."""

    def __init__(self, cluster: ClusterState, placement: Placement, state_queries: StateQueries) -> None:
        self._cluster, self._placement, self._state_queries = cluster, placement, state_queries

    def repeated(self, request: pb.ChangeMixtureRequest) -> pb.ChangeMixtureReply | None:
        """Return the reply to an order that was carried out before, if the request repeats it; else None. Raises
        UnknownRunError, InvalidArgumentError."""
        _check(request)
        run = self._run(request.run)
        made = next((change for change in run.mixture_changes if change.key == request.key), None)
        return None if made is None else pb.ChangeMixtureReply(run=run.name, change=made)

    def trials(self, request: pb.ChangeMixtureRequest) -> list[MixtureTrial]:
        """Return one query for a trial, or one per worker if sources are added. Raises for an impossible change."""
        run = self._run(request.run)
        attempt = self._attempt(run)
        self._check_step(attempt, request.from_step)
        box = _furthest(attempt)
        at, epochs = _position(box), _position(box).epoch - box.start.epoch
        began = at.step - sum(at.delivered) if epochs else box.start.step
        trial = pb.MixtureTrial(weights=request.weights, added=request.added, retired=request.retired)
        trial.steps, trial.epochs = request.from_step - 1 - began, epochs
        where = _slot_of_each_worker(attempt) if request.added else [(box.number, None)]
        return [
            MixtureTrial(
                run.name,
                attempt.number,
                0,
                self._cluster.next_version(),
                box=number,
                blob=f"{request.key} {index}",
                trial=trial,
                slot=slot,
                epoch=at.epoch,
                changes=len(run.mixture_changes),
            )
            for index, (number, slot) in enumerate(where)
        ]

    def proposed(
        self, request: pb.ChangeMixtureRequest, trials: Sequence[MixtureTrial], plans: Sequence[pb.MixturePlan]
    ) -> Proposal:
        """Return the order with its trials' results. Raises if it is no longer possible, or the trials differ."""
        trial, plan = trials[0], plans[0]
        for other, found in zip(trials, plans, strict=True):
            if found != plan:
                raise InvalidArgumentError(
                    "all workers must have the same code and data of the added sources, which differ between those of "
                    f"box {trial.box} slot {trial.slot} and box {other.box} slot {other.slot}"
                )
        run = self._run(request.run)
        attempt = self._attempt(run)
        if attempt.number != trial.attempt:
            raise SupersededError(f"attempt {trial.attempt} of run {run.name} ended meanwhile. {AGAIN}")
        self._check_step(attempt, request.from_step)
        if len(run.mixture_changes) != trial.changes:
            raise OverloadedError(f"another change of run {run.name} was made meanwhile. {AGAIN}")
        if _position(_furthest(attempt)).epoch != trial.epoch:
            raise StateUnavailableError(f"an epoch of run {run.name} ended meanwhile. {AGAIN}")
        change = records_pb2.MixtureChange()
        change.CopyFrom(plan.change)
        change.key, change.step, change.attempt = request.key, request.from_step, attempt.number
        size = sum(one.ByteSize() for one in (*run.mixture_changes, change))
        if size > CHANGES_SIZE:
            raise InvalidArgumentError(
                f"all changes of a run must have at most {CHANGES_SIZE} bytes, got {size}: write a Schedule instead"
            )
        slots = [slot for box in attempt.boxes.values() for slot in box.slots]
        queued = sum(slot.gauge.queued for slot in slots)
        fence = str(self._cluster.next_version())
        return Proposal(run, attempt, change, trial.epoch, fence, list(plan.shares), len(slots), queued)

    @staticmethod
    def patience(proposal: Proposal) -> float:
        """Return the longest wait in s: FENCE_S, or half of the shortest `timeout_s`, after which a loop fails."""
        deadlines = [box.opening.loader.options.timeout_s for box in proposal.attempt.boxes.values()]
        return min([FENCE_S, *(deadline / 2 for deadline in deadlines if deadline > 0)])

    def fence(self, proposal: Proposal) -> None:
        attempt, change = proposal.attempt, proposal.change
        attempt.fence = pb.MixtureFence(key=proposal.fence, step=change.step)
        for box in attempt.boxes.values():
            self._cluster.bump_box(attempt, box)

    def undecided(self, proposal: Proposal) -> str:
        """Return what the order waits for, as text; "" if it can be made now. Raises if it no longer can."""
        attempt, change = proposal.attempt, proposal.change
        if proposal.run.current is not attempt:
            raise SupersededError(f"attempt {attempt.number} ended meanwhile: {attempt.why}. {AGAIN}")
        self._attempt(proposal.run, own=True)
        boxes = [box for _, box in sorted(attempt.boxes.items())]
        heard = [box for box in boxes if box.fence[0] == proposal.fence]
        taken = max([box.fence[1] for box in heard] + [box.step for box in boxes])
        if taken >= change.step:
            raise _too_early(attempt, change.step, taken + 1)
        if any(_position(box).epoch != proposal.epoch for box in boxes):
            raise StateUnavailableError(f"an epoch of run {attempt.run} ended meanwhile. {AGAIN}")
        missing = [str(box.number) for box in boxes if box.fence[0] != proposal.fence]
        if missing:
            return f"the answer of box {', '.join(missing[:8])}"
        return "a state of the run that is being saved" if self._state_queries.are_open(attempt.run) else ""

    def make(self, proposal: Proposal) -> None:
        """Put the change into the journal, and give all slots new runners."""
        cluster, run, attempt, change = self._cluster, proposal.run, proposal.attempt, proposal.change
        row = {"run": run.name, "number": len(run.mixture_changes), "change": change.SerializeToString()}
        run.mixture_changes.append(change)
        cluster.journal.put("mixture_changes", row)
        attempt.fence = None
        weights = ", ".join(f"{share.source} {share.now:.4g}" for share in proposal.shares)
        note = f"the mixture changes from step {change.step} on: {weights}"
        cluster.events.add("mixture changed", note, run=run.name, attempt=attempt.number)
        for box in attempt.boxes.values():
            last = advance(_position(box), change.step - 1, box.ends, box.abandoned)
            for slot in box.slots:
                total = last.total[slot.key.slot]
                cluster.snapshot_index.drop_beyond(slot.key, total)
                self._placement.cancel_migration(slot)
                self._placement.move(slot, note, None)
                slot.remade.append((slot.generation, total))
                slot.firsts.clear()  # made before the change
                slot.migrated = True  # a planned move, of which the training job need not be warned
            cluster.bump_box(attempt, box)

    def withdraw(self, proposal: Proposal) -> None:
        attempt = proposal.attempt
        if attempt.fence is None or attempt.fence.key != proposal.fence:
            return
        attempt.fence = None
        if proposal.run.current is attempt:
            for box in attempt.boxes.values():
                self._cluster.bump_box(attempt, box)

    # ---- checks

    def _run(self, name: str) -> Run:
        """Return the run JOB/N, or the job's only one. Raises UnknownRunError, InvalidArgumentError for several."""
        found = self._cluster.runs_named(name)
        if len(found) > 1:
            names = ", ".join(run.name for run in found[:8])
            raise InvalidArgumentError(f"the run must be one of {names}, got the job {name!r}")
        return found[0]

    def _attempt(self, run: Run, *, own: bool = False) -> Attempt:
        """Return the open attempt. Raises unless all boxes are live, no slot has failed and no other change is being
        decided; `own`: its fence is the caller's."""
        attempt = run.current
        if attempt is None:
            raise UnknownRunError(f"run {run.name} must be open, but its training job has ended")
        missing = [number for number in range(attempt.num_boxes) if number not in attempt.live]
        if missing:
            raise StateUnavailableError(f"all boxes of run {run.name} must be live, box {missing[0]} is not. {AGAIN}")
        failed = [slot for box in attempt.boxes.values() for slot in box.slots if slot.phase == pb.FAILED]
        if failed:
            raise StateUnavailableError(
                f"all slots of run {run.name} must work, but {failed[0]} has failed: see `penstock status`"
            )
        if attempt.fence is not None and not own:
            raise OverloadedError(f"another change of run {run.name} is being decided. {AGAIN}")
        return attempt

    @staticmethod
    def _check_step(attempt: Attempt, step: int) -> None:
        reached = _furthest(attempt).step
        if step <= reached:
            raise _too_early(attempt, step, reached + 1)


def _slot_of_each_worker(attempt: Attempt) -> list[tuple[int, int]]:
    """Return for each worker the box and number of one of its slots; slots without a worker count as one worker's."""
    found: dict[str, tuple[int, int]] = {}
    for box in attempt.boxes.values():
        for slot in box.slots:
            found.setdefault(slot.worker, (box.number, slot.key.slot))
    return sorted(found.values())


def _furthest(attempt: Attempt) -> Box:
    return max(attempt.boxes.values(), key=lambda box: box.step)


def _position(box: Box) -> Position:
    return Position.from_proto(box.delivered) if box.delivered.slots else box.start


def _too_early(attempt: Attempt, step: int, lowest: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"--from-step must be at least {lowest} for run {attempt.run}, got {step}: give a step that is some way ahead"
    )


def _check(request: pb.ChangeMixtureRequest) -> None:
    check_name("run", request.run)
    check_name("change", request.key)
    check_measures(deadline_s=request.deadline_s)
    check_counts(from_step=request.from_step)
    if not request.key:
        raise InvalidArgumentError("the key of a change must be a random text, got none")
    if not (request.weights or request.retired):
        raise InvalidArgumentError("a change needs --weights or --retire, got neither")
    texts = [text for asked in request.weights for text in (asked.source, asked.weight)]
    texts += [text for added in request.added for text in (added.source, added.function)] + list(request.retired)
    if len(texts) > TEXTS_MAX or any(len(text) > TEXT_MAX for text in texts):
        raise InvalidArgumentError(
            f"a change must have at most {TEXTS_MAX} names, functions and weights, each of at most {TEXT_MAX} "
            f"characters, got {len(texts)}, the longest with {max(map(len, texts))} characters"
        )
    unprintable = next((text for text in texts if not text.isprintable()), None)
    if unprintable is not None:
        raise InvalidArgumentError(f"names, functions and weights must be printable text, got {unprintable!a}")
