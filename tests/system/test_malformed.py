"""Malformed and oversized requests of a caller whose token is right and who keeps to none of our limits.

They are refused, and the coordinator continues. docs/limits.md says how much of a request gRPC itself holds until then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import grpc
import pytest
from bearer import metadata
from census import peak_memory
from cluster import TOKEN, Cluster, running

from penstock.proto.errors import SAME_RELEASE
from penstock.proto.rpc.auth_interceptor import SERVICE
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.rpc.channel import REQUEST_MAX
from penstock.proto.rpc.wire_errors import METADATA_MAX

Call = Callable[..., tuple[grpc.StatusCode, str]]
MIB = 1 << 20
UNCAPPED = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 * MIB),
    ("grpc.absolute_max_metadata_size", 64 * MIB),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("malformed") / "state") as cluster:
        yield cluster


@pytest.fixture
def call(cluster: Cluster) -> Iterator[Call]:
    """A raw call: its status and what that says. An ordinary one works after them all, in the same process."""
    with grpc.insecure_channel(cluster.address, options=UNCAPPED) as channel:

        def made(
            method: str, request: bytes, header: int = 0, compression: grpc.Compression = grpc.Compression.NoCompression
        ) -> tuple[grpc.StatusCode, str]:
            sent = (*metadata(TOKEN), *([("x", "v" * header)] if header else []))
            # A stream of one looks the same.
            make: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/{method}")
            try:
                make(request, metadata=sent, timeout=30, compression=compression)
            except grpc.RpcError as error:
                return error.code(), error.details() or ""
            return grpc.StatusCode.OK, ""

        yield made
    with CoordinatorClient(cluster.address, TOKEN, insecure=True) as ordinary:
        assert ordinary.status().version
    assert cluster.coordinator.poll() is None


def test_a_message_above_the_cap_is_refused(call: Call) -> None:
    for size in (REQUEST_MAX + 1, 5 * MIB):
        code, said = call("PutBlob", bytes(size))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"({size} vs. {REQUEST_MAX})" in said


def test_only_headers_above_the_cap_are_refused(call: Call) -> None:
    for _ in range(3):
        assert call("Status", b"", header=METADATA_MAX - 1024) == (grpc.StatusCode.OK, "")
        for size in (METADATA_MAX, METADATA_MAX * 5 // 4, 2 * METADATA_MAX, MIB):
            code, said = call("Status", b"", header=size)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"vs. {METADATA_MAX}" in said


def test_a_compressed_message_is_not_unpacked(cluster: Cluster, call: Call) -> None:
    before = peak_memory(cluster.coordinator.pid)
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        code, _ = call("Status", bytes(96 * MIB), compression=compression)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert peak_memory(cluster.coordinator.pid) < before + 64 * MIB


def test_non_request_is_refused_with_the_method(call: Call) -> None:
    rng = random.Random(1)
    for method in ("Status", "RegisterWorker", "Heartbeat", "OpenRun", "PutBlob", "PutSnapshot"):
        for size in (1, 10, 1000, MIB):
            data = b"\xff" + rng.randbytes(size)  # a field of the wire type 7, which there is not
            code, said = call(method, data)
            assert (code, said) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a request of {method} cannot be decoded. {SAME_RELEASE}",
            )
