"""Reader of torch's index of a checkpoint, the pickle `.metadata`. Reading the index runs no code from the pickle, and
compares the index with the checkpoint's files."""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
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
"""Names of the classes and functions that a pickled index may use, by module."""
PATH_KEYS = {str, int}
"""Types that the keys on the path to a value in the state may have. torch writes no other types."""
LARGE = 1 << 30
"""Largest size in bytes of a tensor that may be stored in fewer bytes than its size. An expanded tensor is stored so:
its repeated values were written once. A larger tensor with missing bytes is damage."""


def read_index(data: bytes, where: Path, files: Mapping[str, int]) -> Metadata:
    """Return torch's index, made from its pickle `data` and checked.

    Args:
        where: path of the index, for errors.
        files: length in bytes of each of the checkpoint's files, by name.

    Raises CheckpointCorruptError, naming `where`, if `data` is not an index, or not the index of these files.
    """
    try:
        metadata = _Index(io.BytesIO(bounded(data))).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"the index must be a pickle of torch's Metadata, got one of {type(metadata).__name__}")
        _check(metadata, files)
    except CheckpointCorruptError:
        raise
    except Exception as error:  # an arbitrary pickle can raise any error
        raise CheckpointCorruptError(f"{where} cannot be read: {error or type(error).__name__}") from error
    return metadata


def _check(metadata: Metadata, files: Mapping[str, int]) -> None:
    """Raise ValueError or TypeError if the index is damaged: it contradicts itself or the checkpoint's files (`files`:
    length in bytes, by name).

    No value of the index is hashed, printed or multiplied before its type is known, because these operations on deeply
    nested tuples could take centuries. (`bounded` in pickles.py checks only the keys of dicts.)
    """
    written: Counter[str] = Counter()
    for index, info in metadata.storage_data.items():
        if type(info.relative_path) is not str or info.relative_path not in files:
            raise ValueError(f"the index says that {index.fqn!r} is in a file that the checkpoint does not have")
        if not 0 <= info.offset <= info.offset + info.length <= files[info.relative_path]:
            raise ValueError(f"the index says that {index.fqn!r} is beyond the end of the file {info.relative_path}")
        written[index.fqn] += info.length
    for name, saved in metadata.state_dict_metadata.items():
        if name not in written:
            raise ValueError(f"the checkpoint's index lists {name!r}, but no file that holds it")
        if name not in metadata.planner_data:
            raise ValueError(f"the checkpoint's index lists {name!r}, but not its keys in the state dict")
        if isinstance(saved, TensorStorageMetadata):
            _check_tensor(name, saved, written[name])
    for name, path in metadata.planner_data.items():
        if name not in metadata.state_dict_metadata or not path or not isinstance(path, tuple):
            raise ValueError(
                f"the index says which keys of the state lead to {name!r}, but nothing was saved under that name"
            )
        if not PATH_KEYS.issuperset(map(type, path)):
            raise TypeError(
                f"the keys of the state that lead to {name!r} must be str and int in the index, got other types"
            )


def _check_tensor(name: str, saved: TensorStorageMetadata, written: int) -> None:
    if not all(isinstance(size, torch.Size) for size in (saved.size, *_sizes(saved))):
        raise TypeError(f"the index must have the sizes of {name!r} as torch.Size, got other types")
    count, dtype = math.prod(saved.size), saved.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the index must have a torch.dtype for {name!r}, got a {type(dtype).__name__}")
    if count * dtype.itemsize > max(written, LARGE):
        least = count * dtype.itemsize
        raise ValueError(
            f"the files must have {least:,} bytes of {name!r} ({count:,} values of {dtype}), got {written:,}"
        )
    parts = 0
    for chunk in saved.chunks:
        for begin, length, size in zip(chunk.offsets, chunk.sizes, saved.size, strict=True):
            if not 0 <= begin <= begin + length <= size:
                raise ValueError(
                    f"each part of {name!r} must be within its shape {list(saved.size)}, got one that is not"
                )
        parts += math.prod(chunk.sizes)
    if parts != count:
        raise ValueError(f"all parts of {name!r} together must have {count:,} values, got {parts:,}")


def _sizes(saved: TensorStorageMetadata) -> Iterator[object]:
    for chunk in saved.chunks:
        yield from (chunk.offsets, chunk.sizes)


class _Index(pickle.Unpickler):
    """Unpickler of torch's index, which makes objects only of the classes in `ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # some versions of Python pickle a member of an enum by getattr
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in ALLOWED.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(
                f"the pickle names {module}.{name}, which no index of torch.distributed.checkpoint contains"
            )
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Any:
    """Return the member `name` of the enum `kind`. This function replaces getattr in the pickle. getattr on any other
    object could lead to code of any kind, so it raises UnpicklingError."""
    if not isinstance(kind, EnumType) or type(name) is not str or name not in kind.__members__:
        raise pickle.UnpicklingError("the pickle names an attribute that is not a member of an enum")
    return kind[name]
