"""Start and end of the receiver, the process that receives batches from other hosts. The process runs receiver.py."""

from __future__ import annotations

import json
import os
import secrets
import threading
from pathlib import Path

from penstock.proto.errors import DeadlineError, PenstockError
from penstock.proto.rpc.tls import Tls
from penstock.runtime.process.end import exit_words
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import NULL, Spawned, by_path, environment, spawn

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

    def start(self) -> str:
        """Start the receiver if none runs, and return its socket's name. It ends with this process."""
        with self._lock:
            if self.pid is None:
                self._end()
                self._spawn()
            return self.name

    def stop(self) -> None:
        with self._lock:
            self._end()

    def _spawn(self) -> None:
        name = f"penstock-receiver-{os.getpid()}-{secrets.token_hex(8)}"
        with LinePipe() as ready:
            tls = self.tls
            given = {
                "name": name,
                "parent_pid": os.getpid(),
                "max_batch_bytes": self.max_batch_bytes,
                "tls": ["", "", "", ""] if tls is None else [tls.ca_file, tls.cert_file, tls.key_file, tls.name],
                "ready_fd": ready.theirs.fileno(),
            }
            self._process = process = spawn(
                [*by_path(RECEIVER), json.dumps(given)],
                fds=[ready.theirs],
                stdout=NULL,
                # The receiver gets no token, because it only connects to workers, with tickets.
                env=MALLOC | environment("PENSTOCK_TOKEN*"),
                session=False,
                outlives=True,
            )
            try:
                first_line = ready.line(START_S)
            except TimeoutError:
                self._end()
                raise DeadlineError(
                    f"waited {START_S:g} s for the receiver of batches from other hosts to start: see its messages"
                ) from None
        if first_line is None:
            how = exit_words(process.result())
            self._end()
            raise PenstockError(f"the receiver of batches from other hosts {how} at its start: see its messages above")
        self.name = name

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # the receiver has nothing to clean up
            process.wait()
            process.close()
