"""Requests of a caller whose token is right and who keeps to none of our limits: too large, of as many parts as fit,
small on the wire and large behind it, malformed, with headers without end. What they cost a coordinator, which refuses
them and continues. docs/limits.md says how much of a request gRPC itself holds until then."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from bearer import metadata
from census import peak_memory
from cluster import TOKEN, Cluster, running
from fake_cluster import FakeCluster, limited

from penstock.appliance.core import views
from penstock.appliance.core.run_end import EndedBy
from penstock.appliance.limits import MIB
from penstock.proto.errors import SAME_RELEASE, InvalidArgumentError, OverloadedError
from penstock.proto.rpc.auth_interceptor import SERVICE
from penstock.proto.rpc.bounds import message_bounds
from penstock.proto.rpc.bounds.message_bounds import LargeRequests, check_fields, parsed_request
from penstock.proto.rpc.channel import REPLY_MAX, REQUEST_MAX
from penstock.proto.rpc.wire_errors import METADATA_MAX
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorStub

LARGEST = 4 * MIB - 64
BOX = pb.WatchRunRequest(run="job/0", attempt=1, client_id="c").SerializeToString()
HEARTBEAT = pb.HeartbeatRequest(worker="w", session="s").SerializeToString()
OPENING = pb.OpenRunRequest(
    job="other",
    client_id="c",
    num_boxes=1,
    num_workers_per_box=1,
    loader=records_pb2.LoaderSpec(input_fn="m:f"),
).SerializeToString()
ALLOWED_S = 0.3
"""Processor seconds that one call may take: the slowest took nine."""
ALLOWED = 64 * MIB
"""Bytes that the coordinator's memory may grow by."""
Call = Callable[..., tuple[grpc.StatusCode, str]]
UNCAPPED = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 * MIB),
    ("grpc.absolute_max_metadata_size", 64 * MIB),
]


def number(value: int) -> bytes:
    """A varint."""
    return bytes([value & 127 | 128]) + number(value >> 7) if value > 127 else bytes([value])


def part(field: int, data: bytes) -> bytes:
    """A field of bytes, or of a message."""
    return number(field << 3 | 2) + number(len(data)) + data


