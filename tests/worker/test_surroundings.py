"""What input_fn leaves besides memory: found if a forked child would share or lack it."""

from __future__ import annotations

import mmap
import multiprocessing.shared_memory
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
from forked import join_all

from penstock.proto.state import assignment as assignments
from penstock.worker.runner.surroundings import Surroundings

KEPT: list[Any] = []


def a_thread() -> None:
    over = threading.Event()
    KEPT.append(over)
    threading.Thread(target=over.wait, name="prefetch", daemon=True).start()


def a_socket() -> None:
    KEPT.extend(socket.socketpair())


def a_pipe() -> None:
    KEPT.extend(os.pipe())


def an_epoll() -> None:
    KEPT.append(selectors.EpollSelector())


def a_process() -> None:
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.DEVNULL))
    KEPT[-1].stdin = None


def shared_memory() -> None:
    KEPT.append(mmap.mmap(-1, 4096))
    KEPT[-1][0] = 1


def named_shared_memory() -> None:
    block = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
    block.unlink()
    KEPT.append(block)


def the_epoch() -> None:
    KEPT.append(assignments.current_assignment().epoch)


def another_socket() -> None:
    """It has the descriptor of the one that was there before."""
    fd = KEPT.pop().detach()
    other = socket.socket(socket.AF_UNIX)
    os.dup2(other.fileno(), fd)
    other.close()


def arrow() -> None:
    """Its pools make threads that its fork handlers start again."""
    import pyarrow as pa
    import pyarrow.dataset

    with tempfile.TemporaryDirectory() as folder:
        table = pa.table({"x": list(range(100_000))})
        pyarrow.dataset.write_dataset(
            table, folder, format="parquet", max_rows_per_file=10_000, max_rows_per_group=1000
        )
        assert pyarrow.dataset.dataset(folder).to_table().num_rows == 100_000


def numpy_blas() -> None:
    import numpy as np

    assert (np.ones((600, 600)) @ np.ones((600, 600)))[0, 0] == 600


def files_and_memory() -> None:
    KEPT.append(open(__file__))  # noqa: SIM115
    KEPT.append(mmap.mmap(KEPT[-1].fileno(), 0, prot=mmap.PROT_READ))
    KEPT.append(bytearray(64 << 20))
    KEPT.append(mmap.mmap(KEPT[0].fileno(), 0, flags=mmap.MAP_PRIVATE))
    assignments.current_assignment()


def what_ended() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    subprocess.run(["true"], check=True)
    for end in socket.socketpair():
        end.close()


def found(leave: Callable[[], None]) -> str:
    before = Surroundings()
    leave()
    return before.left()


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (a_thread, "input_fn has left 1 threads (prefetch)"),
        (a_socket, "input_fn has left a socket open"),
        (another_socket, "input_fn has left a socket open"),
        (a_pipe, "input_fn has left a pipe open"),
        (an_epoll, "input_fn has left a eventpoll open"),
        (a_process, "input_fn has left 1 child processes"),
        (shared_memory, "input_fn has left writable shared memory"),
        (named_shared_memory, "input_fn has left "),
        (the_epoch, "input_fn has read current_assignment().epoch"),
        (arrow, ""),
        (numpy_blas, ""),
        (files_and_memory, ""),
        (what_ended, ""),
    ],
)
def test_what_a_child_would_share_is_found(leave: Callable[[], None], said: str) -> None:
    def child() -> None:
        assignments.set_assignment(assignments.NEUTRAL)
        if leave is another_socket:
            KEPT.append(socket.socket(socket.AF_UNIX))
        text = found(leave)
        assert text.startswith(said) if said else not text, text
        if not said:
            join_all(leave)  # it works in a forked child

    join_all(child)  # in a child, as in a worker: here threads of other tests end at any time
