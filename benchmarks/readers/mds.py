"""MDS: mosaicml-streaming writes and reads it, and Penstock reads the same files.

mosaicml-streaming is configured as benchmarks/peers/mosaic_streaming.py says. Shards have its default size of 64 MiB,
without compression and hashes.
"""

from __future__ import annotations

from benchmarks.peers.mosaic_streaming import Mosaic, streaming
from benchmarks.readers import batch_reader
from benchmarks.readers.batch_reader import all_samples
from benchmarks.streaming_data import KINDS

__all__ = ["Ours", "Theirs"]


class Theirs(Mosaic):
    def write(self, kind: str, folder: str, samples: int) -> None:
        with streaming.MDSWriter(out=folder, columns=KINDS[kind].columns) as writer:
            for sample in all_samples(kind, samples):
                writer.write(sample)


class Ours(batch_reader.Ours):
    def write(self, kind: str, folder: str, samples: int) -> None:
        """Write nothing: Penstock reads the index that mosaicml-streaming has written."""
