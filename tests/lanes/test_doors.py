"""What a consumer hears that the daemon does not let in, on both lanes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from refusing_doors import doors
from tests.lanes.conftest import next_frame

from penstock.client.landing import Lander
from penstock.proto.errors import AuthenticationError, PenstockError, SupersededError
from penstock.proto.lane import LANE_PROTOCOL, Consumer, connect_local
from penstock.proto.v1 import lane_pb2


@pytest.fixture(scope="module")
def lander() -> Iterator[Lander]:
    lander = Lander()
    yield lander
    lander.stop()


@pytest.mark.parametrize("lane", ["local", "tcp"])
@pytest.mark.parametrize(
    ("error", "protocol", "kind", "name"),
    [
        (SupersededError("generation 2 is here"), LANE_PROTOCOL, lane_pb2.CLOSE, "SupersededError"),
        (AuthenticationError("no such ticket"), LANE_PROTOCOL, lane_pb2.ERROR, "AuthenticationError"),
        (AuthenticationError("not even asked"), LANE_PROTOCOL - 1, lane_pb2.ERROR, "VersionSkewError"),
    ],
)
def test_who_is_refused_hears_why(
    lander: Lander, lane: str, error: PenstockError, protocol: int, kind: int, name: str
) -> None:
    with doors(error) as opened:
        hello = lane_pb2.Hello(protocol=protocol, next_total=1)
        if lane == "tcp":
            hello.target = opened.tcp_address
        sock = connect_local(lander.start() if lane == "tcp" else opened.local_address, 5)
        sock.send(hello.SerializeToString())
        consumer = Consumer(sock, "a daemon")
        frame = next_frame(consumer)
        assert (frame.kind, frame.error.name) == (kind, name)
        consumer.close()
