"""Index of a checkpoint: which values it has, and where their bytes are. Anybody may have written it: every field is
checked, and compared with the manifest's files.

Format: penstock/proto/state/checkpoint_index.py. An earlier Penstock's checkpoint has only torch's `.metadata`, a
pickle. A child process without torch (metadata_reader.py) converts it, so that a pickle that takes forever, or all
memory, ends with it."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from penstock.proto.errors import CheckpointCorruptError
from penstock.proto.state.checkpoint_index import FORMAT, in_fours
from penstock.runtime.process.lifetime import signals_blocked
from penstock.runtime.process.spawn import environment

READER = Path(__file__).with_name("metadata_reader.py")
READER_S = 120.0
"""Seconds to read a `.metadata`. 3,000 entries take 0.1 s."""
LARGE = 1 << 30
"""Largest bytes of an expanded tensor, whose repeated values are written once; a larger one is damaged."""


class Archive(NamedTuple):
    """Bytes of one chunk of a tensor, or of one object, in a file."""

    chunk: int
    file: str
    offset: int
    length: int


class SavedValue(NamedTuple):
    tensor: TensorStorageMetadata | None
    path: tuple[str | int, ...]
    archives: list[Archive]


def converted(metadata: bytes, where: str) -> bytes:
    command = [sys.executable, "-I", "-S", str(READER)]
    try:
        with signals_blocked(signal.SIGTERM):  # of the whole job, which may still save
            done = subprocess.run(
                command, input=metadata, capture_output=True, timeout=READER_S, env=environment("PENSTOCK_TOKEN*")
            )
    except subprocess.TimeoutExpired:
        raise CheckpointCorruptError(f"{where} cannot be read: it takes longer than {READER_S:g} s") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise CheckpointCorruptError(f"{where} cannot be read: {last or f'its reader ended with {done.returncode}'}")
    return done.stdout


def read_index(data: bytes, where: str, files: Mapping[str, int]) -> dict[str, SavedValue]:
    """Return a checkpoint's values by name, from index.json. `where`: for errors. `files`: lengths in bytes."""
    try:
        index = json.loads(data)
        if index["format"] > FORMAT:
            raise CheckpointCorruptError(f"{where} is in format {index['format']}: upgrade Penstock here")
        tensors = [_tensor(*kind) for kind in index["tensors"]]
        names: list[str] = index["files"]
        if not all(type(name) is str and name in files for name in names):
            raise ValueError("the index names a file that the checkpoint does not have")
        return {
            name: _value(name, None if kind is None else tensors[_count(kind)], path, archives, names, files)
            for name, (kind, path, *archives) in index["values"].items()
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where} cannot be read: {error or type(error).__name__}") from error


def _tensor(dtype: str, shape: list[int], chunks: list[Any]) -> TensorStorageMetadata:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"each tensor must have a dtype of torch, got {dtype!r:.100}")
    size = torch.Size(map(_count, shape))
    parts = [ChunkStorageMetadata(*(torch.Size(map(_count, numbers)) for numbers in chunk)) for chunk in chunks]
    for part in parts:
        for begin, length, whole in zip(part.offsets, part.sizes, size, strict=True):
            if begin + length > whole:
                raise ValueError(f"each part of a tensor must be within its shape {list(size)}, got one that is not")
    if (count := sum(math.prod(part.sizes) for part in parts)) != math.prod(size):
        raise ValueError(f"all parts of a tensor of {list(size)} must have {math.prod(size):,} values, got {count:,}")
    return TensorStorageMetadata(TensorProperties(kind), size, parts)


def _value(
    name: str,
    tensor: TensorStorageMetadata | None,
    path: list[Any],
    archives: list[int],
    names: list[str],
    files: Mapping[str, int],
) -> SavedValue:
    if not path or not all(type(key) in (str, int) for key in path):
        raise ValueError(f"the keys that lead to {name!r} must be texts and integers, got {path!r:.100}")
    found = [
        Archive(_count(chunk), names[_count(file)], _count(begin), _count(length))
        for chunk, file, begin, length in in_fours(archives)
    ]
    for archive in found:
        if archive.offset + archive.length > files[archive.file]:
            raise ValueError(f"{name!r} must be within the file {archive.file}, got bytes beyond its end")
    found.sort()
    if [archive.chunk for archive in found] != list(range(1 if tensor is None else len(tensor.chunks))):
        raise ValueError(f"each part of {name!r} must be in a file, got {len(found)} of them")
    if tensor is not None:
        least, written = math.prod(tensor.size) * tensor.properties.dtype.itemsize, sum(one.length for one in found)
        if least > max(written, LARGE):
            raise ValueError(f"the files must have {least:,} bytes of {name!r}, got {written:,}")
    return SavedValue(tensor, tuple(path), found)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"the index must have whole numbers from 0 there, got {value!r:.100}")
    return value
