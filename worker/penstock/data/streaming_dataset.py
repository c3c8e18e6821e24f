"""Dataset of shards on any filesystem, read sample by sample as if it were local.

This module returns samples by number, and fetches shards on demand. StreamingLoader adds order, batches and prefetch.
"""

from __future__ import annotations

import contextlib
import copy
import grp
import hashlib
import operator
import os
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch.utils.data
import xxhash

from penstock.data.arguments import byte_count, sample_count, whole
from penstock.data.cache.block_footers import BlockFooters
from penstock.data.cache.decode_ahead import DecodeAhead
from penstock.data.cache.index_watch import IndexWatch
from penstock.data.cache.open_shards import MIN_OPEN, OpenShards
from penstock.data.cache.shard_cache import HeldShard, ShardCache
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.index import read_index
from penstock.data.formats.mds import columns_of
from penstock.data.formats.parquet.parquet_ranges import block_shard, has_ranges
from penstock.data.formats.readers import open_block, open_shard
from penstock.data.formats.shards import BlockReader, ReadOptions, Shard, ShardReader, rows_of
from penstock.data.ordering.permutation import Ints
from penstock.data.remote.folders import RemoteFolder, joined
from penstock.data.stop_iteration import stop_iteration_error
from penstock.data.writing.uploads import local_folder
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["Stream", "StreamingDataset"]


@dataclass(frozen=True)
class Stream:
    """Dataset among several that a StreamingDataset reads together. Give at most one of proportion, repeat and
    choose, and the same one for all streams."""

    remote: str | os.PathLike[str] | None = None
    """Folder of the dataset: a path, or any URL that fsspec opens (http://, s3://, ...). None: the data is in
    `local`."""
    local: str | os.PathLike[str] | None = None
    """Folder on this machine that caches the dataset's files; None: a folder for this remote in the user's cache
    directory."""
    split: str | None = None
    """Name of a subfolder that is appended to `remote` and `local`."""
    proportion: float | None = None
    """Weight of this stream's samples in an epoch, relative to the other streams'."""
    repeat: float | None = None
    """Number of times that an epoch takes each sample of this stream."""
    choose: int | str | None = None
    """Number of samples that an epoch takes of this stream, or a text such as "100k"."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for fsspec's filesystem: keys, endpoint, headers."""
    validate_hash: str | Literal[False] | None = None
    """Hash algorithm that verifies files, as in StreamingDataset; None: the dataset's setting."""
    keep_zip: bool | None = None
    """True to keep compressed files in the cache beside the decompressed ones; None: the dataset's setting."""
    timeout_s: float | None = None
    """Seconds to wait for a shard; None: the dataset's setting."""
    columns: Sequence[str] | None = None
    """Names of the columns to read; None: the dataset's setting."""


class StreamingDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Map-style dataset of samples in shard files, which are downloaded to a local cache when they are needed. A sample
    is a dict from column name to value. The samples of the first stream have the lowest numbers.

    It works with any torch DataLoader. Give it to a StreamingLoader to read it faster, in an order whose position can
    be saved. Subclasses may override `__getitem__`, for example to tokenize. Safe for threads, and for forked and
    spawned worker processes.

    Example::

        dataset = StreamingDataset("s3://bucket/train", "/data/cache", cache_limit="64gb")
        loader = StreamingLoader(dataset, batch_size=32, shuffle=True)
    """

    def __init__(
        self,
        remote: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        *,
        split: str | None = None,
        streams: Sequence[Stream] = (),
        cache_limit: int | str | None = None,
        validate_hash: str | Literal[False] | None = None,
        keep_zip: bool = False,
        timeout_s: float = 600.0,
        download_threads: int = 4,
        cache_group: str | int | None = None,
        allow_unsafe_types: bool = False,
        images: Literal["pil", "array"] = "pil",
        columns: Sequence[str] | None = None,
        decoded_limit: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            remote, local, split, storage_options: arguments of a single Stream; give either these or `streams`.
            cache_limit: largest number of bytes, or a text such as "64gb", that all processes of the host together keep
                on disk. The least recently used shards are evicted first; a shard in use is never evicted. Streams
                share the limit evenly. None: no limit.
            validate_hash: None: verify fetched files, and unverified files found in the cache, by the fastest hash that
                the index has, if any. Name of an algorithm, such as "sha1": verify by this hash, also shards that are
                read in place; the index must have it. False: verify nothing.
            keep_zip: True: keep compressed files in the cache beside the decompressed ones.
            timeout_s: seconds to wait for a shard.
            download_threads: number of shards that a stream fetches at a time.
            cache_group: name or ID of a Unix group whose members share the cache folders. None: folders that another
                user made or can write to are refused.
            allow_unsafe_types: True: read columns of pickles. A pickle can run any code when it is read, so use this
                only for data that you trust.
            images: "pil": images are Pillow's, decoded when they are first used. "array": images are numpy arrays of
                shape (height, width, channels), or (height, width) for one channel, with the dtype and values of
                `numpy.asarray(image)`. They are decoded when a sample is read: in parallel if the loader has
                `fetch_threads`.
            columns: names of the columns that samples have; None: all. Of Parquet files no other column is read. The
                order of samples, and so a saved state, does not depend on the columns.
            decoded_limit: largest number of bytes, or a text such as "1gb", of decoded row groups that this process
                keeps in memory; the least recently used ones are dropped first. All datasets of a process share one
                limit, the largest that any of them was given. None: 256 MiB.

        Raises:
            ShardUnavailableError: an index cannot be fetched.
            DatasetError: an index cannot be read, or has no samples.
            InvalidArgumentError: an argument is invalid.
        """
        if (remote is None and local is None) == (not streams):
            raise InvalidArgumentError("give remote, local or both, or else streams")
        if streams and (split is not None or storage_options is not None):
            raise InvalidArgumentError("with streams, split and storage_options must be given in each Stream")
        given = tuple(streams) or (Stream(remote, local, split, storage_options=storage_options or {}),)
        self.streams = tuple(_with_plain_weights(number, stream) for number, stream in enumerate(given))
        _check_weights(self.streams)
        limit = byte_count("cache_limit", cache_limit)
        self.decoded_limit = byte_count("decoded_limit", decoded_limit)
        """Bytes of decoded row groups that this dataset asks the process to keep; None: the default."""
        remotes = [_remote_of(stream) for stream in self.streams]
        self.name = ", ".join(name for _, _, name in remotes[:3]) + (", ..." if len(remotes) > 3 else "")
        """Name of the dataset, for errors."""
        self.stream_names = _stream_names([name for _, _, name in remotes])
        """Name of each stream: the last part of its address. Streams with the same name get their numbers too."""
        if images not in ("pil", "array"):
            raise InvalidArgumentError(f'images must be "pil" or "array", got {images!r}')
        self._options = [
            ReadOptions(
                allow_unsafe_types,
                images,
                _columns(
                    f"stream {number}: " if streams else "", columns if stream.columns is None else stream.columns
                ),
            )
            for number, stream in enumerate(self.streams)
        ]
        self._caches = [
            ShardCache(
                remote,
                folder,
                limit=None if limit is None else max(1, limit // len(remotes)),
                validate=validate_hash if stream.validate_hash is None else stream.validate_hash,
                keep_packed=keep_zip if stream.keep_zip is None else stream.keep_zip,
                timeout_s=timeout_s if stream.timeout_s is None else stream.timeout_s,
                threads=download_threads,
                group=_group(cache_group),
            )
            for stream, (remote, folder, _) in zip(self.streams, remotes, strict=True)
        ]
        self._open = OpenShards()
        self._decoder = DecodeAhead(self._decode)
        self._relieve_caches()
        indexes = [cache.index() for cache in self._caches]
        shards = [read_index(index, name) for index, (_, _, name) in zip(indexes, remotes, strict=True)]
        self._indexes = [
            IndexWatch.of(cache.index_path, index, hashed=_hashed(own), in_place=cache.in_place)
            for cache, index, own in zip(self._caches, indexes, shards, strict=True)
        ]
        for own, (_, _, name), options in zip(shards, remotes, self._options, strict=True):
            _check_columns(own, options.columns, name)
            if own and own[0].format == "mds":
                try:
                    # raises an error now instead of after a shard was fetched
                    columns_of(own[0], options)
                except DatasetError as error:
                    raise DatasetError(f"{name}: {error.message}") from None
        self._shards = [(number, shard) for number, own in enumerate(shards) for shard in own]
        units = [len(shard.units) for _, shard in self._shards]
        self._file_of = np.repeat(np.arange(len(units)), units)
        """Number of the file that each unit of `sizes` lies in."""
        self.has_blocks = any(shard.blocks for _, shard in self._shards)
        """True if any shard has blocks that are decoded as a whole."""
        known = [shard for _, shard in self._shards if shard.decoded_bytes]
        self.sample_bytes = sum(shard.decoded_bytes for shard in known) / max(1, sum(shard.samples for shard in known))
        """Mean number of bytes that a sample takes in a decoded row group; 0 if it is unknown."""
        self._footers = BlockFooters()
        self.sizes: list[Ints] = [
            np.array([samples for shard in own for samples in shard.units], np.int64) for own in shards
        ]
        """Number of samples in each unit that is read as a whole, for each stream: a row group, or else a shard."""
        self._unit_sizes = np.concatenate(self.sizes)
        by_unit = np.array(
            [has_ranges(one) and self._caches[own].fetches_ranges(one) for own, one in self._shards], bool
        )
        self._opened_of = np.cumsum(_begins(self._file_of) | by_unit[self._file_of]) - 1
        """Number of what is opened to read each unit: a file, or the unit alone, if it is fetched without the rest of
        the file."""
        self._first_units = np.flatnonzero(_begins(self._opened_of))
        """First unit of each thing that is opened."""
        self._alone = by_unit[self._file_of[self._first_units]]
        """True for each thing that is opened if it is a unit alone."""
        counts = np.bincount(self._opened_of, self._unit_sizes, len(self._first_units)).astype(np.int64)
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._reads_bulk = any(shard.format not in ("mds", "json", "xsv", "csv", "tsv") for _, shard in self._shards)
        self._starts: list[int] = self._bounds.tolist()  # indexing a list is faster than an array for a single sample
        if not len(self):
            raise DatasetError(
                f"{self.name}: the index lists no samples: write the dataset to its end, or give another folder"
            )
        for stream, sizes, (_, _, name) in zip(self.streams, self.sizes, remotes, strict=True):
            if (stream.proportion or stream.repeat or stream.choose) and not sizes.sum():
                raise DatasetError(f"{name}: the index lists no samples, but an epoch needs some of this stream")
        self.fingerprint = _fingerprint(shards)
        """Digest of all shards. It changes with the data, and does not depend on where they are stored."""

    @property
    def files(self) -> list[Ints] | None:
        """Number of the file that each unit of `sizes` lies in, for each stream; None if no file has blocks."""
        if not self.has_blocks:
            return None
        return np.split(self._file_of, np.cumsum([len(sizes) for sizes in self.sizes])[:-1])

    def sources_of(self, numbers: Ints) -> list[str]:
        """Return, for the samples with these numbers, the names of the streams that they come from."""
        names = self.stream_names
        if len(names) == 1:
            return names * len(numbers)
        ends = np.cumsum([int(sizes.sum()) for sizes in self.sizes])
        return [names[stream] for stream in np.searchsorted(ends, numbers, side="right").tolist()]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self)} samples in {len(self._shards)} shards>"

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """Return a sample. Waits for its shard.

        Raises:
            IndexError: `index` is out of range.
            ShardUnavailableError, ShardCorruptError: the sample's shard cannot be fetched or read.
        """
        at = operator.index(index)
        if at < 0:
            at += len(self)
        if not 0 <= at < len(self):
            raise IndexError(f"{self.name}: a sample's number must be at least 0 and below {len(self)}, got {index}")
        shard = bisect_right(self._starts, at) - 1
        return self._open.get(shard, self._opened)[at - self._starts[shard]]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return the samples of a batch, for torch's DataLoader."""
        return [self[index] for index in indices]

    @property
    def is_overridden(self) -> bool:
        """True if a subclass makes the samples in its own `__getitem__`."""
        return type(self).__getitem__ is not StreamingDataset.__getitem__

    def get_many(self, samples: Ints) -> list[dict[str, Any]]:
        """Return the samples with these numbers, without checking that the numbers are in range."""
        if self.is_overridden:
            return [self._overridden(index) for index in samples.tolist()]
        shards = np.searchsorted(self._bounds, samples, side="right") - 1
        offsets = samples - self._bounds[shards]
        get, opened = self._open.get, self._opened
        if not self._reads_bulk:
            return [get(shard, opened)[row] for shard, row in zip(shards.tolist(), offsets.tolist(), strict=True)]
        if len(samples) and (shards == shards[0]).all():
            return rows_of(get(int(shards[0]), opened), offsets.tolist())
        order = np.argsort(shards, kind="stable")
        ends = np.flatnonzero(np.append(shards[order][1:] != shards[order][:-1], True)) + 1
        found: list[dict[str, Any]] = [{}] * len(samples)
        begin = 0
        for end in ends.tolist() if len(samples) else ():
            chosen = order[begin:end]
            read = rows_of(get(int(shards[chosen[0]]), opened), offsets[chosen].tolist())
            for place, sample in zip(chosen.tolist(), read, strict=True):
                found[place] = sample
            begin = end
        return found

    def _overridden(self, index: int) -> dict[str, Any]:
        """Return a sample by calling a subclass's `__getitem__`, which may raise any exception."""
        what = f"{type(self).__qualname__} for sample {index}"
        try:
            return self[index]
        except StopIteration as error:
            raise stop_iteration_error(what) from error
        except Exception as error:
            error.add_note(f"raised by {what}")
            raise

    def fetch_ahead(self, shards: Ints) -> None:
        """Fetch the shards of these units (see `sizes`) in the background, in this order. The list replaces the one of
        the call before."""
        opened = self._opened_of[shards]
        _, firsts = np.unique(opened, return_index=True)
        opened = opened[np.sort(firsts)]
        self._open.most = max(MIN_OPEN, len(opened))
        wanted: list[list[Shard]] = [[] for _ in self._caches]
        for number in opened.tolist():
            stream, shard, block = self._file(number)
            wanted[stream].append(shard if block is None else block_shard(shard, block))
        for cache, ahead in zip(self._caches, wanted, strict=True):
            cache.fetch_ahead(ahead)

    def decode_ahead(self, units: Ints) -> None:
        """Decode these units (see `sizes`) in the background, in this order, as far as half of the memory for decoded
        row groups lasts. The list replaces the one of the call before. Does nothing if the index lists no row
        groups."""
        if not self.has_blocks:
            return
        needed = np.cumsum(self._unit_sizes[units]) * self.sample_bytes
        limit = max(MEMORY.limit, self.decoded_limit or 0) // 2
        self._decoder.want(units[needed <= limit].tolist())

    def forget(self, units: Ints) -> None:
        """Let the memory of these decoded units be freed, because their samples are not needed soon."""
        for unit in units.tolist():
            reader = self._open.peek(int(self._opened_of[unit]))
            if isinstance(reader, BlockReader):
                reader.forget(self._block_of(unit))

    def _decode(self, unit: int) -> None:
        reader = self._open.get(int(self._opened_of[unit]), self._opened)
        if isinstance(reader, BlockReader):
            reader.load(self._block_of(unit))

    def _block_of(self, unit: int) -> int:
        """Return the number of a unit in what is opened to read it."""
        return unit - int(self._first_units[self._opened_of[unit]])

    def _file(self, number: int) -> tuple[int, Shard, int | None]:
        """Return the stream and the file of what is opened, and the number of its only block; None: the whole file."""
        unit = int(self._first_units[number])
        file = int(self._file_of[unit])
        stream, shard = self._shards[file]
        return stream, shard, unit - int(np.searchsorted(self._file_of, file)) if self._alone[number] else None

    def shares(self, epoch_size: int | None = None) -> list[int]:
        """Return the number of samples that an epoch takes of each stream. `epoch_size`: number of samples in the
        epoch; None: as the streams' settings say."""
        totals = [int(sizes.sum()) for sizes in self.sizes]
        if self.streams[0].repeat is not None or self.streams[0].choose is not None:
            if epoch_size is not None:
                raise InvalidArgumentError("epoch_size needs proportions; repeat and choose already define the size")
            return [
                int(stream.choose) if stream.choose is not None else round((stream.repeat or 0) * total)
                for stream, total in zip(self.streams, totals, strict=True)
            ]
        if self.streams[0].proportion is None:
            weights: list[float] = [*totals]
        else:
            weights = [stream.proportion or 0.0 for stream in self.streams]
        return _apportioned(weights, sum(totals) if epoch_size is None else epoch_size)

    def close(self) -> None:
        """Release all shards and stop fetching. Samples that were read stay valid."""
        self._decoder.close()
        self._open.clear()
        for cache in self._caches:
            cache.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ may have failed
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_decoder")} | {
            "_caches": copy.deepcopy(self._caches)  # the original's may be in use
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open = OpenShards()
        self._decoder = DecodeAhead(self._decode)
        self._relieve_caches()

    def _relieve_caches(self) -> None:
        """Let each cache call a function of this dataset when it needs space; the function closes open shards. The
        cache has only a weak reference, so it does not keep the dataset alive."""
        open_shards = weakref.ref(self._open)

        def relieve() -> None:
            shards = open_shards()
            if shards is not None:
                shards.clear()

        for cache in self._caches:
            cache.on_pressure = relieve

    def _opened(self, number: int) -> tuple[HeldShard, ShardReader]:
        stream, shard, block = self._file(number)
        held = self._caches[stream].hold(shard if block is None else block_shard(shard, block))
        try:
            source, options = self._source(stream, held.paths[0], shard), self._options[stream]
            MEMORY.raise_limit(self.decoded_limit)
            if block is None:
                reader = open_shard(shard, held.paths, options, source=source)
            else:
                place = self._footers.place(stream, self._caches[stream], shard, block, source)
                reader = open_block(block_shard(shard, block), held.paths[0], place, options, source=source)
            self._indexes[stream].check(held.paths)  # after opening: the open file cannot change any more
            return held, reader
        except BaseException:
            held.release()
            raise

    def _source(self, stream: int, path: Path, shard: Shard) -> str:
        remote = self._caches[stream].remote
        if remote is None or (remote.local and path.is_relative_to(remote.local)):
            return str(path)
        return f"{remote.url_of(shard.name)} ({path}: remove it to have it fetched again)"


