"""Messages from the reader of a box, the rank that reads the box's batches, to the box's other ranks, over gloo.

The reader sends to the leaders of the other stages (rank_groups.py), which broadcast to their stages, whose ranks run
in lockstep. The last stage requests a batch only when its activations arrive, and they would never come if the reader
waited for that. So a thread of the reader sends; the pipeline's depth limits its queue. Every wait ends after the
timeout of the process groups."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, Final

import torch

from penstock.client.host_group import HostGroup, open_group
from penstock.client.integrations.batch_messages import BatchMessages
from penstock.client.integrations.rank_groups import RankGroups, Stages
from penstock.proto.errors import DeadlineError, LaneLostError, PenstockError, error_named, malformed

MAX_MESSAGE_BYTES: Final = 4 << 30
"""Largest message in bytes for which a rank allocates memory."""


class Kind(IntEnum):
    BATCH = 0
    END = 1
    ERROR = 2
    """The content is the name of the error's class, a newline, and the error's text."""
    STATE = 3


Message = tuple[Kind, torch.Tensor]
"""The content is a uint8 tensor of shape [bytes]."""

NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Relay:
    """Connection with the other ranks of the box. All ranks of the job create theirs in the same order."""

    def __init__(self, ranks: RankGroups, stages: Stages, timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self._peers = open_group(ranks.peers, ranks.rank, timeout_s)
        self._leaders = open_group(ranks.leaders, ranks.rank, timeout_s) if ranks.leads else None
        self._readers = open_group(ranks.readers, ranks.rank, timeout_s) if ranks.reads else None
        targets = ranks.targets(stages) if ranks.reads else ()
        self._sender = _Sender(targets, self._leaders) if targets and self._leaders is not None else None

    def send(self, message: Message) -> None:
        """On the reader: send a message to the other ranks of the box that get batches."""
        if self._sender is not None:
            self._sender.put(message)
        self._broadcast(message, self._peers)

    def receive(self) -> Message:
        message = None
        if self._ranks.leads:
            assert self._leaders is not None
            receive, reader = self._leaders.receive, self._ranks.leaders[0]
            with _named(self._ranks):
                message = _exchanged(partial(receive, rank=reader), None)
        return self._broadcast(message, self._peers)

    def share(self, message: Message | None) -> Message:
        """Return the reader's `message` on all ranks of the box, which call this together, the others with None."""
        if self._sender is not None:
            self._sender.drain(self._timeout_s)
        if self._ranks.leads:
            message = self._broadcast(message, self._leaders)
        return self._broadcast(message, self._peers)

    def _broadcast(self, message: Message | None, group: HostGroup | None) -> Message:
        """Return the first rank's `message` on all ranks of the group. The others pass None."""
        if group is None:
            assert message is not None
            return message
        with _named(self._ranks):
            return _exchanged(group.broadcast, message)

    def sum_over_boxes(self, count: int) -> int:
        """Return the sum of the counts that the readers of all boxes pass, together."""
        if self._readers is None:
            return count
        total = torch.tensor(count, dtype=torch.int64)
        with _named(self._ranks):
            self._readers.sum(total)
        return int(total)

    def close(self) -> None:
        """Wait until the queued messages are sent, and end the sending thread."""
        if self._sender is not None:
            self._sender.close(self._timeout_s)


class _Sender:
    def __init__(self, targets: Sequence[int], group: HostGroup) -> None:
        self._targets, self._group = targets, group
        self._waiting: queue.SimpleQueue[Message | threading.Event | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-relay", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        self._check()
        self._waiting.put(message)

    def drain(self, timeout_s: float) -> None:
        """Wait until all is sent. Raises DeadlineError, or LaneLostError if a message could not be sent."""
        sent = threading.Event()
        self._waiting.put(sent)
        if not sent.wait(timeout_s):
            self._check()
            raise DeadlineError(
                f"ranks {list(self._targets)} have not received the batches of their box within {timeout_s:.0f} s"
            )
        self._check()

    def close(self, timeout_s: float) -> None:
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _check(self) -> None:
        if self._error is not None:
            raise LaneLostError(
                f"batches could not be sent to ranks {list(self._targets)} of the same box: {self._error}"
            ) from self._error

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._error is None:
                try:
                    self._send(item)
                except Exception as error:
                    self._error = error

    def _send(self, message: Message) -> None:
        for target in self._targets:
            _exchanged(partial(self._group.send, rank=target), message)


@contextmanager
def _named(ranks: RankGroups) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LaneLostError(
            f"rank {ranks.rank} could not exchange batches with the other ranks of box {ranks.box}: {error}"
        ) from error


def _exchanged(move: Callable[[torch.Tensor], None], message: Message | None) -> Message:
    """Send `message` by calls of `move`, which sends a tensor; None: receive one, by which `move` fills a tensor."""
    numbers = [-1, 0] if message is None else [message[0], message[1].numel()]
    header = torch.tensor(numbers, dtype=torch.int64)
    move(header)
    content = _content(header) if message is None else message[1]
    if content.numel():
        move(content)
    return Kind(int(header[0])), content


def _content(header: torch.Tensor) -> torch.Tensor:
    kind, nbytes = header.tolist()
    if kind not in iter(Kind) or not 0 <= nbytes <= MAX_MESSAGE_BYTES:
        raise malformed(f"a message of a box's reader must be of a known kind, got kind {kind} of {nbytes} bytes")
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def relayed(batches: Iterator[Any] | None, relay: Relay, rank: int) -> Iterator[Any]:
    """Yield the reader's batches on all ranks of its box, which request each together, to the end. `batches`: on the
    reader.

    The reader's error is raised on all ranks: on others in the same class if that is a PenstockError, else as a
    PenstockError with the class's name in its text."""
    return _received(relay) if batches is None else _sent(batches, relay, rank)


def _sent(batches: Iterator[Any], relay: Relay, rank: int) -> Iterator[Any]:
    messages = BatchMessages()
    while True:
        try:
            batch = next(batches)
            message: Message = Kind.BATCH, messages.pack(batch)
        except StopIteration:
            relay.send((Kind.END, NOTHING))
            return
        except Exception as error:
            relay.send(failure_message(error, rank))
            raise
        relay.send(message)
        yield batch


def _received(relay: Relay) -> Iterator[Any]:
    messages = BatchMessages()
    while True:
        kind, content = relay.receive()
        if kind is Kind.END:
            return
        if kind is not Kind.BATCH:
            raise error_of(content)
        yield messages.unpack(content)


def failure_message(error: Exception, rank: int) -> Message:
    name, text = type(error).__name__, str(error)
    if not isinstance(error, PenstockError):
        name, text = PenstockError.__name__, f"the reader, rank {rank}, failed with {name}: {text}"
    return Kind.ERROR, torch.frombuffer(bytearray(f"{name}\n{text}".encode()), dtype=torch.uint8)


def error_of(content: torch.Tensor) -> PenstockError:
    name, _, text = content.numpy().tobytes().decode(errors="replace").partition("\n")
    return error_named(name, text)
