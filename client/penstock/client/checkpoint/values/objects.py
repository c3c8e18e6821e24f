"""Objects in a checkpoint: written as torch.save writes them, and loaded so that no code in them can run.

torch.save and torch.load take 0.2 to 0.8 ms for the smallest object, and a state has thousands of numbers. Without
tensors, archives differ only in the pickle and its length, so the rest is cached by length."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from functools import lru_cache
from typing import Any

import torch

from penstock.client.checkpoint.values.torch_frames import saved_bytes
from penstock.client.checkpoint.values.torch_private import without_crc32
from penstock.proto.errors import CheckpointCorruptError, CheckpointError

PROTOCOL = 2
HEADER = 30
"""Bytes in a zip archive from the start of a file's header to the file's name."""


def plain_bytes(value: Any) -> bytes:
    """Return what torch.save writes for a value without tensors, but without the CRC32, which torch.load ignores."""
    pickled = pickle.dumps(value, PROTOCOL)
    kept = _around(len(pickled))
    if kept is None:
        return saved_bytes(value)
    before, behind = kept
    return before + pickled + behind


@lru_cache(maxsize=4096)
def _around(length: int) -> tuple[bytes, bytes] | None:
    """Return what torch.save writes before and after a pickle of `length` bytes; None if torch's way is unknown."""
    for value in ("x" * max(length - 10, 0), None, 1, 256, 65536, 0.5, ""):
        pickled = pickle.dumps(value, PROTOCOL)
        if len(pickled) == length:
            with without_crc32():
                data = saved_bytes(value)
            begin = _pickle_at(data)
            if begin is None or data[begin : begin + length] != pickled:
                return None
            return data[:begin], data[begin + length :]
    return None


def _pickle_at(data: bytes) -> int | None:
    """Offset of the pickle in what torch.save wrote; None if it is not the archive's first file."""
    if data[:4] != b"PK\x03\x04" or data[8:10] != b"\0\0":
        return None
    name, extra = int.from_bytes(data[26:28], "little"), int.from_bytes(data[28:30], "little")
    if not data[HEADER : HEADER + name].endswith(b"/data.pkl"):
        return None
    return HEADER + name + extra


class _Plain(pickle.Unpickler):
    """Unpickler that refuses tensors, and any class except bytes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _encoded  # protocol 2 writes bytes with it
        if name == "bytes" and module in ("__builtin__", "builtins"):
            return _no_bytes  # protocol 2 writes b"" with it
        raise pickle.UnpicklingError(f"a plain value must contain no class, got {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a plain value must contain no tensor, got one")


def _encoded(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in a plain value must be encoded as latin1, got {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


def load_object(data: bytes, name: str, where: str, *, unsafe: bool) -> Any:
    """Return the object that torch.save wrote. `unsafe`: unpickle any class. Raises CheckpointError."""
    begin = _pickle_at(data)
    if begin is not None:
        try:
            pickled = bounded(data[begin:])
        except pickle.UnpicklingError as error:
            raise _unreadable(name, where, error) from error
        try:
            return _Plain(io.BytesIO(pickled)).load()  # a pickle ends with an opcode of its own
        except Exception:  # not a plain value: torch.load decides
            pass
    try:
        file = _stored(data)
    except Exception as error:  # arbitrary bytes can raise any error
        raise _unreadable(name, where, error) from error
    try:
        return torch.load(file, map_location="cpu", weights_only=not unsafe)
    except Exception as error:  # here too
        if isinstance(error, pickle.UnpicklingError) and not unsafe:
            raise CheckpointError(
                f"{name!r} of {where} has a class that could run code: pass restore(..., allow_unsafe_types=True) if "
                f"you trust who wrote it. Cause: {error}"
            ) from error
        raise CheckpointError(f"{name!r} of {where} cannot be loaded: {type(error).__name__}: {error}") from error


def _unreadable(name: str, where: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{name!r} of {where} cannot be loaded: {error}")


def load_tensor(data: bytes, name: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """Raises CheckpointCorruptError if `data` is not a tensor of this dtype and shape; CheckpointError for a class that
    torch.load(weights_only=True) does not know in this process."""
    try:
        tensor = torch.load(_stored(data), map_location="cpu", weights_only=True)
    except Exception as error:  # arbitrary bytes can raise any error
        if classes := unknown_classes(data):
            raise CheckpointError(
                f"{name!r} is a tensor of a class that torch.load does not know here, {', '.join(classes)}: import the "
                "package that has it before, or pass the class to torch.serialization.add_safe_globals"
            ) from error
        raise CheckpointCorruptError(f"{name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes):
        raise CheckpointCorruptError(f"{name!r} must be a {dtype} tensor of shape {list(sizes)}, as in the index")
    return tensor


def unknown_classes(data: bytes) -> list[str]:
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(_stored(data))
    except Exception:  # here too
        return []


def _stored(data: bytes) -> io.BytesIO:
    """Return `data` as a file, after a check that reading it takes no more memory than it has bytes."""
    file = io.BytesIO(data)
    if data[:2] != b"PK":
        raise ValueError("the data must be a zip archive, as torch.save writes since torch 1.6")
    with zipfile.ZipFile(file) as archive:
        if sum(one.file_size for one in archive.infolist()) > len(data):
            raise ValueError("the zip archive declares more bytes than it has")
        for one in archive.infolist():
            if one.compress_type != zipfile.ZIP_STORED:
                raise ValueError("the zip archive has compressed parts, which torch.save does not write")
            if one.filename.endswith("data.pkl"):  # without `read`, which checks a CRC32 that Penstock leaves out
                name, extra = struct.unpack_from("<HH", data, one.header_offset + 26)
                begin = one.header_offset + HEADER + name + extra
                bounded(data[begin : begin + one.file_size])
    file.seek(0)
    return file


def bounded(data: bytes) -> bytes:
    """Return `data`, if unpickling takes no more memory than its length justifies; else raise pickle.UnpicklingError.

    The unpickler allocates memory for any length or memo position before it checks whether the data exist: five bytes
    make it allocate 32 GiB. genops checks lengths. A pickler never writes a position above the pickle's own length."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(data):
                raise ValueError(f"it has {len(data):,} bytes, but names the memo position {argument:,}")
    except ValueError as error:
        raise pickle.UnpicklingError(f"the pickle is damaged: {error}") from error
    return data
