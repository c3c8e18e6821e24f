"""Description of torch's index of a checkpoint (the file `.metadata`, a pickle that says which value is where). The
writer process makes the index from this description, without torch.

See penstock/proto/state/checkpoint_index.py. This module pickles torch's classes and the values that stay the same from
save to save. The rest of the index, which the writer adds, refers to them by their positions in the pickler's memo.
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
"""Description of one archive (the bytes of one saved value): name of the value, offset of the part in its tensor (None
for an object), and hint, as in torch's MetadataIndex; then the archive's offset and number of bytes in its file."""
PROTOCOL = 3
"""Pickle protocol of the index. Pickles of newer protocols contain frames with lengths, and could not be embedded in
another pickle."""


class _Parts:
    """List of the objects that are pickled together. An object that is added again keeps its number in the list."""

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
        """Return the pickle of all objects, the number of positions in its memo, and the memo position of each object,
        in the order of the list."""
        file = io.BytesIO()
        pickler = pickle.Pickler(file, PROTOCOL)
        pickler.dump(self._values)
        memo = pickler.memo.copy()
        return file.getvalue(), len(memo), [memo[id(value)][0] for value in self._values]


def described(metadata: Metadata, files: Iterable[tuple[str, Iterable[Stored]]]) -> bytes:
    """Return the encoded description of torch's index. `metadata`: the index without its `storage_data`. `files`: name
    of each file, and descriptions of its archives, from which `storage_data` is made."""
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
    pickled, memo, memo_positions = parts.pickled()
    return DescribedIndex(
        pickled.decode("latin-1"),
        memo,
        memo_positions,
        storage_meta,
        str(metadata.version),
        kinds,
        names,
        metadata.planner_data,
        entries,
    ).encode()
