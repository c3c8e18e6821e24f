"""Samples of Arrow IPC files, in the file format and in the stream format: a row is a sample, a file is a shard.

pyarrow opens a record batch without a copy, and its offsets are checked once (`_check_columns`); rows are slices of its
buffers, so rows in any order cost the same. Small ones are copied together (MERGED_BYTES). Files with compressed record
batches, or with columns not stored row by row (dictionaries), are decoded by whole record batches. Only such ones are
blocks in the index.

A file on a local disk is mapped. If it is truncated, the next call raises an error; but within a call, the process ends
by SIGBUS. On a network file system, where this also happens when the server fails, the bytes of rows are read when
needed (`_Copy`). The reader of a part (file_ranges.py) also has the file's header: all before the first record batch.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.formats.arrow.ipc_messages import (
    BATCH,
    DICTIONARY,
    SCHEMA,
    Message,
    messages,
    messages_between,
    rows_of_batch,
)
from penstock.data.formats.columnar.columns import Column
from penstock.data.formats.columnar.common_types import CommonTypes, check_types, common_types_of
from penstock.data.formats.columnar.reader import Block, BlocksReader
from penstock.data.formats.columnar.values import storage_of
from penstock.data.formats.contents import CHANGED, check_content, of_pieces
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.fields import check_unique, names
from penstock.data.formats.file_ranges import file_range, part_shard, spans_of
from penstock.data.formats.raw_files import check_samples, open_file, truncated, unreadable
from penstock.data.formats.shards import ReadOptions, Shard, ShardFile, StoredFile
from penstock.proto.errors import DatasetError, ShardCorruptError
from penstock.runtime.files.filesystems import NETWORK, filesystem
from penstock.runtime.process.free_memory import free_memory

MERGED_BYTES = 256 << 10
"""Most bytes of record batches that are copied together: one read costs less than to look up the columns of ten."""
PAGE_BYTES = 4096
"""Least bytes that are read at a time from a file that is not mapped."""
COLUMN_BYTES = 2048
"""Memory of a column's objects in a mapped record batch, in bytes; 8 more for each row."""
_SCHEMA = "schema"
"""Setting that only indexing has, until `with_common_types`: the file's serialized schema, in base64."""
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"

Read = Callable[[Any, int, int], None]
"""(buffer, begin, end), to be called before these bytes of a pyarrow buffer are read."""


def _pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise DatasetError("Arrow files need the package pyarrow. Run pip install 'penstock[parquet]'") from error


@lru_cache(maxsize=256)
def _is_local(folder: Path) -> bool:
    try:
        kind = filesystem(folder, Path("/proc/self/mountinfo").read_text())
    except OSError:
        return False
    return kind not in {"", "9p", "virtiofs", *NETWORK} and not kind.startswith("fuse.")


@dataclass(frozen=True, slots=True)
class ArrowPart:
    header: bytes
    """Bytes of the whole file before its first record batch."""
    begin: int
    """Offset of the part's first byte, counted in the whole file."""
    first: int
    """Number of the part's first row, counted in the whole file."""


