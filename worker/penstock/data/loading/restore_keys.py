"""Restore keys: short texts in a batch, one for each row, by which the row's sample can be read again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from penstock.proto.errors import InvalidArgumentError, StateMismatchError

KIND = "p"
"""First letter of keys of epoch, position and a digest of the order."""


def checked_name(keys: str | None) -> str | None:
    if keys is not None and (not isinstance(keys, str) or not keys):
        raise InvalidArgumentError(f"keys must be the name of a field to add to each batch, got {keys!r}")
    return keys


def with_keys(batch: Any, name: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return a batch with `keys` in field `name`; one that is no dict is put into the field "batch"."""
    if not isinstance(batch, dict):
        return {"batch": batch, name: list(keys)}
    if name in batch:
        raise InvalidArgumentError(f"keys must be a field name that the batch does not have yet, got {name!r}")
    return {**batch, name: list(keys)}


@dataclass(frozen=True)
class PositionKeys:
    length: int
    """Samples in an epoch."""
    order: str

    @staticmethod
    def of(described: Mapping[str, Any], length: int) -> PositionKeys:
        # The tail decides which batches an epoch has, but not which sample is at a position.
        text = json.dumps({**described, "tail": None}, sort_keys=True)
        return PositionKeys(length, xxhash.xxh3_64_hexdigest(text.encode()))

    def key(self, epoch: int, position: int) -> str:
        return f"{KIND}:{epoch}:{position}:{self.order}"

    def position_of(self, key: str) -> tuple[int, int]:
        found = re.fullmatch(KIND + ":([0-9]+):([0-9]+):([^:]*)", key) if isinstance(key, str) else None
        if found is None:
            raise InvalidArgumentError(f"a restore key must be the unchanged text from a batch's field, got {key!r}")
        epoch, position, order = found.groups()
        if order != self.order:
            raise StateMismatchError(
                f"the restore key {key!r} must have the digest {self.order} of this loader's dataset, seed and order"
            )
        if int(position) >= self.length:
            raise InvalidArgumentError(f"the restore key {key!r} must have a position below {self.length}")
        return int(epoch), int(position)
