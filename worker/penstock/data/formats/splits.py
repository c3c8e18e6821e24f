"""Splits (train, validation, test) that the names of a folder's files say, by the rule of Hugging Face datasets. The
first of these that fits any file decides, and files that do not fit it belong to no split:

1. data/NAME-00000-of-00005.parquet, in the folder `data` alone: split NAME.
2. A folder `split=NAME` (a hive partition, which Hugging Face datasets does not read): split NAME.
3. A folder whose name has a split's word, such as `train/`, `my-test_2/`.
4. A file whose name has one, such as `valid.csv`, `part_train_0.jsonl`.

A word is whole: `-`, `.`, `_`, a space, a digit or an end stands before and after it, so `latest` is no test. A file
may have the words of two splits, and then belongs to both. Partitions such as `part=test/` or `train=1/` are no splits.

https://huggingface.co/docs/datasets/repository_structure
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePath
from urllib.parse import unquote

from penstock.data.formats.shards import Shard
from penstock.proto.errors import InvalidArgumentError

WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
EVERY_SPLIT = "*"
"""Value of the argument `split` that takes the files of all splits; while a folder is indexed, all of its files."""
WITHOUT_WORDS = "train"
"""Split of all files if no name has a word."""
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""Value of a folder `key=value` whose rows have none."""
_SHARDED = re.compile(r"data/([^/]*)-\d{5}-of-\d{5}[^/]*\.[^/]*", re.ASCII)
_FOLDERS, _FILES = (
    {split: re.compile(rf"(?:.*[-._ 0-9])?(?:{words})(?:[-._ 0-9].*{end})", re.ASCII) for split, words in WORDS.items()}
    for end in ("|", "")
)


def splits_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of each split's files, in their order, the splits in the order of WORDS; empty if the names say
    nothing. All are EVERY_SPLIT if only partitions have words: as the split "train", they would have rows of others.
    `names`: paths relative to the dataset's folder."""
    for rule in (_sharded, _by_partition, _by_folder, _by_file):
        found: dict[str, list[str]] = {}
        for name in names:
            for split in rule(name):
                found.setdefault(split, []).append(name)
        if found:
            return {split: found[split] for split in _in_order(found)}
    texts = {text for name in names for step in hive_steps(name) for text in step}
    if any(words.fullmatch(text) for text in texts for words in _FOLDERS.values()):
        return {EVERY_SPLIT: list(names)}
    return {}


def hive_steps(name: str) -> list[tuple[str, str]]:
    """Return the key and the value of each folder `key=value` in a path."""
    steps = (folder.partition("=") for folder in name.split("/")[:-1])
    return [(unquote(key), unquote(value)) for key, equals, value in steps if equals]


def select_split(shards: Sequence[Shard], split: str | None, where: str, *, is_folder: bool) -> list[Shard]:
    """Return the shards of one split (EVERY_SPLIT: all). `is_folder`: True if `split` led to the dataset's folder, so
    that it need not be one of its splits, too. Raises InvalidArgumentError for an unknown split, and for None unless
    there is one alone."""
    of_each = [(shard, shard.settings.get("splits", ())) for shard in shards]
    known = _in_order({name for _, splits in of_each for name in splits})
    if is_folder and split not in known:
        split = None
    if split is None and len(known) == 1:
        [split] = known
    if split not in (EVERY_SPLIT, *known):
        raise InvalidArgumentError(
            f"{where}: split must be one of {', '.join(known)}, got {split!r}. Pass {EVERY_SPLIT!r} for all"
        )
    return [shard for shard, splits in of_each if split == EVERY_SPLIT or split in splits]


def check_split(split: str | None) -> None:
    """Raise InvalidArgumentError for a subfolder outside of the dataset's folder."""
    if split is not None and (PurePath(split).is_absolute() or ".." in PurePath(split).parts):
        raise InvalidArgumentError(f"split must be the relative path of a subfolder without '..', got {split!r}")


def _in_order(splits: Collection[str]) -> list[str]:
    return [*(split for split in WORDS if split in splits), *sorted(set(splits) - WORDS.keys())]


def _sharded(name: str) -> Iterable[str]:
    found = _SHARDED.fullmatch(name)
    return [found[1]] if found and found[1] else []


def _by_partition(name: str) -> Iterable[str]:
    return [value for key, value in hive_steps(name) if key == "split" and value not in ("", NO_VALUE, EVERY_SPLIT)]


def _by_folder(name: str) -> Iterable[str]:
    folders = name.split("/")[:-1]
    return [split for split, words in _FOLDERS.items() if any(map(words.fullmatch, folders))]


def _by_file(name: str) -> Iterable[str]:
    file = name.rpartition("/")[2]
    return [split for split, words in _FILES.items() if words.fullmatch(file)]
