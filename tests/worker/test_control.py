"""Messages between a daemon and its children, over a real socket pair."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from penstock.proto.errors import InputFnError
from penstock.worker.processes.control_channel import (
    ControlChannel,
    ControlMessage,
    plain_detail,
)


def pair() -> tuple[ControlChannel, ControlChannel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return ControlChannel(ours), ControlChannel(theirs)


def received(channel: ControlChannel) -> ControlMessage:
    message = channel.receive()
    assert message is not None
    return message


def test_fields_payload_and_descriptors_arrive() -> None:
    ours, theirs = pair()
    read, write = os.pipe()
    ours.send("first", b"payload", fds=[write], total=3)
    ours.send("second")
    os.close(write)
    message = received(theirs)
    assert (message.kind, message.fields, message.payload) == ("first", {"total": 3}, b"payload")
    os.write(message.fds[0], b"x")
    assert os.read(read, 1) == b"x"
    assert received(theirs).kind == "second"
    for fd in (read, *message.fds):
        os.close(fd)
    ours.sock.close()
    theirs.sock.close()


@pytest.mark.parametrize("taken", [1, 60])
def test_partial_send_is_continued(taken: int) -> None:
    class Short(socket.socket):
        def sendmsg(self, buffers: Any, *rest: Any) -> int:
            return self.send(b"".join(buffers)[:taken])

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender, receiver = ControlChannel(Short(fileno=ours.detach())), ControlChannel(theirs)
    for payload in (b"", b"payload" * 100):
        sender.send("cut", payload, total=3)
        message = received(receiver)
        assert (message.fields, message.payload) == ({"total": 3}, payload)
    sender.sock.close()
    theirs.close()


def test_an_error_keeps_its_name_and_traceback() -> None:
    detail = plain_detail(InputFnError("it broke", remote_traceback="line 3"))
    assert detail == {"name": "InputFnError", "message": "it broke", "remote_traceback": "line 3"}
    other = plain_detail(KeyError("k"))
    assert other["name"] == "PenstockError"
    assert "KeyError: 'k'" in other["message"]
    assert plain_detail(ValueError("bad \ud800"))["message"] == "ValueError: bad \\ud800"
    assert len(plain_detail(ValueError("y" * 10**6))["message"]) < 10_000
