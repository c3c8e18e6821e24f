"""Conversion of a dataset of any format that Penstock reads to MDS or Parquet.

Several processes copy parts of some 32 to 96 MiB, each into a folder of its own (convert_part.py). A part is finished
or not there, so a killed run is started again and skips those that are. The index is written last.

Samples keep their numbers. Unless keep_order=False, the index notes how the source's shards divided them
(indexes/order_layout.py): then the order is the source's, and states saved with the source can be resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec

from penstock.data.arguments import at_least_one, byte_count, one_of, truth
from penstock.data.cache.shard_cache import ShardCache
from penstock.data.cache.shard_versions import origin_of
from penstock.data.converting.convert_part import (
    UNFINISHED,
    ConversionPlan,
    converting,
    part_folder,
    parts_of,
    read_rows,
)
from penstock.data.converting.target_columns import TargetColumn, mds_columns, parquet_columns
from penstock.data.formats.arrow.ipc_messages import MAGIC
from penstock.data.formats.columnar.common_types import common_types_of
from penstock.data.formats.columnar.values import storage_of
from penstock.data.formats.index import INDEX, SPLITS_NOTE, index_notes, join_indexes, read_index, write_index
from penstock.data.formats.parquet.shards import pyarrow_parquet
from penstock.data.formats.shards import ReadOptions, Shard
from penstock.data.indexes.order_layout import OrderLayout
from penstock.data.indexes.shard_table import ShardTable
from penstock.data.job_processes import in_processes
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.uploads import writable_remote
from penstock.data.writing.writers import SIZE_LIMIT
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.telemetry.progress import FILES_S, Progress

SAMPLED_SHARDS, SAMPLED_ROWS = 8, 64
"""Shards, and rows in each of them, that are read at most to choose the types of columns."""
PROCESS_BYTES = 128 << 20
"""Bytes for which a process is started: with fewer, starting it takes longer than it saves."""
THREADS = 16
"""Small files that are read at the same time."""
PROGRAM = "penstock.data.converting.convert_part"
PARQUET_GROUP = 16 << 20
"""Default size of the values in a row group of Parquet, in bytes."""
PARQUET_COMPRESSIONS = ("brotli", "gzip", "lz4", "none", "snappy", "zstd")
"""Compressions of Parquet's pages, by pyarrow's names."""
_PART = re.compile(r"part-\d{6,}")


@dataclass(frozen=True)
class Converted:
    """Result of a conversion."""

    shards: list[Shard]
    """Shards of the result, as its index lists them."""
    samples: int
    digest: str
    """Digest of all rows as a reader gets them, in hexadecimal. It is the same for MDS and Parquet, unless a column was
    changed for one of them, such as times to text, or MDS was copied to MDS as it is stored."""
    parts: int
    """Number of parts. This call converted `made` of them; an earlier one had finished the others."""
    made: int
    columns: Mapping[str, str]
    """Type of each column: the encoding of MDS, or Arrow's type."""


