"""One opening of a loader: a run at an appliance, and the feed that reads it."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field, replace

from penstock.client.api.appliance import Appliance
from penstock.client.stream.ordered_reader import Stats
from penstock.client.stream.stream_interfaces import Reader, StreamRun
from penstock.proto.errors import EmptyInputError

__all__ = ["Session"]

_log = logging.getLogger("penstock.client")


@dataclass
class Session:
    """One opening of a loader."""

    appliance: Appliance
    run: StreamRun
    feed: Reader
    name: str
    first_step: int
    """The step before its first batch."""
    pass_began_at: int
    """The step before the first batch of the pass under way."""
    whole_pass: bool
    """The pass under way was begun at its beginning, and not somewhere by a restored state."""
    told_ended: set[tuple[int, int]] = field(default_factory=set)
    """Ends of other boxes that the loop was warned of."""
    told_cut: bool = False
    cut_due: bool = False
    """The pass was left by `break`; the next executor cuts it."""

    @property
    def progress(self) -> bool:
        return self.appliance.settings.progress

    def stats(self) -> Stats:
        feed = self.feed
        return replace(
            feed.stats,
            steps=feed.position.step - self.first_step,
            copies=feed.copies,
            waited_by_worker=dict(feed.stats.waited_by_worker),
        )

    def pass_ended(self) -> None:
        """The feed has come to the end of a pass. Raises EmptyInputError if there was nothing in it."""
        step = self.feed.position.step
        if self.whole_pass and step == self.pass_began_at:
            raise self.empty()
        self.pass_began_at, self.whole_pass = step, True

    def cut(self) -> None:
        """Leave the pass where its loop was left; says once that the next loop does not go on there, for other systems'
        iterators do."""
        if not self.told_cut:
            self.told_cut = True
            _log.warning(
                "%s: a loop was left at step %d, within its pass, and the next loop begins the next pass: the rest of "
                "this one is not delivered, and an endless source begins again. To go on with the next batch in each "
                "loop, use DataExecutor(loader, persistent=True), or num_steps=",
                self.name,
                self.feed.position.step,
            )
        self.feed.cut()
        self.cut_due = False
        self.pass_began_at, self.whole_pass = self.feed.position.step, True

    def warn_of_ended(self, step: int) -> None:
        """Say once of each other box that its pass ended before this step: a collective would wait for it."""
        for box, last in self.run.ended_boxes.items():
            # One that ended its pass where this box began its own is between two passes, as this one was.
            if self.pass_began_at < last < step and (box, last) not in self.told_ended:
                self.told_ended.add((box, last))
                warnings.warn(
                    f"{self.name}: the pass of box {box} ended at step {last}, and box {self.run.box} goes on with "
                    f"step {step}: a collective between them would hang. Give all boxes as many batches, or num_steps",
                    UserWarning,
                    stacklevel=3,
                )

    def empty(self) -> EmptyInputError:
        """No batch in a whole pass."""
        position = self.feed.position
        which = "no batch at all" if position.step == 0 else f"no batch in pass {max(position.epoch - 1, 0)}"
        return EmptyInputError(
            f"{self.name} yielded {which} on any worker of box {self.run.box}: check its data paths, its sharding, and "
            "whether it returns an iterator that is used up"
        )

    def expected_last(self) -> int | None:
        """The last step of this pass by what the workers' loaders say of their lengths; None if one does not."""
        position, last = self.feed.position, self.feed.position.step
        for slot in position.live:
            length = self.run.views[slot].traits.length
            if not self.run.views[slot].HasField("traits") or length < 0:
                return None
            last += max(0, length - position.delivered[slot])
        return last
