"""Documents of Megatron-core's token files, by number.

Tokens are read with pread into an array of their own, and not mapped as in Megatron: a mapped file that is truncated
kills its reader (SIGBUS). The copy of a document of 1,000 tokens takes 0.5 us, and its array is writable, as
torch.from_numpy wants it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.megatron.token_index import TokenIndex
from penstock.data.formats.raw_files import unreadable
from penstock.data.formats.shards import ReadOptions, Shard, ShardFile, StoredFile
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

__all__ = ["MegatronDocuments", "MegatronReader", "index_megatron", "open_megatron"]

Tokens = np.ndarray[Any, np.dtype[Any]]


class _TokenFile:
    """Open .bin file of tokens with its .idx file. Thread-safe, and usable in forked children."""

    def __init__(self, data: Path, index: Path, data_name: str, index_name: str) -> None:
        self.name = data_name
        self.index = TokenIndex(index, index_name)
        self._itemsize, self._dtype = self.index.dtype.itemsize, self.index.dtype
        self._extents = self.index.extents
        try:
            self._file: Descriptor | None = Descriptor(data)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise ShardCorruptError(
                f"{data_name}: {data} cannot be read: {error}. Check that the file exists and that this user may "
                "read it"
            ) from error
        if self.size != self.index.data_bytes:
            raise ShardCorruptError(
                f"{data_name} must have {self.index.data_bytes} bytes, as {index_name} says, got {self.size}. Copy or "
                "write the two files together again"
            )

    def tokens(self, number: int) -> Tokens:
        extents = self._extents
        if extents is None:
            begin, end = self.index.extent(number)
            if end > self.size:
                raise ShardCorruptError(
                    f"{self.index.name}: document {number} must end within the {self.size} bytes of {self.name}, got "
                    f"byte {end}. Write the files again"
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
                f"{self.name}: document {number} is truncated: {read} of {end - begin} bytes are left. Write the file "
                "again, and do not change it while it is read"
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

    `documents[i]` is an array of the tokens of document i, of the stored dtype. `documents[a:b]` is a view of the
    documents from a to b - 1, and reads nothing. The object is an indexable piece for LogicalShards. Thread-safe, and
    usable in forked and spawned processes.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """
        Args:
            prefix: path of the files without .bin and .idx.

        Raises DatasetError if a file is missing, ShardCorruptError if one is damaged or they do not belong together.
        """
        if not isinstance(prefix, str | os.PathLike):
            raise InvalidArgumentError(
                f"prefix must be a path as text or Path, got {prefix!r:.100}. Pass the path of the files without .bin "
                "and .idx"
            )
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
        """Digest of the .idx file (of some parts of a large one), with the numbers of the first document of this object
        and of the document after its last one. The tokens do not enter into it."""
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
        """Return the tokens of a document: a writable array of shape (tokens,), which shares no memory with others. For
        a slice, return a view of these documents.

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
        """Close the .bin file, also for all views of this object. Arrays that were read stay valid, and a later read
        raises ValueError."""
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
                    f"{path} must exist: prefix must be the path of a .bin and an .idx file without that ending, got "
                    f"{self.prefix!r}. Correct the prefix, or copy the missing file"
                )
        return _TokenFile(Path(data), Path(index), data, index)

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "digest": self._file.index.digest(), "range": self._range}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix, self._range = state["prefix"], state["range"]
        self._file = self._opened()
        if self._file.index.digest() != state["digest"]:
            raise DatasetError(
                f"{self.prefix}.idx must not change while a job reads it, but its documents differ now. Start the job "
                "again"
            )


class MegatronReader:
    """Reader of a .bin and an .idx file as a shard, see formats.shards.ShardReader. A sample is a document, as
    MegatronDocuments.sample returns it."""

    def __init__(self, shard: Shard, data: Path, index: Path) -> None:
        stored, boundaries = (file.raw for file in shard.files)
        self.name = stored.name
        self._file = _TokenFile(data, index, stored.name, boundaries.name)
        for path, size, expected in (
            (data, self._file.size, stored.size),
            (index, self._file.index.size, boundaries.size),
        ):
            if size != expected:
                raise ShardCorruptError(
                    f"{path.name}: {path} must have {expected} bytes, as the dataset's index lists, got {size}. "
                    "Fetch the file again, or index the folder again"
                )
        if len(self) != shard.samples:
            raise ShardCorruptError(
                f"{boundaries.name} must have {shard.samples} documents, as the dataset's index lists, got "
                f"{len(self)}. Index the folder again"
            )

    def __len__(self) -> int:
        return len(self._file.index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: a sample's number must be at least 0 and below {len(self)}, got {index}")
        return self._file.sample(index)

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples with these numbers."""
        return [self[row] for row in rows]

    def close(self) -> None:
        """Close the file. Samples that were read stay valid."""
        self._file.close()


def open_megatron(shard: Shard, paths: Sequence[Path], options: ReadOptions) -> MegatronReader:
    """Return a reader of a Megatron shard (the function `Format.open` of this format)."""
    del options  # no pickles here, and images stay as stored
    return MegatronReader(shard, *paths)


def index_megatron(path: Path, name: str) -> Shard:
    """Index a .bin file and its .idx file: return the one shard that describes both. `path`: the .bin file; `name`:
    path of the .bin file, relative to the dataset's folder. Raises ShardCorruptError if a file is missing or
    damaged."""
    if path.suffix != ".bin":
        raise InvalidArgumentError(f"path must end in .bin, got {path}. Pass the .bin file of the pair")
    index_name = name.removesuffix(".bin") + ".idx"
    file = _TokenFile(path, path.with_suffix(".idx"), name, index_name)
    return Shard(
        "megatron",
        len(file.index),
        (ShardFile(StoredFile(name, file.size)), ShardFile(StoredFile(index_name, file.index.size))),
    )
