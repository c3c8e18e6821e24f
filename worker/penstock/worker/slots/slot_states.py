"""Answers to requests for a slot's state at a position: from a restart point, `advance_state`, or a replay in a helper
process. Helpers also aggregate all workers' states, and try changes of the mixture."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from penstock.proto.errors import DeadlineError, NotRestartableError, PenstockError, StateUnavailableError
from penstock.proto.rpc.wire_errors import detail_of, error_of
from penstock.proto.state.envelope import with_bytes
from penstock.proto.state.loader_names import name_of
from penstock.proto.state.position import link_between
from penstock.proto.state.restartable import is_pure, is_vouched
from penstock.proto.v1 import coordinator_pb2
from penstock.worker.loader.restart_plan import replay_s
from penstock.worker.processes.control_channel import ControlMessage
from penstock.worker.processes.progress_page import ENTRIES, BatchRecord
from penstock.worker.slots.slot_record import SlotHost, SlotRecord
from penstock.worker.slots.snapshots import StoredSnapshot

POLL_S = 0.005
"""Seconds between two reads of the page in a wait for a batch."""
POLLERS = 8
"""Requests that read the page every POLL_S; more do so more rarely, because hundreds would keep the event loop busy."""
NEXT_S = 0.5
"""Longest wait for the batch after the state, if only that batch can verify a resume."""
END_S = 10.0
"""Longest wait for what follows the state at the end of some box's epoch: a runner may start first, user code be
slow."""
CHEAP_S = 5.0
"""Seconds of a runner's work up to which a replay of all batches is cheap."""
HELPER_S = 120.0
HELPER_SHARE = 0.7
"""Share of a request's time for its helper: the stack of a slow one must reach the caller before the deadline."""


_pausing = 0


async def _pause() -> None:
    global _pausing
    _pausing += 1
    try:
        await asyncio.sleep(POLL_S * max(1.0, _pausing / POLLERS))
    finally:
        _pausing -= 1


def _share(until: float) -> float:
    return min(HELPER_S, max(0.1, HELPER_SHARE * (until - time.monotonic())))


def _abandoned(request: coordinator_pb2.StateRequest) -> dict[int, int]:
    return {end.epoch: end.total for end in request.abandoned}


