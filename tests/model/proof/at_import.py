"""Dataset that reads on in a file that its module has opened, and in a socket if socket_at_import.py has."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from proof.mutations import mutable
from torch.utils.data import DataLoader, IterableDataset

from penstock.worker import current_assignment

LINES = 200
FILE = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115  # it is the user who never closes it
FILE.write(b"".join(b"%07d\n" % number for number in range(LINES)))
FILE.seek(0)
SOCKETS: list[socket.socket] = []


def open_sockets() -> None:
    """Open a pair of sockets, and fill one with numbers."""
    reading, writing = socket.socketpair()
    writing.sendall(b"".join(b"%07d\n" % (1000 + number) for number in range(LINES)))
    SOCKETS.extend((reading, writing))


class Opened(IterableDataset[Any]):
    """What it reads depends on all that was read before from what the module has opened."""

    def __init__(self, length: int) -> None:
        self.length, self.with_socket = length, bool(SOCKETS)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            numbers = [current_assignment().global_worker_id, int(FILE.read(8))]
            if self.with_socket:
                numbers.append(int(SOCKETS[0].recv(8)))
            yield torch.tensor([*numbers, float(torch.rand(()))])


@mutable
def opens_file(length: int = 20) -> Any:
    return DataLoader(Opened(length), batch_size=None)