def full_of(data: bytes) -> bytes:
    return data * (LARGEST // len(data))


def trouble() -> bytes:
    return pb.LaneTrouble(slot=0, generation=1).SerializeToString()


REQUESTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty reports": ("Heartbeat", lambda: HEARTBEAT + full_of(part(5, b""))),
    "live slots": ("WatchRun", lambda: BOX + part(7, b"\x08\x05" + part(3, b"\x01" * (LARGEST - 64)) + part(5, b""))),
    "progress of a query": ("FetchState", lambda: part(6, BOX + full_of(part(71, trouble()))[: 3 * MIB // 8 * 8])),
    "unknown fields in a start": ("OpenRun", lambda: OPENING + part(14, full_of(b"\xa0\x06\x01"))),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as cluster:
        with grpc.insecure_channel(cluster.address) as channel:
            stub = CoordinatorStub(channel)
            opening = pb.OpenRunRequest.FromString(OPENING)
            opening.job = "job"
            stub.RegisterWorker(
                pb.RegisterWorkerRequest(worker="w", session="s", slots=1), metadata=metadata(TOKEN), timeout=30
            )
            stub.OpenRun(opening, metadata=metadata(TOKEN), timeout=30)
        yield cluster


def used_s(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def call(cluster: Cluster) -> Iterator[Call]:
    """A raw call: its status and what that says. It takes little memory, and an ordinary one works after them all, in
    the same process."""
    before = peak_memory(cluster.coordinator.pid)
    with grpc.insecure_channel(cluster.address, options=UNCAPPED) as channel:

        def made(
            method: str, request: bytes, header: int = 0, compression: grpc.Compression = grpc.Compression.NoCompression
        ) -> tuple[grpc.StatusCode, str]:
            sent = (*metadata(TOKEN), *([("x", "v" * header)] if header else []))
            kind: Any = channel.unary_stream if method == "FetchState" else channel.unary_unary
            reply = kind(f"/{SERVICE}/{method}")
            try:
                # A stream of one request looks the same.
                list(reply(request, metadata=sent, timeout=60, compression=compression))
            except grpc.RpcError as error:
                return error.code(), error.details() or ""
            return grpc.StatusCode.OK, ""

        yield made
        assert CoordinatorStub(channel).Status(pb.StatusRequest(), metadata=metadata(TOKEN), timeout=30).version
    assert peak_memory(cluster.coordinator.pid) - before < ALLOWED


@pytest.mark.parametrize("name", REQUESTS)
def test_a_large_request_costs_little(cluster: Cluster, call: Call, name: str) -> None:
    method, request = REQUESTS[name]
    data = request()
    assert 3 * MIB // 2 < len(data) <= 4 * MIB
    began_s = used_s(cluster.coordinator.pid)
    code, said = call(method, data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, said
    assert used_s(cluster.coordinator.pid) - began_s < ALLOWED_S


def test_a_message_above_the_cap_is_refused(call: Call) -> None:
    for size in (REQUEST_MAX + 1, 5 * MIB):
        code, said = call("PutBlob", bytes(size))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"({size} vs. {REQUEST_MAX})" in said


def test_only_headers_above_the_cap_are_refused(call: Call) -> None:
    for _ in range(3):
        assert call("Status", b"", header=METADATA_MAX - 1024) == (grpc.StatusCode.OK, "")
        for size in (METADATA_MAX, METADATA_MAX * 5 // 4, 2 * METADATA_MAX, MIB, 2 * MIB):
            code, said = call("Status", b"", header=size)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"vs. {METADATA_MAX}" in said


def test_a_health_check_without_a_token_is_answered_unread(cluster: Cluster, call: Call) -> None:
    with grpc.insecure_channel(cluster.address, options=UNCAPPED) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        check(bytes(96 * MIB), timeout=60)


def test_a_compressed_bomb_is_not_unpacked(call: Call) -> None:
    """96 MiB of zeros, 0.1 on the wire. More would keep a slow sender busy for longer than a connection may take."""
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        code, _ = call("Status", bytes(96 * MIB), compression=compression)
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_non_request_is_refused_with_the_method(call: Call) -> None:
    rng = random.Random(1)
    for method in ("Status", "RegisterWorker", "Heartbeat", "OpenRun", "PutBlob", "PutSnapshot"):
        for size in (1, 10, 1000, MIB):
            data = b"\xff" + rng.randbytes(size)  # a field of the wire type 7, which there is not
            assert call(method, data) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a request of {method} cannot be decoded. {SAME_RELEASE}",
            )


def test_fields_are_counted_at_every_level() -> None:
    position = records_pb2.BoxPosition(slots=[records_pb2.SlotPosition()] * 200)
    report = pb.WatchRunRequest(delivered=position)
    for message in (report, pb.FetchStateRequest(progress=report), pb.CloseRunRequest(progress=report)):
        data = message.SerializeToString()
        check_fields(data, message.DESCRIPTOR, 203)
        with pytest.raises(InvalidArgumentError, match="at most 199 fields"):
            check_fields(data, message.DESCRIPTOR, 199)
    with pytest.raises(InvalidArgumentError, match="fields"):
        check_fields(b"\x0b" * 99, pb.WatchRunRequest.DESCRIPTOR, 40)  # groups
    deep = pb.StatePart()
    for _ in range(90):
        deep = pb.StatePart(parts=[deep])
    with pytest.raises(InvalidArgumentError, match="fields"):
        check_fields(deep.SerializeToString(), pb.StatePart.DESCRIPTOR, 100)


def test_unknown_fields_are_left_out() -> None:
    padded = OPENING + part(99, b"x" * 9999) + part(14, part(99, b"x" * 9999))
    assert parsed_request("OpenRun", pb.OpenRunRequest.FromString, padded).ByteSize() == len(OPENING) + 2


def test_large_requests_of_a_token_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_bounds, "LARGE_REQUESTS", 3 * MIB)
    requests = LargeRequests()
    with requests.answering("one") as count, requests.answering("one") as another, requests.answering("two") as other:
        count(2 * MIB)
        with pytest.raises(OverloadedError, match="large requests of one token"):
            another(2 * MIB)
        another(1000)
        other(2 * MIB)
    with requests.answering("one") as count:
        count(3 * MIB)
    assert not requests._bytes


def test_what_is_kept_has_memory_of_its_own() -> None:
    """A part of a request keeps all of the request in memory, however large."""
    world = FakeCluster()
    worker = world.worker("w")
    world.open()
    assignments = worker.heartbeat().assignments
    reports = [worker.slot_report(assignment, pb.READY) for assignment in assignments]
    for report in reports:
        report.capabilities.length = 7
    request = pb.HeartbeatRequest(worker="w", session=worker.session, slots=reports)
    world.heartbeat(request)
    (slot, _) = world.slots()
    assert slot.capabilities is not None
    assert slot.capabilities.length == 7
    request.slots[0].capabilities.length = 8
    assert slot.capabilities.length == 7, "its own"


@limited(abandoned_at_once=3)
def test_a_report_has_so_many_parts() -> None:
    world = FakeCluster()
    worker, box = world.worker("w", 2), world.open()
    worker.heartbeat(*[pb.SlotReport()] * 4)
    with pytest.raises(InvalidArgumentError, match=r"slots in a heartbeat .* must be 0 to 4, got 5"):
        worker.heartbeat(*[pb.SlotReport()] * 5)
    watch = pb.WatchRunRequest(run="job/0", attempt=1, box=0, client_id=box.request.client_id)
    watch.unreachable.extend([pb.LaneTrouble()] * 3)
    with pytest.raises(InvalidArgumentError, match=r"unreachable slots .* must be 0 to 2, got 3"):
        world.watch(watch)
    del watch.unreachable[:]
    watch.abandoned.extend([pb.AbandonedEpoch()] * 4)
    with pytest.raises(InvalidArgumentError, match=r"abandoned epochs .* must be 0 to 3, got 4"):
        world.watch(watch)


# ------------------------------------------------------------------------------------------------ replies to workers


def test_a_worker_can_always_be_answered() -> None:
    """A worker whose reply is too large to send is lost, with the slots of every job on it."""
    world = FakeCluster()
    worker = world.worker("w", 1024)
    opening = pb.OpenRunRequest(job="large", client_id="c")
    opening.loader.arguments = bytes(200 << 10)
    for number in range(64):
        world.open(job=f"large-{number}", loader=opening.loader)
    world.open(job="small")
    placed = len(worker.heartbeat().assignments)
    assert worker.heartbeat().ByteSize() < REPLY_MAX
    assert 50 <= placed < 60
    other = world.worker("other", 8)
    worker.heartbeat()
    assert len(other.heartbeat().assignments) == 8, "the rest waits for other workers"
    world.state_machine.attempts.end(world.state_machine.cluster.open_attempts()[0], EndedBy.OPERATOR, "over")
    for _ in range(4):
        worker.heartbeat()
    assert len(worker.heartbeat().assignments) == placed, "what has ended makes room"


def test_state_requests_come_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply has room for so many; the others follow as these are answered."""
    monkeypatch.setattr(views, "STATE_REQUESTS", 3)
    world = FakeCluster()
    worker, box = world.worker("w"), world.open(num_workers_per_box=2)
    worker.ready()
    box.deliver(4)
    for step in range(4):
        world.state_machine.begin_state(pb.FetchStateRequest(run="job/0", attempt=1, step=step + 1, deadline_s=9))
    answered: set[str] = set()
    seen = 0
    while True:
        request = pb.HeartbeatRequest(worker="w", session=worker.session, seen_version=seen)
        reply = world.heartbeat(request)
        if reply.unchanged:
            break
        assert len(reply.state_requests) <= 3
        seen = reply.version
        for one in reply.state_requests:
            answered.add(one.request)
            answer = pb.StateAnswer(request=one.request, worker="w", session=worker.session)
            world.state_machine.answer_state(answer, b"")
    assert len(answered) == 8
