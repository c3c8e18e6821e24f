"""A dataset of shards that lie anywhere, read sample by sample as if it were here.

This is the data alone: samples by number, fetched when they are asked for. In which order, in what batches, and ahead
of need is the business of StreamingLoader.
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
import torch.utils.data
import xxhash

from penstock.data.arguments import byte_count, sample_count, whole
from penstock.data.cache.index_watch import IndexWatch
from penstock.data.cache.open_shards import FEWEST_OPEN, OpenShards
from penstock.data.cache.shard_cache import HeldShard, ShardCache
from penstock.data.formats.index import read_index
from penstock.data.formats.mds import columns_of
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import Shard, ShardReader
from penstock.data.ordering.permutation import Ints
from penstock.data.remote.folders import RemoteFolder, joined
from penstock.data.stop_iteration import not_an_end
from penstock.data.writing.uploads import local_folder
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["Stream", "StreamingDataset"]


@dataclass(frozen=True)
class Stream:
    """One of several sources of a dataset. At most one of proportion, repeat and choose, and the same for all
    streams."""

    remote: str | os.PathLike[str] | None = None
    """Folder of the dataset: a path, or any URL that fsspec knows (http://, s3://, ...). None: it is `local`."""
    local: str | os.PathLike[str] | None = None
    """Folder of this machine to keep its files in; None: one for this remote below the user's cache directory."""
    split: str | None = None
    """Folder below the remote and the local one."""
    proportion: float | None = None
    """Weight of its samples in an epoch, relative to the other streams'."""
    repeat: float | None = None
    """How often an epoch takes each of its samples."""
    choose: int | str | None = None
    """Samples of it in an epoch, or a text such as "100k"."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """For fsspec: keys, endpoint, headers."""
    validate_hash: str | Literal[False] | None = None
    """As of the dataset; None: the dataset's."""
    keep_zip: bool | None = None
    """As of the dataset; None: the dataset's."""
    timeout_s: float | None = None
    """Seconds to wait for a shard; None: the dataset's."""


class StreamingDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples (column -> value) by number, those of the first stream first.

    A map-style dataset for any torch DataLoader; give it to a StreamingLoader to read it at speed in an order that can
    be saved. Subclasses may override `__getitem__`, say to tokenize. Safe for threads, and for forked and spawned
    worker processes.
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
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            remote, local, split, storage_options: of the one stream, see Stream; or give `streams`.
            cache_limit: bytes, or a text such as "64gb", that all processes of the host keep of it; the least recently
                used shards go first, never one in use. Several streams share it evenly. None: no limit.
            validate_hash: None verifies what is fetched, and what is found in the cache and was not verified yet, by
                the fastest hash that the index has, if it has any. An algorithm, such as "sha1", verifies by that one,
                also shards that are read where they lie; the index must have it. False verifies nothing.
            keep_zip: keep compressed files too.
            timeout_s: seconds to wait for a shard.
            download_threads: shards of a stream that are fetched at a time.
            cache_group: name or number of a group of users who share the cache folders. None: folders that another user
                has made, or can write to, are refused.
            allow_unsafe_types: read columns of pickles, which are programs: only from who you trust.

        Raises:
            ShardUnavailableError: an index cannot be fetched.
            DatasetError: an index cannot be read, or there is no sample at all.
            InvalidArgumentError: settings that cannot be meant.
        """
        if (remote is None and local is None) == (not streams):
            raise InvalidArgumentError("give remote or local, or streams: one of the two")
        if streams and (split is not None or storage_options is not None):
            raise InvalidArgumentError("split and storage_options are each stream's own where there are streams")
        given = tuple(streams) or (Stream(remote, local, split, storage_options=storage_options or {}),)
        self.streams = tuple(_with_plain_weights(number, stream) for number, stream in enumerate(given))
        _check_weights(self.streams)
        limit = byte_count("cache_limit", cache_limit)
        places = [_place_of(stream) for stream in self.streams]
        self.name = ", ".join(name for _, _, name in places[:3]) + (", ..." if len(places) > 3 else "")
        """For messages."""
        self._unsafe = allow_unsafe_types
        self._caches = [
            ShardCache(
                place,
                folder,
                limit=None if limit is None else max(1, limit // len(places)),
                validate=validate_hash if stream.validate_hash is None else stream.validate_hash,
                keep_packed=keep_zip if stream.keep_zip is None else stream.keep_zip,
                timeout_s=timeout_s if stream.timeout_s is None else stream.timeout_s,
                threads=download_threads,
                group=_group(cache_group),
            )
            for stream, (place, folder, _) in zip(self.streams, places, strict=True)
        ]
        self._open = OpenShards()
        self._relieve_caches()
        indexes = [cache.index() for cache in self._caches]
        shards = [read_index(index, name) for index, (_, _, name) in zip(indexes, places, strict=True)]
        self._indexes = [
            IndexWatch.of(cache.index_path, index, hashed=_hashed(own), in_place=cache.in_place)
            for cache, index, own in zip(self._caches, indexes, shards, strict=True)
        ]
        for own, (_, _, name) in zip(shards, places, strict=True):
            if own and own[0].format == "mds":
                try:
                    columns_of(own[0], allow_unsafe_types=allow_unsafe_types)  # now, and not when a shard was fetched
                except DatasetError as error:
                    raise DatasetError(f"{name}: {error.message}") from None
        self._shards = [(number, shard) for number, own in enumerate(shards) for shard in own]
        self.sizes: list[Ints] = [np.array([shard.samples for shard in own], np.int64) for own in shards]
        """Of each stream, the samples of its shards."""
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(self.sizes))])
        self._starts: list[int] = self._bounds.tolist()  # for one sample, of which a list is faster
        if not len(self):
            raise DatasetError(f"{self.name}: its index names no sample")
        for stream, sizes, (_, _, name) in zip(self.streams, self.sizes, places, strict=True):
            if (stream.proportion or stream.repeat or stream.choose) and not sizes.sum():
                raise DatasetError(f"{name}: its index names no sample, and an epoch is to have some of it")
        self.fingerprint = _fingerprint(shards)
        """Of all shards: other data, other fingerprint; the same wherever they lie."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """A sample; waits for its shard.

        Raises:
            IndexError: there is no such sample.
            ShardUnavailableError, ShardCorruptError: its shard cannot be fetched or read.
        """
        at = operator.index(index)
        if at < 0:
            at += len(self)
        if not 0 <= at < len(self):
            raise IndexError(f"{self.name}: sample {index} of {len(self)}")
        shard = bisect_right(self._starts, at) - 1
        return self._open.get(shard, self._opened)[at - self._starts[shard]]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """The samples of a batch, for torch's DataLoader."""
        return [self[index] for index in indices]

    @property
    def is_overridden(self) -> bool:
        """Its samples are made by a `__getitem__` of a subclass."""
        return type(self).__getitem__ is not StreamingDataset.__getitem__

    def get_many(self, samples: Ints) -> list[dict[str, Any]]:
        """The same for numbers known to be right."""
        if self.is_overridden:
            return [self._overridden(index) for index in samples.tolist()]
        shards = np.searchsorted(self._bounds, samples, side="right") - 1
        offsets = samples - self._bounds[shards]
        get, opened = self._open.get, self._opened
        return [get(shard, opened)[offset] for shard, offset in zip(shards.tolist(), offsets.tolist(), strict=True)]

    def _overridden(self, index: int) -> dict[str, Any]:
        """A sample by the `__getitem__` of a subclass, which may raise anything."""
        what = f"{type(self).__qualname__} for sample {index}"
        try:
            return self[index]
        except StopIteration as error:
            raise not_an_end(what) from error
        except Exception as error:
            error.add_note(f"raised by {what}")
            raise

    def fetch_ahead(self, shards: Ints) -> None:
        """Have these fetched in the background, the first ones first, instead of what was asked for before."""
        self._open.most = max(FEWEST_OPEN, len(shards))
        wanted: list[list[Shard]] = [[] for _ in self._caches]
        for number in shards.tolist():
            stream, shard = self._shards[number]
            wanted[stream].append(shard)
        for cache, ahead in zip(self._caches, wanted, strict=True):
            cache.fetch_ahead(ahead)

    def shares(self, epoch_size: int | None = None) -> list[int]:
        """Of each stream, how many of its samples make an epoch (of `epoch_size` samples, if that is given)."""
        totals = [int(sizes.sum()) for sizes in self.sizes]
        if self.streams[0].repeat is not None or self.streams[0].choose is not None:
            if epoch_size is not None:
                raise InvalidArgumentError("epoch_size goes with proportions; repeat and choose say it themselves")
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
        self._open.clear()
        for cache in self._caches:
            cache.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # its making failed
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_open"} | {
            "_caches": copy.deepcopy(self._caches)  # this very ones may be at work
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open = OpenShards()
        self._relieve_caches()

    def _relieve_caches(self) -> None:
        """When a cache has no room, shards that we hold are let go. It must not keep us alive for that."""
        relief = weakref.ref(self._open)

        def relieve() -> None:
            shards = relief()
            if shards is not None:
                shards.clear()

        for cache in self._caches:
            cache.on_pressure = relieve

    def _opened(self, number: int) -> tuple[HeldShard, ShardReader]:
        stream, shard = self._shards[number]
        held = self._caches[stream].hold(shard)
        try:
            source = self._source(stream, held.paths[0], shard)
            reader = open_shard(shard, held.paths, allow_unsafe_types=self._unsafe, source=source)
            self._indexes[stream].check(held.paths)  # behind the opening: what is open stays what it was
            return held, reader
        except BaseException:
            held.release()
            raise

    def _source(self, stream: int, path: Path, shard: Shard) -> str:
        place = self._caches[stream].place
        if place is None or (place.local and path.is_relative_to(place.local)):
            return str(path)
        return f"{place.url_of(shard.name)} ({path}: remove it to have it fetched again)"


def _hashed(shards: Sequence[Shard]) -> bool:
    """Each file has a hash, raw or packed."""
    return all(file.raw.hashes or (file.packed and file.packed.hashes) for shard in shards for file in shard.files)


def _place_of(stream: Stream) -> tuple[RemoteFolder | None, Path, str]:
    """(where it lies, where its files are kept, name for messages)."""
    below = stream.split or ""
    if Path(below).is_absolute() or ".." in Path(below).parts:
        raise InvalidArgumentError(f"split={stream.split!r}: it is a folder below the dataset's")
    if stream.remote is None:
        if stream.local is None:
            raise InvalidArgumentError("a stream needs remote or local")
        folder = local_folder("local", stream.local) / below
        return None, folder, str(folder)
    remote = os.fspath(stream.remote)
    place = RemoteFolder(joined(remote, below) if below else remote, stream.storage_options)
    if stream.local is not None:
        return place, local_folder("local", stream.local) / below, place.url
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return place, Path(cache) / "penstock" / hashlib.sha256(place.identity.encode()).hexdigest()[:16], place.url


def _with_plain_weights(number: int, stream: Stream) -> Stream:
    """With Python's own numbers: with those of numpy an order's description would not be one in a state."""
    name = f"stream {number}: "
    choose = sample_count(f"{name}choose", stream.choose)
    proportion, repeat = _real(f"{name}proportion", stream.proportion), _real(f"{name}repeat", stream.repeat)
    return replace(stream, proportion=proportion, repeat=repeat, choose=choose)


def _real(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real):
        raise InvalidArgumentError(f"{name}={value!r}; it must be a number of at least 0")
    return float(value)


def _group(group: str | int | None) -> int | None:
    """Its number."""
    if not isinstance(group, str):
        return whole("cache_group", group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise InvalidArgumentError(
            f"cache_group={group!r} must be a group of this machine: see getent group"
        ) from error


def _check_weights(streams: Sequence[Stream]) -> None:
    kinds = {
        tuple(name for name in ("proportion", "repeat", "choose") if getattr(stream, name) is not None)
        for stream in streams
    }
    if len(kinds) > 1 or len(next(iter(kinds))) > 1:
        raise InvalidArgumentError("streams are mixed by proportion, or by repeat, or by choose: the same for all")
    for number, stream in enumerate(streams):
        for name in ("proportion", "repeat", "choose"):
            value = getattr(stream, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidArgumentError(f"stream {number}: {name}={value}; it must be a number of at least 0")


def _apportioned(weights: Sequence[float], total: int) -> list[int]:
    """`total` shared out by weight, as near as whole numbers can be (largest remainders)."""
    exact_weights = [Fraction(weight) for weight in weights]
    together = sum(exact_weights)
    if together <= 0:
        raise InvalidArgumentError("the proportions of all streams are 0")
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
    return digest.hexdigest()
