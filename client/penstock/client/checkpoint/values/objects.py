"""Objects in a checkpoint: written as torch.save writes them, and loaded so that no code in them can run.

torch.save and torch.load take 0.2 to 0.8 ms for the smallest object, and a state has thousands of numbers. For values
without tensors, torch.save writes zip archives that differ only in the pickle and its length. So the rest of the
archive is cached by the pickle's length, and a number is saved in microseconds.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from functools import lru_cache
from typing import Any

import torch

from penstock.client.checkpoint.values.torch_frames import saved_bytes
from penstock.client.checkpoint.values.torch_private import without_crc32
from penstock.proto.errors import CheckpointCorruptError, CheckpointError

__all__ = ["bounded", "load_object", "load_tensor", "plain_bytes"]

PROTOCOL = 2
"""Number of the pickle protocol that torch.save uses."""
HEADER = 30
"""Number of bytes in a zip archive from the start of a file's header to the file's name."""


def plain_bytes(value: Any) -> bytes:
    """Return the bytes that torch.save writes for a value without tensors, but with zero in place of the CRC32, which
    torch.load ignores."""
    pickled = pickle.dumps(value, PROTOCOL)
    kept = _around(len(pickled))
    if kept is None:
        return saved_bytes(value)
    before, behind = kept
    return before + pickled + behind


@lru_cache(maxsize=4096)
def _around(length: int) -> tuple[bytes, bytes] | None:
    """Return the bytes that torch.save writes before and after a pickle of `length` bytes. Return None if this version
    of torch writes them in an unknown way."""
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
    """Return the offset of the pickle in bytes that torch.save wrote; None if the pickle is not the first file in this
    archive."""
    if data[:4] != b"PK\x03\x04" or data[8:10] != b"\0\0":
        return None
    name, extra = int.from_bytes(data[26:28], "little"), int.from_bytes(data[28:30], "little")
    if not data[HEADER : HEADER + name].endswith(b"/data.pkl"):
        return None
    return HEADER + name + extra


class _Plain(pickle.Unpickler):
    """Unpickler of plain values: it raises UnpicklingError for any class except bytes, and for tensors."""

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
    """Return the object `name` that torch.save wrote as `data`. `where`: path of the checkpoint, for errors. `unsafe`:
    True to unpickle any class. Raises CheckpointError if `data` cannot be loaded, or has a class that is not
    allowed."""
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
                f"{name!r} of {where} has a class that could run code while it is loaded: pass restore(..., "
                f"allow_unsafe_types=True) if you trust the program that wrote this checkpoint. Cause: {error}"
            ) from error
        raise CheckpointError(
            f"{name!r} of {where} cannot be loaded: {type(error).__name__}: {error}. Restore with the code and the "
            "version of torch that wrote the checkpoint"
        ) from error


def _unreadable(name: str, where: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{name!r} of {where} cannot be loaded: {error}. Leave it out of the state to restore, or restore another "
        "checkpoint"
    )


def load_tensor(data: bytes, name: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor `name` that torch.save wrote as `data`. Raises CheckpointCorruptError if `data` is not a tensor
    of this dtype and shape."""
    try:
        tensor = torch.load(_stored(data), map_location="cpu", weights_only=True)
    except Exception as error:  # arbitrary bytes can raise any error
        raise CheckpointCorruptError(
            f"{name!r} cannot be loaded: {type(error).__name__}: {error}. Restore another checkpoint"
        ) from error
    if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes):
        is_tensor = isinstance(tensor, torch.Tensor)
        got = f"a {tensor.dtype} tensor of shape {list(tensor.shape)}" if is_tensor else type(tensor).__name__
        raise CheckpointCorruptError(
            f"{name!r} must be a {dtype} tensor of shape {list(sizes)}, as in the checkpoint's index, got {got}: "
            "restore another checkpoint"
        )
    return tensor


