"""Marks of tables: what lies in the folder of a table of Delta Lake, Iceberg or Hudi. Its log says which Parquet files
below that folder are valid, and which of their rows, so none of them is read without the log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from penstock.proto.errors import DatasetError

DELTA, ICEBERG, HUDI = "Delta Lake", "Iceberg", "Hudi"
FOLDERS = {DELTA: "_delta_log", ICEBERG: "metadata", HUDI: ".hoodie"}
"""Folder in a table's folder, by the kind of table."""
METADATA = re.compile(r".*\.metadata\.json(\.gz)?")
"""Names of the files that make a folder "metadata" Iceberg's."""


def kind_of_table(folder: Path) -> str:
    """Return the kind of table that a local folder is; "" if it is none."""
    for kind, name in FOLDERS.items():
        inside = folder / name
        if inside.is_dir() and is_mark(kind, (path.name for path in inside.iterdir())):
            return kind
    return ""


def is_mark(kind: str, names: Iterable[str]) -> bool:
    """Return True if a folder of FOLDERS with files of these names shows that kind of table."""
    return any(kind != ICEBERG or METADATA.fullmatch(name) for name in names)


def tables_in(names: Iterable[str]) -> dict[str, str]:
    """Return the tables of which a folder has files: path relative to the folder -> kind. `names`: relative paths."""
    found = {}
    for name in names:
        parent, _, last = name.rpartition("/")
        folder, _, mark = parent.rpartition("/")
        for kind, own in FOLDERS.items():
            if mark == own and is_mark(kind, (last,)):
                found[folder] = kind
    return found


def refuse_table(folder: Path) -> None:
    """Raise DatasetError if a local folder is a table's, or lies in one."""
    folder = folder.resolve()
    for each in (folder, *folder.parents):
        if kind := kind_of_table(each):
            raise table_error(kind, str(each))


def table_error(kind: str, address: str) -> DatasetError:
    """Return the error for files of a table that are to be read without its log."""
    return DatasetError(
        f"the files of a {kind} table must be read by its log, because they hold deleted and old rows, too: {address} "
        "is such a table. " + ("Export it to Parquet" if kind == HUDI else f"Call index_table({address!r})")
    )
