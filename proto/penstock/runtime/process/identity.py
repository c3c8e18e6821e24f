"""Identity of a process on disk, so that others can tell whether it still runs, even if its id was reused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.process.watch import Process, stat_of


@dataclass(frozen=True)
class Identity:
    """A process's id, its start time and the machine's boot: one differs in any later process."""

    pid: int
    started: int
    """In clock ticks since the machine's boot."""
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Raises ProcessLookupError if the process does not exist."""
        fields = stat_of(pid)
        if not fields:
            raise ProcessLookupError(f"process {pid} does not exist")
        return cls(pid, int(fields[19]), Path("/proc/sys/kernel/random/boot_id").read_text().strip())

    def open(self) -> Process | None:
        """Return the process, for watching and signals; None if it has ended. The caller must close it."""
        if self.pid <= 0:
            return None
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
