"""Progress line of a training loop: its steps per second, and the share of its time for which it waited for batches."""

from __future__ import annotations

from penstock.client.stream.stream_interfaces import StreamStats
from penstock.runtime.telemetry.progress import Progress
from penstock.runtime.telemetry.units import INPUT_BOUND, percent, rate

__all__ = ["ProgressLine"]


class ProgressLine:
    """Line on standard error that shows the progress of one loop.

    Args:
        label: name of the loader, shown in the line.
        stats: statistics of the loader's stream. The reader updates them while the loop runs.
        step: number of the last step before the loop's first batch.
    """

    def __init__(self, label: str, stats: StreamStats, step: int) -> None:
        self._label, self._stats, self._line = label, stats, Progress()
        self._shown_step, self._shown_waited = step, stats.waited_s
        self.finish = self._line.finish

    def update(self, step: int) -> None:
        """Show the line, if enough time has passed since it was last shown. `step`: number of the present step."""
        seconds, stats = self._line.due(), self._stats
        if not seconds:
            return
        per_s = (step - self._shown_step) / seconds
        waited = min(1.0, (stats.waited_s - self._shown_waited) / seconds)
        line = f"{self._label}: step {step}, {rate(per_s)} steps/s, waiting for data {percent(waited)}"
        if waited > INPUT_BOUND and stats.waited_by_worker:
            line += f" (most for {max(stats.waited_by_worker, key=lambda worker: stats.waited_by_worker[worker])})"
        self._line.show(line)
        self._shown_step, self._shown_waited = step, stats.waited_s
