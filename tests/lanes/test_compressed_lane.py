"""Sender and receiver with compressed payloads, each against a bare socket; the whole lane is in test_contract."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest
from lane_frames import checked
from tests.lanes.conftest import next_frame
from tests.lanes.runner_child import content
from tests.lanes.test_receiver import SLOT, batch
from tests.lanes.test_receiver import Rig as ReceiverRig
from tests.lanes.test_sender import Rig as SenderRig

from penstock.client.stream.receiver_process import Receiver
from penstock.proto.errors import LaneLostError
from penstock.proto.lane.compression import NAMES, PIECE, Packer, load
from penstock.proto.lane.frames import ERROR, Frame, pack_shapes
from penstock.proto.lane.tcp import CHECK_BYTES, sealed
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon import sender

CODECS = sorted(NAMES.values())
BOTH = pytest.mark.parametrize("number", CODECS)


def wire(number: int, data: bytes) -> bytes:
    codec = load(number)
    assert codec is not None
    packed = Packer(codec).pack(memoryview(data))
    assert packed is not None
    return b"".join(packed[1])


def sent(frame: Frame, number: int) -> bytes:
    """A BATCH frame and its payload as a sender sends them, compressed."""
    data = wire(number, content(frame.total, frame.nbytes))
    return checked(frame._replace(codec=number, wire=len(data)), data)


# ---- the sender


@BOTH
def test_the_sender_compresses_what_shrinks(number: int) -> None:
    rig = SenderRig(codecs=[number]).start()
    rig.publish(100, 5000, 2047, 2048, 300_000)  # the fifth is noise
    rig.batches(5)
    assert rig.compressed == [2, 4]
    rig.publish(8 << 20, 8 << 20, 8 << 20)
    rig.batches(8)
    assert rig.compressed == [2, 4, 7, 8], "one batch after the noise was not tried"
    rig.say(delivered=8)
    rig.acks()
    assert rig.producer.delivered == 8
    rig.close()


@BOTH
def test_the_sender_takes_turns_with_the_acks(number: int) -> None:
    """A ring full of frames comes in few packets: what a turn leaves of one is not forgotten."""
    rig = SenderRig(codecs=[number]).start()
    size = sender.PACKED_A_TURN // 2 + 1
    for _ in range(3):
        first = rig.total + 1
        rig.producer._group = 1000  # all frames in one packet
        while (reserved := rig.producer.reserve(size)) is not None:
            rig.total += 1
            reserved.view[:size] = content(rig.total, size)
            rig.producer.publish(reserved, rig.total, 0, 1, size, pack_shapes((size,)), 0, more=True)
        rig.producer.flush()
        assert rig.total - first >= 8
        rig.batches(rig.total)
        rig.say(delivered=rig.total)
        while rig.producer.delivered < rig.total:
            rig.acks()
    rig.close()


@pytest.mark.parametrize("asked", [[lane_pb2.LZ4], [77], [77, lane_pb2.LZ4]])
def test_missing_codec_is_logged_once(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "lz4", None)
    sender._warn_missing_codec.cache_clear()
    for _ in range(2):
        rig = SenderRig(codecs=asked).start()
        rig.publish(50_000, 50_000)
        rig.batches(2)
        assert rig.compressed == []
        rig.close()
    said = [record.getMessage() for record in caplog.records if "uncompressed" in record.getMessage()]
    assert len(said) == 1
    assert ("lz4" if lane_pb2.LZ4 in asked else "77") in said[0]
    assert "pip install penstock[compression]" in said[0]


# ---- the receiver


@pytest.fixture(params=CODECS)
def rig(request: pytest.FixtureRequest, receiver: Receiver) -> Iterator[ReceiverRig]:
    rig = ReceiverRig(receiver, codecs=[request.param])
    yield rig
    rig.close()


def number_of(rig: ReceiverRig) -> int:
    return rig.hello.codecs[0]


def test_the_hello_names_what_the_receiver_has(receiver: Receiver) -> None:
    rig = ReceiverRig(receiver, codecs=[77, lane_pb2.ZSTD, lane_pb2.LZ4])
    assert list(rig.received.codecs) == [lane_pb2.ZSTD, lane_pb2.LZ4]
    rig.close()
    rig = ReceiverRig(receiver)
    assert list(rig.received.codecs) == []
    rig.close()


def test_abandon_within_a_compressed_payload(rig: ReceiverRig) -> None:
    size, number = SLOT, number_of(rig)
    rig.begin()
    for abandons in range(12):
        total, of_pass = 10 * abandons + 1, {"abandons": abandons, "epoch": abandons}
        first = sent(batch(total, size, **of_pass), number)
        stale = wire(number, bytes(size // 2) + random.Random(abandons).randbytes(size // 4) + bytes(size // 4))
        frame = batch(total + 1, size, codec=number, wire=len(stale), **of_pass)
        head = sealed(frame.encode())
        half = (len(stale) * abandons) // 12
        left = len(stale) + CHECK_BYTES - half
        rig.far.sendall(first + head + stale[:half])
        place = rig.expect(total, size)
        rig.consumer.delivered(total)
        rig.consumer.release(place)
        rig.consumer.abandon(abandons, total)
        ack = rig.ack()
        assert (ack.delivered, ack.abandon_epoch) == (total, abandons + 1)
        # What still comes of it may be anything: nobody may look at it.
        rig.far.sendall(b"?" * left + head + b"?" * (left + half))
        rig.far.sendall(sent(batch(total + 1, size, abandons=abandons + 1, epoch=abandons + 1), number))
        rig.take(total + 1, size)
        rig.ack()
    slots = next(iter(rig.consumer.rings.values())).entries
    noise = [
        checked(batch(total, size, abandons=12, epoch=12), content(total, size)) for total in range(200, 200 + slots)
    ]
    rig.far.sendall(b"".join(noise))
    assert len({rig.expect(total, size) for total in range(200, 200 + slots)}) == slots, "all slots are there"


def broken(number: int, case: str) -> bytes:
    good = content(1, 5000)
    data = wire(number, good)
    fields = {"codec": number, "wire": len(data)}
    if case == "not asked for":
        fields["codec"] = sum(CODECS) - number
    elif case == "longer than the batch":
        fields["wire"] = 5000
    elif case == "corrupt":
        data = data[:4] + b"\xff" * (len(data) - 4)
    elif case == "a bomb":
        data = wire(number, bytes(PIECE - 8))
        fields["wire"] = len(data)
    elif case == "too short":
        data = wire(number, content(1, 4992))
        fields["wire"] = len(data)
    return checked(batch(1, 5000, **fields), data)


@pytest.mark.parametrize(
    ("case", "name", "says"),
    [
        ("not asked for", "ProtocolError", "codec that the receiver requested"),
        ("longer than the batch", "ProtocolError", "when compressed"),
        ("corrupt", "BatchCorruptError", "5000 bytes"),
        ("a bomb", "BatchCorruptError", "5000 bytes"),
        ("too short", "BatchCorruptError", "5000 bytes"),
    ],
)
def test_invalid_payload_is_a_named_error(
    rig: ReceiverRig, receiver: Receiver, case: str, name: str, says: str
) -> None:
    pid = receiver.pid
    rig.begin()
    rig.send_in_vain(broken(number_of(rig), case))
    frame = next_frame(rig.consumer)
    assert (frame.kind, frame.error.name) == (ERROR, name)
    assert says in frame.error.message
    with pytest.raises(LaneLostError):
        next_frame(rig.consumer)
    assert receiver.pid == pid
