"""Megatron-core's token files: documents by number, from a .bin file of tokens and its .idx file (version 1 of
"MMIDIDX").

    [b"MMIDIDX" 0 0] [version: 8] [code of the dtype: 1] [sequences: 8] [documents + 1: 8]
    [length in tokens: 4] * sequences [begin in bytes: 8] * sequences
    [number of the document's first sequence: 8] * (documents + 1) [mode: 1] * sequences, only for multimodal data

A document is one sequence or several (sentences, or texts and images in turn), without gaps in the .bin file. Tables of
up to KEPT_BYTES are read and checked when the file is opened; of larger ones entries are checked when read, so an index
of 10^9 documents opens at once, and takes no memory. Nothing is mapped as in Megatron: a mapped file that is truncated
kills its reader (SIGBUS). A copy of 1,000 tokens takes 0.5 us, and is writable, as torch.from_numpy wants it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex, overload

import numpy as np
import xxhash

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.raw_files import check_samples, open_file, unreadable
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

Tokens = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
ONE, TWO = struct.Struct("<q"), struct.Struct("<2q")
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""dtype of the tokens, by its code in the .idx file."""
KEPT_BYTES = 64 << 20
"""Largest size in bytes of an .idx file whose tables are read into memory."""
HASHED_PART = 1 << 20
"""Bytes of each of the KEPT_BYTES / HASHED_PART evenly spaced parts of a large .idx file in its digest."""


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """Position of a document in the .bin file, in bytes, and lengths of its sequences."""

    begin: int
    lengths: np.ndarray[Any, np.dtype[np.int32]]
    """Number of tokens in each sequence of the document; shape (sequences,)."""
    modes: np.ndarray[Any, np.dtype[np.int8]] | None
    """Mode of each sequence (Megatron's number for text, image and so on); None if all are text."""


