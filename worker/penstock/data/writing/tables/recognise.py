"""Recognition of tables among folders that are to be indexed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.data.formats.table_marks import FOLDERS, is_mark, kind_of_table, refuse_table, table_error, tables_in
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import ShardUnavailableError

ASKED_S = 20.0
"""Most seconds to wait for a remote's answer whether a folder is a table."""


def table_at(address: str | os.PathLike[str], options: Mapping[str, Any] | None, timeout_s: float) -> str:
    """Return the kind of table that a folder is; "" if it is none, or for a server that lists no files. `options`: for
    fsspec's filesystem."""
    local = RemoteFolder(address, options).local
    if local is not None:
        return kind_of_table(local)
    for kind, name in FOLDERS.items():
        log = RemoteFolder(f"{os.fspath(address).rstrip('/')}/{name}", options)
        with contextlib.suppress(ShardUnavailableError), contextlib.closing(log):
            if is_mark(kind, log.names(deadline_s=min(timeout_s, ASKED_S))):
                return kind
    return ""


def refuse_tables(
    remote: RemoteFolder, names: Iterable[str], options: Mapping[str, Any] | None, timeout_s: float
) -> None:
    """Raise DatasetError if a folder is a table, lies in one or has one below it. `names`: relative paths of its files;
    `options`: for fsspec's filesystem."""
    for folder, kind in tables_in(names).items():
        raise table_error(kind, remote.url_of(folder) if folder else remote.url)
    if remote.local:
        refuse_table(remote.local)
        return
    scheme, _, path = remote.address.partition("://")
    steps = path.rstrip("/").split("/")
    for count in range(len(steps) - 1, 0, -1):
        above = f"{scheme}://{'/'.join(steps[:count])}"
        if kind := table_at(above, options, timeout_s):
            raise table_error(kind, RemoteFolder(above, options).url)