class SlotStates:
    """helper: `run_task` without its first two arguments."""

    def __init__(self, slot: SlotRecord, host: SlotHost, helper: Callable[..., Awaitable[ControlMessage]]) -> None:
        self._slot, self._host, self._helper = slot, host, helper

    async def answer(self, request: coordinator_pb2.StateRequest) -> tuple[coordinator_pb2.StateAnswer, bytes] | None:
        """Wait until the runner has reached the position, and return the answer and the state's bytes; if the epoch
        ended before, the answer names its last batch. None if the runner died: the slot's next worker gets the
        request."""
        answer = coordinator_pb2.StateAnswer(request=request.request, worker=self._host.name)
        data = b""
        until = time.monotonic() + request.deadline_s
        try:
            async with asyncio.timeout(request.deadline_s):
                data = await self._state(request, answer, until)
        except PenstockError as error:  # a DeadlineError of a helper process is a TimeoutError too
            if self._slot.lost or self._slot.runner_gone:
                return None
            answer.error.CopyFrom(detail_of(error))
        except TimeoutError:
            answer.error.CopyFrom(detail_of(self._late(request)))
        for epoch, total in self._slot.progress_page.ends().items():
            answer.ends.add(epoch=epoch, total=total)
        answer.digests_after = request.digests_after
        if not answer.digests:
            answer.digests.extend(self._digests(request, self._slot.progress_page.entry))
        answer.capabilities.CopyFrom(self._slot.capabilities)
        answer.state_bytes = len(data)
        return answer, data

    async def _state(
        self, request: coordinator_pb2.StateRequest, answer: coordinator_pb2.StateAnswer, until: float
    ) -> bytes:
        epoch, delivered, total = request.epoch, request.position.delivered, request.position.total
        await self._slot.ready.wait()
        if request.aggregate_blob:
            states = await self._host.coordinator.get_blob(request.aggregate_blob)
            return (await self._helper([states], "aggregate", _share(until))).payload
        if request.HasField("mixture"):
            trial = request.mixture.SerializeToString()
            return (await self._helper([trial], "mixture", _share(until))).payload
        self._require_saving()
        if not await self._produced(request, answer):
            return b""
        entry = self._slot.progress_page.entry(total)
        if entry is not None:
            answer.samples_streamed, answer.digest, answer.chain = entry.samples, entry.digest, entry.chain_in(epoch)
        # A pure loader is saved by the number of its batches, with or without a snapshot.
        if self._slot.unsaved is not None and (
            self._slot.capabilities.state_methods == 4 or not is_pure(self._slot.capabilities)
        ):
            raise error_of(self._slot.unsaved)
        await self._note_next(request, answer, until)
        slot, aggregated = self._slot, self._slot.capabilities.state_methods == 4
        # A loader whose states are aggregated needs a state of exactly this position. Other loaders can use an earlier
        # state and the number of batches since. That state must be of this epoch, because the loop may have abandoned
        # an epoch in between without this worker knowing.
        point = (
            slot.store.exactly(epoch, delivered, total, request.step) if aggregated else self._nearest(request, entry)
        )
        lacks = point is not None and (self._lacks(point, request) or self._lacks_next(request, answer))
        pure = is_pure(slot.capabilities)
        begins = pure and not delivered
        compares = pure or is_vouched(slot.capabilities)
        lacks = lacks or (compares and delivered > 0 and entry is None)  # what is resumed must be compared
        if point is not None and (point.epoch == epoch or begins) and not lacks:
            if entry is None and point.total == total:
                answer.samples_streamed = point.samples
            return self._comparable(point.data, request)
        data = await self._advance(request, answer, until) or await self._materialise(request, answer, until)
        return self._comparable(data, request)

    def _late(self, request: coordinator_pb2.StateRequest) -> DeadlineError:
        page, who = self._slot.progress_page, f"{self._slot.name} on worker {self._host.name}"
        page.refresh()
        doing, since = page.activity
        if request.aggregate_blob or request.HasField("mixture"):
            what = "try the change of the mixture" if request.HasField("mixture") else "aggregate the workers' states"
            again = "Run `penstock mix` again" if request.HasField("mixture") else "Save again, or raise timeout_s"
            return DeadlineError(
                f"{who} did not {what} within {request.deadline_s:.0f} s: the runner is not ready (it has been in "
                f"{doing} for {since:.1f} s), or helper processes are busy. {again}"
            )
        return DeadlineError(
            f"{who} did not return the state of step {request.step} within {request.deadline_s:.0f} s: the runner has "
            f"made {page.total} of {request.position.total} batches, and has been in {doing} for {since:.1f} s. Save "
            "again, or raise timeout_s"
        )

    def _nearest(self, request: coordinator_pb2.StateRequest, entry: BatchRecord | None) -> StoredSnapshot | None:
        slot, position = self._slot, request.position
        if not is_pure(slot.capabilities):
            return self._earlier(request) or slot.store.nearest(
                request.epoch, position.total, abandoned=_abandoned(request)
            )
        began = position.total - position.delivered
        spent_s = None if entry is None else entry.spent_s
        limit_s = replay_s(slot.assignment.loader.options)
        return slot.store.within(request.epoch, position.total, began, spent_s, limit_s)

    def _earlier(self, request: coordinator_pb2.StateRequest) -> StoredSnapshot | None:
        """Return a vouched loader's newest point before the last batch, which a resume makes again and compares."""
        slot, position = self._slot, request.position
        if not (is_vouched(slot.capabilities) and position.delivered):
            return None
        point = slot.store.nearest(request.epoch, position.total, abandoned=_abandoned(request), below=position.total)
        return point if point is not None and point.epoch == request.epoch else None

    def _comparable(self, data: bytes, request: coordinator_pb2.StateRequest) -> bytes:
        """Return the state of the position, with an earlier one to compare the last batch by as `earlier`: this
        runner's own if the mixture has changed, as another run does not learn that from an older state."""
        slot = self._slot
        if not data or not is_vouched(slot.capabilities) or slot.capabilities.state_methods != 4:
            return data
        point = self._earlier(request)
        if not slot.assignment.mixture_changes:
            return data if point is None else with_bytes(data, "earlier", point.data)
        is_own = point is not None and not (point.inherited or point.begins or point.position in slot.from_before)
        return with_bytes(data, "earlier", point.data if point is not None and is_own else b"")

    async def _note_next(
        self, request: coordinator_pb2.StateRequest, answer: coordinator_pb2.StateAnswer, until: float
    ) -> None:
        """Add the next batch's digest, with which a resumed loader must continue. If only that verifies the state, wait
        up to NEXT_S; at the end of some box's epoch, up to END_S for this slot's end or a further batch."""
        slot, total = self._slot, request.position.total
        waits_s = NEXT_S if self._needs_next and not self._waits_for_loop else 0.0
        patience = min(until, time.monotonic() + (END_S if request.at_end else waits_s))
        while True:
            slot.progress_page.refresh()
            over = slot.progress_page.ends().get(request.epoch) == total
            over = answer.next_epoch = over and slot.abandoned.get(request.epoch) != total
            following = slot.progress_page.entry(total + 1)
            if following is not None and following.epoch == request.epoch + over:
                answer.next_digest = self._link(following)
                return
            ended = request.epoch in slot.progress_page.ends()
            idle = ended and (slot.progress_page.activity[0] == "waiting" or not self._needs_next)
            if time.monotonic() >= patience or idle:
                return
            await asyncio.sleep(POLL_S)

    def _link(self, batch: BatchRecord) -> int:
        """Return what the chain links for a batch: its digest, unless that is a sum over rows; 0 = unknown."""
        if not self._slot.assignment.loader.options.row_digest:
            return batch.digest
        before = self._slot.progress_page.entry(batch.total - 1)
        if before is not None:
            return link_between(before.chain_in(batch.epoch), batch.chain)
        return 0 if batch.total > 1 else batch.chain

    @property
    def _needs_next(self) -> bool:
        """True if the loader resumes from an aggregated state, which only the next batch verifies."""
        return self._slot.capabilities.state_methods == 4 and not self._slot.capabilities.exact_states

    def _lacks_next(self, request: coordinator_pb2.StateRequest, answer: coordinator_pb2.StateAnswer) -> bool:
        """Return whether a helper must make the next batch for its digest. At an epoch's end, where there may be none,
        only if a replay is cheap, or the next turn is not slot 0's: only that batch then shows which slot becomes
        worker 0 (start.py)."""
        if not self._needs_next or answer.next_digest:
            return False
        if not answer.next_epoch or self._slot.progress_page.worked_s <= CHEAP_S:
            return True
        begin, workers = self._slot.assignment.start, self._slot.assignment.num_workers_per_box
        return (begin.cursor + request.step - begin.step) % workers != 0

    @property
    def _waits_for_loop(self) -> bool:
        """True if a replacing runner does not know yet where the loop continues: the page is empty."""
        return self._slot.assignment.recovery and not self._slot.attached

    def _lacks(self, point: StoredSnapshot, request: coordinator_pb2.StateRequest) -> bool:
        """Return whether this point cannot answer: an earlier runner's may lack skipped batches, digests, or a mixture
        change."""
        if self._may_lack_a_change(point):
            return True
        if not point.inherited:
            return False
        if self._slot.assignment.skips:
            return True
        start, after = self._start(request), request.digests_after
        return self._waits_for_loop and start is not None and start.total <= after < request.position.total

    def _may_lack_a_change(self, point: StoredSnapshot) -> bool:
        """Return whether an earlier runner made the state, also if this one started from it and sent it again as its
        own."""
        if not self._slot.assignment.mixture_changes:
            return False
        return point.inherited or (point.position in self._slot.from_before and not point.begins)

    def _start(self, request: coordinator_pb2.StateRequest) -> StoredSnapshot | None:
        """Return the point to replay from: the nearest, or an earlier one if digests of batches before it are
        requested."""
        store, abandoned = self._slot.store, _abandoned(request)
        point = self._nearest(request, self._slot.progress_page.entry(request.position.total))
        if point is not None and self._waits_for_loop and request.digests_after < request.position.total:
            before = store.nearest(point.epoch, request.digests_after, abandoned=abandoned)
            if before is not None and before.epoch == point.epoch:
                return before
        return point

    def _digests(
        self, request: coordinator_pb2.StateRequest, entry_of: Callable[[int], BatchRecord | None]
    ) -> list[int]:
        """Return the requested digests in order; none if one is unknown here, or of an abandoned epoch."""
        total = request.position.total
        began = total - request.position.delivered
        digests = []
        for count in range(request.digests_after + 1, total + 1) if total - request.digests_after <= ENTRIES else ():
            entry = entry_of(count)
            if entry is None or (entry.epoch == request.epoch) != (count > began):
                return []
            digests.append(entry.digest)
        return digests

    def _require_saving(self) -> None:
        where = f"{name_of(self._slot.assignment.loader)} ({self._slot.name})"
        if self._slot.capabilities.not_restartable:
            raise NotRestartableError(f"{where} cannot be saved: {self._slot.capabilities.not_restartable}")
        if not self._slot.is_savable:
            raise NotRestartableError(
                f"{where} cannot be saved: give its loader state_dict and load_state_dict, or pass replay=True"
            )

    async def _produced(self, request: coordinator_pb2.StateRequest, answer: coordinator_pb2.StateAnswer) -> bool:
        """Wait until all batches up to the position are made. Return False if its epoch or the one before ended
        elsewhere, as the answer then says."""
        epoch, total = request.epoch, request.position.total
        began, page = total - request.position.delivered, self._slot.progress_page
        named = _abandoned(request).get(epoch - 1) == began
        while True:
            page.refresh()
            if self._waits_for_loop:
                # The loop may be waiting for this state. A delivered batch was made once, so a replay can make it
                # again.
                return True
            ends, reached = page.ends(), max(page.epoch, page.begun)
            end = ends.get(epoch - 1)
            # Without an end, or with more batches than the request assumes, the runner may be ahead of the loop, which
            # has abandoned that epoch. Unless the coordinator names the epoch as abandoned, the request may be wrong
            # instead: another slot has fewer batches then, and reports that, and the end is final once this runner has
            # begun the next epoch.
            if reached < epoch if end is None else end > began and (named or reached < epoch):
                self._require_runner(f"epoch {epoch}")
                await _pause()
                continue
            if end not in (None, began):
                answer.ended, answer.ended_epoch, answer.ended_total = True, epoch - 1, end
                return False
            if ends.get(epoch, total) < total:
                answer.ended, answer.ended_epoch, answer.ended_total = True, epoch, ends[epoch]
                return False
            if page.total >= total:
                await self._slot.drain()  # the runner sent its snapshots before the progress page showed the batch
                return True
            self._require_runner(f"batch {total}")
            await _pause()

    def _require_runner(self, for_what: str) -> None:
        """Raise if the runner makes no more batches: a saving loop does not take the batch that would raise."""
        if self._slot.broken is not None:
            raise error_of(self._slot.broken)
        if self._slot.phase == coordinator_pb2.FAILED:
            raise StateUnavailableError(
                f"{self._slot.name} failed before {for_what}. The training loop raises its error"
            )

    async def _begun(self, request: coordinator_pb2.StateRequest, tried: StoredSnapshot) -> None:
        """Wait until the epoch after an abandoned one has begun with a restart point. Raises StateUnavailableError if
        no other than `tried`, which failed, can be expected."""
        slot, epoch, position = self._slot, request.epoch, request.position
        waits = not (self._waits_for_loop or position.delivered)
        while waits and slot.progress_page.begun < epoch:
            self._require_runner(f"epoch {epoch}")
            await _pause()
        await slot.drain()
        if not waits or self._start(request) is tried:
            raise StateUnavailableError(
                f"{slot.name}: the state of step {request.step} is not available yet, because the slot's new runner "
                "does not know yet where the training loop left an epoch by `break`. Save again after the next step"
            )

    async def _advance(
        self, request: coordinator_pb2.StateRequest, answer: coordinator_pb2.StateAnswer, until: float
    ) -> bytes:
        """Return the state that `advance_state` computes from an earlier one in the epoch, without input_fn; b"" if it
        cannot."""
        slot, total = self._slot, request.position.total
        point = slot.store.nearest(request.epoch, total, abandoned=_abandoned(request))
        entry = slot.progress_page.entry(total)
        if not slot.capabilities.advances_state or point is None or point.epoch != request.epoch or entry is None:
            return b""
        is_other = point.began != total - request.position.delivered or point.step or slot.assignment.skips
        if is_other or self._may_lack_a_change(point):
            return b""
        done = await self._helper(
            [point.data],
            "advance",
            _share(until),
            loader=slot.capabilities.advances_state,
            delivered=request.position.delivered,
            total=total,
            samples=entry.samples,
            digest=entry.digest,
            chain=entry.chain_in(request.epoch),
        )
        return done.payload

    async def _materialise(
        self, request: coordinator_pb2.StateRequest, answer: coordinator_pb2.StateAnswer, until: float
    ) -> bytes:
        epoch, total = request.epoch, request.position.total
        point = self._start(request)
        pure = is_pure(self._slot.capabilities)
        if point is None and not pure:
            raise StateUnavailableError(
                f"{self._slot.name}: the state of step {request.step} is no longer available: all snapshots before "
                f"batch {total} have been dropped. Save at a later step, or raise retention_steps"
            )
        digests = {
            str(count): entry.digest
            for count in range((total - request.position.delivered if point is None else point.total) + 1, total + 1)
            if (entry := self._slot.progress_page.entry(count)) is not None
        }
        done = await self._helper(
            [] if point is None else [point.data],
            "state",
            _share(until),
            epoch=epoch,
            delivered=request.position.delivered,
            total=total,
            samples=self._samples_before(total - request.position.delivered),
            step=request.step,
            digests=digests,
            left={str(epoch): there for epoch, there in _abandoned(request).items()},
            abandoned_from=request.abandoned_from,
            labels={str(known.epoch): known.label for known in request.labels},
            following=self._lacks_next(request, answer),
        )
        if "elsewhere" in done.fields:
            assert point is not None
            await self._begun(request, point)
            return await self._state(request, answer, until)
        if done.fields["ended"]:
            answer.ended, answer.ended_epoch, answer.ended_total = True, epoch, done.fields["total"]
            return b""
        answer.samples_streamed, answer.digest = done.fields["samples"], done.fields["digest"]
        answer.chain = done.fields["chain"]
        if done.fields["following"]:
            answer.next_digest, answer.next_epoch = done.fields["following"], done.fields["over"]
        seen = done.fields["replayed"]
        replayed = {count: BatchRecord(count, *at) for count, at in enumerate(seen, total + 1 - len(seen))}
        answer.digests.extend(self._digests(request, replayed.get))
        return done.payload

    def _samples_before(self, total: int) -> int:
        entry = self._slot.progress_page.entry(total)
        if entry is not None:
            return entry.samples
        return next((kept.samples for kept in reversed(self._slot.store) if kept.total <= total), 0)
