"""Iterator over a box's batches on all ranks of the box, which request each batch together: one rank, the reader,
iterates the loader and sends the batches to the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.client.integrations.batch_messages import BatchMessages
from penstock.client.integrations.batch_relay import Kind, Message, Relay
from penstock.proto.errors import PenstockError, error_named

__all__ = ["NOTHING", "error_of", "failure_message", "relayed"]

NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
"""Content of a message without content."""


def relayed(batches: Iterator[Any] | None, relay: Relay, rank: int) -> Iterator[Any]:
    """Yield the reader's batches on all ranks of its box. All of them must request each batch together, and iterate to
    the end. `batches`: iterator over the loader on the reader; None on the other ranks.

    Raises an error of the reader on all ranks of the box: on the reader the error itself; on the others one of the same
    class if that is a PenstockError, else a PenstockError with the class's name in its text."""
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
    """Return the message by which the reader, `rank`, tells the other ranks its error."""
    name, text = type(error).__name__, str(error)
    if not isinstance(error, PenstockError):
        name, text = PenstockError.__name__, f"the reader, rank {rank}, failed with {name}: {text}"
    return Kind.ERROR, torch.frombuffer(bytearray(f"{name}\n{text}".encode()), dtype=torch.uint8)


def error_of(content: torch.Tensor) -> PenstockError:
    """Return the error in the content of a message that `failure_message` made."""
    name, _, text = content.numpy().tobytes().decode(errors="replace").partition("\n")
    return error_named(name, text)
