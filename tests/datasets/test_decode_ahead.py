"""Thread that decodes blocks before they are needed."""

from __future__ import annotations

import time

import pytest
from waiting import until

from penstock.data.cache import decode_ahead
from penstock.data.cache.decode_ahead import DecodeAhead


class Decoded:
    def __init__(self) -> None:
        self.blocks: list[int] = []

    def add(self, block: int) -> None:
        self.blocks.append(block)


def test_closing_does_not_wait_for_an_idle_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_ahead, "IDLE_S", 60.0)
    decoded = Decoded()
    ahead = DecodeAhead(decoded.add)
    ahead.want([1, 2])
    until(lambda: decoded.blocks == [1, 2])
    started = time.monotonic()
    ahead.close(30)
    assert time.monotonic() - started < 10


def test_blocks_are_decoded_after_closing() -> None:
    decoded = Decoded()
    ahead = DecodeAhead(decoded.add)
    for count in (1, 2):
        ahead.close(30)
        ahead.want([5] * count)
    until(lambda: len(decoded.blocks) >= 2)
    ahead.close(30)