def _begins(numbers: Ints) -> npt.NDArray[np.bool_]:
    """Return for each of these ascending numbers whether it is the first of its kind."""
    return np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]


def _columns(where: str, columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of the columns to read; None: all."""
    if columns is None:
        return None
    if isinstance(columns, str) or not columns or not all(isinstance(name, str) for name in columns):
        raise InvalidArgumentError(f"{where}columns must be a list of at least one column's name, got {columns!r}")
    if len(set(columns)) != len(columns):
        raise InvalidArgumentError(f"{where}columns must be unique, got {', '.join(columns)}")
    return tuple(columns)


def _check_columns(shards: Sequence[Shard], columns: Sequence[str] | None, where: str) -> None:
    """Raise InvalidArgumentError for a column that the index shows to be missing. All shards have the same columns."""
    known = shards[0].settings.get("column_names", shards[0].settings.get("columns")) if shards else None
    missing = [name for name in columns or () if known is not None and name not in known]
    if missing and known is not None:
        raise InvalidArgumentError(
            f"{where}: columns must be some of {', '.join(known)}, got {', '.join(missing)}, which the data have not"
        )


def _hashed(shards: Sequence[Shard]) -> bool:
    """Return True if the index has a hash of each file, in its raw or packed form."""
    return all(file.raw.hashes or (file.packed and file.packed.hashes) for shard in shards for file in shard.files)


def _remote_of(stream: Stream) -> tuple[RemoteFolder | None, Path, str]:
    """Return the (remote folder, cache folder, name for errors) of a stream."""
    below = stream.split or ""
    if Path(below).is_absolute() or ".." in Path(below).parts:
        raise InvalidArgumentError(f"split must be a folder below the dataset's, got {stream.split!r}")
    if stream.remote is None:
        if stream.local is None:
            raise InvalidArgumentError("a Stream must have remote, local or both, got neither")
        folder = local_folder("local", stream.local) / below
        return None, folder, str(folder)
    url = os.fspath(stream.remote)
    remote = RemoteFolder(joined(url, below) if below else url, stream.storage_options)
    if stream.local is not None:
        return remote, local_folder("local", stream.local) / below, remote.url
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return remote, Path(cache) / "penstock" / hashlib.sha256(remote.identity.encode()).hexdigest()[:16], remote.url


def _with_plain_weights(number: int, stream: Stream) -> Stream:
    """Return a stream whose weights are Python numbers. A saved state contains them, and must not contain numpy
    types."""
    name = f"stream {number}: "
    choose = sample_count(f"{name}choose", stream.choose)
    proportion, repeat = _real(f"{name}proportion", stream.proportion), _real(f"{name}repeat", stream.repeat)
    return replace(stream, proportion=proportion, repeat=repeat, choose=choose)


def _real(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real):
        raise InvalidArgumentError(f"{name} must be a number >= 0, got {value!r}")
    return float(value)


def _group(group: str | int | None) -> int | None:
    """Return the ID of a Unix group, given by name or ID."""
    if not isinstance(group, str):
        return whole("cache_group", group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise InvalidArgumentError(
            f"cache_group must be a group of this machine, got {group!r}: see getent group"
        ) from error


def _stream_names(addresses: list[str]) -> list[str]:
    names = [address.rstrip("/").rpartition("/")[2] for address in addresses]
    return [f"{name}.{number}" if names.count(name) > 1 else name for number, name in enumerate(names)]


def _check_weights(streams: Sequence[Stream]) -> None:
    kinds = {
        tuple(name for name in ("proportion", "repeat", "choose") if getattr(stream, name) is not None)
        for stream in streams
    }
    if len(kinds) > 1 or len(next(iter(kinds))) > 1:
        raise InvalidArgumentError(
            "all streams must use the same one of proportion, repeat and choose, or none of them"
        )
    for number, stream in enumerate(streams):
        for name in ("proportion", "repeat", "choose"):
            value = getattr(stream, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidArgumentError(f"stream {number}: {name} must be a number >= 0, got {value}")


def _apportioned(weights: Sequence[float], total: int) -> list[int]:
    """Divide `total` into whole numbers in proportion to `weights`, by the method of largest remainders."""
    exact_weights = [Fraction(weight) for weight in weights]
    together = sum(exact_weights)
    if together <= 0:
        raise InvalidArgumentError("at least one stream must have a proportion above 0")
    exact = [total * weight / together for weight in exact_weights]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(shares)), key=lambda number: (shares[number] - exact[number], number))
    for number in by_rest[: total - sum(shares)]:
        shares[number] += 1
    return shares


def _fingerprint(streams: Sequence[Sequence[Shard]]) -> str:
    digest = xxhash.xxh3_128()
    for shards in streams:
        digest.update(f"stream of {len(shards)}\n".encode())
        for shard in shards:
            files = [(file.raw.name, file.raw.size, sorted(file.raw.hashes.items())) for file in shard.files]
            digest.update(f"{shard.format} {shard.samples} {files}\n".encode())
            if shard.blocks:  # the order depends on them
                digest.update(f"blocks {shard.blocks} of {shard.decoded_bytes} bytes\n".encode())
    return digest.hexdigest()
