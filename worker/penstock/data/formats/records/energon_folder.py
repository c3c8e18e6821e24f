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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, ClassVar

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
MAX_NAMES_BYTES = 128 << 20
"""Largest memory in bytes for the names of archives for which a file's names with braces, such as
`shard_{000..127}.tar`, stand together: about 1.3 million."""

NAME_BYTES = 80
"""Memory of a string beside its characters, and of its place in a list and a dict."""
MAX_DIGITS = 20
"""Most digits of a number in braces."""

_PLAIN = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:bool")
_INTEGER = re.compile(r"[-+]?(0|[1-9]\d{0,17})$", re.ASCII)
_DECIMAL = re.compile(r"[-+]?((\d+\.\d*|\.\d+)([eE][-+]\d+)?|\.(inf|nan))$", re.ASCII)

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
    return [
        # of a remote folder the archives are not read, so no index says what is in them
        replace(shard, settings={**shard.settings, "splits": splits[shard.name], **fields}, content="")
        for shard in shards
    ]


def check_indexed(folder: Path, split: str | None, where: str) -> None:
    """Raise DatasetError if the index, which lists no splits, was written before Energon prepared the folder."""
    if split is not None and is_prepared(folder):
        raise DatasetError(
            f"{where}: split must be None, got {split!r}, because the index was written before {META}/{SPLITS[0]}. "
            "Run index_folder again"
        )


def check_tar(settings: dict[str, Any]) -> None:
    if settings.get("key", "last_dot") != "last_dot":
        raise InvalidField("key", f"must be 'last_dot' or left out, got {settings['key']!r:.100}")
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


def columns_of_field(text: str) -> set[str]:
    """Return the columns that may have the value for an entry of Energon's field map, see `field_of`."""
    found = {column for option in text.split(",") for column in (option, option.partition("[")[0])}
    return found | {column.lower() for column in found}


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
    names = _Names(path)
    left_out = {name for pattern in exclude for name in names.of(pattern)}
    inside = sorted(name for name in left_out if not name.endswith(".tar"))
    if inside:
        raise DatasetError(
            f"{path}: exclude must list whole archives, got the sample {inside[0]}. Write the archive without it"
        )
    splits: dict[str, list[str]] = {}
    for split, patterns in parts.items():
        for name in [name for pattern in patterns or () for name in names.of(pattern)]:
            if name not in left_out and split not in splits.setdefault(name, []):
                splits[name].append(str(split))
    outside = [name for name in splits if ".." in Path(name).parts or Path(name).is_absolute()]
    if outside:
        raise DatasetError(
            f"{path}: an archive must be a file in the folder, got {outside[0]}. Copy it there, and prepare again"
        )
    return splits


class _Names:
    """Names that the patterns in a file stand for, with a limit for all: a few bytes must not fill the memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = MAX_NAMES_BYTES

    def of(self, pattern: object) -> Iterator[str]:
        """Yield the names that a pattern such as `shard_{000..127}.tar` or `{a,b}.tar` stands for. Numbers are padded
        with zeros if the first or the last one is: `{08..10}` stands for 08, 09, 10."""
        if not isinstance(pattern, str):
            raise DatasetError(
                f"{self._path}: a file's name must be a string, got {pattern!r:.200}. Run `energon prepare` again"
            )
        parts = _BRACES.split(pattern)
        choices = [self._choices(part, pattern) if number % 2 else [part] for number, part in enumerate(parts)]
        if prod(map(len, choices)) * NAME_BYTES > self._left:
            raise self._too_many(pattern)
        for name in map("".join, product(*choices)):
            self._left -= NAME_BYTES + len(name)
            if self._left < 0:
                raise self._too_many(pattern)
            yield name

    def _choices(self, braces: str, pattern: str) -> list[str]:
        ends = _RANGE.fullmatch(braces)
        if ends is None:
            found = braces.split(",")
        else:
            width = max(map(len, ends.groups()))
            first, last = int(ends[1][:MAX_DIGITS]), int(ends[2][:MAX_DIGITS])
            if width > MAX_DIGITS or (last - first) * NAME_BYTES > self._left:
                raise self._too_many(pattern)
            padded = any(len(end) > 1 and end[0] == "0" for end in ends.groups())
            found = [f"{n:0{width if padded else 0}}" for n in range(first, last + 1)]
        if len(found) < 1 + (ends is None):
            raise DatasetError(
                f"{self._path}: braces must hold choices (a,b) or an ascending range (0..9), got {pattern!r:.200}"
            )
        return found

    def _too_many(self, pattern: str) -> DatasetError:
        return DatasetError(
            f"{self._path}: names with braces must stand for at most {MAX_NAMES_BYTES >> 20} MiB of names together, "
            f"got more with {pattern!r:.200}. Split the dataset into several folders"
        )


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
    """Return mappings and lists of texts, decimal numbers, booleans and nulls; dates and other numbers stay texts.
    Raises ValueError for a text that is not YAML or has tags, or aliases and merges, by which a few bytes become
    gigabytes; DatasetError without the package. `path`: for this error."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise DatasetError(f"{path} needs the package pyyaml. Run pip install pyyaml") from error

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined, misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
            first: [rule for rule in rules if rule[0] in _PLAIN]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"the alias *{event.anchor} is not supported: write the value itself")
            if event.tag is not None:
                raise ValueError(f"the tag {event.tag:.40} is not supported: write the value without it")
            if isinstance(event, yaml.ScalarEvent) and (event.value, event.style) == ("<<", None):
                raise ValueError("a merge (<<) is not supported: write the entries themselves")
            return super().compose_node(parent, index)

    Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _DECIMAL, list("-+0123456789."))
    try:
        return yaml.load(text, Loader=Loader)
    except (RecursionError, yaml.YAMLError) as error:
        raise ValueError(str(error)) from error
