"""Errors of a consumer that the daemon does not let in, on both lanes."""

from __future__ import annotations

import socket

import pytest
from lane_doors import listeners, refusing
from tests.lanes.conftest import next_frame
from waiting import until

from penstock.client.stream.receiver_process import Receiver
from penstock.proto.errors import AuthenticationError, PenstockError, SupersededError
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import CLOSE, ERROR, LANE_PROTOCOL, connect_local
from penstock.proto.lane.tcp import sealed
from penstock.proto.rpc.tls import host_of
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon.listeners import slot_of


@pytest.mark.parametrize("lane", ["local", "tcp"])
@pytest.mark.parametrize(
    ("error", "protocol", "kind", "name"),
    [
        (SupersededError("generation 2 is here"), LANE_PROTOCOL, CLOSE, "SupersededError"),
        (AuthenticationError("no such ticket"), LANE_PROTOCOL, ERROR, "AuthenticationError"),
        (AuthenticationError("not even asked"), LANE_PROTOCOL - 1, ERROR, "VersionSkewError"),
    ],
)
def test_who_is_refused_hears_why(
    receiver: Receiver, lane: str, error: PenstockError, protocol: int, kind: int, name: str
) -> None:
    with listeners(refusing(error)) as (opened, _):
        hello = lane_pb2.Hello(protocol=protocol, next_total=1)
        if lane == "tcp":
            hello.target = opened.tcp_address
        sock = connect_local(receiver.start() if lane == "tcp" else opened.local_address, 5)
        sock.send(hello.SerializeToString())
        consumer = Consumer(sock, "a daemon")
        frame = next_frame(consumer)
        assert (frame.kind, frame.error.name) == (kind, name)
        consumer.close()


def test_lanes_of_an_ended_slot_end_with_it() -> None:
    """The consumer's host may have vanished, and its TCP connection not know it."""
    runners: list[socket.socket] = []

    async def attach(connection: socket.socket, hello: lane_pb2.Hello) -> None:
        runners.append(connection)

    with listeners(attach) as (opened, loop):
        lanes = []
        for slot in (0, 1):
            hello = lane_pb2.Hello(
                protocol=LANE_PROTOCOL, run="job/0", attempt=1, slot=slot, generation=1, next_total=1
            )
            sock = socket.create_connection(host_of(opened.tcp_address), 5)
            message = hello.SerializeToString()
            sock.sendall(sealed(message))
            lanes.append((sock, slot_of(hello)))
        (gone, key), (other, _) = lanes
        other.settimeout(0.2)
        until(lambda: len(opened._senders) == 2, 5, "the lanes were not opened")
        loop.call_soon_threadsafe(opened.drop, key)
        assert gone.recv(1) == b""
        with pytest.raises(TimeoutError):
            other.recv(1)
        gone.close()
        other.close()
    for runner in runners:
        runner.close()