def _stored(data: bytes) -> io.BytesIO:
    """Check that reading `data`, which torch.save wrote, takes no more memory than `data` has bytes. Return `data` as a
    file object.

    Raises ValueError if `data` is not a zip archive, or has compressed parts (torch.save compresses nothing). Raises
    pickle.UnpicklingError for a pickle that `bounded` refuses.
    """
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
                header = data[one.header_offset : one.header_offset + HEADER]
                begin = (
                    one.header_offset + HEADER + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
                )
                bounded(data[begin : begin + one.file_size])
    file.seek(0)
    return file


# ---- pickles
#
# The unpickler allocates memory for any length, or position in its memo, that a pickle names, before it checks whether
# the data exist: five bytes make it allocate 32 GiB. A pickler never writes a length or position above the pickle's
# own length, so larger numbers are refused. One regular expression skips the opcodes with an argument of fixed length,
# or of at most 255 bytes: 120,000 opcodes take 3 ms, and 38 ms with Python's own `pickletools.genops`.

_LENGTHS = {pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4}
_LENGTHS[pickletools.TAKEN_FROM_ARGUMENT8U] = 8
_CODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_SIZES = {code: 0 if opcode.arg is None else opcode.arg.n for code, opcode in _CODES.items()}
"""Length in bytes of the argument of each opcode of pickles; a negative number is one of pickletools' constants for
variable lengths."""
_STOP, _PUT, _LONG_PUT = b".", b"p", b"r"
"""Opcodes for the end of a pickle (STOP) and for storing an object in the memo (PUT, LONG_BINPUT). PUT belongs to
protocol 0, which neither torch nor Penstock writes."""
_COUNTED = {code: _LENGTHS[size] for code, size in _SIZES.items() if size in _LENGTHS} | {_LONG_PUT: 4}
"""Length in bytes of the number after each opcode that has one. The number is the length of the data that follow, or a
position in the memo."""
_LINES = {code: 2 if code in b"ci" else 1 for code, size in _SIZES.items() if size == pickletools.UP_TO_NEWLINE}
"""Number of lines of text that are the arguments of an opcode, for opcodes with such arguments."""
del _LINES[_PUT]


def _fixed() -> re.Pattern[bytes]:
    """Return the regular expression that matches a run of opcodes which need no check: their arguments have a fixed
    length, or begin with their length as one byte."""
    kinds = []
    for size in (0, 1, 2, 4, 8):
        codes = b"".join(re.escape(code) for code, known in _SIZES.items() if known == size and code not in _COUNTED)
        kinds.append(b"[%s].{%d}" % (codes.replace(re.escape(_STOP), b""), size))
    short = b"".join(re.escape(code) for code, size in _SIZES.items() if size == pickletools.TAKEN_FROM_ARGUMENT1)
    texts = b"|".join(b"%s.{%d}" % (re.escape(bytes([length])), length) for length in range(256))
    return re.compile(b"(?s:%s|[%s](?:%s))*+" % (b"|".join(kinds), short, texts))


_FIXED = _fixed()


def bounded(data: bytes) -> bytes:
    """Return `data`, unchanged, after a check of the pickle at its beginning: unpickling must take no more memory than
    the pickle's length justifies. Raises pickle.UnpicklingError if it would take more, or if the pickle has no end."""
    at = 0
    while True:
        found = _FIXED.match(data, at)
        assert found is not None  # the pattern also matches an empty text
        code = data[found.end() : found.end() + 1]
        at = found.end() + 1
        if code == _STOP:
            return data
        if code in _COUNTED:
            number = int.from_bytes(data[at : at + _COUNTED[code]], "little")
            at += _COUNTED[code]
            follows = 0 if code == _LONG_PUT else number
            if max(number, at + follows) > len(data):
                raise pickle.UnpicklingError(
                    f"the pickle is damaged: it has {len(data):,} bytes, but names a length or memo position of "
                    f"{number:,} before byte {at:,}"
                )
            at += follows
        elif code in _LINES:
            for _ in range(_LINES[code]):
                at = data.find(b"\n", at) + 1
                if not at:
                    raise pickle.UnpicklingError("the pickle is damaged: a line of text in it has no end")
        else:
            raise pickle.UnpicklingError(
                f"the pickle is damaged: byte {found.end():,} of {len(data):,} is not a pickle opcode"
            )
