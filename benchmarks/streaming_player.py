"""Requests to a reader of streaming datasets, and their timing: the same for Penstock and for the peers.

A player is a process (see benchmarks/modes.py) that answers requests, one a line. Measurements:

    rate    samples/s of warm epochs: the first tenth of each is the warm-up, the clock stops at its last sample
    cold    seconds of a whole epoch, from opening the dataset, with nothing in the local folder
    start   seconds from nothing but imports to the first batch at a position, and the memory that it took. It is the
            only request of its process

Runs in the peers' environments.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.streaming_data import BATCH, KINDS, look_at, value_checksum

__all__ = ["Reader", "answer_of", "memory_mib", "play"]

WARM_SHARE = 10
"""Divisor of the number of samples in an epoch: this part of them, at the start, is not measured."""
LONGEST_S = 3.0
"""Largest number of seconds for all epochs of one measurement of a rate, with their openings. At least one epoch is
read, even if it takes longer."""
LARGE_BYTES = 24 << 20


class Reader(ABC):
    packages: Sequence[str] = ()
    """Names of the packages whose versions are reported."""
    decodes = True
    """True if the reader yields decoded values of samples, False if it yields their bytes."""

    @abstractmethod
    def samples(self, kind: str, folder: str, *, shuffle: bool) -> Iterator[dict[str, Any]]:
        """Return an iterator over the samples of an epoch, which are read from local files by the dataset itself, in
        this process. `kind`: name of the kind of data."""

    @abstractmethod
    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        """Return an iterable over an epoch in collated batches of BATCH samples. `workers`: number of worker processes.
        `remote`: address from which the data are downloaded into `folder`; "": the data are in `folder`."""

    def write(self, kind: str, folder: str, samples: int) -> None:
        """Write a dataset of `samples` samples in the reader's own format. Only readers of other formats than MDS do
        this."""
        raise NotImplementedError

    def first_batch(self, folder: str, position: int) -> Any:
        """Return the first batch of a shuffled epoch that is resumed at `position`, the number of samples read
        before."""
        raise NotImplementedError

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request that only some readers support. Raises NotImplementedError in a reader that does not."""
        raise NotImplementedError(
            f"this reader does not answer requests of kind {request['do']!r}: leave it out of this measurement"
        )


def memory_mib(key: str) -> float:
    """Return the memory of this process in MiB. `key`: "VmRSS", the present memory, or "VmHWM", the largest so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"key must be a line of /proc/self/status, such as VmRSS, got {key!r}")


def _size(batch: Any) -> int:
    return len(batch["number"])


def _rate(items: Iterator[Any], total: int, size: int) -> dict[str, Any]:
    """Read an epoch of `total` samples in items of `size` samples each. Return the figures of its speed. Raises
    ValueError if the number of samples is wrong."""
    expected = -(-total // size)
    warm = expected // WARM_SHARE
    item = None
    for item in islice(items, warm):  # noqa: B007
        pass
    started, before = time.perf_counter(), time.process_time()
    for item in islice(items, expected - warm):  # noqa: B007  # held until the next one comes, as a loop does
        pass
    seconds, processor_s = time.perf_counter() - started, time.process_time() - before
    if size > 1 and _size(item) != (total - 1) % size + 1:
        raise ValueError(
            f"the last batch must have {(total - 1) % size + 1} samples, got {_size(item)}: a fault of the reader"
        )
    if next(items, None) is not None:
        raise ValueError(f"an epoch must have {total} samples, got more: a fault of the reader")
    return {"samples": total - warm * size, "seconds": seconds, "processor_s": processor_s}


def _epochs(reader: Reader, request: dict[str, Any]) -> dict[str, Any]:
    """Read epochs until they have taken the request's `at_least_s` seconds, or LONGEST_S with their openings. Return
    the figures of all of them."""
    answer, begun = {"samples": 0, "seconds": 0.0, "processor_s": 0.0}, time.perf_counter()
    while True:
        found = _epoch(reader, request)
        answer = {name: answer[name] + found[name] for name in answer}
        if answer["seconds"] >= request["at_least_s"] or time.perf_counter() - begun > LONGEST_S:
            return answer
        # frees a finished epoch in a reference cycle, because some readers cannot be opened twice at a time
        gc.collect()


def _epoch(reader: Reader, request: dict[str, Any]) -> dict[str, Any]:
    kind, folder, shuffle = request["kind"], request["folder"], request["shuffle"]
    if request["shape"] == "samples":
        samples = reader.samples(kind, folder, shuffle=shuffle)
        looks = reader.decodes and KINDS[kind].column == "image"
        return _rate(_looked_at(samples) if looks else samples, request["samples"], 1)
    batches = reader.batches(kind, folder, shuffle=shuffle, workers=request["workers"])
    return _rate(iter(batches), request["samples"], BATCH)


def _looked_at(samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for sample in samples:
        look_at(sample)
        yield sample


def answer_of(reader: Reader, request: dict[str, Any]) -> dict[str, Any]:
    what = request["do"]
    if what == "hello":
        return {"versions": {name: version(name) for name in reader.packages}}
    if what == "write":
        reader.write(request["kind"], request["folder"], request["samples"])
        return {}
    if what == "check":
        samples = reader.samples(request["kind"], request["folder"], shuffle=request["shuffle"])
        count, total = value_checksum(samples)
        return {"samples": count, "checksum": total}
    if what == "rate":
        return _epochs(reader, request)
    if what == "cold":
        started = time.perf_counter()
        epoch = iter(
            reader.batches(
                "cold", request["folder"], shuffle=True, workers=request["workers"], remote=request["remote"]
            )
        )
        first = next(epoch)
        first_s = time.perf_counter() - started
        count = sum(map(_size, chain([first], epoch)))
        return {"samples": count, "seconds": time.perf_counter() - started, "first_s": first_s}
    if what == "start":
        before, started = memory_mib("VmRSS"), time.perf_counter()
        batch = reader.first_batch(request["folder"], request["position"])
        seconds = time.perf_counter() - started
        if _size(batch) != BATCH:
            raise ValueError(f"the first batch must have {BATCH} samples, got {_size(batch)}: a fault of the reader")
        return {"seconds": seconds, "mib": memory_mib("VmHWM") - before}
    return reader.answer(request)


def play(reader: Reader) -> None:
    """Run a player: answer requests to a reader, one a line, until standard input ends."""
    torch.set_num_threads(1)
    # Until a process has freed a large block once, the C library returns each freed batch to the kernel and allocates
    # it again page by page, which costs a fifth of the rate with samples of 64 KiB. Training processes have freed one,
    # so this process frees one too.
    np.empty(LARGE_BYTES, np.uint8)
    # Libraries and their processes print to descriptor 1, so that becomes standard error, and answers go to a copy of
    # standard output.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                answer = answer_of(reader, json.loads(line))
            except Exception:
                answer = {"error": traceback.format_exc()}
                traceback.print_exc()
            gc.collect()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
