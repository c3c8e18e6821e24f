"""Folders of tar archives that Megatron Energon prepared (`energon prepare`), local or remote, read as they are.

    .nv-meta/split.yaml      archives of each split (train, val, test), and those to leave out
    .nv-meta/dataset.yaml    class of the samples, and the archive member of each of their fields
    .nv-meta/.info.json      number of samples in each archive (.info.yaml in older folders)
    NAME.tar.idx             offset of each sample in an archive

Python code that dataset.yaml names (`sample_loader`, `part_filter`) is never run: samples have the archive's members as
columns. Energon's own index (index.sqlite) is not needed.

META stands for `.nv-meta`, of which the cache of a remote folder has a copy. Penstock's index has a note with the
digests of the files in META, which show if it is older than these, and the name of the `sample_loader`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from penstock.data.formats.fields import InvalidField
from penstock.data.formats.shards import Shard
from penstock.proto.errors import DatasetError
from penstock.runtime.files.plain_files import read_plain

META = ".nv-meta"
NOTE = "energon"
SPLITS, DATASET, INFOS = ("split.yaml", "split.json"), "dataset.yaml", (".info.json", ".info.yaml")
META_FILES = (*SPLITS, DATASET, *INFOS)
"""Names of the files in META from which an index is made."""
MAX_BYTES = 64 << 20
"""Largest size in bytes of a file in META (the folder .nv-meta)."""
MAX_NAMES = 1 << 20
"""Most archives that one name with braces, such as `shard_{000..127}.tar`, may stand for."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)
_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")


def is_prepared(folder: Path) -> bool:
    return any((folder / META / name).is_file() for name in SPLITS)


