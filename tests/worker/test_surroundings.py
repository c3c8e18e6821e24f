"""What input_fn leaves besides memory: found if a forked child would share or lack it."""

from __future__ import annotations

import mmap
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


def a_process() -> None:
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.DEVNULL))
    KEPT[-1].stdin = None


def shared_memory() -> None:
    KEPT.append(mmap.mmap(-1, 4096))
    KEPT[-1][0] = 1


def the_epoch() -> None:
    KEPT.append(assignments.current_assignment().epoch)


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


def files_and_memory() -> None:
    KEPT.append(open(__file__))  # noqa: SIM115
    KEPT.append(mmap.mmap(KEPT[-1].fileno(), 0, prot=mmap.PROT_READ))
    KEPT.append(bytearray(64 << 20))
    KEPT.append(mmap.mmap(KEPT[0].fileno(), 0, flags=mmap.MAP_PRIVATE))
    assignments.current_assignment()


def found(leave: Callable[[], None]) -> str:
    before = Surroundings()
    leave()
    return before.left()


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (a_thread, "input_fn has left 1 threads (prefetch)"),
        (a_socket, "input_fn has left a socket open"),
        (a_process, "input_fn has left 1 child processes"),
        (shared_memory, "input_fn has left writable shared memory"),
        (the_epoch, "input_fn has read current_assignment().epoch"),
        (arrow, ""),
        (files_and_memory, ""),
    ],
)
def test_what_a_child_would_share_is_found(leave: Callable[[], None], said: str) -> None:
    def child() -> None:
        assignments.set_assignment(assignments.NEUTRAL)
        text = found(leave)
        assert text.startswith(said) if said else not text, text
        if not said:
            join_all(leave)  # it works in a forked child

    join_all(child)  # in a child, as in a worker: here threads of other tests end at any time
