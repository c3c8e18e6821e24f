"""A user's loader that can be brought to any position in its stream, across epochs.

positioned_loader.py describes when the loader's state and the random generators are taken and set. epoch_crossing.py
describes how the next epoch is opened. All code that opens, saves, restores or replays a loader is in these modules.
The runner that streams runs the same code as the helper processes that verify and make states.
"""

from __future__ import annotations

from penstock.worker.loader.crossing_kinds import KEPT
from penstock.worker.loader.epoch_crossing import cross
from penstock.worker.loader.positioned_loader import PositionedLoader
from penstock.worker.loader.restart_points import RestartPoint

__all__ = ["RestorableLoader"]


class RestorableLoader(PositionedLoader):
    """Loader of one slot that can be brought to any position. An exception of user code is raised as InputFnError."""

    def open_epoch(self, *, step: int = 0) -> RestartPoint:
        """Open epoch `position.epoch`, by the right crossing if the loader was restored within the epoch before. Return
        the epoch start, whose state is taken as of the box's `step`."""
        if self._held is not None:
            return self._open_held(step)
        crosses = self.restored and not (self.capabilities.is_iterator or self.capabilities.exact_states)
        kept = self.history.crossing == KEPT and not self.is_untouched
        opened = cross(self, step) if crosses else self.open(step=step)
        self.restored &= kept  # the other crossings give a loader that runs the whole epoch
        return opened
