"""Damaged and forged state envelopes: each is named, and none allocates what it does not hold."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
import torch
import xxhash

from penstock.proto.errors import StateCorruptError, StateVersionError
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.envelope import FORMAT_VERSION
from penstock.proto.state.state_json import state_as_json


def seal(tree: bytes, blobs: bytes = b"", *, version: int = FORMAT_VERSION, flags: int = 0) -> bytes:
    """An envelope whose framing and checksum hold, whatever it contains."""
    body = struct.pack("<8sIIQQ", b"PENSTATE", version, flags, len(tree), len(blobs)) + tree + blobs
    return body + xxhash.xxh3_64_digest(body)


SAMPLE = encode_state(
    {
        "a": [1, 2.5, None, (True, {3: b"bytes"})],
        "t": torch.arange(5, dtype=torch.bfloat16),
        "n": np.arange(3, dtype=">i2"),
        "r": tuple(range(50)),
        "s": {1, 2},
    }
)


def test_every_truncation_is_corrupt() -> None:
    for size in range(len(SAMPLE)):
        with pytest.raises(StateCorruptError):
            decode_state(SAMPLE[:size])
    with pytest.raises(StateCorruptError, match=f"announces {len(SAMPLE)} bytes, got {len(SAMPLE) + 1}"):
        decode_state(SAMPLE + b"\0")


def test_every_flipped_bit_is_corrupt() -> None:
    for position in range(8 * len(SAMPLE)):
        damaged = bytearray(SAMPLE)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(StateCorruptError):  # also in the version field: damage is no newer version
            decode_state(damaged)


def test_a_newer_format_is_named() -> None:
    with pytest.raises(StateVersionError, match=rf"format {FORMAT_VERSION + 1}, above {FORMAT_VERSION}\b"):
        decode_state(seal(b"not even JSON", version=FORMAT_VERSION + 1, flags=7))


HUGE = 2**62
TOO_LARGE: list[list[object]] = [
    ["tensor", "float32", HUGE],
    ["tensor", "uint8", 17],
    ["array", "<f8", HUGE],
    ["array", "|V999999999", 5],
    ["bytes", HUGE],
    ["bytes", 17],
    ["bytes_", 17],
    ["numbers", "tuple", "<u4", HUGE],
]


@pytest.mark.parametrize("node", TOO_LARGE, ids=str)
def test_sizes_are_checked_before_allocation(node: list[object]) -> None:
    for read in (decode_state, state_as_json):
        with pytest.raises(StateCorruptError, match=r"the 16 bytes that are left, got \d+"):
            read(seal(json.dumps({"$": node}).encode(), bytes(16)))


FORGED: list[object] = [
    {"$": ["tensor", "float32", 0, HUGE, HUGE, HUGE]},
    {"$": ["tensor", "float32", -1]},
    {"$": ["tensor", "float32", 1.0]},
    {"$": ["tensor", "qint8", 1]},
    {"$": ["tensor", "Tensor", 1]},
    {"$": ["array", "|O", 1]},
    {"$": ["array", "f8,f8", 1]},
    {"$": ["array", "<f8", *[1] * 100]},
    {"$": ["array", "<U9999999999", 0]},
    {"$": ["scalar", "|O", "00" * 8]},
    {"$": ["scalar", "<f8", "00"]},
    {"$": ["set", "abc"]},
    {"$": ["np.dtype", "|O"]},
    {"$": ["np.dtype", "<M8[0s]"]},
    {"$": ["bytearray", -1]},
    {"$": ["numbers", "eval", "<u4", 0]},
    {"$": ["range", 0, 1, 0]},
    {"$": ["set", [[]]]},
    {"$": ["dict", [1]]},
    {"$": ["dict", [1, 2, 1, 3]]},
    {"$": ["dict", [[], 1]]},
    {"$": ["device", "nowhere:0"]},
    {"$": ["dtype", "Tensor"]},
    {"$": ["size", -1]},
    {"$": ["int", "zz"]},
    {"$": ["pickle", 1]},
    {"$": []},
    {"$": "tuple"},
    {"$": ["tuple"], "b": 1},
    math.nan,
]


@pytest.mark.parametrize("node", FORGED, ids=str)
def test_forged_nodes_are_corrupt(node: object) -> None:
    with pytest.raises(StateCorruptError):
        decode_state(seal(json.dumps(node).encode()))
    with pytest.raises(StateCorruptError):
        decode_state(seal(json.dumps(node).encode(), bytes(16)))


def test_bombs_are_corrupt() -> None:
    for tree in (b"[" * 100_000, b'{"$":["tuple",' * 100_000, b"[" * 200 + b"]" * 200, b"9" * 10_000):
        with pytest.raises(StateCorruptError):
            decode_state(seal(tree))
    with pytest.raises(StateCorruptError, match="must belong to a value"):
        decode_state(seal(b"1", bytes(16)))
    with pytest.raises(StateCorruptError, match="header of a state is damaged"):
        decode_state(seal(b"1", flags=1))
