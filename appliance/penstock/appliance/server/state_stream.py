"""Messages in which states are sent to callers, and the order of sending.

When hundreds of boxes save at one step, they request each other's states. So that heartbeats are still received, states
are serialised once for all callers, and each turn of the event loop sends only one large message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from penstock.appliance.core.state_query import BoxState
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.calls import pieces
from penstock.proto.rpc.channel import CHUNK
from penstock.proto.state.state_json import state_as_json
from penstock.proto.v1 import coordinator_pb2 as pb


def parts(states: Iterable[BoxState]) -> Iterator[pb.StatePart]:
    """Yield a message for each slot, or several if its state is large."""
    for state in states:
        for index, (record, data) in enumerate(state.records):
            first, *more = pieces(data) if data else [b""]
            yield pb.StatePart(record=record, data=first, position=None if index else state.position)
            for piece in more:
                yield pb.StatePart(data=piece)


def in_json(state: BoxState, limit: int) -> BoxState:
    """Return the states as JSON. Raises InvalidArgumentError for a slot's state above `limit` bytes in binary form."""
    records = []
    for record, data in state.records:
        if len(data) > limit:
            raise InvalidArgumentError(
                f"a state must have at most {limit} bytes to be sent as JSON, got {len(data)} from box {record.box} "
                f"slot {record.local_worker_id}: fetch it in binary form (STATE_ENVELOPE)"
            )
        changed, text = pb.WorkerRecord(), state_as_json(data)
        changed.CopyFrom(record)
        changed.state_bytes = len(text)
        records.append((changed, text))
    return replace(state, records=records)


def packed(states: Iterable[BoxState]) -> Iterator[bytes]:
    """Yield serialised messages: states up to half of CHUNK bytes share one (StatePart.parts)."""
    pack: list[bytes] = []
    size = 0
    for part in _serialised(states):
        nbytes = sum(map(len, part))
        if pack and (size + nbytes > CHUNK or nbytes > CHUNK // 2):
            yield b"".join(pack)
            pack, size = [], 0
        if nbytes > CHUNK // 2:
            yield b"".join(part)
        else:
            pack += [_head(pb.StatePart.PARTS_FIELD_NUMBER, nbytes), *part]
            size += nbytes
    if pack:
        yield b"".join(pack)


def _serialised(states: Iterable[BoxState]) -> Iterator[list[bytes]]:
    """Yield each serialised message as pieces to concatenate, so that no data is copied; only the order of fields
    differs from SerializeToString."""
    number = pb.StatePart.DATA_FIELD_NUMBER
    for state in states:
        for head, (_, data) in zip(state.heads, state.records, strict=True):
            first, *more = pieces(data) if len(data) > CHUNK else [data]
            yield [head, _head(number, len(first)), first]
            for piece in more:
                yield [_head(number, len(piece)), piece]


def _head(number: int, size: int) -> bytes:
    """Return a protobuf field's tag and length, which precede content of `size` bytes."""
    return _varint(number << 3 | 2) + _varint(size)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
