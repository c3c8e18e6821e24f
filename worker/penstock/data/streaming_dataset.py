"""Dataset of shards on any filesystem, read by sample number; StreamingLoader adds order and prefetch."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self, SupportsIndex

import numpy as np
import torch.utils.data

from penstock.data.arguments import byte_count, column_names, whole
from penstock.data.batch_columns import Columns, ColumnSource, by_number, joined
from penstock.data.cache.dataset_versions import Version, check_version, open_version
from penstock.data.cache.decode_ahead import DecodeAhead
from penstock.data.cache.index_watch import IndexWatch
from penstock.data.cache.open_shards import MIN_OPEN, OpenShards, PartTables
from penstock.data.cache.prefetch import FetchStats
from penstock.data.cache.shard_cache import HeldShard, ShardCache
from penstock.data.formats.arrow.saved_datasets import SAVED_NOTE, STATE, check_saved
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.fields import unknown_columns
from penstock.data.formats.file_ranges import part_shard
from penstock.data.formats.format_table import reads_by_column
from penstock.data.formats.index import SPLITS_NOTE, file_notes
from penstock.data.formats.mds import columns_of
from penstock.data.formats.media.clips import AudioClip, VideoClip, check_clips
from penstock.data.formats.media.images import ImageError, load_images
from penstock.data.formats.parquet.shards import PARQUET
from penstock.data.formats.parquet.table_files import TABLE_FILE
from penstock.data.formats.raw_files import CORRECT
from penstock.data.formats.readers import check_columns, open_part, open_shard
from penstock.data.formats.records.energon_folder import check_current, check_indexed
from penstock.data.formats.shards import BlockReader, ReadOptions, Shard, ShardReader, columns_of_rows, rows_of
from penstock.data.formats.splits import EVERY_SPLIT, select_split
from penstock.data.formats.table_marks import refuse_table, table_error
from penstock.data.indexes.open_index import open_index
from penstock.data.indexes.opened_units import Units
from penstock.data.indexes.order_layout import OrderLayout, joint_fingerprint
from penstock.data.indexes.shard_table import ShardTable
from penstock.data.ordering.permutation import Ints
from penstock.data.sample_numbers import many_numbers, one_number
from penstock.data.stop_iteration import forbid_stop_iteration, stop_iteration_error
from penstock.data.streams import (
    ANSWER_WAIT_S,
    Stream,
    check_same_files,
    check_weights,
    group_id,
    names_files,
    prepared_folder,
    remote_of,
    samples_of_epoch,
    stream_names,
    with_plain_values,
)
from penstock.data.writing.tables.recognise import table_at
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    SampleCorruptError,
    ShardUnavailableError,
    SnapshotExpiredError,
)
from penstock.runtime.moved_names import says_where
from penstock.runtime.process.ranks import distributed_ranks

_SAMPLERS = ("/torch/utils/data/sampler.py", "/torchdata/stateful_dataloader/sampler.py")
_LOADERS = ("/torch/utils/data/dataloader.py", "/torchdata/stateful_dataloader/stateful_dataloader.py")


@says_where
class StreamingDataset(torch.utils.data.Dataset[dict[str, Any]], ColumnSource):
    """Map-style dataset of samples in shard files, which are downloaded to a local cache when needed. A sample is a
    dict from column name to value. The samples of the first stream have the lowest numbers.

    It works with any torch DataLoader; a StreamingLoader reads it faster, in an order whose position can be saved.
    Subclasses may override `__getitem__`, for example to tokenize. Threads, and forked and spawned processes, may read
    it.

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
        clips: Mapping[str, VideoClip | AudioClip] | None = None,
        columns: Sequence[str] | None = None,
        decoded_limit: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        version: int | Literal["newest"] | None = None,
        fill: Mapping[str, Any] | None = None,
        skip_failures: int = 0,
        repair: Callable[[int, SampleCorruptError], Any] | None = None,
    ) -> None:
        """
        Args:
            remote, local, split, storage_options: arguments of a single Stream; give either these or `streams`. Without
                split, a folder with the files of several is an error that lists them.
            cache_limit: most bytes, or a text such as "64gb", that all processes of the host together keep on disk,
                shared evenly by the streams. The least recently used shards, if not in use, go first. None: no limit.
            validate_hash: None: verify fetched files, and unverified files in the cache, by the index's fastest hash,
                if any. Name of an algorithm, such as "sha1", that the index must have: verify by it, also shards read
                in place. False: verify nothing.
            keep_zip: True: keep compressed files in the cache beside the decompressed ones.
            timeout_s: seconds to wait for a shard.
            download_threads: most shards that a stream prefetches at a time, besides one that is needed at once.
            cache_group: name or ID of a Unix group whose members share the cache folders. None: folders that another
                user made are refused.
            allow_unsafe_types: True: read columns of pickles. A pickle can run any code when it is read, so use this
                only for data that you trust.
            images: "pil": Pillow's images, decoded when first used. "array": numpy arrays of shape (height, width,
                channels), or (height, width) for one channel, as of `numpy.asarray(image)`, decoded when a sample is
                read: in parallel if the loader has `fetch_threads`.
            clips: name of a column of encoded videos or sounds -> the frames or audio samples to decode of each. None:
                such columns stay bytes. Needs penstock[media].
            columns: names of the columns that samples have; None: all. Of Parquet files no other column is read. The
                order of samples, and so a saved state, does not depend on it.
            decoded_limit: most bytes, or a text such as "1gb", of decoded row groups that this process keeps in memory,
                the least recently used dropped first. All datasets of a process share one limit: the largest given, and
                at least 256 MiB, which is also the default.
            version: number of the version to read, if the dataset has versions (docs/datasets.md). None: the newest, or
                that of the state which a StreamingLoader loads. "newest": the same, but with a state between two epochs
                the loader stays at the newest version.
            fill: by the name of a column, the value in place of its nulls, and in samples that lack it; of Parquet and
                Arrow files one of the column's type, to which it is cast. Without it a batch of the default collate
                function with a null in a column of numbers is an error that names it.
            skip_failures: most samples in a row that loaders leave out of a batch because their bytes cannot be
                decoded, such as broken images; with a warning, and counted in the state. Their order stays the same,
                and a batch has fewer rows; one without a row is an error. A file that cannot be read is never skipped.
            repair: function from the number of such a sample and its error to the sample that comes in its place. It
                must always give the same. With either of the two, images are decoded when a sample is read.

        Raises:
            ShardUnavailableError: an index cannot be fetched.
            DatasetError: an index cannot be read, or has no samples.
            InvalidArgumentError: an argument is invalid.
        """
        if (remote is None and local is None) == (not streams):
            raise InvalidArgumentError(
                "a StreamingDataset needs either streams, or a dataset's folder as remote, local or both"
            )
        if streams and (split is not None or storage_options is not None):
            raise InvalidArgumentError("split and storage_options must be left out with streams")
        given = tuple(streams) or (Stream(remote, local, split, storage_options=storage_options or {}),)
        self.streams = tuple(with_plain_values(number, stream) for number, stream in enumerate(given))
        check_weights(self.streams)
        self.skip_failures, self._repair = whole("skip_failures", skip_failures), repair
        if self.skip_failures < 0 or (repair is not None and (self.skip_failures or not callable(repair))):
            raise InvalidArgumentError(
                f"give either skip_failures, at least 0, or repair, a function, got {skip_failures} and {repair!r:.100}"
            )
        filled = dict(fill or {})
        self._is_tolerant = self.skip_failures > 0 or repair is not None
        limit = byte_count("cache_limit", cache_limit)
        self.decoded_limit = byte_count("decoded_limit", decoded_limit)
        remotes = [remote_of(stream) for stream in self.streams]
        self.name = ", ".join(name for _, _, name in remotes[:3]) + (", ..." if len(remotes) > 3 else "")
        self.stream_names = stream_names([name for _, _, name in remotes])
        """The last part of each address, with the stream's number if several have the same."""
        if images not in ("pil", "array"):
            raise InvalidArgumentError(f'images must be "pil" or "array", got {images!r}')
        decoded = check_clips(clips)
        self.clips_draw = any(clip.draws for clip in decoded.values())
        self._options = [
            ReadOptions(
                allow_unsafe_types,
                images,
                column_names(
                    f"stream {number}: " if streams else "", columns if stream.columns is None else stream.columns
                ),
                clips=decoded,
                fill=filled,
            )
            for number, stream in enumerate(self.streams)
        ]
        self._cache_settings: list[dict[str, Any]] = [
            {
                "limit": None if limit is None else max(1, limit // len(remotes)),
                "validate": validate_hash if stream.validate_hash is None else stream.validate_hash,
                "keep_packed": keep_zip if stream.keep_zip is None else stream.keep_zip,
                "timeout_s": timeout_s if stream.timeout_s is None else stream.timeout_s,
                "threads": download_threads,
                "group": group_id(cache_group),
            }
            for stream in self.streams
        ]
        self.asked_versions: list[Version] = [
            version if stream.version is None else stream.version for stream in self.streams
        ]
        for asked in self.asked_versions:
            check_version("version", asked)
        self._open_versions(self.asked_versions)

    def at_versions(self, versions: Sequence[int | None]) -> Self:
        """Return a copy of this dataset that reads other versions of its streams; None for one without versions."""
        other = copy.copy(self)
        for cache in other._caches:  # the copy's own, see __getstate__
            cache.close()
        other._open_versions(versions)
        return other

    def _open_versions(self, versions: Sequence[Version]) -> None:
        remotes = [remote_of(stream) for stream in self.streams]
        opened = [
            open_version(partial(_cache, stream, settings), version, name)
            for stream, settings, version, (_, _, name) in zip(
                self.streams, self._cache_settings, versions, remotes, strict=True
            )
        ]
        self._caches = [cache for cache, _, _ in opened]
        self.versions = [number for _, _, number in opened]
        """Version of each stream that is read; None without versions."""
        self._open = OpenShards()
        self._decoder = DecodeAhead(self._decode)
        self._relieve_caches()
        indexes = [index for _, index, _ in opened]
        read = [
            (index, *open_index(cache.index_path, index, f"{name}: {cache.index_path.name}"))
            for cache, index, (_, _, name) in zip(self._caches, indexes, remotes, strict=True)
        ]
        self._tables = [
            _selected(table, stream, file_notes(index), name)
            for (index, table, _), (_, _, name), stream in zip(read, remotes, self.streams, strict=True)
        ]
        for cache, index, (_, _, name) in zip(self._caches, indexes, remotes, strict=True):
            _check_saved(cache, file_notes(index), name)
        self._plain_folders: set[Path] = set()
        """Folders of Parquet files that were found not to belong to a table."""
        for cache, table, stream, (remote, _, _) in zip(self._caches, self._tables, self.streams, remotes, strict=True):
            if PARQUET not in table.facts.formats:
                continue
            if cache.files_folder:
                self._refuse_table(cache.files_folder)
            elif remote and cache.fetched_index:  # not each time, because a remote answers slowly, or not at all
                kind = table_at(remote.address, stream.storage_options, cache.timeout_s)
                if kind:
                    raise table_error(kind, remote.url)
        self._indexes = [
            IndexWatch.of(cache.index_path, index, digest, hashed=table.facts.hashed, in_place=cache.in_place)
            for cache, (index, _, digest), table in zip(self._caches, read, self._tables, strict=True)
        ]
        for own, (_, _, name), options in zip(self._tables, remotes, self._options, strict=True):
            check_columns(own, options.columns, name)
            check_columns(own, tuple(options.fill), name)
            if options.columns is not None and (
                error := unknown_columns(f"{name}: fill", options.fill, options.columns)
            ):
                raise InvalidArgumentError(error)
            if own and own[0].format == "mds":
                try:
                    # raises an error now instead of after a shard was fetched
                    columns_of(own[0], options)
                except DatasetError as error:
                    raise DatasetError(f"{name}: {error.message}") from None
        self._ahead: dict[int, None] = {}
        """Opened pieces (opened_units.py) that the last `fetch_ahead` prefetches, by number."""
        self._to_decode: list[int] = []
        """Units to be decoded in the background once `fetch_ahead` prefetches their files."""
        self.layouts = [
            OrderLayout.noted(file_notes(index), own, name)
            for index, own, (_, _, name) in zip(indexes, self._tables, remotes, strict=True)
        ]
        """Units (row groups or shards), numbered through all streams, that decide the order of samples."""
        facts = [table.facts for table in self._tables]
        self.has_blocks = any(fact.blocks for fact in facts)
        """True if any shard has blocks (such as row groups) that are decoded as a whole."""
        known = sum(fact.decoded_samples for fact in facts)
        self.sample_bytes = sum(fact.decoded_bytes for fact in facts) / max(1, known)
        """Mean bytes of a sample in a decoded row group; 0 if unknown."""
        self._part_tables = PartTables()
        by_unit = [
            table.has_ranges & cache.fetches_ranges(table.hashed)
            for table, cache in zip(self._tables, self._caches, strict=True)
        ]
        self._units = Units(self._tables, by_unit)
        self._bounds_of_units: list[Ints] | None = None
        """Bounds of the units that are read, and of those of `layouts`: first sample of each, then the total. None: the
        same units."""
        order_bounds = np.concatenate([[0], np.cumsum(np.concatenate(self.sizes))])
        if not np.array_equal(self._units.unit_bounds, order_bounds):
            self._bounds_of_units = [self._units.unit_bounds, order_bounds]
        self._reads_columns = all(reads_by_column(name) for fact in facts for name in fact.formats)
        self._reads_bulk = any({*fact.formats} - {"mds", "json", "xsv", "csv", "tsv"} for fact in facts)
        self._starts: list[int] = self._units.bounds.tolist()  # for a single sample bisect is faster on a list
        if not len(self):
            raise DatasetError(f"{self.name}: the index lists no samples")
        first = 0
        for options, cache, sizes in zip(self._options, self._caches, self.sizes, strict=True):
            count = int(sizes.sum())
            if options.fill and cache.in_place and count:  # its values are compared with the columns' types
                self._open.get(bisect_right(self._starts, first) - 1, self._opened)
            first += count
        for stream, layout, (_, _, name) in zip(self.streams, self.layouts, remotes, strict=True):
            if (stream.proportion or stream.repeat or stream.choose) and not layout.units.sum():
                raise DatasetError(f"{name}: the index lists no samples, but an epoch needs some of this stream")
        self.fingerprint = joint_fingerprint(self.layouts)
        """Digest of what the indexes say of all data: names, sizes and hashes of files, numbers of samples. It stays
        the same if the data are moved, or converted by `penstock data convert`."""

    @property
    def sizes(self) -> list[Ints]:
        """Number of samples in each unit of `layouts`: an array for each stream."""
        return [layout.units for layout in self.layouts]

    def sources_of(self, numbers: Ints) -> list[str]:
        """Return the name of each sample's stream."""
        names = self.stream_names
        if len(names) == 1:
            return names * len(numbers)
        ends = np.cumsum([int(sizes.sum()) for sizes in self.sizes])
        return [names[stream] for stream in np.searchsorted(ends, numbers, side="right").tolist()]

    def __len__(self) -> int:
        _forbid_whole_in_ranks(self.name, sys._getframe(1))
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self)} samples in {self._units.count} shards>"

    def __getitem__(self, index: Any) -> Any:
        """Return a sample; for a slice, a list or an array of numbers, the list of these samples. Waits for shards.

        Raises IndexError, and ShardUnavailableError or ShardCorruptError if a shard cannot be fetched or read.
        """
        several = many_numbers(index, len(self), self.name)
        if several is not None:
            return self._read_many(np.array(several, np.int64))
        at = one_number(index, len(self), self.name)
        if self._is_tolerant:
            return self._read_one(at)
        shard = bisect_right(self._starts, at) - 1
        return self._open.get(shard, self._opened)[at - self._starts[shard]]

    def _read_one(self, at: int) -> Any:
        """Return a sample, finished, or what `repair` gives for it."""
        shard = bisect_right(self._starts, at) - 1
        row = at - self._starts[shard]
        try:
            return self._finished(self._open.get(shard, self._opened)[row], shard, row)
        except SampleCorruptError as error:
            if self._repair is None:
                raise
            warnings.warn(f"{self.name}: sample {at} is repaired: {error.message}", stacklevel=4)
            with forbid_stop_iteration(f"repair for sample {at}"):
                return self._repair(at, error)

    def _finished(self, sample: dict[str, Any], number: int, row: int) -> dict[str, Any]:
        """Decode a sample's images, so that broken ones are skipped or repaired."""
        try:
            load_images(sample)
        except ImageError as error:
            raise SampleCorruptError(f"{self._place(number, row)}, {error}. {CORRECT}") from error
        return sample

    def place_of(self, index: int) -> str:
        """Return the file of a sample, and its number in it, for errors."""
        number = bisect_right(self._starts, index) - 1
        return self._place(number, index - self._starts[number])

    def _place(self, number: int, row: int) -> str:
        _, shard, part = self._file(number)
        first = sum(shard.parts[:part]) if part is not None else 0
        return f"{self._open.get(number, self._opened).name}: sample {first + row}"

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[dict[str, Any]]:
        return self.get_many(np.array(many_numbers(list(indices), len(self), self.name), np.int64))

    @property
    def is_overridden(self) -> bool:
        return type(self).__getitem__ is not StreamingDataset.__getitem__

    def get_many(self, samples: Ints) -> list[dict[str, Any]]:
        if self.is_overridden:
            return [self._overridden(index) for index in samples.tolist()]
        return self._read_many(samples)

    def _read_many(self, samples: Ints) -> list[dict[str, Any]]:
        if not self._is_tolerant:
            return self._read_bulk(samples)
        try:
            found = self._read_bulk(samples)
            for number, sample in zip(samples.tolist(), found, strict=True):
                self._finished(sample, shard := bisect_right(self._starts, number) - 1, number - self._starts[shard])
            return found
        except SampleCorruptError:
            return [self._read_one(number) for number in samples.tolist()]

    def _read_bulk(self, samples: Ints) -> list[dict[str, Any]]:
        shards = np.searchsorted(self._units.bounds, samples, side="right") - 1
        offsets = samples - self._units.bounds[shards]
        get, opened = self._open.get, self._opened
        if not self._reads_bulk:
            return [get(shard, opened)[row] for shard, row in zip(shards.tolist(), offsets.tolist(), strict=True)]
        found: list[dict[str, Any]] = [{}] * len(samples)
        for shard, chosen in by_number(shards):
            read = rows_of(get(shard, opened), offsets[chosen].tolist())
            for place, sample in zip(chosen.tolist(), read, strict=True):
                found[place] = sample
        return found

    def get_columns(self, samples: Ints) -> Columns | None:
        if not self._reads_columns:
            return None
        shards = np.searchsorted(self._units.bounds, samples, side="right") - 1
        offsets = samples - self._units.bounds[shards]
        parts = []
        for shard, chosen in by_number(shards):
            columns = columns_of_rows(self._open.get(shard, self._opened), offsets[chosen])
            if columns is None:
                return None
            parts.append((chosen, columns))
        return joined(len(samples), parts)

    def _overridden(self, index: int) -> dict[str, Any]:
        what = f"{type(self).__qualname__} for sample {index}"
        try:
            sample: dict[str, Any] = self[index]
            return sample
        except StopIteration as error:
            raise stop_iteration_error(what) from error
        except Exception as error:
            error.add_note(f"raised by {what}")
            raise

    def fetch_ahead(self, units: Ints) -> None:
        """Prefetch the files of these units (see `units_of`) in this order, in place of the previous list."""
        wanted: list[list[Shard]] = [[] for _ in self._caches]
        self._ahead = dict.fromkeys(self._opened_for(units))
        for number in self._ahead:
            stream, shard, part = self._file(number)
            wanted[stream].append(shard if part is None else part_shard(shard, part))
        for cache, ahead in zip(self._caches, wanted, strict=True):
            cache.fetch_ahead(ahead)
        if self._to_decode and (ready := self._decodable()):
            self._decoder.want(ready, more=True)

    def _opened_for(self, units: Ints) -> list[int]:
        """Return each unit's opened piece (a file, or a part fetched alone)."""
        opened: list[int] = self._units.opened_of(units).tolist()
        return opened

    def units_of(self, samples: Ints) -> Ints:
        """Return the unit (row group, span or file) that must be read for each sample."""
        return np.searchsorted(self._units.unit_bounds, samples, side="right") - 1

    def fetch_stats(self) -> FetchStats:
        """Return what this process has fetched of all streams so far, and what it has prefetched and not used yet."""
        return sum((cache.stats() for cache in self._caches), FetchStats())

    def keep_open(self, units: Ints) -> None:
        """Keep the files of these units open. Close others if any stream has a cache: an open shard cannot be
        evicted."""
        needed = set(self._opened_for(units))
        self._open.most = max(MIN_OPEN, len(needed))
        if not all(cache.in_place for cache in self._caches):
            self._open.keep(needed)

    def decode_ahead(self, units: Ints) -> None:
        """Decode these units (see `layouts`) in the background, in this order, once their files are at hand, up to half
        of the memory for decoded row groups, in place of the previous list."""
        if not self.has_blocks:
            return
        units = self.read_units(units)
        needed = np.cumsum(self._units.sizes[units]) * self.sample_bytes
        limit = max(MEMORY.limit, self.decoded_limit or 0) // 2
        self._to_decode = units[needed <= limit].tolist()
        self._decoder.want(self._decodable())

    def _decodable(self) -> list[int]:
        """Take those of `_to_decode` whose files are at hand or being prefetched: decoding must not fetch others."""
        opened = self._units.opened_of(np.array(self._to_decode, np.int64)).tolist()
        known = list(zip(self._to_decode, opened, strict=True))
        ready = [unit for unit, number in known if number in self._ahead or self._is_at_hand(number)]
        taken = set(ready)
        self._to_decode = [unit for unit in self._to_decode if unit not in taken]
        return ready

    def _is_at_hand(self, number: int) -> bool:
        return self._caches[self._file(number)[0]].in_place or self._open.peek(number) is not None

    def forget(self, units: Ints) -> None:
        """Free the memory of these units of `layouts`: their samples are not needed soon."""
        units = self.read_units(units)
        for unit, opened in zip(units.tolist(), self._units.opened_of(units).tolist(), strict=True):
            reader = self._open.peek(opened)
            if isinstance(reader, BlockReader):
                reader.forget(unit - self._units.first_unit(opened))

    def read_units(self, units: Ints) -> Ints:
        if self._bounds_of_units is None:
            return units
        own, wanted = self._bounds_of_units
        first = np.searchsorted(own, wanted[units], side="right") - 1
        end = np.searchsorted(own, wanted[units + 1], side="left")
        counts = np.maximum(end - first, 0)
        begins = np.cumsum(counts) - counts
        return np.repeat(first - begins, counts) + np.arange(int(counts.sum()))

    def _decode(self, unit: int) -> None:
        opened = int(self._units.opened_of(np.array([unit]))[0])
        reader = self._open.get(opened, self._opened)
        if isinstance(reader, BlockReader):
            reader.load(unit - self._units.first_unit(opened))

    def _file(self, number: int) -> tuple[int, Shard, int | None]:
        """Return (stream, file, part within the file or None) of an opened piece."""
        stream, file, part = self._units.file(number)
        return stream, self._tables[stream][file], part

    def shares(self, epoch_size: int | None = None) -> list[int]:
        return samples_of_epoch(self.streams, [int(sizes.sum()) for sizes in self.sizes], epoch_size)

    def close(self) -> None:
        """Release all shards and stop fetching. Samples that were read stay valid."""
        self._decoder.close()
        self._open.clear()
        for cache in self._caches:
            cache.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # The default argument keeps the function available while the interpreter exits. Then modules are gone already,
        # and the process's end releases what the dataset holds.
        if not is_exiting():
            with contextlib.suppress(AttributeError):  # __init__ may have failed
                self.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_open", "_decoder")}
        return kept | {"_caches": copy.deepcopy(self._caches)}  # the original's may be in use

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open = OpenShards()
        self._decoder = DecodeAhead(self._decode)
        self._relieve_caches()

    def _relieve_caches(self) -> None:
        """Make each cache close open shards of this dataset when it needs space, by a weak reference."""
        open_shards = weakref.ref(self._open)

        def relieve() -> None:
            shards = open_shards()
            if shards is not None:
                shards.clear()

        for cache in self._caches:
            cache.on_pressure = relieve
            cache.neighbours = [other for other in self._caches if other is not cache]

    def _refuse_table(self, folder: Path) -> None:
        """Raise DatasetError if plain files became those of a table after they were indexed."""
        if folder not in self._plain_folders:
            refuse_table(folder)
            self._plain_folders.add(folder)

    def _held(self, stream: int, shard: Shard, part: int | None) -> HeldShard:
        try:
            return self._caches[stream].hold(shard if part is None else part_shard(shard, part))
        except ShardUnavailableError as error:
            if shard.format != TABLE_FILE or not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise SnapshotExpiredError(
                f"{shard.name} of snapshot {self.versions[stream]} of the table is missing: the snapshot was expired, "
                f"or its files vacuumed. Index a newer snapshot, and start without this state: {error.message}"
            ) from error

    def _opened(self, number: int) -> tuple[HeldShard, ShardReader]:
        stream, shard, part = self._file(number)
        cache = self._caches[stream]
        held = self._held(stream, shard, part)
        try:
            if cache.files_folder and shard.format == PARQUET:
                self._refuse_table(held.paths[0].parent)
            source, options = cache.name_of(held.paths[0], shard), self._options[stream]
            MEMORY.raise_limit(self.decoded_limit)
            if part is None:
                reader = open_shard(shard, held.paths, options, source=source)
            else:
                table = self._part_tables.of(stream, cache, shard, source)
                reader = open_part(shard, part, held.paths[0], table, options, source=source)
            self._indexes[stream].check(held.paths)  # after opening: the open file cannot change any more
            return held, reader
        except BaseException:
            held.release()
            raise


