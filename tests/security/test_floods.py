"""Calls that are small on the wire and large behind it, and headers without end: what they cost a coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from bearer import metadata
from census import peak_memory
from cluster import TOKEN, Cluster, running

from penstock.appliance.model.limits import MIB
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorStub

METHOD = "/penstock.proto.v1.Coordinator/OpenRun"
SENT = 192 * MIB
ALLOWED = 96 * MIB
"""Bytes that the coordinator's memory may grow by: what it reads of a message until it knows that it is too long."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as cluster:
        yield cluster


def answers(cluster: Cluster) -> bool:
    with grpc.insecure_channel(cluster.address) as channel:
        return not CoordinatorStub(channel).Status(pb.StatusRequest(), metadata=metadata(TOKEN), timeout=30).runs


@pytest.mark.parametrize("token", [TOKEN, "a-wrong-token-0123456789"])
def test_a_compressed_bomb_is_not_unpacked(cluster: Cluster, token: str) -> None:
    """192 MiB of zeros, 0.2 on the wire."""
    assert answers(cluster)
    before = peak_memory(cluster.coordinator.pid)
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(cluster.address, options=options, compression=grpc.Compression.Gzip) as channel:
        call: Any = channel.unary_unary(METHOD)
        with pytest.raises(grpc.RpcError) as refused:
            call(bytes(SENT), metadata=metadata(token), timeout=60)
    assert refused.value.code() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    )
    assert peak_memory(cluster.coordinator.pid) - before < ALLOWED
    assert answers(cluster)


def test_headers_without_end_are_refused(cluster: Cluster) -> None:
    assert answers(cluster)
    before = peak_memory(cluster.coordinator.pid)
    flood = tuple((f"x-{number}", "y" * 8000) for number in range(256))
    with grpc.insecure_channel(cluster.address, options=[("grpc.max_metadata_size", 1 << 30)]) as channel:
        call: Any = channel.unary_unary(METHOD)
        for _ in range(20):
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", metadata=(*metadata(TOKEN), *flood), timeout=60)
            assert refused.value.code() in (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.UNAVAILABLE,  # where the connection was ended for it
            )
    assert peak_memory(cluster.coordinator.pid) - before < ALLOWED
    assert answers(cluster)
