"""Decoders of one block of bytes: structures, batches, states, positions, pieces of compressed payloads."""

from __future__ import annotations

import json
import random
import struct
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
import xxhash
from targets.target import Target, pieces, script, words
from torch.utils._pytree import register_pytree_node

from penstock.client.integrations.batch_messages import BatchMessages
from penstock.client.states import saved_state
from penstock.client.stream.box_progress import DeliveredCounts
from penstock.proto.batch.digest import FULL_BELOW, ShapesCache, batch_digest, region_digest
from penstock.proto.batch.flatten import Assembler, Flattener, wrap_buffer
from penstock.proto.batch.structure import Structure
from penstock.proto.errors import PenstockError, ProtocolError
from penstock.proto.lane.compression import PIECE, Packer, Unpacker, check_claim, load
from penstock.proto.lane.frames import COUNTED, Frame, counts_of, pack_shapes
from penstock.proto.rpc.wire_errors import detail_of, error_of
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.counts import MOST_GROUPS, Tally, by_source, new_row, plain_rows, saved_rows
from penstock.proto.state.generators import capture_rng, restore_rng
from penstock.proto.state.position import Position, advance
from penstock.proto.state.state_json import state_as_json
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.restart_points import RestartPoint, StreamHistory, StreamPosition

__all__ = ["TARGETS"]

ROOM = 1 << 19
"""Bytes of the region that batches are read from."""


class Registered:
    """Type in torch's pytree registry, with a leaf and a context."""

    def __init__(self, leaf: Any, context: Any) -> None:
        self.leaf = leaf
        self.context = context


register_pytree_node(
    Registered,
    lambda value: ([value.leaf], value.context),
    lambda leaves, context: Registered(*leaves, context),  # type: ignore[call-arg]
)


def _batches() -> list[Any]:
    return [
        torch.arange(6, dtype=torch.float32).reshape(2, 3),
        {"x": torch.zeros(3, 0), "y": np.arange(4, dtype=">i2"), "z": [1, 2.5, True, None, "ä", b"b"]},
        (np.float64(1.0), np.str_("s"), np.datetime64(3, "s"), torch.tensor(2, dtype=torch.bfloat16)),
        {1: {None: [(torch.ones(1, dtype=torch.bool),)]}, False: -(1 << 80)},
        [torch.Size([2, 3]), deque([1, torch.ones(2)], maxlen=4), torch.ones(2, 2).max(0), defaultdict(None, a=1)],
        (Registered(torch.ones(2), {"k": [1, ("x", None)]}), Registered([torch.zeros(1)], 1.5)),
    ]


def _large_batches() -> list[Any]:
    """Batches that digests sample: one leaf, few, many."""
    return [[np.zeros(size, np.uint8) for size in sizes] for sizes in ([300_000, 7], [140_000] * 2, [30_000, 9] * 10)]


# ---- structures and batches


def _structure(data: bytes) -> None:
    structure = Structure.from_bytes(data)
    assert structure.to_bytes() == data
    assert len(structure.describe()) <= 2000
    Assembler(structure)


def _structure_seeds() -> list[bytes]:
    return [Flattener().flatten(batch).structure.to_bytes() for batch in _batches()]


def _layout(data: bytes) -> None:
    """A batch as its frame and its ring entry tell it: structure, shapes, nbytes, and the bytes in the slot."""
    parts = dict(pieces(data, 4))
    shapes, numbers = words(parts.get(1, b"")), words(parts.get(2, b"")[:16])
    offset, nbytes = (*numbers, 0, 0)[:2]
    memory = bytearray(ROOM)
    content = parts.get(3, b"")[:ROOM]
    memory[: len(content)] = content
    ring, released = wrap_buffer(memory), deque[int]()
    assembler = Assembler(Structure.from_bytes(parts.get(0, b"")))
    _digest(assembler.structure, shapes, ring, offset, nbytes)
    try:
        batch = assembler.assemble(shapes, ring, offset, nbytes, released, 7)
    except PenstockError:
        assert not released, "a slot was given back for a batch that was refused"
        raise
    low, high = ring.ctypes.data + offset, ring.ctypes.data + offset + nbytes
    for address, size in _places(batch):
        assert low <= address <= address + size <= high, "a leaf outside of its region"
    del batch
    assert list(released) == [7], "the slot came back other than once"


def _digest(structure: Structure, shapes: list[int], ring: Any, offset: int, nbytes: int) -> None:
    """What a reader does before it looks at the shapes. The region is within its entry by then."""
    if offset + nbytes > ROOM:
        return
    _, seed, sampling = ShapesCache(structure).find(nbytes, pack_shapes(shapes))
    assert sampling is None or nbytes > FULL_BELOW
    digests = {region_digest(seed, memoryview(ring), offset, nbytes, sampling) for _ in range(3)}
    assert digests == {batch_digest(structure, ring, offset, nbytes, shapes)}


