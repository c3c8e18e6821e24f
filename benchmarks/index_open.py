"""Time to open a dataset with a large index: with its entries read by this process, and with the columns that another
process has stored.

Both are measured in one run, so that their ratio is meaningful. Both times the whole dataset is opened: its index is
read, its fingerprint is computed, and its parts that can be shuffled (units) are laid out.

Run `python -m benchmarks.index_open [SHARDS]`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import xxhash

from penstock.data import StreamingDataset
from penstock.data.indexes import open_index


def write_index(folder: Path, shards: int) -> Path:
    """Write the index of a dataset of `shards` MDS shards, without the shards, and return its path."""
    common = {"column_encodings": ["int", "bytes"], "column_names": ["id", "blob"], "column_sizes": [8, None]}
    common |= {"compression": None, "format": "mds", "hashes": ["xxh3_64"], "version": 2, "zip_data": None}
    path = folder / "index.json"
    with path.open("w") as file:
        file.write('{"shards": [')
        for number in range(shards):
            raw = {"basename": f"shard.{number:07}.mds", "bytes": 1 << 20, "hashes": {"xxh3_64": f"{number:016x}"}}
            file.write(", " * bool(number) + json.dumps({**common, "raw_data": raw, "samples": 1000}, sort_keys=True))
        file.write('], "version": 2}')
    return path


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that a call of `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """Measure both ways, and print the times, their ratio, and the floor, the least that each must do."""
    shards = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/home"
        path = write_index(Path(name), shards)
        with mock.patch.object(open_index, "HUGE_INDEX", 1 << 60):
            parsed = min(seconds(lambda: StreamingDataset(local=name)) for _ in range(3))
        with mock.patch.object(open_index, "HUGE_INDEX", 0):
            made = seconds(lambda: StreamingDataset(local=name))
            opened = min(seconds(lambda: StreamingDataset(local=name)) for _ in range(3))
        floor = seconds(lambda: xxhash.xxh3_128_hexdigest(path.read_bytes()))
    print(f"{shards} shards: opened by entries in {parsed:.3f} s, columns made in {made:.3f} s, then in {opened:.3f} s")
    print(f"{parsed / opened:.0f} times as fast; floor (the index read and hashed): {floor:.3f} s")


if __name__ == "__main__":
    main()
