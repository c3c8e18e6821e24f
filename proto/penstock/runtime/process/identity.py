"""Names a process in a record on disk, so that another command finds it later, and never another one of its number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.process.watch import Process, stat_of

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity:
    """A process for a record on disk: as long as it lives, and never another of its number."""

    pid: int
    started: int
    """Clock ticks from the boot."""
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Return that of a process that lives. ProcessLookupError otherwise."""
        fields = stat_of(pid)
        if not fields:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(pid, int(fields[19]), Path("/proc/sys/kernel/random/boot_id").read_text().strip())

    def open(self) -> Process | None:
        """Return the process, for the caller to close; None if it has ended."""
        try:
            process = Process(self.pid)
        except ProcessLookupError:
            return None
        try:  # after it was opened: what is compared is what will be signalled
            if Identity.of(self.pid) == self:
                return process
        except ProcessLookupError:
            pass
        process.close()
        return None

    def send(self, number: int) -> bool:
        """Send it a signal. Return False if it has ended."""
        process = self.open()
        if process is None:
            return False
        with process:
            return process.send(number)
