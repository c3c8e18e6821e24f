"""Streams of a StreamingDataset: datasets read together. A stream's *weight* is its proportion, repeat or choose."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from penstock.data.arguments import apportioned, real_number, sample_count, whole
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import (
    INDEX,
    OWN_INDEX,
    SPLITS_NOTE,
    file_notes,
    first_notes,
    index_notes,
    local_index,
    read_index,
)
from penstock.data.formats.records.energon_folder import is_prepared
from penstock.data.formats.splits import check_split
from penstock.data.remote.folders import RemoteFolder, joined
from penstock.data.remote.prepared_meta import fetch_meta
from penstock.data.writing.uploads import local_folder
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardUnavailableError
from penstock.runtime.moved_names import says_where

ANSWER_WAIT_S = 60.0
"""Longest wait in seconds for a remote's answer what `split` means in its folder."""
_plain: set[tuple[str, str]] = set()
"""(remote folder, split) that Energon has not prepared, so that the remote is asked only once."""
_of_files: dict[tuple[str, str], bool] = {}
"""What `names_files` found for (remote folder, split)."""


@says_where
@dataclass(frozen=True)
class Stream:
    """Dataset that a StreamingDataset reads together with others. Give at most one of proportion, repeat and choose,
    and the same one for all streams."""

    remote: str | os.PathLike[str] | None = None
    """Folder: a path, or any URL that fsspec opens (http://, s3://, ...). None: the data is in `local`."""
    local: str | os.PathLike[str] | None = None
    """Folder that caches files; None: one in the user's cache directory. Without a remote: the dataset."""
    split: str | None = None
    """Subfolder of `remote` and `local`; without one, a split that the names of the folder's files say (see
    `index_folder`), or in a folder that Energon prepared one in split.yaml. "*": all of these."""
    proportion: float | None = None
    """Share of an epoch's samples, relative to the other streams: 3 and 1 give 75% and 25%."""
    repeat: float | None = None
    """Times that an epoch takes each sample. 0.5: half of the samples, and the next epoch the other half."""
    choose: int | str | None = None
    """Number of samples that an epoch takes, or a text such as "100k"."""
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
    version: int | Literal["newest"] | None = None
    """Version of the dataset to read, as in StreamingDataset; None: the dataset's setting."""


def local_source(stream: Stream) -> Path | None:
    """Return the local folder of a stream's dataset, without `split`; None for a remote stream."""
    if stream.remote is not None:
        local = RemoteFolder(os.fspath(stream.remote), stream.storage_options).local
        return None if local is None else Path(local)
    return None if stream.local is None else Path(stream.local)


def remote_of(stream: Stream) -> tuple[RemoteFolder | None, Path, str]:
    """Return (remote folder or None, cache or local folder, name for errors) of a stream."""
    below = stream.split or ""
    check_split(stream.split)
    if stream.remote is None and stream.local is None:
        raise InvalidArgumentError("a Stream must have remote, local or both, got neither")
    if prepared_folder(stream) is not None or names_files(stream):
        below = ""  # one index lists the files of all splits, see select_split
    if stream.remote is None:
        folder = local_folder("local", stream.local) / below
        return None, folder, str(folder)
    remote, folder = _remote_below(stream, below)
    return remote, folder, remote.url


def prepared_folder(stream: Stream) -> Path | None:
    """Return the local folder with Energon's description of the splits (copied into the cache); None if Energon has not
    prepared it, and of a remote also without split, with an index in the cache, or without an answer."""
    source = local_source(stream)
    if source is not None or not stream.split:
        return source if source is not None and is_prepared(source) else None
    remote, folder = _remote_below(stream, "")
    if is_prepared(folder):
        return folder
    known = remote.identity, stream.split
    if known in _plain or local_index(_remote_below(stream, stream.split)[1]).exists():
        return None
    try:
        if fetch_meta(remote, folder, deadline_s=min(stream.timeout_s or ANSWER_WAIT_S, ANSWER_WAIT_S)):
            return folder
    except ShardUnavailableError:
        return None  # the index cannot be fetched either, and its error says why
    finally:
        remote.close()
    _plain.add(known)
    return None


def names_files(stream: Stream) -> bool:
    """Return True if `split` is no subfolder: none of this name has an index, but the folder has one with splits."""
    if not stream.split or any(local_index(folder).exists() for folder in _index_folders(stream, stream.split)):
        return False
    for folder in _index_folders(stream, ""):
        with contextlib.suppress(OSError):
            return SPLITS_NOTE in file_notes(Descriptor(local_index(folder)))
    if local_source(stream) is not None:
        return False
    remote = _remote_below(stream, "")[0]
    known, wait_s = (remote.identity, stream.split), min(stream.timeout_s or ANSWER_WAIT_S, ANSWER_WAIT_S)
    if known not in _of_files:
        try:
            has_folder = any(remote.exists(f"{stream.split}/{name}", deadline_s=wait_s) for name in (INDEX, OWN_INDEX))
            if has_folder and remote.exists(OWN_INDEX, deadline_s=wait_s):
                own = f"{stream.split}/{OWN_INDEX}"
                own = own if remote.exists(own, deadline_s=wait_s) else f"{stream.split}/{INDEX}"
                whole, below = (remote.read(name, deadline_s=wait_s) for name in (OWN_INDEX, own))
                _compare(whole, below, stream.split, remote.url)
            names = [] if has_folder else [OWN_INDEX, INDEX]
            own = next((name for name in names if remote.exists(name, deadline_s=wait_s)), "")
            notes = first_notes(lambda size: remote.read(own, deadline_s=wait_s, first=size)) if own else {}
            if not has_folder and SPLITS_NOTE not in notes:
                return False  # neither has an index yet
            _of_files[known] = not has_folder
        except ShardUnavailableError:
            return False  # the index cannot be fetched either, and its error says why
        finally:
            remote.close()
    return _of_files[known]


