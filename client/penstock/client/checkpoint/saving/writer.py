"""The checkpoint writer: a process that writes shared memory to files and commits them as a checkpoint.

Each rank has one, without torch, gRPC or CUDA: it starts in 0.1 s, takes 12 to 14 MiB, shares no interpreter lock with
the loop, and lives as long as its checkpointer. (For a bucket it imports s3fs at its first save, which takes 0.6 s and
50 MiB.) writer_process.py starts it by its file's path; its arguments are the descriptor of their socket and the
training process's id. Requests are JSON after their length, over a Unix socket, and may carry the memfd to write from;
replies are lines of JSON. What it does with a request: save_job.py.

When the training process has ended, the writer finishes or abandons the save in flight, as the save asks."""

from __future__ import annotations

import gc
import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.client.checkpoint.saving.folder_save import DurablePath, FolderSave
from penstock.client.checkpoint.saving.save_job import SaveJob, WriteFailed
from penstock.proto.state.checkpoint_catalog import is_bucket
from penstock.runtime.process.lifetime import outlive_signals, wait_for_parent_end
from penstock.runtime.process.titles import name_process

LENGTH = 8
NICENESS = 10
"""The training loop and its input have priority on a busy processor."""

Send = Callable[[dict[str, Any]], None]
MakeJob = Callable[[dict[str, Any], memoryview, Send, Callable[[], bool]], SaveJob]


class Parent:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.images: dict[int, memoryview] = {}
        """By their numbers in the training process."""
        self.gone = threading.Event()

    def receive(self) -> dict[str, Any] | None:
        """Return the next request; None if the training process has ended, or has closed its checkpointer."""
        try:
            head, handles, _, _ = socket.recv_fds(self._sock, LENGTH, 1)
            head += self._read(LENGTH - len(head))
            request: dict[str, Any] = json.loads(self._read(int.from_bytes(head)))
            self.images = {number: image for number, image in self.images.items() if number in request["images"]}
            for handle in handles:
                self.images[request["image"]] = memoryview(mmap.mmap(handle, 0, prot=mmap.PROT_READ))
                os.close(handle)
            return request
        except (OSError, EOFError):
            return None

    def _read(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            piece = self._sock.recv(min(nbytes - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def end(self) -> None:
        """Let `receive` return None after the requests so far, also if forks of the training process live on."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def send_reply(self, reply: dict[str, Any]) -> None:
        with self._lock, suppress(OSError):  # the parent may have ended; the save continues
            self._sock.sendall(json.dumps(reply).encode() + b"\n")


def exit_after_parent(parent: Parent, watched: list[SaveJob], parent_watch: int) -> None:
    """Wait in a thread for the training process's end; then let `serve` end after its save, or end at once if the save
    is to be abandoned (`finish` is False), or at its deadline."""
    wait_for_parent_end(parent_watch)
    parent.gone.set()
    parent.end()
    while True:
        if watched and not (watched[0].request["finish"] and time.monotonic() < watched[0].deadline):
            os._exit(0)
        time.sleep(0.05)


def serve(parent: Parent, parent_watch: int) -> None:
    watched: list[SaveJob] = []
    jobs: dict[str, MakeJob] = {}
    """By folder: what keeps between saves what it knows of the place."""
    threading.Thread(target=exit_after_parent, args=(parent, watched, parent_watch), daemon=True).start()
    parent.send_reply({"kind": "ready"})
    while (request := parent.receive()) is not None:
        if os.getppid() != parent_watch and not request["finish"]:
            return
        image = parent.images.get(request["image"], memoryview(b""))
        if request["folder"] not in jobs:
            jobs[request["folder"]] = _jobs_of(request)
        save = jobs[request["folder"]](request, image, parent.send_reply, parent.gone.is_set)
        watched[:] = [save]
        try:
            save.run()
            reply: dict[str, Any] = {"kind": "done", "warning": save.warning}
        except WriteFailed as failed:
            reply = {"kind": "failed", "causes": failed.causes}
        except Exception as error:  # a bug makes this save fail, but the writer continues
            reply = {"kind": "failed", "causes": {save.rank: f"{type(error).__name__}: {error}"}}
        watched.clear()
        parent.send_reply({"save": save.save, **reply})
        gc.collect()


def _jobs_of(request: dict[str, Any]) -> MakeJob:
    if not is_bucket(request["folder"]):
        path = DurablePath()
        return lambda request, image, send, orphaned: FolderSave(request, image, send, orphaned, path)
    from penstock.client.checkpoint.saving.bucket_save import BucketSave, OwnedBucket

    bucket = OwnedBucket(request)
    return lambda request, image, send, orphaned: BucketSave(request, image, send, orphaned, bucket)


def main() -> None:
    outlive_signals()
    name_process("penstock-writer")
    gc.disable()  # a collection would stop all threads: `serve` makes one after each save,
    gc.freeze()  # of what the save has left only, in 0.1 ms
    with suppress(OSError):
        os.nice(NICENESS)
    with suppress(OSError):  # if memory runs out, losing a save is better than losing the training
        Path("/proc/self/oom_score_adj").write_text("500")
    serve(Parent(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2]))


if __name__ == "__main__":
    main()
