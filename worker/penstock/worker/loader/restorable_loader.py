"""A user's loader that can be brought to any position in its stream, across epochs.

positioned_loader.py describes when the loader's state and the random generators are taken and set. epoch_crossing.py
describes how the next epoch is opened. The runner that streams and the helper processes that verify and make states run
the same code.
"""

from __future__ import annotations

from penstock.worker.loader.crossing_kinds import KEPT
from penstock.worker.loader.epoch_crossing import cross
from penstock.worker.loader.positioned_loader import PositionedLoader
from penstock.worker.loader.restart_points import RestartPoint

__all__ = ["RestorableLoader"]


class RestorableLoader(PositionedLoader):
    """Loader of one slot that can be brought to any position. Exceptions of user code are raised as InputFnError."""

    def open_epoch(self, *, step: int = 0) -> RestartPoint:
        """Open epoch number `position.epoch`, and return the epoch start: a restart point with the loader's state. If
        the loader was restored within the previous epoch, open the epoch in the way that gives the right batches
        (epoch_crossing.py).

        step: training step of the box (data-parallel rank) that `get_worker_state()` reports to the loader's
        state_dict().
        """
        if self._held is not None:
            return self._open_held(step)
        crosses = self.restored and not (self.capabilities.is_iterator or self.capabilities.exact_states)
        kept = self.history.crossing == KEPT and not self.is_untouched
        opened = cross(self, step) if crosses else self.open(step=step)
        self.restored &= kept  # the other crossings give a loader that runs the whole epoch
        return opened
