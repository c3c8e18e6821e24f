"""Identity of a process, to record on disk. Another command can find the process by its identity later, even if the
process id was reused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.process.watch import Process, stat_of

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity:
    """Identity of a process: its id and its start time. A later process with the same id has another identity."""

    pid: int
    started: int
    """Start time of the process, in clock ticks since boot."""
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Return the identity of a live process. Raises ProcessLookupError if the process does not exist."""
        fields = stat_of(pid)
        if not fields:
            raise ProcessLookupError(f"process {pid} does not exist")
        return cls(pid, int(fields[19]), Path("/proc/sys/kernel/random/boot_id").read_text().strip())

    def open(self) -> Process | None:
        """Return the process, which the caller must close; None if it has ended."""
        try:
            process = Process(self.pid)
        except ProcessLookupError:
            return None
        try:  # compare after opening, so that the compared process is the one that is signalled
            if Identity.of(self.pid) == self:
                return process
        except ProcessLookupError:
            pass
        process.close()
        return None

    def send(self, number: int) -> bool:
        """Send the process a signal. Return False if it has ended."""
        process = self.open()
        if process is None:
            return False
        with process:
            return process.send(number)