def _places(batch: Any) -> list[tuple[int, int]]:
    if isinstance(batch, torch.Tensor):
        return [(batch.data_ptr(), batch.nbytes)] if batch.nbytes else []
    if isinstance(batch, np.ndarray):
        return [(batch.ctypes.data, batch.nbytes)] if batch.nbytes else []
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, Registered):
        batch = [batch.leaf]
    return [place for child in batch for place in _places(child)] if isinstance(batch, list | tuple | deque) else []


def _message(data: bytes) -> None:
    """A batch as a message between ranks of one box."""
    message = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)) if data else torch.empty(0, dtype=torch.uint8)
    messages = BatchMessages()
    messages.rows(message)
    low, high = message.data_ptr(), message.data_ptr() + len(data)
    for address, size in _places(messages.unpack(message)):
        assert low <= address <= address + size <= high, "a leaf outside of its message"


def _message_seeds() -> list[bytes]:
    return [BatchMessages().pack(batch).numpy().tobytes() for batch in _batches()]


def _layout_seeds() -> list[bytes]:
    seeds = []
    for batch in _batches() + _large_batches():
        flat = Flattener().flatten(batch)
        memory = np.zeros(flat.nbytes + 64, np.uint8)
        flat.write_to(memory.ctypes.data)
        seeds.append(
            script(
                (0, flat.structure.to_bytes()),
                (1, struct.pack(f"<{len(flat.shapes)}Q", *flat.shapes)),
                (2, struct.pack("<QQ", 0, flat.nbytes)),
                (3, memory.tobytes()[: 1 << 10]),
            )
        )
    return seeds


# ---- states


def sealed(data: bytes) -> bytes:
    """The bytes with a checksum that holds: who means harm computes it, too."""
    return data + xxhash.xxh3_64_digest(data)


def _state(data: bytes) -> None:
    value = decode_state(sealed(data))
    # What came out is a state like any other. Ints in a set or nan do not compare, so their encodings are compared.
    again = encode_state(value)
    assert encode_state(decode_state(again)) == again or b'"set"' in again or b'"frozenset"' in again


def _state_json(data: bytes) -> None:
    json.loads(state_as_json(sealed(data)))


def _states() -> list[Any]:
    numbers = list(range(40))
    return [
        {"epoch": 3, "rng": random.getstate(), "t": torch.ones(3, dtype=torch.bfloat16), "n": numbers},
        [1, -(1 << 70), 1.5, float("inf"), 2j, "s", b"b", bytearray(b"c"), {1, 2}, frozenset("ab"), range(9)],
        {"$": 1, (1, None): np.array(["a", "bc"]), "d": torch.float16, "n": np.float32(1), "s": torch.Size([2])},
        ("x", torch.zeros(2, 0), np.dtype("<i4"), torch.device("cpu"), np.zeros((0, 3), "<M8[ns]"), slice(1, 2)),
        tuple(map(float, numbers)),
    ]


def _state_seeds() -> list[bytes]:
    return [encode_state(value)[:-8] for value in _states()]


def _point(data: bytes) -> None:
    point = RestartPoint.decode(sealed(data))
    assert isinstance(point.position, StreamPosition)


def _base_seeds() -> list[bytes]:
    snapshot = RestartPoint(StreamPosition(0, 3, 3, 12), {"at": 3}, b"rng", None, 77)
    epoch_start = RestartPoint(StreamPosition(1, 0, 9, 36), None, b"after", b"before")
    behind = RestartPoint(
        StreamPosition(1, 2, 11, 44),
        {},
        b"r",
        digest=5,
        history=StreamHistory(abandoned=((0, 3),)),
        replayed_from=epoch_start,
    )
    return [point.encode()[:-8] for point in (snapshot, epoch_start, behind)]


def _saved(data: bytes) -> None:
    read = saved_state.read(
        {
            saved_state.KEY: {"format": saved_state.FORMAT, "step": 3, "record": sealed(data)},
            saved_state.STATE: None,
            "user": 1,
        }
    )
    if read.positions:
        read.start(0, read.num_boxes, read.num_workers_per_box, strict=True)
        if read.methods == 4:
            read.start(0, 1, 5, strict=True)


def _saved_seeds() -> list[bytes]:
    parts = [saved_state.WorkerPart(0, slot, 2 - slot, 8, 1, {"at": [0, 1, 1, 4]}, {"n": 1}) for slot in range(2)]
    position = Position(3, 0, [0, 1], 1, [2, 1], [2, 1])
    records = [
        saved_state.SavedState(3, "m:f", methods, 1, 2, 5, positions=[position], parts=parts, aggregated={"user": 1})
        for methods in (2, 4)
    ]
    return [record.to_dict()[saved_state.KEY]["record"][:-8] for record in records]


def _rng(data: bytes) -> None:
    before = capture_rng()
    try:
        restore_rng(sealed(data))
        for draw in (random.random, random.gauss, np.random.rand, np.random.randn, lambda: torch.rand(1)):
            draw()
    finally:
        restore_rng(before)


