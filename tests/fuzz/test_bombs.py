"""Small inputs that claim to be large, in one process that may have 256 MiB more than it starts with."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HEADROOM = 256 << 20


def _bombs() -> dict[str, Callable[[], object]]:
    import fcntl
    import os
    import struct

    import torch
    import xxhash

    from penstock.client.states import saved_state
    from penstock.proto.batch.flatten import Assembler, wrap_buffer
    from penstock.proto.batch.structure import Structure
    from penstock.proto.lane.compression import Unpacker, check_claim, load
    from penstock.proto.state.codec import decode_state, encode_state
    from penstock.proto.v1 import lane_pb2
    from penstock.worker.processes.control_channel import MAX_PAYLOAD, SEALS, LargeMessage

    def tree(node: str) -> bytes:
        text = node.encode().ljust(-(-len(node) // 16) * 16)
        body = struct.pack("<8sIIQQ", b"PENSTATE", 1, 0, len(text), 0) + text
        return body + xxhash.xxh3_64_digest(body)

    def array(leaf: str, *shape: int) -> object:
        return Assembler(Structure.from_bytes(leaf.encode())).assemble(shape, wrap_buffer(bytearray(4096)), 0, 0).shape

    def unpack(number: int, size: int, piece: bytes) -> object:
        codec = load(number)
        assert codec is not None
        wire = struct.pack("<I", len(piece)) + piece
        check_claim(len(wire), size)
        unpacker = Unpacker(codec)
        target = unpacker.begin(memoryview(bytearray(size)), len(wire))
        target[:] = wire[:4]
        target = unpacker.step()  # type: ignore[assignment]
        target[:] = piece
        return unpacker.step()

    def zeros(number: int) -> bytes:
        """A gigabyte of them, in a piece of a few KiB or so."""
        import zstandard

        if number == lane_pb2.ZSTD:
            compressor = zstandard.ZstdCompressor(level=1).compressobj(size=-1)
            return b"".join(compressor.compress(bytes(1 << 20)) for _ in range(64)) + compressor.flush()
        return b"\x1f\x00\x01\x00" + b"\xff" * 4000 + b"\x00" + b"\x50" + bytes(5)

    def boxes() -> object:
        record = saved_state.SavedState(0, "m:f", 2, 1 << 31, 1 << 31, None).to_dict()[saved_state.KEY]["record"]
        value = decode_state(record)
        value["step"], value["positions"] = 1, [b"\x1a\x01\x00*\x00"]  # type: ignore[index]
        return saved_state.read({saved_state.KEY: {"format": 3, "step": 1, "record": encode_state(value)}})

    def said(text: int, size: int) -> object:
        memory = os.memfd_create("message", os.MFD_ALLOW_SEALING)
        os.write(memory, struct.pack("<I", text) + b"{}")
        os.truncate(memory, size)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
        return LargeMessage([memory]).read(MAX_PAYLOAD)

    torch.zeros(1)
    return {
        "a tensor's claimed dims": lambda: decode_state(tree('{"$":["tensor","uint8",1099511627776]}')),
        "an array's claimed dims": lambda: decode_state(tree('{"$":["array","<U999999999",9]}')),
        "an array without elements": lambda: decode_state(tree('{"$":["array","<U999999999",0,4294967296]}')) and 1 / 0,
        "claimed numbers": lambda: decode_state(tree('{"$":["numbers","list","<u4",4294967296]}')),
        "a deep tree": lambda: decode_state(tree("[" * 100_000)),
        "a structure of too many values": lambda: Structure.from_bytes(b'[1,["l",[' + b"null," * 800_000 + b"null]]]"),
        "a deep structure": lambda: Structure.from_bytes(b'[1,["l",[' * 100_000),
        "a batch's array without width": lambda: array('[1,["a","<U0",1]]', 1 << 40) and 1 / 0,
        "a batch's claimed dims": lambda: array('[1,["t","float64",2]]', 1 << 40, 1 << 40),
        "a zstd piece": lambda: unpack(lane_pb2.ZSTD, 200_000, zeros(lane_pb2.ZSTD)),
        "an lz4 piece": lambda: unpack(lane_pb2.LZ4, 200_000, zeros(lane_pb2.LZ4)),
        "boxes of a saved state": boxes,
        "a control message's payload": lambda: said(2, 1 << 31),
        "a control message's text": lambda: said(1 << 31, 1 << 31),
    }


def _explode() -> None:
    """Decode each bomb in the child process, and print the result of each."""
    from penstock.proto.errors import PenstockError

    bombs = _bombs()
    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (here + HEADROOM, here + HEADROOM))
    became = {}
    for name, bomb in bombs.items():
        try:
            bomb()
            became[name] = "taken"
        except PenstockError as error:
            became[name] = f"ours: {type(error).__name__}"
        except ZeroDivisionError:
            became[name] = "ours: taken, and small"
        except BaseException as error:
            became[name] = f"{type(error).__name__}: {error}"[:200]
    print(json.dumps(became))


@pytest.fixture(scope="module")
def became() -> dict[str, str]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, timeout=100, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", _bombs())
def test_a_bomb_does_not_go_off(became: dict[str, str], name: str) -> None:
    assert became[name].startswith("ours: "), became[name]


if __name__ == "__main__":
    _explode()
