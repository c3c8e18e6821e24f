"""Script for an interpreter that has Megatron Energon: the samples that a rank still delivers in an epoch.

    python energon_order.py OUT.npy < REQUEST.json

Energon's states are pickles, which this script does not read: a function of the user makes the loader as training did,
and restores it. The loader must read its remaining samples, because sample numbers come only with the samples.
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

SEVERAL = (
    "datasets in a mixture (BlendDataset) end their epochs at different steps and cannot be imported. Start without a "
    "state"
)


def main() -> None:
    """Write integers to OUT.npy: the epoch, the number of samples of the dataset, and then the numbers of the samples
    that the loader still delivers in this epoch, in the order of their delivery."""
    request = json.load(sys.stdin)
    sys.path[:0] = request["path"]
    module, _, name = request["loader"].partition(":")
    loader = getattr(importlib.import_module(module), name)(request["state"], request["rank"], request["ranks"])
    made = getattr(loader.dataset, "dataset", loader.dataset)
    found = list(datasets(made))
    repeats = [dataset for dataset in found if type(dataset).__name__ == "RepeatDataset"]
    sources = [dataset for dataset in found if type(dataset).__name__ == "WebdatasetSampleLoaderDataset"]
    if not sources:
        raise SystemExit(
            "the loader must read a dataset of tar files, got none. Return the savable loader of such a dataset from "
            "the function in --loader"
        )
    if len(sources) != 1:
        raise SystemExit(f"the loader must read one dataset of tar files, got {len(sources)}: {SEVERAL}")
    state = loader.save_state_rank()
    buffered = sum(dataset.size for dataset in found if type(dataset).__name__ == "ShuffleBufferDataset")
    epoch = epoch_of(state, sources[0], buffered)
    for dataset in repeats:
        dataset.repeats = epoch + 1  # so that the loader ends with this epoch
    rest = [number for batch in loader for number in numbers(batch.__restore_key__)]
    if len(set(rest)) < len(rest):
        raise SystemExit(
            f"the state must not have samples of two epochs in its shuffle buffer, got a state from the beginning of "
            f"epoch {epoch}. Pass a state that was saved some steps before or after the beginning of an epoch"
        )
    total = len(sources[0].join_readers[0])
    np.save(sys.argv[1], np.array([epoch, total, *rest], np.int64))


def datasets(dataset: Any) -> Iterator[Any]:
    """Yield a dataset, and all datasets that it wraps."""
    yield dataset
    inner = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    for one in inner:
        if one is not None:
            yield from datasets(one)


def epoch_of(state: Any, source: Any, buffered: int) -> int:
    """Return the epoch that all workers of a rank are in, from 0. Exit with an error if that is not certain.

    Energon makes a checkpoint of a worker process only now and then. The state of the worker is its last checkpoint and
    the number of batches since then. How many samples the worker has read since then is known only up to the size of
    its shuffle buffer. So near the end of an epoch it is not certain whether the worker has begun the next epoch.

    Args:
        state: state of the rank, with one state for each of its workers.
        source: Energon's dataset that reads the tar files.
        buffered: largest number of samples that the shuffle buffer holds.
    """
    epochs: set[int] = set()
    for number, worker in enumerate(state.worker_states):
        since = getattr(worker, "offset", None)
        # smallest and largest number of samples that the worker can have read since its checkpoint
        read = (0, 0) if since is None else (since * (state.micro_batch_size or 1),) * 2
        read = read if since is None else (max(0, read[0] - buffered), read[1] + buffered)
        repetition = next(fields(worker, "_repetition"), 0)
        index, length = next(fields(worker, "_index"), 0), source.len_worker(number)
        epochs |= {repetition + (index + rows) // length for rows in read}
    if len(epochs) != 1:
        raise SystemExit(
            f"all workers must be in one epoch, but may be in the epochs {sorted(epochs)}. Pass a state that was saved "
            "some steps before or after the end of the epoch"
        )
    return epochs.pop()


def fields(value: Any, name: str) -> Iterator[int]:
    """Yield the values of all fields called `name` in a state, at any depth. Only fields beside a field `_repetition`
    count: those tell how far Energon has read the tar files."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        if name in value and "_repetition" in value:
            yield int(value[name])
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from fields(item, name)


def numbers(key: Any) -> Iterator[int]:
    """Yield the sample numbers in a restore key. The key of a batch contains the keys of its samples."""
    if isinstance(key, tuple):
        for at, part in enumerate(key):
            if part == "Webdataset":
                yield int(key[at + 1])
            else:
                yield from numbers(part)


if __name__ == "__main__":
    main()