# ---- positions, errors


def _position(data: bytes) -> None:
    """A record of a box, and where it is some steps later by what was said of ends and of epochs left."""
    parts = dict(pieces(data, 3))
    try:
        message = records_pb2.BoxPosition.FromString(parts.get(0, b""))
    except Exception as error:
        raise ProtocolError(str(error)) from None
    position = Position.from_proto(message)
    assert Position.from_proto(position.to_proto()) == position
    numbers = words(parts.get(1, b""))
    ends = {
        (a % 8, position.epoch + b % 8): c for a, b, c in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=False)
    }
    numbers = words(parts.get(2, b""))
    abandoned = {position.epoch + a % 8: b for a, b in zip(numbers[::2], numbers[1::2], strict=False)}
    for ahead in (0, 1, 1000, 1 << 61):
        advance(position, position.step + ahead, ends, abandoned).to_proto()


def _position_seeds() -> list[bytes]:
    position = Position(7, 1, [0, 2], 1, [2, 1, 1], [3, 2, 2]).to_proto().SerializeToString()
    ends, abandoned = struct.pack("<6Q", 0, 0, 5, 2, 1, 9), struct.pack("<4Q", 0, 9, 1, 12)
    return [script((0, position)), script((0, position), (1, ends), (2, abandoned))]


def _error(data: bytes) -> None:
    try:
        detail = records_pb2.ErrorDetail.FromString(data)
    except Exception as unread:
        raise ProtocolError(str(unread)) from None
    error = error_of(detail)
    assert isinstance(error, PenstockError)
    str(type(error)(f"{error.message} [box 1]", remote_traceback=error.remote_traceback))
    assert detail_of(error).ByteSize() <= 1 << 16


def _error_seeds() -> list[bytes]:
    names = ("LaneLostError", "PortTakenError", "Unheard", "")
    return [records_pb2.ErrorDetail(name=name, message="m", remote_traceback="t").SerializeToString() for name in names]


# ---- compression


def _unpacking(data: bytes) -> None:
    """A payload as it comes over TCP: codec, size of the batch, then what is on the wire."""
    number, size, wire = data[:1], int.from_bytes(data[1:4], "little"), data[4:]
    codec = load(number[0] if number else 0)
    if codec is None:
        raise ProtocolError("no codec")
    check_claim(len(wire), size)
    around, unpacker, at = bytearray(b"!" * (size + 200)), Unpacker(codec), 0
    try:
        target: memoryview | None = unpacker.begin(memoryview(around)[100:-100], len(wire))
        while target is not None:
            assert at + len(target) <= len(wire), "it asks for more than was announced"
            target[:] = wire[at : at + len(target)]
            at += len(target)
            target = unpacker.step()
        assert at == len(wire), "not all of the payload was taken"
    finally:
        assert around[:100] == around[-100:] == b"!" * 100, "written outside of the entry"


def _unpacking_seeds() -> list[bytes]:
    seeds = []
    for number in (1, 2):
        codec = load(number)
        assert codec is not None
        for size in (3000, PIECE + 5000):
            packed = Packer(codec).pack(memoryview(bytes(size)))
            assert packed is not None
            seeds.append(bytes([number]) + size.to_bytes(3, "little") + b"".join(map(bytes, packed[1])))
    return seeds


def _counts(data: bytes) -> None:
    """The counts at the end of a frame, as a training process takes them."""
    counts = DeliveredCounts(1)
    for _, frame in pieces(data, 4):
        counts.take(0, counts_of(Frame(flags=COUNTED, rest=frame)))
    rows = counts.rows()
    assert len(rows) <= MOST_GROUPS
    assert saved_rows(plain_rows(rows)) == rows
    by_source(rows)


def _counts_seeds() -> list[bytes]:
    tally, frames = Tally(shares={"web": (700_000, 0)}), []
    for number in range(3):
        row = new_row()
        row[0] = number + 1
        tally.add({("web", "ä" * number): row})
        taken = tally.take()
        frames.append(b"shapes  " + taken + len(taken).to_bytes(4, "little"))
    return [script(*((0, frame) for frame in frames[:count])) for count in (1, 3)]


TARGETS = [
    Target("counts", _counts, _counts_seeds, examples=80),
    Target("structure", _structure, _structure_seeds),
    Target("layout", _layout, _layout_seeds),
    Target("message", _message, _message_seeds),
    Target("state", _state, _state_seeds),
    Target("state_json", _state_json, _state_seeds),
    Target("point", _point, _base_seeds),
    Target("saved", _saved, _saved_seeds),
    Target("rng", _rng, lambda: [capture_rng()[:-8]], examples=60),
    Target("position", _position, _position_seeds),
    Target("error", _error, _error_seeds),
    Target("unpacking", _unpacking, _unpacking_seeds, most_bytes=40 << 20),
]
