"""mosaicml-streaming: StreamingDataLoader with one worker over a dataset in local files. The module is the program of a
player, the process that measures this mode (see benchmarks/serve.py).

    python -m benchmarks.peers.mosaic

Its source is files in its own format, so it cannot yield ready batches: the worker finds, reads and decodes each
sample. The files are written before the measurement, without compression and hashes, and are in the page cache. A
sample has the size of one batch of the case, and the loader's batches have one sample, passed on as decoded, because
batches of 8 smaller samples, collated by torch, were slower. It does not shuffle. One epoch is longer than any
measurement.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.cases import LEAF_SHAPE, Case
from benchmarks.peers.importing import import_streaming
from benchmarks.processes import Role
from benchmarks.serve import Way, serve

DATA_BYTES = 128 << 20
"""Largest size of a dataset in bytes. An epoch repeats the dataset."""
MOST_SAMPLES = 8192
EPOCH_SAMPLES = 200_000

streaming = import_streaming()


def _handed_on(samples: list[dict[str, Any]]) -> Any:
    """Collate the one sample of a batch: return tensors over the memory of its decoded bytes, without a copy."""
    (sample,) = samples
    leaves = {name: torch.from_numpy(leaf) for name, leaf in sample.items()}
    return leaves.get("data", leaves)


class Mosaic(Way):
    # A forked worker has the same command line as this process.
    roles = (Role("benchmarks.peers.mosaic", "worker"), Role("resource_tracker", "resource tracker"))
    packages = ("mosaicml-streaming", "torch", "numpy")

    def __init__(self) -> None:
        # The decoded sample is read-only memory, which torch warns of; no code here writes to it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.set_num_threads(1)
        self.files = tempfile.TemporaryDirectory(prefix="penstock-bench-")
        self.written: dict[str, Path] = {}

    def _write(self, case: Case) -> Path:
        out = Path(self.files.name) / str(len(self.written))
        random = np.random.default_rng(0)
        sample: dict[str, Any]
        if case.leaves == 1:
            columns = {"data": f"ndarray:uint8:{case.nbytes}"}
            sample = {"data": random.integers(0, 255, case.nbytes, dtype=np.uint8)}
        else:
            shape = ",".join(map(str, LEAF_SHAPE))
            columns = {f"leaf{n}": f"ndarray:int64:{shape}" for n in range(case.leaves)}
            sample = {name: random.integers(0, 1 << 40, LEAF_SHAPE) for name in columns}
        with streaming.MDSWriter(out=str(out), columns=columns, compression=None, hashes=[]) as writer:
            for _ in range(min(MOST_SAMPLES, DATA_BYTES // case.nbytes)):
                writer.write(sample)
        return out

    @contextmanager
    def open(self, case: Case) -> Iterator[Iterator[Any]]:
        if case.name not in self.written:
            self.written[case.name] = self._write(case)
        dataset = streaming.StreamingDataset(
            local=str(self.written[case.name]),
            shuffle=False,
            batch_size=1,
            epoch_size=EPOCH_SAMPLES,
            num_canonical_nodes=1,
        )
        loader = streaming.StreamingDataLoader(dataset, batch_size=1, num_workers=1, collate_fn=_handed_on)
        yield iter(loader)  # its end stops the worker


if __name__ == "__main__":
    serve(Mosaic)
