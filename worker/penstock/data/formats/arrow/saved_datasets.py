"""Folders that Hugging Face datasets wrote with `save_to_disk`.

    dataset_dict.json        of a DatasetDict: names of its splits, each a folder below
    state.json               of a Dataset: its files, in the order of its rows
    dataset_info.json        names and types of columns

The files have the rows in their order after select() and shuffle(). Folders of old releases, with a mapping of indices,
are refused. Other Arrow files (cache-*.arrow, written by map()) are not part of the dataset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from penstock.data.formats.contents import CHANGED
from penstock.proto.errors import DatasetError
from penstock.runtime.files.plain_files import read_plain

SAVED_NOTE = "saved"
"""Note in the index: digest of state.json."""
DICT, STATE, INFO = "dataset_dict.json", "state.json", "dataset_info.json"
MAX_BYTES = 64 << 20


def saved_splits(folder: Path) -> list[str] | None:
    """Return a DatasetDict's splits; None if the folder has none. Raises DatasetError for a damaged one."""
    path = folder / DICT
    if not path.exists():
        return None
    splits = _json(path).get("splits")
    if not isinstance(splits, list) or not splits or not all(_is_name(split) for split in splits):
        raise DatasetError(
            f"{path}: splits must be a list of folder names, got {splits!r:.200}. Save the dataset again"
        )
    for split in splits:
        if not (folder / split / STATE).exists():
            raise DatasetError(f"{folder / split / STATE} must exist, as {DICT} lists it. Save the dataset again")
    return splits


def saved_files(folder: Path) -> list[Path] | None:
    """Return a Dataset's files, in the order of its rows; None if the folder has none. Raises DatasetError for a
    damaged one, and for a folder with the cached files of several splits."""
    path = folder / STATE
    if not path.exists():
        _refuse_cache(folder)
        return None
    state = _json(path)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DatasetError(
            f"{path}: rows must be stored in order, got a mapping of indices. Call flatten_indices(), and save again"
        )
    listed = state.get("_data_files")
    if listed == []:
        raise DatasetError(
            f"{path} lists no files, because the dataset that was saved has no rows. Save one that has; the other "
            "splits of a DatasetDict are indexed alone by the argument `split`"
        )
    names = [each.get("filename") if isinstance(each, dict) else None for each in listed or ()]
    if not isinstance(listed, list) or not names or not all(_is_name(name) for name in names):
        raise DatasetError(
            f"{path}: _data_files must be a list of filenames, got {listed!r:.200}. Save the dataset again"
        )
    files = [folder / str(name) for name in names]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DatasetError(
            f"{missing[0]} must exist, as {STATE} lists it. Save the dataset again, or copy all of its files"
        )
    return files


def saved_note(folder: Path) -> dict[str, Any]:
    """Return {SAVED_NOTE: digest of state.json} for the index of a Dataset; empty for other folders."""
    path = folder / STATE
    return {SAVED_NOTE: xxhash.xxh3_128_hexdigest(read_plain(path, MAX_BYTES))} if path.exists() else {}


def check_saved(notes: Mapping[str, Any], read: Callable[[], bytes], where: str) -> None:
    """Raise DatasetError if a Dataset was saved again since the index, with SAVED_NOTE in its notes, was written.
    `read`: returns the content of state.json."""
    try:
        now = xxhash.xxh3_128_hexdigest(read())
    except OSError as error:
        raise DatasetError(f"{where}: {STATE} cannot be read: {error}. {CHANGED}") from error
    if now != notes[SAVED_NOTE]:
        raise DatasetError(
            f"{where}: {STATE} must be as it was when it was indexed, but the dataset was saved again. {CHANGED}"
        )


def _refuse_cache(folder: Path) -> None:
    """Raise DatasetError for a cache folder with the files of several splits side by side."""
    path = folder / INFO
    splits = _json(path).get("splits") if path.exists() else None
    if isinstance(splits, dict) and len(splits) > 1:
        raise DatasetError(
            f"{folder} must have the files of one split, got {', '.join(map(str, splits))}. Save them with save_to_disk"
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_plain(path, MAX_BYTES).decode())
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error}. Check that this user may read it") from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is damaged: {error}. Save the dataset again") from error
    if not isinstance(value, dict):
        raise DatasetError(f"{path} must be a JSON object, got {type(value).__name__}. Save the dataset again")
    return value


def _is_name(name: object) -> bool:
    return isinstance(name, str) and PurePosixPath(name).name == name and name not in ("", ".", "..")
