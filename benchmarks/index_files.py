"""Speed of indexing a folder of tar archives: in one process and in several, with Penstock's own reader of plain
headers and with Python's tarfile. The ways take turns.

    python -m benchmarks.index_files [--files 16] [--samples 2000] [--rounds 3]

The archives are as webdataset writes them: three members to a sample, each with an extended header. Prints the median
seconds of wall-clock and of processor time of each way, and their ratios to one process that reads plain headers.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from penstock.data import index_folder
from penstock.data.formats.records import tar_samples
from penstock.data.writing import indexing

__all__ = ["main"]


def write_archives(folder: Path, files: int, samples: int) -> None:
    for number in range(files):
        with tarfile.open(folder / f"{number:04}.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            for sample in range(samples):
                for ending, size in (("jpg", 1500), ("txt", 20), ("json", 40)):
                    member = tarfile.TarInfo(f"{number:04}{sample:06}.{ending}")
                    member.size, member.mtime = size, time.time()  # a fraction of a second needs an extended header
                    archive.addfile(member, io.BytesIO(os.urandom(size)))


def not_plain(*arguments: Any) -> Iterator[Any]:
    raise tar_samples._NotPlainError
    yield


def ways() -> dict[str, Callable[[ExitStack], object]]:
    """Return the compared ways to index, by name, each as a function that makes its settings. The settings end with the
    ExitStack that it gets."""
    alone = patch.object(indexing, "WORTH_S", 1e9)
    return {
        "one process": lambda stack: stack.enter_context(alone),
        "several processes": lambda stack: None,
        "one process, tarfile": lambda stack: [
            stack.enter_context(alone),
            stack.enter_context(patch.object(tar_samples, "_plain_found", not_plain)),
        ],
    }


def spent() -> tuple[float, float]:
    """Return (wall-clock seconds, seconds of processor time of this process and its ended children)."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways()}
    with tempfile.TemporaryDirectory() as folder:
        write_archives(Path(folder), options.files, options.samples)
        for _ in range(options.rounds):
            for name, change in ways().items():
                with ExitStack() as stack:
                    change(stack)
                    before = spent()
                    index_folder(folder)
                    after = spent()
                found[name].append((after[0] - before[0], after[1] - before[1]))
    base = [statistics.median(each) for each in zip(*found["one process"], strict=True)]
    for name, taken in found.items():
        wall, processor = (statistics.median(each) for each in zip(*taken, strict=True))
        print(
            f"{name:22} {wall:6.2f} s ({wall / base[0]:.2f}), {processor:6.2f} s of processor time "
            f"({processor / base[1]:.2f})"
        )


if __name__ == "__main__":
    main()
