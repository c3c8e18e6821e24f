"""litdata reads its own format, which Penstock does not read: Penstock reads MDS files of the same samples.

litdata is configured as benchmarks/peers/litdata_streaming.py says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.peers.litdata_streaming import LitData
from benchmarks.readers import batch_reader
from benchmarks.readers.batch_reader import all_samples
from benchmarks.streaming_data import KINDS

from penstock.data import MDSWriter

__all__ = ["Ours", "Theirs"]

Theirs = LitData


class Ours(batch_reader.Ours):
    def write(self, kind: str, folder: str, samples: int) -> None:
        with MDSWriter(_beside(folder), KINDS[kind].columns) as writer:
            for sample in all_samples(kind, samples):
                writer.write(sample)

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        return super().batches(kind, _beside(folder), shuffle=shuffle, workers=workers)


def _beside(folder: str) -> str:
    return f"{folder}-mds"
