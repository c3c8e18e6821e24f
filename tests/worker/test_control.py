"""Messages between a daemon and its children, over a real socket pair."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

import pytest
from waiting import until

from penstock.proto.errors import InputFnError, ProtocolError
from penstock.worker.processes.control_channel import (
    MAX_JSON,
    ControlChannel,
    ControlMessage,
    LargeMessage,
    close_all,
    decoded,
    packed,
    plain_detail,
)
from penstock.worker.processes.progress_page import ENTRIES


def pair() -> tuple[ControlChannel, ControlChannel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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


def test_a_large_message_comes_in_memory_that_nobody_can_change() -> None:
    ours, theirs = pair()
    payload, labels = bytes(range(256)) * 4096, {str(number): "label" for number in range(20_000)}
    read, write = os.pipe()
    ours.send("point", payload, fds=[read], labels=labels)
    # one at a time: until it is read it is nobody's memory
    assert not ours.send_packet([b""], [], [read], wait=False)
    large = theirs.receive_packet()
    assert isinstance(large, LargeMessage)
    for change in (lambda fd: os.pwrite(fd, b"x", 0), lambda fd: os.ftruncate(fd, 0)):
        with pytest.raises(PermissionError):
            change(large.fds[-1])
    data, got = large.read()
    message = decoded(data, large.fds, got)
    assert (message.kind, message.fields["labels"], message.payload) == ("point", labels, payload)
    os.close(write)
    assert os.read(message.fds[0], 1) == b""
    close_all([read, *message.fds])
    before = len(os.listdir("/proc/self/fd"))
    ours.send("point", payload)
    with pytest.raises(ProtocolError, match="at most 9 bytes"):
        theirs.receive_packet().read(9)  # type: ignore[union-attr]
    most = [[(1 << 64) - 1] * 3] * ENTRIES
    ours.send("done", payload, replayed=most)
    data, got = theirs.receive_packet().read(len(payload))  # type: ignore[union-attr]
    assert decoded(data, [], got).fields["replayed"] == most, "the largest that a child sends"
    ours.send("point", payload, labels=labels)
    with pytest.raises(ProtocolError, match=f"{MAX_JSON} of JSON"):
        theirs.receive_packet().read(len(payload))  # type: ignore[union-attr]
    parts, (memory,) = packed(ControlMessage("point", {}, payload))
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.write(loose, os.pread(memory, 1 << 21, 0))
    with open("/dev/null") as null:
        for fd in (loose, null.fileno()):
            ours.send_packet(parts, [], [fd])
            with pytest.raises(ProtocolError):
                theirs.receive()
    close_all([loose, memory])
    until(lambda: len(os.listdir("/proc/self/fd")) == before, what="/dev/null is closed too, by a thread")
    ours.close()
    theirs.close()


def test_what_waits_can_be_looked_at() -> None:
    """Also what comes after a large message, and more than once."""
    ours, theirs = pair()
    with open("/dev/null") as null:
        ours.send("point", bytes(1 << 20))
        ours.send("prepare", total=1)
        ours.send("attach", b"hello", fds=[null.fileno()])
    for _ in range(2):
        prepare, attach = theirs.peek()
        assert (prepare.kind, attach.kind, attach.payload, len(attach.fds)) == ("prepare", "attach", b"hello", 1)
        close_all(attach.fds)
    assert [received(theirs).kind for _ in range(2)] == ["point", "prepare"]
    close_all(received(theirs).fds)
    assert theirs.peek() == []
    ours.close()
    theirs.close()


def test_descriptors_that_wait_as_they_are_closed_hold_nobody_up() -> None:
    """A daemon closes what children have sent: connections that linger for their unsent bytes, for example."""
    with socket.create_server(("127.0.0.1", 0), backlog=20) as listener:
        all_linger = []
        for _ in range(20):
            lingers = socket.create_connection(listener.getsockname())
            lingers.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    lingers.send(bytes(1 << 16))
            lingers.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 8))
            lingers.setblocking(True)
            all_linger.append(lingers.detach())
        began, threads = time.monotonic(), threading.active_count()
        close_all(all_linger)
        assert time.monotonic() - began < 4
        time.sleep(0.5)
        assert threading.active_count() - threads <= 8
        assert time.monotonic() - began < 6
    until(lambda: threading.active_count() == threads, what="all are closed")  # by the end of the listener


def test_an_error_keeps_its_name_and_traceback() -> None:
    detail = plain_detail(InputFnError("it broke", remote_traceback="line 3"))
    assert detail == {"name": "InputFnError", "message": "it broke", "remote_traceback": "line 3"}
    other = plain_detail(KeyError("k"))
    assert other["name"] == "PenstockError"
    assert "KeyError: 'k'" in other["message"]
    assert plain_detail(ValueError("bad \ud800"))["message"] == "ValueError: bad \\ud800"
    assert len(plain_detail(ValueError("y" * 10**6))["message"]) < 10_000