def check_same_files(stream: Stream) -> None:
    """Raise DatasetError if the indexes of a local folder and of its subfolder `split` list different files of it."""
    if local_source(stream) is None or not stream.split:
        return
    indexes = [[local_index(each) for each in _index_folders(stream, below)] for below in ("", stream.split)]
    found = [next((path for path in paths if path.exists()), None) for paths in indexes]
    if found[0] is not None and found[1] is not None:
        _compare(found[0].read_bytes(), found[1].read_bytes(), stream.split, str(found[0].parent))


def _compare(whole: bytes, below: bytes, split: str, where: str) -> None:
    if split not in index_notes(whole).get(SPLITS_NOTE, ()):
        return
    ours, others = (
        {(shard.name, shard.files[0].raw.size) for shard in read_index(data, where)} for data in (whole, below)
    )
    ours = {(name.removeprefix(f"{split}/"), size) for name, size in ours if name.startswith(f"{split}/")}
    if ours and ours != others:
        raise DatasetError(
            f"{where}: the indexes of this folder and of its subfolder {split} must have the same "
            f"files of the subfolder, but {min(ours ^ others)[0]} differs. Index both again, or remove the older index"
        )


def _index_folders(stream: Stream, below: str) -> list[Path]:
    """Return the local folders, of the files and of the cache, that may have the index of the folder `below`."""
    source = local_source(stream)
    found = [] if source is None else [source / below]
    if stream.remote is not None and (source is None or stream.local is not None):
        found.insert(0, _remote_below(stream, below)[1])
    return found


def _remote_below(stream: Stream, below: str) -> tuple[RemoteFolder, Path]:
    url = os.fspath(stream.remote or "")
    remote = RemoteFolder(joined(url, below) if below else url, stream.storage_options)
    if stream.local is not None:
        return remote, local_folder("local", stream.local) / below
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return remote, Path(cache) / "penstock" / hashlib.sha256(remote.identity.encode()).hexdigest()[:16]


def stream_names(addresses: Sequence[str]) -> list[str]:
    """Return the last part of each stream's address; with its number, if several have the same."""
    last = [address.rstrip("/").rpartition("/")[2] for address in addresses]
    names = [f"{name}.{number}" if last.count(name) > 1 else name for number, name in enumerate(last)]
    return names if len(set(names)) == len(names) else [f"{name}.{number}" for number, name in enumerate(last)]


def with_plain_values(number: int, stream: Stream) -> Stream:
    """Return the stream with Python numbers as weights, because a saved state contains them."""
    name = f"stream {number}: "
    choose = sample_count(f"{name}choose", stream.choose)
    proportion = real_number(f"{name}proportion", stream.proportion)
    repeat = real_number(f"{name}repeat", stream.repeat)
    return replace(stream, proportion=proportion, repeat=repeat, choose=choose)


def group_id(name_or_id: str | int | None) -> int | None:
    if not isinstance(name_or_id, str):
        return whole("cache_group", name_or_id)
    try:
        return grp.getgrnam(name_or_id).gr_gid
    except KeyError as error:
        raise InvalidArgumentError(f"cache_group must be a group of this machine, got {name_or_id!r}") from error


def check_weights(streams: Sequence[Stream]) -> None:
    """Raise InvalidArgumentError unless all streams give the same one of proportion, repeat and choose, or none."""
    kinds = {
        tuple(name for name in ("proportion", "repeat", "choose") if getattr(stream, name) is not None)
        for stream in streams
    }
    if len(kinds) > 1 or len(next(iter(kinds))) > 1:
        raise InvalidArgumentError("all streams must give the same one of proportion, repeat and choose, or none")
    for number, stream in enumerate(streams):
        for name in ("proportion", "repeat", "choose"):
            value = getattr(stream, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidArgumentError(f"stream {number}: {name} must be a finite number >= 0, got {value}")


def samples_of_epoch(streams: Sequence[Stream], totals: Sequence[int], epoch_size: int | None) -> list[int]:
    """Return the samples of an epoch from each stream. `epoch_size` None: as `repeat` or `choose` say, or all."""
    if streams[0].repeat is not None or streams[0].choose is not None:
        if epoch_size is not None:
            raise InvalidArgumentError(
                f"epoch_size must be None with streams that give repeat or choose, got {epoch_size}"
            )
        return [
            int(stream.choose) if stream.choose is not None else round((stream.repeat or 0) * total)
            for stream, total in zip(streams, totals, strict=True)
        ]
    own = streams[0].proportion is not None
    weights = [stream.proportion or 0.0 for stream in streams] if own else [float(total) for total in totals]
    return apportioned(_shares(weights), sum(totals) if epoch_size is None else epoch_size)


def _shares(weights: Sequence[float]) -> list[Fraction]:
    exact = [Fraction(weight) for weight in weights]
    if sum(exact) <= 0:
        raise InvalidArgumentError("at least one stream must have a proportion above 0")
    return [weight / sum(exact) for weight in exact]
