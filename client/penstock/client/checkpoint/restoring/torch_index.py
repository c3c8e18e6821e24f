"""torch's index of a checkpoint, `.metadata`: a pickle, read so that nothing in it can run, and believed in nothing."""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter
from collections.abc import Mapping
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from penstock.client.checkpoint.values.pickles import bounded
from penstock.proto.errors import CheckpointCorruptError

__all__ = ["read_index"]

ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""Module -> classes that torch's index is made of."""
LARGE = 1 << 30
"""Bytes of a tensor that must have been written. A smaller one may repeat values that were written once."""


def read_index(data: bytes, where: Path, files: Mapping[str, int]) -> Metadata:
    """The index that was written as `data`.

    Args:
        files: name -> bytes of the checkpoint's files.

    Raises CheckpointCorruptError, naming `where`, for what is no index, or not that of these files.
    """
    try:
        metadata = _Index(io.BytesIO(bounded(data))).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__} and no index")
        _check(metadata, files)
    except CheckpointCorruptError:
        raise
    except Exception as error:  # whatever a pickle of any content leads to
        raise CheckpointCorruptError(f"{where} cannot be read: {error or type(error).__name__}") from error
    return metadata


def _check(metadata: Metadata, files: Mapping[str, int]) -> None:
    """Raises whatever it comes to for an index that restoring could not go by."""
    written: Counter[str] = Counter()
    for index, info in metadata.storage_data.items():
        if info.relative_path not in files:
            raise ValueError(f"{index.fqn!r} is in {info.relative_path!r}, which is no file of the checkpoint")
        if not 0 <= info.offset <= info.offset + info.length <= files[info.relative_path]:
            raise ValueError(f"{index.fqn!r} is at bytes that {info.relative_path} does not have")
        written[index.fqn] += info.length
    for name, saved in metadata.state_dict_metadata.items():
        if name not in written or name not in metadata.planner_data:
            raise ValueError(f"{name!r} has no place")
        if isinstance(saved, TensorStorageMetadata):
            _check_tensor(name, saved, written[name])
    for name, path in metadata.planner_data.items():
        if name not in metadata.state_dict_metadata or not path or not isinstance(path, tuple):
            raise ValueError(f"{name!r} has no place")


def _check_tensor(name: str, saved: TensorStorageMetadata, written: int) -> None:
    count, dtype = math.prod(saved.size), saved.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} has the dtype {dtype!r}")
    if count * dtype.itemsize > max(written, LARGE):
        raise ValueError(f"{name!r} has {count:,} values, and {written:,} bytes were written")
    parts = 0
    for chunk in saved.chunks:
        for begin, length, size in zip(chunk.offsets, chunk.sizes, saved.size, strict=True):
            if not 0 <= begin <= begin + length <= size:
                raise ValueError(f"{name!r} has a part beyond its size {list(saved.size)}")
        parts += math.prod(chunk.sizes)
    if parts != count:
        raise ValueError(f"{name!r} has {count:,} values, and its parts have {parts:,}")


class _Index(pickle.Unpickler):
    """Of torch's index, which is a pickle: makes objects of the classes that it is made of, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # by which some versions of Python write the members of an enum
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in ALLOWED.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Any:
    """getattr of anything else would be a way to whatever there is."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which no index needs")
    return kind[name]