def convert_dataset(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    to: str,
    *,
    columns: Sequence[str] | None = None,
    types: Mapping[str, str] | None = None,
    compression: str | None = "default",
    hashes: Collection[str] | None = None,
    size_limit: int | str | None = None,
    keep_order: bool = True,
    processes: int | None = None,
    timeout_s: float = 600.0,
) -> Converted:
    """Convert a dataset to MDS or Parquet, in parallel. A call skips what an earlier one that was killed has finished.

        convert_dataset("/data/web", "s3://bucket/web", "mds")

    Progress is printed on standard error from the third second on.

    Args:
        source: folder of the dataset, local or any URL that fsspec opens, with credentials as its filesystem finds them
            (environment, fsspec's configuration). It must have an index.
        dest: folder of the result, local or a URL; empty, or with parts of the same conversion.
        to: "mds" or "parquet".
        columns: names of the columns to convert; None: all.
        types: types of some columns, instead of those chosen from samples: MDS encodings, or Arrow's types by name;
            "json" stores JSON.
        compression: for MDS as in MDSWriter, for Parquet as in pyarrow; "default": none for MDS, zstd for Parquet.
        hashes: hash algorithms of MDS files, as in MDSWriter; None: xxh64.
        size_limit: bytes of an MDS shard (64 MiB), or of the values in a row group of Parquet (16 MiB).
        keep_order: True: keep the source's order, so that states saved with the source can be resumed on the result.
            False: the result's own shards decide its order.
        processes: number of processes; None: one for each processor, but at most one for each 128 MiB of data.
        timeout_s: seconds for each file of a remote.

    Raises InvalidArgumentError, DatasetError, ShardCorruptError, ShardUnavailableError.
    """
    settings = _settings(to, compression, hashes, size_limit)
    workers = None if processes is None else at_least_one("processes", processes)
    truth("keep_order", keep_order)
    source, remote = _address(source), writable_remote(os.fspath(dest))
    with tempfile.TemporaryDirectory(prefix="penstock-convert-") as scratch, contextlib.closing(remote):
        origin = RemoteFolder(source)
        with contextlib.closing(ShardCache(origin, scratch, timeout_s=timeout_s)) as cache:
            text = cache.index().read_all()
            shards = read_index(text, source)
            splits = index_notes(text).get(SPLITS_NOTE, ())
            if len(splits) > 1:
                raise DatasetError(
                    f"{source} must have one split, got {', '.join(splits)}. Index one alone by the argument `split`"
                )
            chosen = _choose(cache, shards, to, columns, types or {}, source)
        parts, sizes = parts_of(shards), [shard.size for shard in shards]
        workers = workers or max(1, min(len(os.sched_getaffinity(0)), sum(sizes) // PROCESS_BYTES))
        layout = OrderLayout.noted(index_notes(text), ShardTable.of(text, source), source) if keep_order else None
        notes = {} if layout is None else {"order": layout.note()}
        decisive = [to, settings, *chosen[1:], list(map(asdict, chosen[0])), parts, notes]
        plan = ConversionPlan(
            source,
            _address(dest),
            to,
            *chosen,
            settings=settings,
            parts=parts,
            key=_digest(json.dumps([*decisive, [origin_of(shard, origin.local) for shard in shards]], sort_keys=True)),
            timeout_s=timeout_s,
            cache=scratch,
            cache_limit=max(4 << 30, (workers + 1) * max(sizes)),
        )
        done = _finished(plan, remote)
        missing = [number for number in range(len(parts)) if number not in done]
        done |= _made(plan, missing, min(workers, len(missing)), remote.url)
        return _published(plan, [done[number] for number in range(len(parts))], notes, remote, made=len(missing))


def _settings(
    to: str, compression: str | None, hashes: Collection[str] | None, limit: int | str | None
) -> dict[str, Any]:
    one_of("to", to, ("mds", "parquet"))
    size = byte_count("size_limit", limit)
    if to == "parquet":
        pyarrow_parquet()  # fail early if the package is missing
        packed = "zstd" if compression == "default" else compression or "none"
        one_of("compression", packed, PARQUET_COMPRESSIONS)
        if hashes is not None:
            raise InvalidArgumentError(
                f"hashes must be left out for Parquet, whose pages have checksums, got {', '.join(hashes)}"
            )
        return {"compression": packed, "group_bytes": size or PARQUET_GROUP}
    chosen = sorted(set(("xxh64",) if hashes is None else hashes))
    packing = None if compression == "default" else compression or None
    return {"compression": packing, "hashes": chosen, "size_limit": size or SIZE_LIMIT}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _address(folder: str | os.PathLike[str]) -> str:
    text = os.fspath(folder)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _choose(
    cache: ShardCache,
    shards: Sequence[Shard],
    to: str,
    columns: Sequence[str] | None,
    types: Mapping[str, str],
    name: str,
) -> tuple[list[TargetColumn], str, bool]:
    """Return the columns, the Parquet schema in hexadecimal ("" for MDS), and whether values are copied as stored."""
    if not any(shard.samples for shard in shards):
        raise DatasetError(
            f"{name}: the index must list at least one sample, got none. Give the folder of another dataset"
        )
    plain = {
        (tuple(each.settings.get("column_names", ())), tuple(each.settings.get("column_encodings", ())))
        for each in shards
    }
    if to == "mds" and all(shard.format == "mds" for shard in shards) and len(plain) == 1 and not types:
        [(stored, encodings)] = plain
        known = dict(zip(stored, encodings, strict=True))
        return [TargetColumn(each, known[each]) for each in _chosen(columns, stored, types, name)], "", True
    samples = _sampled(cache, shards)
    names = _chosen(columns, list(samples[0]), types, name)
    if to == "parquet":
        made, schema = parquet_columns(samples, names, types, _declared(cache, shards[0]))
        return made, schema.serialize().to_pybytes().hex(), False
    known_encodings = _known_encodings(shards, names)
    return mds_columns(samples, names, {**known_encodings, **types}), "", False


def _chosen(columns: Sequence[str] | None, known: Sequence[str], types: Mapping[str, str], name: str) -> list[str]:
    names = list(known) if columns is None else list(columns)
    for argument, given, among in (("columns", names, known), ("types (--as)", list(types), names)):
        wrong = [each for each in given if each not in among or given.count(each) > 1]
        if wrong or not names:
            raise InvalidArgumentError(
                f"{name}: {argument} must be some of {', '.join(among)}, each once, got {', '.join(wrong) or 'none'}"
            )
    return names


def _declared(cache: ShardCache, shard: Shard) -> dict[str, Any]:
    if shard.format not in ("parquet", "arrow"):
        return {}
    arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    with cache.hold(shard) as held, held.paths[0].open("rb") as file:
        if shard.format == "parquet":
            schema = parquet.read_schema(file)
        else:
            begin = file.read(len(MAGIC))
            file.seek(0)
            schema = (arrow.ipc.open_file if begin == MAGIC else arrow.ipc.open_stream)(file).schema
        return {field.name: storage_of(field.type) for field in schema} | common_types_of(shard.settings)


def _known_encodings(shards: Sequence[Shard], names: Sequence[str]) -> dict[str, str]:
    kinds = {"jpg": "jpeg", "jpeg": "jpeg", "png": "png"}
    if shards[0].format == "webdataset":
        return {name: kinds[end] for name in names if (end := name.rpartition(".")[2]) in kinds}
    if shards[0].format == "mds":
        pairs = zip(shards[0].settings["column_names"], shards[0].settings["column_encodings"], strict=True)
        return {name: encoding for name, encoding in pairs if name in names}
    return {}


def _sampled(cache: ShardCache, shards: Sequence[Shard]) -> list[dict[str, Any]]:
    filled = [shard for shard in shards if shard.samples]
    step = -(-len(filled) // SAMPLED_SHARDS)
    found: list[dict[str, Any]] = []
    for shard in filled[::step]:
        chosen = range(0, shard.samples, -(-shard.samples // SAMPLED_ROWS))
        found += read_rows(cache, shard, chosen, ReadOptions(images="file"))
    return found


def _finished(plan: ConversionPlan, remote: RemoteFolder) -> dict[int, bytes]:
    """Return each finished part's index, and remove what killed runs began. Raise DatasetError for other contents."""
    names = remote.names(deadline_s=plan.timeout_s)
    others = [name for name in names if not (name == INDEX or _PART.fullmatch(name) or name.startswith(UNFINISHED))]
    if others:
        raise DatasetError(f"{remote.url} must be empty, but it has {min(others)}. Give another folder")
    files = remote.find(deadline_s=plan.timeout_s)
    indexes = [name for name in files if name == INDEX or _PART.fullmatch(name.removesuffix(f"/{INDEX}"))]
    with ThreadPoolExecutor(THREADS) as threads:
        texts = list(threads.map(partial(remote.read, deadline_s=plan.timeout_s), indexes))
    if any(index_notes(text).get("convert", {}).get("key") != plan.key for text in texts):
        raise DatasetError(f"{remote.url} must be empty, but it has a dataset of other data or with other settings")
    for path in remote.local.glob(f"{UNFINISHED}*") if remote.local else ():
        shutil.rmtree(path, ignore_errors=True)
    return {
        int(name.removeprefix("part-").removesuffix(f"/{INDEX}")): text
        for name, text in zip(indexes, texts, strict=True)
        if name != INDEX
    }


def _made(plan: ConversionPlan, missing: Sequence[int], processes: int, url: str) -> dict[int, bytes]:
    made: dict[int, bytes] = {}
    line, done = Progress(FILES_S), len(plan.parts) - len(missing)
    try:
        for report in _reports(msgspec.json.encode(plan), missing, processes):
            made[report["part"]] = report["index"].encode()
            line.count(f"{url}: converted", done + len(made), len(plan.parts), "parts")
    finally:
        line.finish()
    return made


def _reports(plan: bytes, missing: Sequence[int], processes: int) -> Iterator[Mapping[str, Any]]:
    if processes > 1:
        yield from in_processes(PROGRAM, plan, missing, processes)
    elif missing:
        with converting(plan) as convert:
            yield from map(convert, missing)


def _published(
    plan: ConversionPlan, parts: Sequence[bytes], notes: Mapping[str, Any], remote: RemoteFolder, made: int
) -> Converted:
    shards = join_indexes(
        (part_folder(number), read_index(text, remote.url_of(part_folder(number)))) for number, text in enumerate(parts)
    )
    index = write_index(shards, {**notes, "convert": {"key": plan.key}})
    remote.write(INDEX, index, deadline_s=plan.timeout_s)
    digest = _digest("".join(index_notes(text)["convert"]["digest"] for text in parts))
    columns = {column.name: column.type for column in plan.columns}
    return Converted(shards, sum(shard.samples for shard in shards), digest, len(parts), made, columns)