class _ArrowFile:
    def __init__(self, path: Path, name: str, part: ArrowPart | None = None, expected: int | None = None) -> None:
        arrow = _pyarrow()
        self.name = name
        self._header, self._begin = (part.header, part.begin) if part else (b"", 0)
        self.descriptor, self.size = open_file(path, name, expected)
        self.version = os.fstat(self.descriptor.fileno()).st_mtime_ns
        self.dictionaries: list[Message] = []
        self.batches: list[tuple[int, int, int, int]] = []
        """For each record batch: (offset of its message, offset and size of the body, number of dictionaries that it
        may need). In a stream these are those before its message; in the file format, where they may lie behind,
        all."""
        rows: list[int] = []
        try:
            all_messages = messages(self._peek, self.size) if part is None else self._messages_of(part)
            self.head = next(all_messages)
            if self.head.kind != SCHEMA:
                raise ValueError("the file must begin with a schema")
            self.schema = arrow.ipc.read_schema(arrow.py_buffer(self._bytes(self.head)))
            self.names: list[str] = list(self.schema.names)
            by_rows = all(_has_rows(field.type) for field in self.schema)
            for message in all_messages:
                if message.kind == BATCH:
                    count, compressed = rows_of_batch(message.metadata)
                    rows.append(count)
                    by_rows &= not compressed
                    self.batches.append((message.begin, message.body, message.body_size, len(self.dictionaries)))
                elif message.kind == DICTIONARY:
                    self.dictionaries.append(message)
        except DatasetError:
            raise
        except Exception as error:  # errors of pyarrow, of the system, and of damaged metadata
            if isinstance(error, OSError) and error.errno is not None:  # pyarrow's own OSError has no number
                raise unreadable(name, error) from error
            raise ShardCorruptError(f"{name} must be an Arrow IPC file: {error}. Write the file again") from error
        self.by_rows = by_rows
        """True if a row can be read without the others of its record batch."""
        self.rows = tuple(rows)

    def _messages_of(self, part: ArrowPart) -> Iterator[Message]:
        yield from messages_between(self._peek, 0, len(part.header))
        yield from messages_between(self._peek, part.begin, part.begin + self.size)

    def blocks(self) -> list[int]:
        """Return the first record batch of each block (one, or several small ones), then the number of all."""
        firsts, total = [0], 0
        for number, (begin, body, size, _) in enumerate(self.batches):
            total += body + size - begin
            if number > firsts[-1] and (not self.by_rows or total > MERGED_BYTES):
                firsts.append(number)
                total = body + size - begin
        return [*firsts, len(self.batches)] if self.batches else [0]

    def mapped(self) -> Any:
        return _pyarrow().py_buffer(mmap.mmap(self.descriptor.fileno(), self.size, access=mmap.ACCESS_READ))

    def offset(self, begin: int) -> int:
        """Return the offset in this file of byte `begin` of the whole file."""
        return begin - self._begin

    def whole(self, number: int) -> Any:
        """Return record batch `number`, decoded from a stream of the schema, the dictionaries and this batch alone."""
        arrow = _pyarrow()
        begin, body, size, dictionaries = self.batches[number]
        needed, free = body + size - begin, free_memory()
        if needed > free:
            raise DatasetError(
                f"{self.name}: a record batch must fit into memory: it takes {needed} bytes, but {free} are free"
            )
        before = [self._bytes(message) for message in (self.head, *self.dictionaries[:dictionaries])]
        stream = b"".join([*before, self.read(begin, needed), END])
        with arrow.ipc.open_stream(arrow.py_buffer(stream)) as reader:
            table = reader.read_all()
        table.validate(full=True)
        return table

    def read(self, begin: int, size: int) -> bytes:
        """`begin`: in the whole file. Raises ShardCorruptError if the file has become shorter."""
        try:
            data = self._peek(begin, size)
        except OSError as error:
            raise unreadable(self.name, error) from error
        if len(data) != size:
            raise truncated(self.name, len(data), size, begin)
        return data

    def _peek(self, begin: int, size: int) -> bytes:
        in_header = begin < len(self._header)
        return self._header[begin : begin + size] if in_header else self.descriptor.read(size, begin - self._begin)

    def _bytes(self, message: Message) -> bytes:
        return self.read(message.begin, message.end - message.begin)


