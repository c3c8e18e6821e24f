"""What the daemon sends to a runner after the assignment, before the slot starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from penstock.proto.state.codec import decode_state
from penstock.worker.loader.restart_points import RestartPoint
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage, payload_of
from penstock.worker.runner.slot_stream import StopError

__all__ = ["StartData", "receive_start"]


@dataclass
class StartData:
    """Data with which a slot starts."""

    resume: dict[str, Any] | None = None
    """Decoded state from which the launch resumes; None: it begins without a state, or the daemon sends it later."""
    points: list[RestartPoint] = field(default_factory=list)
    """Restart points of the slot's previous runner."""
    firsts: list[list[int]] = field(default_factory=list)
    """First batches of epochs that the slot's previous runners have made: epoch, the slot's batches before it, digest.
    """
    begins: bool = False
    """True if the restart point at the launch's start is not in `points`, so that the runner must make it again."""


def receive_start(channel: ControlChannel) -> StartData:
    """Receive the data with which the slot starts. Raises StopError if the daemon stops the slot instead."""
    sent = StartData()
    while (message := cast(ControlMessage, channel.receive())).kind != "go":
        if message.kind == "resume":
            sent.resume = cast(dict[str, Any], decode_state(payload_of(message)))
        elif message.kind == "point":
            sent.points.append(RestartPoint.decode(message.payload))
        elif message.kind == "firsts":
            sent.firsts = message.fields["firsts"]
        elif message.kind == "begins":
            sent.begins = True
        elif message.kind == "stop":
            raise StopError
    return sent