class TokenIndex:
    """Boundaries of the documents in a .bin file. Thread-safe, and usable in forked children."""

    def __init__(self, path: Path, name: str, size: int | None = None) -> None:
        """Open an .idx file and check it. Raises ShardCorruptError if it is missing, damaged or not of `size`."""
        self.name = name
        self._file, self.size = open_file(path, name, size)
        head = self._read(0, HEAD.size)
        magic, version, code, sequences, bounds = HEAD.unpack(head)
        self.sequences: int = sequences
        if magic != MAGIC:
            self._corrupt("the file must begin with MMIDIDX. Give the .idx file that Megatron's preprocessing wrote")
        if version != VERSION:
            self._corrupt(f"the version must be {VERSION}, got {version}. Write the data with a current Megatron-core")
        if code not in DTYPES:
            self._corrupt(
                f"the code of the dtype must be one of {', '.join(map(str, DTYPES))}, got {code}. Write the data again"
            )
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self.documents: int = max(0, bounds - 1)
        plain = HEAD.size + 12 * self.sequences + 8 * bounds
        if bounds < 1 or self.size not in (plain, plain + self.sequences):
            self._corrupt(
                f"the file must have {plain} bytes for {self.sequences} sequences and {self.documents} documents, or "
                f"{plain + self.sequences} with modes, got {self.size}. It is truncated or damaged: write it again"
            )
        self.has_modes = self.sequences > 0 and self.size > plain
        self._tables = (HEAD.size, HEAD.size + 4 * self.sequences, HEAD.size + 12 * self.sequences, plain)
        """Offsets of the tables: lengths and first bytes of sequences, first sequences of documents, modes."""
        self._kept: memoryview | None = None
        if self.size <= KEPT_BYTES:
            self._kept = memoryview(self._read(0, self.size))
        self._check()
        self.data_bytes = self._last_end()
        """Size in bytes that the .bin file must have."""
        self.extents: memoryview[int] | None = self._kept_extents()
        """First byte of each document, then the end of the last; None if the tables are not in memory."""

    def __len__(self) -> int:
        return self.documents

    def extent(self, number: int) -> tuple[int, int]:
        """Return a document's first byte and end. The number must be valid. Raises ShardCorruptError."""
        if self.extents is not None:
            return self.extents[number], self.extents[number + 1]
        first, last = TWO.unpack(self._read(self._tables[2] + 8 * number, 16))
        if not 0 <= first <= last <= self.sequences:
            self._refuse(number, f"sequences 0 to {self.sequences}", f"{first} to {last}")
        begin: int = ONE.unpack(self._read(self._tables[1] + 8 * first, 8))[0] if first < last else 0
        end: int = (
            self.data_bytes if last == self.sequences else ONE.unpack(self._read(self._tables[1] + 8 * last, 8))[0]
        )
        if first < last and not 0 <= begin <= end:
            self._refuse(number, f"bytes 0 to {self.data_bytes}", f"{begin} to {end}")
        return begin, end if first < last else begin

    def document(self, number: int) -> DocumentEntry:
        """The number must be valid. Raises ShardCorruptError."""
        first, end = (int(bound) for bound in self._bounds(number, number + 2))
        if not 0 <= first <= end <= self.sequences:
            self._refuse(number, f"sequences 0 to {self.sequences}", f"{first} to {end}")
        if first == end:
            return DocumentEntry(0, np.zeros(0, np.int32), np.zeros(0, np.int8) if self.has_modes else None)
        lengths, begin = self._lengths(first, end), int(self._begins(first, first + 1)[0])
        if self._kept is None:
            self._check_sequences(
                f"document {number}", lengths, np.append(self._begins(first, end), self.extent(number)[1])
            )
        modes = None
        if self.has_modes:
            modes = self._table(3, np.dtype(np.int8), first, end)
        return DocumentEntry(begin, lengths, modes)

    def tokens(self, begin: int, end: int) -> int:
        """Return the number of tokens in documents `begin` to `end` - 1."""
        return (self._bytes_before(end) - self._bytes_before(begin)) // self.dtype.itemsize if begin < end else 0

    def _last_end(self) -> int:
        if not self.sequences:
            return 0
        last = self.sequences - 1
        return int(self._begins(last, last + 1)[0]) + int(self._lengths(last, last + 1)[0]) * self.dtype.itemsize

    def _bytes_before(self, document: int) -> int:
        first = int(self._bounds(document, document + 1)[0])
        return int(self._begins(first, first + 1)[0]) if first < self.sequences else self.data_bytes

    def _kept_extents(self) -> memoryview[int] | None:
        if self._kept is None:
            return None
        begins = np.append(self._begins(0, self.sequences), self.data_bytes)
        extents: memoryview[int] = begins[self._bounds(0, self.documents + 1)].data
        return extents

    def digest(self) -> str:
        """Return a digest of the .idx file: of the whole file, or for a large file of some parts."""
        hashed = xxhash.xxh3_128(f"{self.size} {self.data_bytes}".encode())
        if self._kept is not None:
            hashed.update(self._kept)
        else:
            for begin in np.linspace(0, self.size - HASHED_PART, KEPT_BYTES // HASHED_PART).astype(np.int64).tolist():
                hashed.update(self._read(begin, HASHED_PART))
        return hashed.hexdigest()

    def _lengths(self, begin: int, end: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self._table(0, np.dtype("<i4"), begin, end)

    def _begins(self, begin: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._table(1, np.dtype("<i8"), begin, end)

    def _bounds(self, begin: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._table(2, np.dtype("<i8"), begin, end)

    def _table(self, table: int, dtype: np.dtype[Any], begin: int, end: int) -> np.ndarray[Any, Any]:
        at = self._tables[table] + begin * dtype.itemsize
        if self._kept is not None:
            return np.frombuffer(self._kept, dtype, end - begin, at)
        return np.frombuffer(self._read(at, (end - begin) * dtype.itemsize), dtype)

    def _check(self) -> None:
        first, last = int(self._bounds(0, 1)[0]), int(self._bounds(self.documents, self.documents + 1)[0])
        if first != 0 or last != self.sequences:
            self._corrupt(f"the documents must consist of sequences 0 to {self.sequences}, got {first} to {last}")
        if self._kept is None or not self.sequences:
            return
        bounds = self._bounds(0, self.documents + 1)
        wrong = np.flatnonzero(bounds[1:] < bounds[:-1])
        if wrong.size:
            self._corrupt(f"document {wrong[0]} must not end before it begins. Write the file again")
        begins = self._begins(0, self.sequences)
        if begins[0] != 0:
            self._corrupt(f"the first sequence must begin at byte 0, got {begins[0]}. Write the file again")
        self._check_sequences("the file", self._lengths(0, self.sequences), np.append(begins, self._last_end()))

    def _check_sequences(self, what: str, lengths: np.ndarray[Any, Any], begins: np.ndarray[Any, Any]) -> None:
        """Raise ShardCorruptError unless sequences lie one after the other. `begins`: with the end of the last."""
        if (lengths < 0).any() or begins[0] < 0:
            self._corrupt(f"{what} must not have a sequence with a negative length or begin. Write the file again")
        ends = begins[:-1] + lengths.astype(np.int64) * self.dtype.itemsize
        wrong = np.flatnonzero(begins[1:] != ends)
        if wrong.size:
            self._corrupt(
                f"{what} must have sequences without gaps, got one that ends at byte {ends[wrong[0]]} before one that "
                f"begins at byte {begins[wrong[0] + 1]}. Write the file again"
            )

    def _read(self, begin: int, size: int) -> bytes:
        try:
            data = self._file.read(size, begin)
        except OSError as error:
            raise unreadable(self.name, error) from error
        if len(data) != size:
            self._corrupt(f"the file is truncated: {len(data)} of the bytes {begin} to {begin + size} are left")
        return data

    def _refuse(self, document: int, inside: str, got: str) -> NoReturn:
        self._corrupt(f"document {document} must not end before it begins, and must lie in {inside}, got {got}")

    def _corrupt(self, why: str) -> NoReturn:
        raise ShardCorruptError(f"{self.name}: {why}")


class _TokenFile:
    """Open .bin file of tokens with its .idx file. Thread-safe, and usable in forked children."""

    def __init__(self, data: Path, index: Path, data_name: str, index_name: str, index_size: int | None = None) -> None:
        self.name = data_name
        self.index = TokenIndex(index, index_name, index_size)
        self._itemsize, self._dtype = self.index.dtype.itemsize, self.index.dtype
        self._extents = self.index.extents
        self._file: Descriptor | None
        self._file, self.size = open_file(data, data_name)
        if self.size != self.index.data_bytes:
            raise ShardCorruptError(
                f"{data_name} must have {self.index.data_bytes} bytes, as {index_name} says, got {self.size}"
            )

    def tokens(self, number: int) -> Tokens:
        extents = self._extents
        if extents is None:
            begin, end = self.index.extent(number)
            if end > self.size:
                raise ShardCorruptError(
                    f"{self.index.name}: document {number} must end within {self.name}, got byte {end}"
                )
        else:  # bounds in memory were checked when the index was opened
            begin, end = extents[number], extents[number + 1]
        file = self._file
        if file is None:
            raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
        tokens = np.empty((end - begin) // self._itemsize, self._dtype)
        try:
            read = os.preadv(file.fileno(), [tokens.data], begin)  # in most cases the first call reads all sequences
            if read != end - begin:
                read = file.read_into(tokens, begin)
        except OSError as error:
            raise unreadable(self.name, error) from error
        if read != end - begin:
            raise ShardCorruptError(
                f"{self.name}: document {number} is truncated: {read} of {end - begin} bytes are left"
            )
        return tokens

    def sample(self, number: int) -> dict[str, Any]:
        entry = self.index.document(number)
        sample = {
            "tokens": self.tokens(number),
            "sequence_lengths": entry.lengths.copy(),
        }
        if entry.modes is not None:
            sample["modes"] = entry.modes.copy()
        return sample

    def close(self) -> None:
        self._file = None


class MegatronDocuments:
    """Documents in a pair of files PREFIX.bin and PREFIX.idx, as Megatron-core's preprocessing writes them.

        documents = MegatronDocuments("corpus_text_document")
        source = Packed(LogicalShards([documents], shards=64, shuffle=True), length=4096)

    `documents[i]` is an array of the tokens of document i, of the stored dtype. `documents[a:b]` is a view, which reads
    nothing. An indexable piece for LogicalShards. Thread-safe, and usable in forked and spawned processes.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """
        Args:
            prefix: path of the files without .bin and .idx.

        Raises DatasetError if a file is missing, ShardCorruptError if one is damaged or they do not belong together.
        """
        if not isinstance(prefix, str | os.PathLike):
            raise InvalidArgumentError(f"prefix must be a path as text or Path, got {prefix!r:.100}")
        self.prefix = os.fspath(prefix)
        """Path of the files without .bin and .idx."""
        self._file = self._opened()
        self._range = range(len(self._file.index))

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the tokens, as the .idx file stores it."""
        return self._file.index.dtype

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the documents of this object, which may be a view of some."""
        return self._file.index.tokens(self._range.start, self._range.stop)

    @property
    def fingerprint(self) -> str:
        """Digest of the .idx file (of some parts of a large one), with the numbers of the first document and of the end
        of this object. The tokens do not enter into it."""
        return f"{self._file.index.digest()}:{self._range.start}:{self._range.stop}"

    def __len__(self) -> int:
        return len(self._range)

    def __repr__(self) -> str:
        return f"<MegatronDocuments {self.prefix}: {len(self)} documents of {self.dtype}>"

    def __iter__(self) -> Iterator[Tokens]:
        return map(self._file.tokens, self._range)

    @overload
    def __getitem__(self, index: slice) -> MegatronDocuments: ...

    @overload
    def __getitem__(self, index: SupportsIndex) -> Tokens: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Tokens | MegatronDocuments:
        """Return the tokens of a document, a writable array of shape (tokens,) with memory of its own; for a slice, a
        view.

        Raises:
            IndexError: the index is out of range.
            ShardCorruptError: the files are damaged, or have changed.
        """
        if isinstance(index, slice):
            return self._part(index)
        try:
            return self._file.tokens(self._range[index])
        except IndexError:
            raise self._no_document(index) from None

    def sample(self, index: SupportsIndex) -> dict[str, Any]:
        """Return a document with the borders of its sequences: `tokens` of shape (tokens,), `sequence_lengths` of shape
        (sequences,), int32, and for multimodal data `modes` of shape (sequences,), int8. Raises as `documents[i]`
        does."""
        try:
            return self._file.sample(self._range[index])
        except IndexError:
            raise self._no_document(index) from None

    def close(self) -> None:
        """Close the .bin file, also for all views. Arrays that were read stay valid; a later read raises ValueError."""
        self._file.close()

    def _no_document(self, index: SupportsIndex) -> IndexError:
        return IndexError(
            f"{self.prefix}: a document's number must be at least {-len(self)} and below {len(self)}, got {index}"
        )

    def _part(self, part: slice) -> MegatronDocuments:
        chosen = self._range[part]
        if chosen.step != 1:
            raise InvalidArgumentError(f"a slice of documents must have step 1, got {part.step}. Use documents[a:b]")
        other = MegatronDocuments.__new__(MegatronDocuments)
        other.prefix, other._file, other._range = self.prefix, self._file, chosen
        return other

    def _opened(self) -> _TokenFile:
        data, index = f"{self.prefix}.bin", f"{self.prefix}.idx"
        for path in (index, data):
            if not os.path.exists(path):
                raise DatasetError(
                    f"{path} must exist: prefix must be the path without .bin and .idx, got {self.prefix!r}"
                )
        return _TokenFile(Path(data), Path(index), data, index)

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "digest": self._file.index.digest(), "range": self._range}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix, self._range = state["prefix"], state["range"]
        self._file = self._opened()
        if self._file.index.digest() != state["digest"]:
            raise DatasetError(f"{self.prefix}.idx must not change while a job reads it. Start the job again")


class MegatronReader:
    """A sample is a document, as MegatronDocuments.sample returns it."""

    def __init__(self, shard: Shard, data: Path, index: Path) -> None:
        stored, boundaries = (file.raw for file in shard.files)
        self.name = stored.name
        self._file = _TokenFile(data, index, stored.name, boundaries.name, boundaries.size)  # which says that of `data`
        check_samples(boundaries.name, "documents", len(self), shard.samples)

    def __len__(self) -> int:
        return len(self._file.index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert 0 <= index < len(self), f"{self.name} has {len(self)} samples"
        return self._file.sample(index)

    def close(self) -> None:
        self._file.close()


def index_megatron(path: Path, name: str) -> Shard:
    """Index a .bin file and its .idx file as one shard. Raises ShardCorruptError if one is missing or damaged."""
    if path.suffix != ".bin":
        raise InvalidArgumentError(f"path must end in .bin, got {path}. Pass the .bin file of the pair")
    index_name = name.removesuffix(".bin") + ".idx"
    file = _TokenFile(path, path.with_suffix(".idx"), name, index_name)
    return Shard(
        "megatron",
        len(file.index),
        (ShardFile(StoredFile(name, file.size)), ShardFile(StoredFile(index_name, file.index.size))),
    )