def _has_rows(kind: Any) -> bool:
    """Return True if a value of this type lies in the same place of its record batch as its row."""
    types = _pyarrow().types
    kind = storage_of(kind)
    if types.is_struct(kind):
        fields = {field.name: field.type for field in kind}  # raises an error for a damaged name
        return all(map(_has_rows, fields.values()))
    if types.is_map(kind):
        return _has_rows(kind.key_type) and _has_rows(kind.item_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _has_rows(kind.value_type)
    if types.is_dictionary(kind) or types.is_nested(kind):
        return False
    return types.is_null(kind) or _is_varying(kind) or _has_width(kind)


def _is_varying(kind: Any) -> bool:
    types = _pyarrow().types
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return bool(is_text or types.is_binary(kind) or types.is_large_binary(kind))


def _has_width(kind: Any) -> bool:
    try:
        return int(kind.bit_width) > 0
    except ValueError:  # a type without a fixed width, such as a view
        return False


class _Copy:
    """Record batch of a file that is not mapped: untouched memory, into which pages are read when needed."""

    def __init__(self, file: _ArrowFile, number: int) -> None:
        self._begin, body, size, _ = file.batches[number]
        self._read = file.read
        self._memory = np.frombuffer(
            mmap.mmap(-1, body + size - self._begin, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
        )
        self._is_here = np.zeros(-(-len(self._memory) // PAGE_BYTES), np.bool_)
        self.nbytes = 0
        self.buffer = _pyarrow().py_buffer(self._memory)
        self._fetch(0, body - self._begin)

    def need(self, buffer: Any, begin: int, end: int) -> None:
        if buffer is not None and begin < end:
            offset = buffer.address - self.buffer.address
            self._fetch(offset + begin, offset + min(end, buffer.size))

    def _fetch(self, begin: int, end: int) -> None:
        first = begin // PAGE_BYTES
        missing = np.flatnonzero(~self._is_here[first : -(-end // PAGE_BYTES)])
        if not missing.size:
            return
        low, high = first + int(missing[0]), first + int(missing[-1]) + 1
        begin, end = low * PAGE_BYTES, min(high * PAGE_BYTES, len(self._memory))
        self._memory[begin:end] = np.frombuffer(self._read(self._begin + begin, end - begin), np.uint8)
        self._is_here[low:high] = True
        self.nbytes += end - begin


def _need_structure(array: Any, need: Read) -> None:
    """Call `need` for the validity and the offsets of all values of an array and of the arrays within it."""
    array = array.storage if hasattr(array, "storage") else array
    types, kind, buffers = _pyarrow().types, array.type, array.buffers()
    if buffers and buffers[0] is not None:
        need(buffers[0], 0, buffers[0].size)
    if types.is_struct(kind):
        for number in range(kind.num_fields):
            _need_structure(array.field(number), need)
    elif types.is_nested(kind):
        if not types.is_fixed_size_list(kind):
            need(buffers[1], 0, buffers[1].size)
        _need_structure(array.values, need)
    elif _is_varying(kind) and buffers[1] is not None:
        need(buffers[1], 0, buffers[1].size)


def _need_values(array: Any, begin: int, end: int, need: Read) -> None:
    """Call `need` for the values in rows of an array, whose structure was read and checked."""
    array = array.storage if hasattr(array, "storage") else array
    types, kind = _pyarrow().types, array.type
    if types.is_struct(kind):
        for number in range(kind.num_fields):
            _need_values(array.field(number), begin, end, need)
    elif types.is_fixed_size_list(kind):
        _need_values(array.values, begin * kind.list_size, end * kind.list_size, need)
    elif types.is_nested(kind):
        offsets = array.offsets
        _need_values(array.values, offsets[begin].as_py(), offsets[end].as_py(), need)
    elif _is_varying(kind):
        _, offsets, values = array.buffers()
        if offsets:
            is_large = types.is_large_string(kind) or types.is_large_binary(kind)
            bounds = np.frombuffer(offsets, np.int64 if is_large else np.int32)
            need(values, int(bounds[begin]), int(bounds[end]))
    elif not types.is_null(kind):
        need(array.buffers()[1], begin * kind.bit_width // 8, -(-end * kind.bit_width // 8))


def _is_copied(kind: Any) -> bool:
    """Return True if `column_of` copies the values: bits, and within extension types."""
    types = _pyarrow().types
    return storage_of(kind) != kind or (hasattr(kind, "value_type") and types.is_boolean(kind.value_type))


def _check_columns(batch: Any) -> None:
    """Raise ValueError if a column's buffers are too small, or its offsets not ascending. Texts are checked when
    decoded: otherwise all would be read for the first row."""
    arrow = _pyarrow()
    plain = {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        try:
            array.validate()
            (array.view(plain[array.type]) if array.type in plain else array).validate(full=True)
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from error


class ArrowReader(BlocksReader):
    block_kind = "record batch"

    def __init__(self, shard: Shard, path: Path, part: ArrowPart | None = None) -> None:
        """Raises ShardCorruptError if the file cannot be read, or differs from its entry in the index."""
        stored = shard.files[0].raw
        file = _ArrowFile(path, stored.name, part, stored.size)
        if part is None:
            check_content(shard, of_pieces(file.descriptor, file.size), path)
        check_samples(stored.name, "rows", sum(file.rows), shard.samples)
        if shard.blocks and shard.blocks != file.rows:
            raise ShardCorruptError(f"{stored.name} must have the record batches that the index lists. {CHANGED}")
        self._firsts = file.blocks()
        """First record batch of each block, then the number of record batches."""
        blocks = [sum(file.rows[first:end]) for first, end in itertools.pairwise(self._firsts)]
        first, types = part.first if part else 0, common_types_of(shard.settings)
        super().__init__(stored.name, blocks, file.names, 0, first, types)
        self._file: _ArrowFile | None = file
        self._mapped = file.mapped() if file.by_rows and file.size and _is_local(path.absolute().parent) else None
        self._is_listed = bool(shard.blocks)
        self._marks_use = self._mapped is None  # opening a mapped record batch again costs little

    def _kind(self, name: str) -> Any:
        return self._opened().schema.field(name).type

    def load(self, block: int) -> None:
        """Decode block `block` of the index, if it is not in memory."""
        if self._is_listed:
            super().load(block)

    def close(self) -> None:
        super().close()
        self._file = self._mapped = None

    def _check_file(self) -> None:
        file = self._file
        if file is None:
            raise self._closed()
        # A seek is the fastest way to learn the size, and nothing uses the position.
        if self._mapped is not None and os.lseek(file.descriptor.fileno(), 0, os.SEEK_END) != file.size:
            raise self._changed()

    def _opened(self) -> _ArrowFile:
        file = self._file
        if file is None:
            raise self._closed()
        return file

    def _decode(self, number: int) -> Block:
        file, first, end = self._opened(), *self._firsts[number : number + 2]
        if not file.by_rows:
            MEMORY.make_room(file.batches[first][2])
            table = self._checked(first, file.whole(first))
            return Block([(name, self._column(name, table[name])) for name in self._wanted], table.nbytes)
        if self._mapped is not None and os.fstat(file.descriptor.fileno()).st_mtime_ns != file.version:
            raise self._changed()
        arrow = _pyarrow()
        nbytes = len(self._wanted) * (COLUMN_BYTES + 8 * file.rows[first])
        if end > first + 1:
            batches = [self._batch(each, self._data(each)).select(self._wanted) for each in range(first, end)]
            for batch in batches:
                _check_columns(batch)
            table = arrow.Table.from_batches(batches).combine_chunks()
            columns = [(name, self._column(name, table[name])) for name in self._wanted]
            return Block(columns, nbytes + table.nbytes)
        if self._mapped is not None:
            return Block(self._columns(self._batch(first, self._data(first))), nbytes)
        copy = _Copy(file, first)
        batch = self._batch(first, copy.buffer)
        arrays = [batch[name] for name in self._wanted]
        for name, array in zip(self._wanted, arrays, strict=True):
            _need_structure(array, copy.need)
            if _is_copied(array.type) or name in self._types or name in self._fill:
                _need_values(array, 0, len(array), copy.need)

        def fetch(begin: int, end: int) -> None:
            before = copy.nbytes
            for array in arrays:
                _need_values(array, begin, end, copy.need)
            if copy.nbytes != before:
                MEMORY.add(self._owner, number, nbytes + copy.nbytes)

        return Block(self._columns(batch), nbytes + copy.nbytes, fetch)

    def _data(self, number: int) -> Any:
        file = self._opened()
        begin, body, size, _ = file.batches[number]
        if self._mapped is None:
            return _pyarrow().py_buffer(file.read(begin, body + size - begin))
        return self._mapped.slice(file.offset(begin), body + size - begin)

    def _batch(self, number: int, data: Any) -> Any:
        return self._checked(number, _pyarrow().ipc.read_record_batch(data, self._opened().schema))

    def _columns(self, batch: Any) -> list[tuple[str, Column]]:
        batch = batch.select(self._wanted)
        _check_columns(batch)
        arrays = zip(self._wanted, batch.columns, strict=True)
        return [(name, self._column(name, _pyarrow().chunked_array([array]))) for name, array in arrays]

    def _checked(self, number: int, batch: Any) -> Any:
        if batch.num_rows != self._opened().rows[number]:
            raise self._changed()
        return batch

    def _changed(self) -> ShardCorruptError:
        return ShardCorruptError(f"{self.name} must not change while it is read. Write new data to a new file")


def header_shard(shard: Shard) -> Shard:
    """Return the header of a shard's file as a shard without samples (`format_table.PartReading.table`)."""
    return Shard("arrow", 0, (file_range(shard, 0, shard.ranges[-1]),))


def read_header(shard: Shard, path: Path) -> bytes:
    header = path.read_bytes()
    if len(header) != shard.ranges[-1]:
        raise ValueError(f"the file's header must have {shard.ranges[-1]} bytes, got {len(header)}")
    return header


def open_arrow_part(shard: Shard, part: int, path: Path, table: bytes, options: ReadOptions) -> ArrowReader:
    """`table`: header of the whole file (`format_table.PartReading.open`)."""
    del options
    place = ArrowPart(table, shard.ranges[2 * part], sum(shard.parts[:part]))
    return ArrowReader(part_shard(shard, part), path, place)


def index_arrow(path: Path, name: str) -> Shard:
    """Index an Arrow IPC file. Raises DatasetError if two columns have the same name, or the file is damaged."""
    file = _ArrowFile(path, name)
    check_unique(name, file.names)
    blocks = () if file.by_rows else file.rows
    shard = Shard(
        "arrow",
        sum(file.rows),
        (ShardFile(StoredFile(name, file.size)),),
        settings={"column_names": file.names, _SCHEMA: base64.b64encode(file.schema.serialize().to_pybytes()).decode()},
        blocks=blocks,
        decoded_bytes=sum(size for _, _, size, _ in file.batches) if blocks else 0,
    )
    return _with_parts(shard, file)


def with_common_types(shards: list[Shard]) -> list[Shard]:
    """Return the shards with the types of their columns (common_types.py) instead of their schemas. Raises
    DatasetError."""
    arrow, types = _pyarrow(), CommonTypes()
    for shard in shards:
        types.add(shard.name, arrow.ipc.read_schema(arrow.py_buffer(base64.b64decode(shard.settings[_SCHEMA]))))
    plain = [{name: value for name, value in shard.settings.items() if name != _SCHEMA} for shard in shards]
    own = zip(shards, plain, types.settings(), strict=True)
    return [replace(shard, settings={**settings, **more}) for shard, settings, more in own]


def _with_parts(shard: Shard, file: _ArrowFile) -> Shard:
    """Return the shard with its parts: blocks, or spans of record batches; unchanged if there would be a single one, or
    other messages lie between or after the record batches: a part's reader would miss a dictionary there."""
    offsets = [begin for begin, _, _, _ in file.batches]
    ends = [body + size for _, body, size, _ in file.batches]
    if len(offsets) < 2 or offsets[1:] != ends[:-1] or any(each.begin > offsets[0] for each in file.dictionaries):
        return shard
    batches = range(len(offsets) + 1) if shard.blocks else spans_of(np.array([*offsets, ends[-1]]))
    if len(batches) <= 2:
        return shard
    parts = list(itertools.pairwise(batches))
    spans = () if shard.blocks else tuple(sum(file.rows[first:end]) for first, end in parts)
    bounds = [bound for first, end in parts for bound in (offsets[first], ends[end - 1])]
    return replace(shard, spans=spans, ranges=(*bounds, offsets[0]))


def check_arrow(settings: dict[str, Any]) -> None:
    names(settings, "column_names")
    check_types(settings)
