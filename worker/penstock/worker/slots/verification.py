"""Verification of a slot's restart points (states of its loader with their positions): a helper process restores a
restart point, and the batches that follow must be the delivered ones.

A loader may count after its `yield`, prefetch in the background, draw from generators that are not saved, or count
batches twice that it skips after a restore. Then its state describes another position than that of the batches it has
yielded, and without verification only a wrong resume would show that. So each state is verified before it is used: a
helper process restores the state in a loader that input_fn has just made, while the stream continues. The next batches
are compared with the delivered ones. The random generators after the first of these batches are compared too, because
the next epoch may draw its order from them. Only verified states become durable (kept by the coordinator), are saved,
and are used for recovery. A later position is reached by replaying a number of batches from a verified state. Each
restart point is verified separately, because the next restart point may come from a loader that was restored.

A *short* verification compares a few batches. A *long* one compares more and more of them, because some restored
loaders are right at first and wrong later.

The beginning of the stream needs no verification, because the stream is made from it. A snapshot that leads to other
batches is not an error: the snapshot is not used, and each worker logs a warning once in a run. Only if the beginning
leads to other batches too, the slot fails; or, for a loader without state methods, the next save.

Verifications take a fixed share of processor time, so their interval follows from their cost. A loader that declares
`exact_states` is verified once by each worker of a run and then trusted; if it also has `advance_state`, it is trusted
from the start. A loader without state methods is verified only if saving by replay was requested: any other such loader
may yield different batches the next time, or may not allow a second instance beside its stream. If the runner of such a
loader is lost, the loader is replayed from the beginning of its epoch, and the replay is compared with the delivered
batches.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from penstock.proto.errors import InputFnError, PenstockError, ReplayMismatchError
from penstock.proto.rpc.channel import detail_of
from penstock.proto.state.restartable import by_own_methods
from penstock.worker.helpers.replayers import DEADLINE_S
from penstock.worker.processes.progress_page import ENTRIES, BatchRecord
from penstock.worker.slots.loader_findings import FIRST_DEPTH
from penstock.worker.slots.slot_interfaces import SlotContext
from penstock.worker.slots.snapshots import StoredSnapshot

__all__ = ["CHECKED_BATCHES", "RestartPointVerifier"]

SHARE = 0.03
"""Fraction of a core's time that the verifications of one slot may take. If the worker has more slots than the machine
has cores, its slots share this fraction of all cores."""
FIRST_BATCHES = 8
"""Number of batches that a runner makes before the first verification, unless an epoch ends before. By then a loader
that prefetches in a thread has had time to run ahead."""
CHECKED_BATCHES = 4
"""Smallest number of batches after a restart point that a verification compares, unless the epoch ends before. If the
epoch ends among the compared batches, up to as many batches after its end are compared too."""
MOST_DEPTH = ENTRIES // 2
"""Largest number of batches that a long verification of a restart point compares."""
LOOK_S = 0.05
"""Seconds between two checks whether a restart point can be verified, before the first verification."""
LATER_LOOK_S = 0.5
"""Seconds between two checks whether a restart point can be verified, after the first verification."""
LAPSES = 2
"""Number of verifications without a result after which a restart point is not used. A verification ends without a
result if the helper process takes too long or dies."""
MAX_PAUSE_FACTOR = 8
"""Largest factor by which failed verifications lengthen the pause before the next verification. One failure doubles it.
"""


class RestartPointVerifier:
    """Verifier of one slot's restart points (states of its loader with their positions)."""

    def __init__(self, slot: SlotContext) -> None:
        self._slot = slot
        self._failed = 0
        """Number of verifications that failed since the last one that succeeded."""
        self._done = 0
        self._hurried = asyncio.Event()
        self._verifying = asyncio.Lock()

    async def run(self) -> None:
        """Verify one restart point after the other, with pauses in between, as long as the loader's states can and must
        be verified (`_verifiable`). The slot cancels this method when it ends."""
        await self._slot.ready.wait()
        if not self._verifiable:
            return
        while self._verifiable:
            candidate = self._next()
            if candidate is None:
                await self._pause(LATER_LOOK_S if self._done else LOOK_S)
                continue
            took = await self.verify(candidate)
            per_core = max(1.0, self._slot.host.slots_here() / (os.cpu_count() or 1))
            await self._pause(took * per_core * min(1 + self._failed, MAX_PAUSE_FACTOR) / SHARE)

    async def _pause(self, seconds: float) -> None:
        self._hurried.clear()
        try:
            await asyncio.wait_for(self._hurried.wait(), seconds)
        except TimeoutError:
            return
        await asyncio.sleep(LOOK_S)  # a waiting request calls `hurry` again during this time

    def hurry(self) -> bool:
        """End the pause before the next verification, because a request waits for a verified restart point. Return
        False if the request cannot expect one soon: no verification is possible, or the last one failed."""
        self._hurried.set()
        return self._verifiable and not self._failed

    @property
    def _verifiable(self) -> bool:
        capabilities = self._slot.capabilities
        findings = self._slot.findings
        if not self._slot.is_savable or by_own_methods(capabilities) or findings.misleads:
            return False
        believed = capabilities.exact_states and not findings.inexact
        return not (capabilities.not_restartable or (believed and (findings.checked or capabilities.advances_state)))

    # ---- which one

    def _next(self) -> StoredSnapshot | None:
        """Return the restart point to verify next; None if no restart point can be verified now. Usually it is the
        newest one without a result whose following batches are known. Restart points at an announced checkpoint step
        are preferred."""
        slot = self._slot
        slot.progress_page.refresh()
        store = list(slot.store)
        beginning = self._beginning(store)
        if beginning is not None:
            return beginning
        first = self._crossing(store) or self._for_long_one(store)
        if first is not None:
            return first
        early = (
            bool(store) and slot.progress_page.total < store[0].total + FIRST_BATCHES and not slot.progress_page.ends()
        )
        if early and not self._done and slot.capabilities.state_methods:
            return None
        # First the delivered batches: the loop may still abandon later ones by a `break`.
        delivered = [point for point in store if point.total <= slot.progress_page.delivered]
        open_ones = self._unjudged(delivered) or self._unjudged(store)
        if self._failed and any(point.epoch_start for point in open_ones):  # snapshots fail, so try epoch starts
            open_ones = [point for point in open_ones if point.epoch_start]
        wanted = [point for point in open_ones if point.wanted]
        return next(reversed(wanted or open_ones), None)

    def _beginning(self, store: list[StoredSnapshot]) -> StoredSnapshot | None:
        """Return the beginning of the stream if it must be verified now: if the loader has no state methods and was not
        verified yet in this run. Return None otherwise.

        The beginning needs no verification for a recovery. But a loader that does not yield the same batches again
        cannot be saved. With a verification now, the next save reports that; otherwise only a resume would.
        """
        if self._slot.capabilities.state_methods or self._slot.findings.checked:
            return None
        return next((point for point in store if point.total == point.epoch == 0 and self._followers(point)), None)

    def _unjudged(self, store: list[StoredSnapshot]) -> list[StoredSnapshot]:
        """Return the restart points that can be verified now, have no result yet, and are newer than all verified
        ones."""
        newest = max((index for index, point in enumerate(store) if point.verified), default=-1)
        return [point for point in store[newest + 1 :] if not point.refuted and self._followers(point)]

    def _crossing(self, store: list[StoredSnapshot]) -> StoredSnapshot | None:
        """Return the last snapshot before an epoch's end, with which the loader's crossing (way into the next epoch)
        can be found. Return None if the crossing is known or cannot be found yet."""
        slot = self._slot
        capabilities = slot.capabilities
        if slot.findings.crossing or capabilities.is_iterator or capabilities.exact_states or self._failed:
            return None
        if not capabilities.state_methods:
            return None
        for epoch, total in slot.progress_page.ends().items():
            before = [point for point in store if point.epoch == epoch and not (point.epoch_start or point.refuted)]
            if before and slot.progress_page.entry(total + 1) is not None and not before[-1].crossed:
                return before[-1]
        return None

    def _for_long_one(self, store: list[StoredSnapshot]) -> StoredSnapshot | None:
        """Return the restart point for a long verification, if one is due: the newest that is followed by enough
        batches. A restored loader may be right until the end of a buffer, a shard or an epoch, and wrong later. Return
        None if no long verification is due or possible."""
        if self._failed or not self._long_is_due:
            return None
        depth, known = self._slot.findings.depth, self._slot.progress_page.total
        fits = [kept for kept in store if kept.total + depth <= known and not (kept.start or kept.refuted)]
        return fits[-1] if fits and len(self._followers(fits[-1], depth)) >= depth else None

    @property
    def _long_is_due(self) -> bool:
        """True if a long verification is due. Long ones get half of the processor time of all verifications."""
        return self._slot.findings.short_s >= self._slot.findings.long_s

    def _most(self, point: StoredSnapshot) -> int:
        """Return the largest number of batches that a verification of this restart point compares."""
        findings = self._slot.findings
        if self._long_is_due and point.total + findings.depth <= self._slot.progress_page.total:
            return findings.depth
        return CHECKED_BATCHES if findings.long_s else FIRST_DEPTH

    def _followers(self, point: StoredSnapshot, most: int = CHECKED_BATCHES) -> dict[str, list[int]]:
        """Return the batches right after a restart point, also those in later epochs, as a dict: number of the batch in
        its slot -> [epoch, digest]. Return an empty dict while too few of them are known, and for a restart point at
        the end of its epoch.

        most: number of batches to return at most. If the epoch ends among them, up to CHECKED_BATCHES batches after its
        end are returned too.
        """
        ends, epoch = self._slot.progress_page.ends(), point.epoch
        end = ends.get(epoch)
        least, last = point.total + CHECKED_BATCHES, point.total + most
        if end is not None and end <= last:
            least, last = min(least, end), max(last, end + CHECKED_BATCHES)
        found: dict[str, list[int]] = {}
        for count in range(point.total + 1, min(last, self._slot.progress_page.total) + 1):
            while ends.get(epoch) == count - 1 and (epoch == point.epoch or epoch not in self._slot.abandoned):
                epoch += 1
            entry = self._slot.progress_page.entry(count)
            if entry is None or entry.epoch != epoch or ends.get(epoch, count) < count:
                break
            found[str(count)] = [entry.epoch, entry.digest]
        return found if str(least) in found and end != point.total else {}

    def _entries(self, counts: range, epoch: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for count in counts:
            entry: BatchRecord | None = self._slot.progress_page.entry(count)
            if entry is None or entry.epoch != epoch:
                break
            found[str(count)] = [entry.epoch, entry.digest]
        return found

    # ---- verification

    async def verify_now(self, point: StoredSnapshot, deadline_s: float = DEADLINE_S) -> bool:
        """Verify the restart point now, within `deadline_s` seconds, unless it is verified already. Return True if it
        is verified; False if it is not, also because the batches after it are not known yet."""
        if not point.verified and self._verifiable and self._followers(point):
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):  # includes the rest of a verification under way
                    await self.verify(point)
        return point.verified

    async def verify(self, point: StoredSnapshot) -> float:
        """Verify the restart point in a helper process, and record the result. Return the helper's processor time, in
        seconds: 0 if there was nothing to verify, and 1, as an estimate, if the helper failed."""
        slot = self._slot
        async with self._verifying:
            most = self._most(point)
            followers = self._followers(point, most)
            beginning = point.total == point.epoch == 0 and not slot.findings.checked
            if point.verified and not beginning and len(followers) <= point.compared:
                return 0.0
            slot.findings.checked = True
            early = self._entries(range(1, 1 + CHECKED_BATCHES), 0)
            try:
                done = await slot.helper(
                    [point.data, *self._opened(point, followers)],
                    "verify",
                    digests=followers,
                    early=early,
                    left=point.epoch in slot.abandoned,
                    generators=point.generators,
                    crossing=slot.findings.crossing,
                )
            except InputFnError as error:  # the loader itself refuses this state
                what = f"fails ({error.message.splitlines()[0]:.200})"
                if beginning:
                    slot.log.warning(
                        "%s: saved states of this loader are not verified, because a second loader from input_fn %s",
                        *(slot.name, what),
                    )
                    return 1.0
                self._refute(point, {"differs": point.total + 1, "what": what, "alike": True})
                return 1.0
            except PenstockError as error:
                slot.log.warning("%s: a snapshot of the loader could not be verified: %s", slot.name, error)
                point.lapses += 1
                point.refuted = point.lapses >= LAPSES and not beginning
                self._failed += 1
                slot.findings.checked = self._failed >= LAPSES  # after a single failure, which may be chance, try again
                return 1.0
            self._done += 1
            point.crossed = True
            fields = done.fields
            self._count(float(fields["took"]), len(followers) >= slot.findings.depth == most)
            if fields["same"]:
                point.verified, point.compared = True, len(followers)
                self._failed = 0
                if fields["crossing"] and fields["crossing"] != slot.findings.crossing:
                    slot.host.found_crossing(slot.assignment, fields["crossing"])
            else:
                self._refute(point, fields)
            return float(fields["took"])

    def _opened(self, point: StoredSnapshot, followers: dict[str, list[int]]) -> list[bytes]:
        """Return the encoded snapshot that the runner took after the first batch of the epoch after `point`. The list
        has one item, or none if there is no such snapshot."""
        beyond = next(((int(count), epoch) for count, (epoch, _) in followers.items() if epoch > point.epoch), None)
        fits = [kept for kept in self._slot.store if (kept.total, kept.epoch) == beyond and not kept.epoch_start]
        return [kept.data for kept in fits[-1:]]

    def _count(self, took: float, long: bool) -> None:
        findings = self._slot.findings
        if long:
            findings.depth, findings.short_s, findings.long_s = min(2 * findings.depth, MOST_DEPTH), 0.0, 2 * took
        else:
            findings.short_s += took

    def _refute(self, point: StoredSnapshot, fields: dict[str, object]) -> None:
        slot = self._slot
        point.refuted, point.verified, slot.findings.inexact = True, False, True
        self._failed += 1
        differs = int(str(fields["differs"]))
        if differs > point.total + CHECKED_BATCHES and fields["alike"]:
            slot.host.found_misleading(slot.assignment)
        source = "epoch start" if point.epoch_start else "state_dict()"
        what = (
            f"{slot.assignment.loader.input_fn}: restored from its {source} after batch {point.total} of {slot.name}, "
            f"the loader does not continue as before: at batch {differs} (step {slot.step_of(differs)}) it "
            f"{fields['what']}"
        )
        if not fields["alike"]:
            mismatch = ReplayMismatchError(
                f"{what}. A new loader from input_fn with the same seed yields other batches than the delivered ones "
                "too. A loader must yield the same batches each time. Draw random numbers from the seeded generators "
                "of Python, numpy and torch, or from generators that you seed with current_assignment().seed, never "
                "from the clock or the system's entropy"
            )
            if slot.capabilities.state_methods:
                slot.fail(detail_of(mismatch), lost=False)
            else:  # not an error: no state was requested yet, and the stream is unaffected
                slot.findings.unrepeatable = mismatch
        elif not slot.findings.not_used:
            slot.findings.not_used = (
                f"{what}. Such states are not used: this run is saved and recovered by replaying batches from a "
                "verified earlier state, which is exact but takes longer. The loader may count after its `yield`, "
                "prefetch in the background, or draw random numbers in worker processes of its own. Its state must "
                "describe the position after the last batch that it has yielded (penstock doctor shows more)"
            )
            slot.log.warning("%s", slot.findings.not_used)
            slot.host.slot_changed()  # the training job logs it, too
