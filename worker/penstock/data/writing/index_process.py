"""Program of a process that indexes files (see job_processes.py). Several such processes share the files of a
folder."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.data.formats.index import write_index
from penstock.data.job_processes import serve_jobs
from penstock.data.writing.index_each import indexed
from penstock.data.writing.indexable_files import INDEXABLE

__all__ = ["indexing"]


@contextlib.contextmanager
def indexing(plan: bytes) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yield a function that indexes the file with a given number. `plan`: JSON text that `index_each` made."""
    task = json.loads(plan)
    root, out, names = Path(task["root"]), Path(task["out"]), task["names"]
    index_file = INDEXABLE[task["format"]].index_file

    def index(number: int) -> dict[str, Any]:
        shard = indexed(index_file, root / names[number], names[number], out)
        return {"number": number, "entry": write_index([shard]).decode()}

    yield index


if __name__ == "__main__":
    sys.exit(serve_jobs(indexing))
