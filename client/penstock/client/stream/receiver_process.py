"""Starts and stops the receiver, the process that receives batches from other hosts. What it does stands in
receiver.py."""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import threading
from pathlib import Path

from penstock.proto.errors import DeadlineError, PenstockError
from penstock.proto.rpc.tls import Tls
from penstock.runtime.process.by_path import by_path

__all__ = ["Receiver"]

RECEIVER = Path(__file__).with_name("receiver.py")
START_S = 30.0
"""Seconds for the process to listen; it takes 0.1 on an idle machine."""

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 20)}
"""For glibc: unpacking makes and drops 256 KiB for each piece, and giving them back to the kernel each time, which it
does by default, took more than half of the receiver's time with lz4: 9.5 ms for 8 MiB instead of 4."""


class Receiver:
    """The receiver of this process. `start` as often as you like: it only starts one that is not running.

    max_batch_bytes: ring entries larger than this are refused.
    tls: for the connections to workers; None: they are plain.
    """

    def __init__(self, max_batch_bytes: int = 1 << 30, tls: Tls | None = None) -> None:
        self.max_batch_bytes = max_batch_bytes
        self.tls = tls
        self.name = ""
        """Abstract Unix socket of the running receiver, "" before the first start."""
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the running receiver."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self, parent_watch: int | None = None) -> str:
        """The name to connect to (`lane.connect_local`), of a receiver that listens.

        parent watch: the pid with whose end the receiver leaves, by default this process's.

        Raises DeadlineError or PenstockError if none can be started.
        """
        with self._lock:
            if self.pid is None:
                self._end()
                self._spawn(os.getpid() if parent_watch is None else parent_watch)
            return self.name

    def stop(self) -> None:
        """End it, and all its lanes."""
        with self._lock:
            self._end()

    def _spawn(self, parent_watch: int) -> None:
        name = f"penstock-receiver-{os.getpid()}-{secrets.token_hex(8)}"
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [
                    *by_path(RECEIVER),
                    *("--parent-pid", str(parent_watch), "--ready-fd", str(write), "--name", name),
                    *("--max-batch-bytes", str(self.max_batch_bytes)),
                    *self._tls_arguments(),
                ],
                pass_fds=[write],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**MALLOC, **_environment()},
                process_group=0,  # an interrupt from the keyboard is the training process's to handle
            )
            os.close(write)
            write = -1
            ready, _, _ = select.select([read], [], [], START_S)
            if not ready:
                self._end()
                raise DeadlineError(f"waited {START_S:g} s for the receiver to listen")
            if not os.read(read, 1):
                code = self._process.wait()
                self._end()
                raise PenstockError(f"the receiver ended with code {code} before it listened; see its standard error")
        finally:
            os.close(read)
            if write >= 0:
                os.close(write)
        self.name = name

    def _tls_arguments(self) -> list[str]:
        """Names of files: no secrets."""
        tls = self.tls
        if tls is None:
            return []
        given = {"ca": tls.ca_file, "cert": tls.cert_file, "key": tls.key_file, "name": tls.name}
        return [f"--tls-{what}={value}" for what, value in given.items() if value]

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # it has nothing to put in order
            process.wait()


def _environment() -> dict[str, str]:
    """Without the token: the receiver talks to workers only, with tickets."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_TOKEN")}
