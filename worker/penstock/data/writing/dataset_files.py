"""Which files of a folder make a dataset when it is indexed, and what their paths and README.md say about them. Tables
whose own log says it are no such folders."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.data.cache.file_hashes import digest_of
from penstock.data.formats.fields import InvalidField, is_int32
from penstock.data.formats.index import (
    INDEX,
    OWN_INDEX,
    SOURCE_NOTE,
    SPLITS_NOTE,
    check_name,
    write_index,
)
from penstock.data.formats.records.energon_folder import load_yaml
from penstock.data.formats.shards import Shard
from penstock.data.formats.splits import EVERY_SPLIT, NO_VALUE, WITHOUT_WORDS, hive_steps, splits_of
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.telemetry.progress import Progress

CARD = "README.md"
"""File of a repository of Hugging Face, whose head may list the files of each split (`configs`)."""
HASH, HASHED_AT_ONCE = "xxh3_128", 4
"""Algorithm of the argument `hashes`, and files that are read for it at the same time."""
PARTITIONED = ("parquet", "arrow", "json_lines", "csv_rows")
"""Formats whose samples are rows: folders like `label=1/` give them columns."""
_INTEGER = re.compile(r"-?[0-9]{1,4000}")
_HEAD = re.compile(r"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)


def local_names(root: Path, pattern: str = "") -> list[str]:
    """Return the relative paths of all files below a folder, hidden ones too, sorted as paths. Raises DatasetError for
    a link to a folder, which is not followed, if it could hold files that match `pattern`."""
    names = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() and not path.is_file():
            if not is_hidden(name) and (not pattern or "/" in pattern):
                raise DatasetError(
                    f"{path} must be a file or a folder, got a link to a folder or a broken link. Index its target"
                )
        elif not path.is_dir():
            names.append(name)
    return names


def is_hidden(name: str) -> bool:
    """Return True if a part of the relative path begins with `.`, or with `_` and has no `=`."""
    return any(step[0] == "." or (step[0] == "_" and "=" not in step) for step in name.split("/"))


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the paths that match a pattern with `*`, `**`, `?` and `[...]`. Raises InvalidArgumentError."""
    from fsspec.utils import glob_translate  # imported here: it takes 0.1 s

    try:
        return list(filter(re.compile(glob_translate(pattern)).match, names))
    except (ValueError, re.error) as error:
        raise InvalidArgumentError(f"the pattern {pattern!r} must be one of fsspec's, but {error}") from None


def with_hashes(shards: Sequence[Shard], remote: RemoteFolder, out: Path | None, timeout_s: float) -> list[Shard]:
    """Return the shards with a hash of each file, which is read as a whole, in the dataset's folder or that of the
    index. Raises OSError, ShardUnavailableError."""

    def digest(name: str) -> str:
        for folder in (remote.local, out):
            if folder is not None and (folder / name).exists():
                return digest_of(folder / name, HASH)
        with tempfile.TemporaryDirectory(prefix="penstock-hash-") as scratch:
            remote.copy(name, Path(scratch, "file"), deadline_s=timeout_s)
            return digest_of(Path(scratch, "file"), HASH)

    def hashed(shard: Shard) -> Shard:
        files = (replace(file, raw=replace(file.raw, hashes={HASH: digest(file.raw.name)})) for file in shard.files)
        return replace(shard, files=tuple(files))

    with ThreadPoolExecutor(HASHED_AT_ONCE) as threads:
        return list(threads.map(hashed, shards))


def write_local_index(folder: Path, shards: Sequence[Shard], notes: Mapping[str, Any]) -> None:
    """Write the index of files of other libraries in place of any index in `folder`. Raises DatasetError."""
    path = folder / OWN_INDEX
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, write_index(shards, notes))
        (folder / INDEX).unlink(missing_ok=True)
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be written: {error}. Give the argument `out`, a folder that you may write to"
        ) from error
    if SOURCE_NOTE not in notes:
        _say_who_reads(str(path), shards)


def write_remote_index(
    remote: RemoteFolder, shards: Sequence[Shard], notes: Mapping[str, Any], timeout_s: float
) -> None:
    """As write_local_index, into the remote folder. Raises ShardUnavailableError."""
    remote.write(OWN_INDEX, write_index(shards, notes), deadline_s=timeout_s)
    if remote.exists(INDEX, deadline_s=timeout_s):  # one who may write may not be allowed to remove
        remote.remove(INDEX, deadline_s=timeout_s)
    _say_who_reads(remote.url_of(OWN_INDEX), shards)


def _say_who_reads(index: str, shards: Sequence[Shard]) -> None:
    if shards[0].format in PARTITIONED:
        progress = Progress()
        progress.show(
            f"{index} is written. pyarrow and pandas read the folder as before, polars with "
            "hidden_file_prefix=('_', '.'), and any program if the index has a folder of its own (out)"
        )
        progress.finish()