def _forbid_whole_in_ranks(name: str, caller: FrameType | None) -> None:
    """Raise InvalidArgumentError if the length is for a sampler that torch's DataLoader or torchdata's made itself and
    iterates, in one of several ranks: each of them would read all samples."""
    while caller is not None and caller.f_code.co_name == "__len__":
        caller = caller.f_back  # of a subclass
    begins = False
    while caller is not None and caller.f_code.co_filename.endswith(_SAMPLERS):
        begins = begins or caller.f_code.co_name in ("__iter__", "__next__")
        caller = caller.f_back
    # a framework that divides the samples among ranks iterates torch's sampler in a file of its own
    if not begins or caller is None or not caller.f_code.co_filename.endswith(_LOADERS):
        return
    known, said = distributed_ranks(), os.environ.get("WORLD_SIZE", "")
    ranks = known[1] if known is not None else int(said) if said.isdecimal() else 1
    if ranks > 1:
        raise InvalidArgumentError(
            f"{name}: torch's DataLoader would give each of {ranks} ranks all samples: use a StreamingLoader, whose "
            "ranks share them exactly, or pass a sampler: DistributedSampler(dataset), or range(len(dataset)) for all "
            "samples in each rank"
        )


def _cache(stream: Stream, settings: Mapping[str, Any], index: str) -> ShardCache:
    remote, folder, _ = remote_of(stream)
    return ShardCache(remote, folder, index=index, **settings)


