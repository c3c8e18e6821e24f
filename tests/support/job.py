"""A training job as a child process (tests/inputs/trainer.py), heard line by line, that can be killed and resumed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from cluster import Cluster
from interpreters import start

__all__ = ["Job"]


class Job:
    """Training job. `batches` maps step to fingerprint over all lives of the job; a step that differs between two is an
    error."""

    def __init__(self, cluster: Cluster, python: Sequence[str] = (sys.executable,), **options: Any) -> None:
        """`python`: the interpreter, and what goes before it; `options`: the trainer's."""
        self.options = {"address": cluster.address, **options}
        self._python = python
        self.environment = cluster.environment
        self.batches: dict[int, int] = {}
        self.step = 0
        self.recoveries: int | None = None
        self.saved: dict[int, str] = {}
        """Step -> the file with its state."""
        self._rest = b""
        self.start()

    def start(self, **options: Any) -> None:
        """Start it, or start it again, with other options from now on."""
        self.options |= options
        self.step, self._rest = 0, b""
        self._open = True
        self.process = start(
            "trainer",
            [json.dumps(self.options)],
            self.environment,
            imports=[],
            python=self._python,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self._said = self.process.stdout
        os.set_blocking(self._said.fileno(), False)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def over(self) -> bool:
        """True if the job has ended and all its output was read."""
        if not self._open:
            return True
        if self.process.poll() is None:
            return False
        while self.hear(0):
            pass
        self._close()
        return True

    def hear(self, timeout_s: float) -> bool:
        """Take note of what it says within so long; False if that is nothing, or the end."""
        if not select.select([self._said], [], [], timeout_s)[0]:
            return False
        data = self._said.read() or b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._note(json.loads(line))
        return bool(data)

    def _note(self, said: dict[str, Any]) -> None:
        if "batch" in said:
            self.step = said["step"]
            known = self.batches.setdefault(said["step"], said["batch"])
            assert known == said["batch"], f"step {said['step']} of {self.options['job']} is another batch now"
        if "saved" in said:
            self.saved[said["saved"]] = said["path"]
        self.recoveries = said.get("recoveries", self.recoveries)

    def reach(self, step: int, deadline_s: float = 60) -> None:
        """Wait until it is at this step."""
        end = time.monotonic() + deadline_s
        while self.step < step:
            self.hear(0.5)
            if self.step >= step:
                return
            assert self.process.poll() is None or self.hear(0), f"{self.options['job']} ended at step {self.step}"
            assert time.monotonic() < end, f"{self.options['job']} is at step {self.step} of {step}"

    def end(self, deadline_s: float = 60) -> int:
        """Its exit status, once it has ended."""
        end = time.monotonic() + deadline_s
        while self.process.poll() is None:
            self.hear(0.5)
            assert time.monotonic() < end, f"{self.options['job']} has not ended; it is at step {self.step}"
        while self.hear(0):
            pass
        self._close()
        return self.process.wait(0)

    def finish(self, deadline_s: float = 60) -> dict[int, int]:
        """Its batches by step, once it has ended well."""
        status = self.end(deadline_s)
        assert status == 0, f"{self.options['job']} ended with status {status}"
        return self.batches

    def kill(self) -> None:
        """SIGKILL to the training process alone; what it had said is heard."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        while self.hear(0):
            pass
        self._close()

    def _close(self) -> None:
        self._open = False
        self._said.close()

    def drop(self) -> None:
        """End it in any case."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
        self._close()