@dataclass(frozen=True)
class DatasetFiles:
    """Files of a dataset, in the order of its samples."""

    names: list[str]
    splits: Mapping[str, Sequence[str]]
    """Names of each split's files. Empty: there are no splits."""

    @staticmethod
    def of(names: Sequence[str], split: str | None, where: str, card: Callable[[], bytes] | None) -> DatasetFiles:
        """Choose among `names`, paths of all files of the dataset's format. `split`: the only one to index, None: all,
        EVERY_SPLIT: do not look for splits; `where`: address for errors; `card`: reads README.md, None without one.
        Raises InvalidArgumentError for an unknown split, DatasetError for a card that cannot be followed."""
        for name in names:
            try:
                check_name("its name", name)
            except InvalidField as error:
                raise DatasetError(f"{where}/{name} cannot be indexed: {error}. Rename the file") from None
        if split == EVERY_SPLIT:
            return DatasetFiles(list(names), {EVERY_SPLIT: names})
        by_card = _splits_of_card(names, card(), where) if card else {}
        splits = by_card or splits_of(names) or {WITHOUT_WORDS: list(names)}
        if split is not None:
            if split not in splits:
                raise InvalidArgumentError(f"{where}: split must be one of {', '.join(splits)}, got {split!r}")
            splits = {split: splits[split]}
        inside = {name for files in splits.values() for name in files}
        if split is None and not by_card and len(inside) < len(names):
            first = next(name for name in names if name not in inside)
            warnings.warn(
                f"{where}: {len(names) - len(inside)} of {len(names)} files are left out, such as {first}: they are "
                f"in no split ({', '.join(splits)}). split={EVERY_SPLIT!r} indexes all files as one dataset",
                stacklevel=5,
            )
        return DatasetFiles([name for name in names if name in inside], splits)

    @property
    def notes(self) -> dict[str, Any]:
        return {SPLITS_NOTE: list(self.splits)} if self.splits else {}

    def completed(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return the shards, each with the splits of its file if there are several, and with the values of its hive
        partitions."""
        said: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        for split, names in self.splits.items() if len(self.splits) > 1 else ():
            for name in names:
                said[name].setdefault("splits", []).append(split)
        for name, values in partitions_of(self.names).items() if shards[0].format in PARTITIONED else ():
            said[name]["partitions"] = values
        return [
            replace(shard, settings={**shard.settings, **said[shard.name]}) if said[shard.name] else shard
            for shard in shards
        ]


def partitions_of(names: Sequence[str]) -> dict[str, dict[str, int | str | None]]:
    """Return the values that folders like `label=1/` give each file, as pyarrow's "hive" partitioning reads them: a
    column is of 32-bit integers if all of its values are, else of texts; a file outside of such a folder has None.
    Empty without such folders."""
    found: dict[str, dict[str, str | None]] = {}
    for name in names:
        steps = reversed(hive_steps(name))
        found[name] = {key: None if value == NO_VALUE else value for key, value in steps}
    keys = dict.fromkeys(key for values in found.values() for key in reversed(values))
    if not keys:
        return {}
    texts = {key: {values.get(key) for values in found.values()} - {None} for key in keys}
    integers = {
        key for key in keys if all(_INTEGER.fullmatch(str(text)) and is_int32(int(str(text))) for text in texts[key])
    }
    return {
        name: {
            key: int(text) if key in integers and (text := values.get(key)) is not None else values.get(key)
            for key in keys
        }
        for name, values in found.items()
    }


def _splits_of_card(names: Sequence[str], card: bytes, where: str) -> dict[str, list[str]]:
    """Return the splits that the head of README.md lists; empty if it lists none."""
    head = _HEAD.match(card.decode(errors="replace"))
    if head is None or "configs:" not in head[1]:
        return {}
    try:
        read = load_yaml(f"{where}/{CARD}", head[1])
    except ValueError as error:
        raise DatasetError(f"{where}/{CARD} must begin with YAML: {error}. Correct it, or remove its head") from error
    configs = [each for each in _listed(read, "configs") if isinstance(each, dict)]
    chosen = [each for each in configs if each.get("default") is True or each.get("config_name") == "default"]
    if len(configs) > 1 and len(chosen) != 1:
        raise DatasetError(
            f"{where}/{CARD} must have one config, or one named default, got "
            f"{', '.join(str(each.get('config_name')) for each in configs)}. Index the folder of one of them, or pass "
            f"split={EVERY_SPLIT!r} for all files"
        )
    config = (chosen or configs or [{}])[0]
    below = str(config.get("data_dir") or "").strip("/")
    inside = [name for name in names if not below or name.startswith(f"{below}/")]
    found: dict[str, list[str]] = {}
    for each in _listed(config, "data_files"):
        of, paths = (each.get("split"), each.get("path")) if isinstance(each, dict) else (WITHOUT_WORDS, each)
        for path in paths if isinstance(paths, list) else [paths]:
            pattern = f"{below}/{path}" if below else str(path).removeprefix("./")
            files = found.setdefault(str(of), [])
            files += [name for name in matching(inside, pattern) if name not in files]
    empty = [split for split, files in found.items() if not files]
    if empty:
        raise DatasetError(
            f"{where}/{CARD} lists files of the split {empty[0]!r}, but the folder has none. Download them"
        )
    if found or not below:
        return found
    by_name = splits_of([name.removeprefix(f"{below}/") for name in inside])
    return {split: [f"{below}/{name}" for name in files] for split, files in by_name.items()} or {WITHOUT_WORDS: inside}


def _listed(value: Any, field: str) -> list[Any]:
    found = value.get(field) if isinstance(value, dict) else None
    return found if isinstance(found, list) else [] if found is None else [found]
