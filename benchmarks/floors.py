"""Floors: the least that any way to deliver batches must do with the same bytes, and so the limit of this machine. The
module is the program of a player (see serve.py), without torch.

    python -m benchmarks.floors memcpy|tcp

memcpy: one thread copies each tensor of a ready batch into the next of several pieces of memory, which have been used
before. That is the one copy that the same host's lane needs, from the user's tensor into the ring.

tcp: two processes and one connection over loopback; one sends each batch from its next ring entry with
`sendall`, the other receives it into its next entry with `recv_into`. No framing, no acknowledgement, and no copy on
either side except the kernel's.

Both use as many pieces of memory as Penstock's ring has entries. With fewer, the bytes would stay in the processor's
faster caches.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.cases import Case
from benchmarks.processes import Role
from benchmarks.serve import Way, serve


def _memory(nbytes: int) -> mmap.mmap:
    """Return shared memory of `nbytes` bytes without a file, like a ring. All its pages are allocated."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Memcpy(Way):
    @contextmanager
    def open(self, case: Case) -> Iterator[Iterator[int]]:
        ready, ring = _memory(case.nbytes), _memory(case.nbytes * case.slots)
        ready[:] = os.urandom(4096) * (case.nbytes // 4096)
        yield self._copies(_address(ready), _address(ring), case)

    @staticmethod
    def _copies(source: int, ring: int, case: Case) -> Iterator[int]:
        leaf, copy = case.nbytes // case.leaves, ctypes.memmove
        offsets = [leaf * n for n in range(case.leaves)]
        while True:
            for start in range(ring, ring + case.nbytes * case.slots, case.nbytes):
                for offset in offsets:
                    copy(start + offset, source + offset, leaf)
                yield case.nbytes


class RawTcp(Way):
    # A forked process has the same command line; the one below the root is the sender.
    roles = (Role("benchmarks.floors", "sender"),)

    @contextmanager
    def open(self, case: Case) -> Iterator[Iterator[int]]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sender = os.fork()
            if not sender:
                _send(listener.getsockname(), case)
            try:
                sock, _ = listener.accept()
                with sock:
                    yield self._received(sock, case)
            finally:
                os.kill(sender, signal.SIGKILL)
                os.waitpid(sender, 0)

    @staticmethod
    def _received(sock: socket.socket, case: Case) -> Iterator[int]:
        receive = sock.recv_into
        view = memoryview(_memory(case.nbytes * case.slots))
        slots = [view[start : start + case.nbytes] for start in range(0, len(view), case.nbytes)]
        while True:
            for slot in slots:
                got = receive(slot)
                while got < case.nbytes:
                    more = receive(slot[got:])
                    if not more:
                        raise ConnectionError(
                            "the process that sends the batches has ended during the measurement: see its messages "
                            "above"
                        )
                    got += more
                yield case.nbytes


def _send(address: tuple[str, int], case: Case) -> None:
    """Run the sending process: send the case's batches until the process is killed."""
    try:
        memory = _memory(case.nbytes * case.slots)
        memory[:] = os.urandom(4096) * (len(memory) // 4096)
        view = memoryview(memory)
        slots = [view[start : start + case.nbytes] for start in range(0, len(view), case.nbytes)]
        with socket.create_connection(address) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send = sock.sendall
            while True:
                for slot in slots:
                    send(slot)
    except OSError:
        pass  # the receiver has ended
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve(Memcpy if sys.argv[1] == "memcpy" else RawTcp)
