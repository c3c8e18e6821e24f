"""Restore keys: short texts that travel with a batch, one for each row, and name the sample that it was made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from penstock.proto.errors import InvalidArgumentError, StateMismatchError

__all__ = ["PositionKeys", "checked_name", "with_keys"]

KIND = "p"
"""Of a key that names a position."""


def checked_name(keys: str | None) -> str | None:
    if keys is not None and (not isinstance(keys, str) or not keys):
        raise InvalidArgumentError(f"keys={keys!r}: it is the name of a field")
    return keys


def with_keys(batch: Any, name: str, keys: Sequence[str]) -> dict[str, Any]:
    """The batch with its rows' keys as one more field; one that is no dict becomes the field `batch` of a new one."""
    if not isinstance(batch, dict):
        return {"batch": batch, name: list(keys)}
    if name in batch:
        raise InvalidArgumentError(f"keys={name!r}: the batch has a field of this name; choose another")
    return {**batch, name: list(keys)}


@dataclass(frozen=True)
class PositionKeys:
    """Keys of an order that is a function from epoch and position to sample."""

    length: int
    """Samples of an epoch."""
    order: str
    """A digest of the data and all settings that decide which sample is where."""

    @staticmethod
    def of(described: Mapping[str, Any], length: int) -> PositionKeys:
        # How an epoch ends decides which batches there are, and not what is at a position.
        text = json.dumps({**described, "tail": None}, sort_keys=True)
        return PositionKeys(length, xxhash.xxh3_64_hexdigest(text.encode()))

    def key(self, epoch: int, position: int) -> str:
        return f"{KIND}:{epoch}:{position}:{self.order}"

    def place(self, key: str) -> tuple[int, int]:
        """(epoch, position). Raises InvalidArgumentError for what is no key, StateMismatchError for one of other data
        or settings."""
        kind, _, rest = key.partition(":") if isinstance(key, str) else ("", "", "")
        numbers, _, order = rest.rpartition(":")
        epoch, _, position = numbers.partition(":")
        if kind != KIND or not all(part.isascii() and part.isdecimal() for part in (epoch, position)):
            raise InvalidArgumentError(f"{key!r} is no key of a sample; keys are what keys= puts into a batch")
        if order != self.order:
            raise StateMismatchError(
                f"the key {key!r} was made with data and settings {order}, and these are {self.order}: another "
                "dataset, seed or order. Make the loader as it was made for the run"
            )
        if int(position) >= self.length:
            raise InvalidArgumentError(f"the key {key!r} names no position of an epoch of {self.length} samples")
        return int(epoch), int(position)