def prepared_files(folder: Path) -> list[Path] | None:
    """Return all splits' archives, in the order of split.yaml; None for a folder that Energon has not prepared. Raises
    DatasetError if a file is missing or invalid."""
    if not is_prepared(folder):
        return None
    names = prepared_names(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DatasetError(
            f"{folder / missing[0]} must be a file in the folder, as {_split_path(folder).name} lists it"
        )
    return [folder / name for name in names]


def prepared_names(folder: Path) -> list[str]:
    """Return all splits' archives, relative to the dataset's folder. `folder`: local, with a copy of META alone. Raises
    DatasetError for an invalid file in META."""
    return list(_splits(folder))


def prepared_note(folder: Path) -> dict[str, Any]:
    """Return {NOTE: entries} for the index; empty if not prepared. Raises DatasetError."""
    if not is_prepared(folder):
        return {}
    return {NOTE: {"files": _digests(folder), "sample_loader": sample_loader_of(folder)}}


def check_current(folder: Path, notes: Mapping[str, Any], where: str) -> None:
    """Raise DatasetError if an index, with these notes, is older than the files in META."""
    note = notes.get(NOTE)
    listed = note.get("files") if isinstance(note, dict) else None
    now = _digests(folder)
    if listed == now:
        return
    known = listed if isinstance(listed, dict) else {}
    changed = next((name for name in META_FILES if known.get(name) != now.get(name)), SPLITS[0])
    raise DatasetError(
        f"{where}: {META}/{changed} must be as it was when the folder was indexed. Run index_folder again"
    )


def sample_loader_of(folder: Path) -> str:
    """Return the name of `sample_loader` in dataset.yaml, "" for none."""
    path = folder / META / DATASET
    found = _read(path).get("sample_loader") if path.is_file() else None
    return str(found) if found is not None else ""


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for name in META_FILES:
        path = folder / META / name
        try:
            found[name] = xxhash.xxh3_128_hexdigest(read_plain(path, MAX_BYTES))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise DatasetError(f"{path} cannot be read: {error}. Check that this user may read it") from error
    return found


def prepared_shards(folder: Path, shards: list[Shard]) -> list[Shard]:
    """Return the shards, in a prepared folder each with the names of its splits and the fields of its samples. Raises
    DatasetError if META is invalid, or lists another number of samples for an archive."""
    if not is_prepared(folder):
        return shards
    splits, fields, counts = _splits(folder), _fields(folder), _counts(folder)
    for shard in shards:
        if counts.get(shard.name, shard.samples) != shard.samples:
            raise DatasetError(
                f"{folder / shard.name} must have {counts[shard.name]} samples, as {META} lists, got {shard.samples}"
            )
    return [replace(shard, settings={"splits": splits[shard.name], **fields}) for shard in shards]


def check_indexed(folder: Path, split: str | None, where: str) -> None:
    """Raise DatasetError if the index, which lists no splits, was written before Energon prepared the folder."""
    if split is not None and is_prepared(folder):
        raise DatasetError(
            f"{where}: split must be None, got {split!r}, because the index was written before {META}/{SPLITS[0]}. "
            "Run index_folder again"
        )


def check_tar(settings: dict[str, Any]) -> None:
    fields = settings.get("fields", {})
    if not isinstance(fields, dict) or not all(isinstance(text, str) for text in fields.values()):
        raise InvalidField("fields", f"must be an object of strings, got {fields!r:.100}")


def field_of(sample: Mapping[str, Any], text: str) -> Any:
    """Return the value for an entry of Energon's field map: a column such as `jpg`, an item such as `json[caption]`, or
    the first that exists of several with commas between. Raises ValueError if none exists."""
    for option in text.split(","):
        found = _FIELD.fullmatch(option)
        column, steps = (found[1], re.findall(r"\[([^\[\]]+)\]", found[2])) if found else (option, [])
        try:
            value = sample[column if column in sample else column.lower()]
            for step in steps:
                value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            continue
        return value
    wanted = f"one of {text}" if "," in text else text
    raise ValueError(f"the sample must have {wanted}, as {META}/{DATASET} says, got {', '.join(sample)}")


def _split_path(folder: Path) -> Path:
    return next((path for name in SPLITS if (path := folder / META / name).is_file()), folder / META / SPLITS[0])


def _splits(folder: Path) -> dict[str, list[str]]:
    path = _split_path(folder)
    content = _read(path)
    parts, exclude = content.get("split_parts"), content.get("exclude") or []
    if not isinstance(parts, dict) or not parts or not all(isinstance(each, list | None) for each in parts.values()):
        raise DatasetError(f"{path}: split_parts must list the archives of each split. Run `energon prepare` again")
    if not isinstance(exclude, list):
        raise DatasetError(f"{path}: exclude must be a list of names, got {exclude!r:.200}")
    left_out = {name for pattern in exclude for name in _expanded(path, pattern)}
    inside = sorted(name for name in left_out if not name.endswith(".tar"))
    if inside:
        raise DatasetError(
            f"{path}: exclude must list whole archives, got the sample {inside[0]}. Write the archive without it"
        )
    splits: dict[str, list[str]] = {}
    for split, patterns in parts.items():
        for name in [name for pattern in patterns or () for name in _expanded(path, pattern)]:
            if name not in left_out and split not in splits.setdefault(name, []):
                splits[name].append(str(split))
    outside = [name for name in splits if ".." in Path(name).parts or Path(name).is_absolute()]
    if outside:
        raise DatasetError(
            f"{path}: an archive must be a file in the folder, got {outside[0]}. Copy it there, and prepare again"
        )
    return splits


def _expanded(path: Path, pattern: object) -> list[str]:
    """Return the names that a pattern such as `shard_{000..127}.tar` or `{a,b}.tar` stands for. Numbers are padded with
    zeros if the first or the last one is: `{08..10}` stands for 08, 09, 10."""
    if not isinstance(pattern, str):
        raise DatasetError(f"{path}: a file's name must be a string, got {pattern!r:.200}. Run `energon prepare` again")
    found = _BRACES.search(pattern)
    if not found:
        return [pattern]
    ends = _RANGE.fullmatch(found[1])
    if ends:
        first, last = int(ends[1]), int(ends[2])
        padded = any(len(end) > 1 and end[0] == "0" for end in ends.groups())
        width = max(map(len, ends.groups())) if padded else 0
        if last - first >= MAX_NAMES:
            raise _too_many(path, pattern)
        choices: Sequence[str] = [f"{n:0{width}}" for n in range(first, last + 1)]
    else:
        choices = found[1].split(",")
    if len(choices) < 1 + (ends is None):
        raise DatasetError(f"{path}: braces must hold choices (a,b) or an ascending range (0..9), got {pattern!r:.200}")
    before, after = pattern[: found.start()], _expanded(path, pattern[found.end() :])
    if len(choices) * len(after) > MAX_NAMES:
        raise _too_many(path, pattern)
    return [f"{before}{choice}{rest}" for choice in choices for rest in after]


def _too_many(path: Path, pattern: str) -> DatasetError:
    return DatasetError(f"{path}: a name with braces must stand for at most {MAX_NAMES} files, got {pattern!r:.200}")


def _fields(folder: Path) -> dict[str, Any]:
    path = folder / META / DATASET
    fields = _read(path).get("field_map") if path.is_file() else None
    if fields is None:
        return {}
    if not isinstance(fields, dict) or not all(isinstance(text, str) for text in fields.values()):
        raise DatasetError(
            f"{path}: field_map must map names to texts, got {fields!r:.200}. Run `energon prepare` again"
        )
    return {"fields": {str(name): text for name, text in fields.items()}}


def _counts(folder: Path) -> dict[str, Any]:
    for name in INFOS:
        path = folder / META / name
        if path.is_file():
            counts = _read(path).get("shard_counts")
            return counts if isinstance(counts, dict) else {}
    return {}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_plain(path, MAX_BYTES).decode()
        value = json.loads(text) if path.suffix == ".json" else load_yaml(str(path), text)
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path} cannot be read: {error}. Run `energon prepare` again") from error
    if not isinstance(value, dict):
        raise DatasetError(f"{path} must be a mapping, got {type(value).__name__}. Run `energon prepare` again")
    return value


def load_yaml(path: str, text: str) -> Any:
    """Raises ValueError for a text that is not YAML, DatasetError without the package. `path`: for this error."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise DatasetError(f"{path} needs the package pyyaml. Run pip install pyyaml") from error
    try:
        return yaml.safe_load(text)
    except (RecursionError, yaml.YAMLError) as error:
        raise ValueError(str(error)) from error