def _check_saved(cache: ShardCache, notes: Mapping[str, Any], name: str) -> None:
    """Raise DatasetError if a dataset of `save_to_disk` was saved again. If a remote does not answer, what was fetched
    can be read without it."""
    if SAVED_NOTE not in notes:
        return
    wait_s, remote = min(cache.timeout_s, ANSWER_WAIT_S), cache.remote
    if cache.files_folder:
        check_saved(notes, (cache.files_folder / STATE).read_bytes, name)
    elif remote is not None:
        with contextlib.suppress(ShardUnavailableError):
            check_saved(notes, lambda: remote.read(STATE, deadline_s=wait_s), name)


def _selected(table: ShardTable, stream: Stream, notes: Mapping[str, Any], name: str) -> ShardTable:
    folder, split = prepared_folder(stream), stream.split
    is_folder = folder is None and not names_files(stream)
    if is_folder:
        check_same_files(stream)
    if not table.facts.splits:
        alone = notes.get(SPLITS_NOTE, [])
        if folder is not None:
            check_indexed(folder, split, name)
        elif not is_folder and split != EVERY_SPLIT and alone != [split]:
            raise InvalidArgumentError(f"{name}: split must be {alone}, as it was indexed, got {split!r}")
        return table
    shards = select_split(table, split, name, is_folder=is_folder)
    if folder is not None:
        check_current(folder, notes, name)
    return table if split == EVERY_SPLIT else ShardTable.of_shards(shards, name)
