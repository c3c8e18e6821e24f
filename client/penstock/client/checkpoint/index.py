"""torch's index of a checkpoint, `.metadata`: a pickle, read so that nothing in it can run."""

from __future__ import annotations

import io
import pickle
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

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


def read_index(data: bytes, where: Path) -> Metadata:
    """Raises CheckpointCorruptError, naming `where`, unless `data` is an index."""
    try:
        metadata = _Index(io.BytesIO(data)).load()
    except (EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, LookupError) as error:
        raise CheckpointCorruptError(f"{where} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(f"{where} holds a {type(metadata).__name__} and no index")
    return metadata


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
