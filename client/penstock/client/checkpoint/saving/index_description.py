"""Description of torch's index of a checkpoint, from which the writer makes the pickle without torch.

See penstock/proto/state/checkpoint_index.py. Only this module uses torch's classes. Python's own pickler pickles them
and their values; everything else refers to them by their positions in the pickler's memo.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from penstock.client.checkpoint.values.torch_private import StorageInfo
from penstock.proto.state.checkpoint_index import ATTRIBUTES, DescribedIndex

__all__ = ["Stored", "described"]

Stored = tuple[tuple[str, tuple[int, ...] | None], int | None, int, int]
"""Description of one archive: the name, offset in the tensor and hint of torch's MetadataIndex, then its offset and
bytes in the file."""
PROTOCOL = 3
"""Pickle protocol of the index. Newer protocols use frames, which cannot be embedded in another pickle."""


class _Parts:
    """List of values that are pickled together. Each object is added once and gets one number, however often it is
    used."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._numbers: dict[int, int] = {}

    def number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._values)
            self._values.append(value)
        return number

    def pickled(self) -> tuple[bytes, int, list[int]]:
        """Return the pickle, the number of positions in its memo, and the position of each part."""
        file = io.BytesIO()
        pickler = pickle.Pickler(file, PROTOCOL)
        pickler.dump(self._values)
        memo = pickler.memo.copy()
        return file.getvalue(), len(memo), [memo[id(value)][0] for value in self._values]


def described(metadata: Metadata, files: Iterable[tuple[str, Iterable[Stored]]]) -> bytes:
    """Return the description of torch's index `metadata`, with `storage_data` for the archives in `files`."""
    parts = _Parts()
    number = parts.number
    for one in (Metadata, TensorStorageMetadata, MetadataIndex, StorageInfo, *ATTRIBUTES):
        number(one)
    kinds: list[Any] = []
    known: dict[int, int] = {}
    names = {}
    for name, stored in metadata.state_dict_metadata.items():
        if (kind := known.get(id(stored))) is None:
            kind = known[id(stored)] = len(kinds)
            if isinstance(stored, TensorStorageMetadata):
                chunks = [number(chunk) for chunk in stored.chunks]
                kinds.append([number(stored.properties), number(stored.size), chunks])
            else:
                kinds.append(number(stored))
        names[name] = kind
    entries = [
        (file, [(name, None if offset is None else number(offset), *others) for (name, offset), *others in stored])
        for file, stored in files
    ]
    storage_meta = number(metadata.storage_meta)
    pickled, memo, places = parts.pickled()
    return DescribedIndex(
        pickled.decode("latin-1"),
        memo,
        places,
        storage_meta,
        str(metadata.version),
        kinds,
        names,
        metadata.planner_data,
        entries,
    ).encode()
