"""The check of a run's early snapshots: do they, restored, reproduce what was delivered?

A loader that counts after its `yield`, or prefetches in the background, saves a state of another place than that of the
batches it has handed out, and nothing else would tell before a resume goes wrong.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.proto.channel import detail_of
from penstock.proto.errors import PenstockError, ReplayMismatchError
from penstock.worker.snapshots import Kept
from penstock.worker.states import POLL_S

if TYPE_CHECKING:
    from penstock.worker.slot import Slot

__all__ = ["EARLY_SNAPSHOTS", "Check"]


EARLY_SNAPSHOTS = 3
"""That are checked."""
CHECKED_BATCHES = 4
"""Batches after a restored snapshot that are compared with those delivered."""


class Check:
    """The check of one slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    async def run(self) -> None:
        """Once per run on this worker: do restored snapshots reproduce what was delivered?"""
        await self._slot.ready.wait()
        trust = self._slot.host.trust(self._slot.assignment)
        if trust.started or self._slot.traits.state_methods == 0 or self._slot.traits.not_restartable:
            return
        trust.started = True
        bases, digests = await self._early_snapshots()
        self._slot.early = []
        if not bases:
            return
        try:
            done = await self._slot.scratch([base.data for base in bases], "check", digests=digests)
        except PenstockError as error:
            self._slot.log.warning("%s: its snapshots could not be checked: %s", self._slot.name, error)
            return
        trust.exact = bool(done.fields["same"])
        self._slot.host.trust_found(self._slot.assignment)
        if trust.exact:
            return
        at, differs = done.fields["base_total"], done.fields["differs"]
        if self._slot.traits.own_workers:
            self._slot.log.info(
                "%s: a restored snapshot does not reproduce its batches (randomness in the loader's own worker "
                "processes, probably): states are saved by replay from the start of the pass",
                self._slot.name,
            )
            return
        mismatch = ReplayMismatchError(
            f"{self._slot.assignment.loader.input_fn}: restored from its state_dict() after batch {at} of "
            f"{self._slot.name}, the loader {done.fields['what']}: batch {differs} (step "
            f"{self._slot.step_of(differs)}) is not the one that was delivered. Does it count after its `yield`, or "
            "prefetch in the background? Its state must be that of the batches it has handed out"
        )
        self._slot.fail(detail_of(mismatch), lost=False)

    async def _early_snapshots(self) -> tuple[list[Kept], dict[str, int]]:
        """The first snapshots of a pass, and by count the digests of the batches that followed each.

        Three, for a loader with a thread of its own may not have run ahead at the first; fewer if the pass is short.
        """
        while True:
            self._slot.ledger.refresh()
            taken = self._slot.early
            enough = len(taken) == EARLY_SNAPSHOTS and self._slot.ledger.total >= taken[-1].total + CHECKED_BATCHES
            if enough or (taken and taken[0].epoch in self._slot.ledger.ends()):
                followers = [(base, self._followers(base)) for base in taken if base.epoch == taken[0].epoch]
                bases = [base for base, digests in followers if digests]
                return bases, {count: digest for _, digests in followers for count, digest in digests.items()}
            await asyncio.sleep(10 * POLL_S)

    def _followers(self, base: Kept) -> dict[str, int]:
        """Count -> digest of the batches right after a base, as far as they are known."""
        counts = range(base.total + 1, base.total + 1 + CHECKED_BATCHES)
        entries = [entry for count in counts if (entry := self._slot.ledger.entry(count)) is not None]
        return {str(entry.total): entry.digest for entry in entries if entry.epoch == base.epoch}
