"""Start and end of the receiver, the process that receives batches from other hosts. The process runs receiver.py."""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path

from penstock.proto.errors import DeadlineError, PenstockError
from penstock.proto.rpc.tls import Tls
from penstock.runtime.process.end import exit_words
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import NULL, Spawned, by_path, environment, spawn

__all__ = ["Receiver"]

RECEIVER = Path(__file__).with_name("receiver.py")
START_S = 30.0
"""On an idle machine the start takes 0.1 s."""

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 20)}
"""glibc by default returns each unpacked 256 KiB to the kernel: 9.5 ms for 8 MiB with lz4 instead of 4."""


class Receiver:
    """Handle on this process's receiver. `max_batch_bytes`: larger ring entries are refused. `tls`: for workers."""

    def __init__(self, max_batch_bytes: int = 1 << 30, tls: Tls | None = None) -> None:
        self.max_batch_bytes = max_batch_bytes
        self.tls = tls
        self.name = ""
        """Its abstract Unix socket; "" before the first start."""
        self._process: Spawned | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.status is None else None

    def start(self, parent_watch: int | None = None) -> str:
        """Start the receiver if none runs, and return its socket's name. It ends with `parent_watch` (None: this
        process)."""
        with self._lock:
            if self.pid is None:
                self._end()
                self._spawn(os.getpid() if parent_watch is None else parent_watch)
            return self.name

    def stop(self) -> None:
        with self._lock:
            self._end()

    def _spawn(self, parent_watch: int) -> None:
        name = f"penstock-receiver-{os.getpid()}-{secrets.token_hex(8)}"
        with LinePipe() as ready:
            what = ("--parent-pid", str(parent_watch), "--ready-fd", str(ready.theirs.fileno()), "--name", name)
            self._process = process = spawn(
                [*by_path(RECEIVER), *what, "--max-batch-bytes", str(self.max_batch_bytes), *self._tls_arguments()],
                fds=[ready.theirs],
                stdout=NULL,
                # The receiver gets no token, because it only connects to workers, with tickets.
                env=MALLOC | environment("PENSTOCK_TOKEN*"),
                session=False,
            )
            try:
                first_line = ready.line(START_S)
            except TimeoutError:
                self._end()
                raise DeadlineError(
                    f"waited {START_S:g} s for the receiver, the process that receives batches from other hosts, to "
                    "start: see its messages on standard error of this process, then start the job again"
                ) from None
        if first_line is None:
            how = exit_words(process.result())
            self._end()
            raise PenstockError(
                f"the receiver, the process that receives batches from other hosts, {how} at its start: see its "
                "messages on standard error of this process, then start the job again"
            )
        self.name = name

    def _tls_arguments(self) -> list[str]:
        tls = self.tls
        if tls is None:
            return []
        given = {"ca": tls.ca_file, "cert": tls.cert_file, "key": tls.key_file, "name": tls.name}
        return [f"--tls-{what}={value}" for what, value in given.items() if value]

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # the receiver has nothing to clean up
            process.wait()
            process.close()
