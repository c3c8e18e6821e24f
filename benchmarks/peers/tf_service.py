"""tf.data service: dispatcher, one worker and the consumer as three processes. A player.

    python -m benchmarks.peers.tf_service                   the consumer, which starts the other two
    python -m benchmarks.peers.tf_service dispatcher
    python -m benchmarks.peers.tf_service worker ADDRESS

The service has no Python stages, so the source is `from_tensors(ready).repeat()`: the worker's C++ sends one
ready tensor again and again. gRPC, no compression. ShardingPolicy.OFF: with one worker there is nothing to divide, and
the dataset has no end to be visited once. `prefetch(AUTOTUNE)` is the last stage, as TensorFlow's guide to input
performance says. `max_outstanding_requests=16`: a tenth faster than its default up to 1 MiB, and no slower at 8.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from benchmarks.cases import LEAF_SHAPE, Case
from benchmarks.processes import Role
from benchmarks.serve import Way, serve

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# By name, because the type checker's environment lacks TensorFlow.
tf: Any = importlib.import_module("tensorflow")
service: Any = tf.data.experimental.service

OUTSTANDING = 16
JOB_GONE_MS = 1000
"""Milliseconds after which the dispatcher drops a job without readers. With its default of 5 minutes, the buffers of
all earlier cases would stay in memory."""


def _child(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start this module as another process, the dispatcher or a worker. Return the process, and the first line that it
    prints. The process ends when its standard input is closed, at the latest with this process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peers.tf_service", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first_line = process.stdout.readline().strip()
    if not first_line:
        raise RuntimeError(
            f"the {arguments[0]} of the tf.data service did not start, and ended with status {process.wait(10)}: see "
            "its messages above"
        )
    return process, first_line


class TfService(Way):
    roles = (Role("tf_service dispatcher", "dispatcher"), Role("tf_service worker", "worker"))
    packages = ("tensorflow-cpu", "numpy", "grpcio", "protobuf")

    def __init__(self) -> None:
        self.dispatcher, self.address = _child("dispatcher")
        self.worker, _ = _child("worker", self.address)

    @contextmanager
    def open(self, case: Case) -> Iterator[Iterator[Any]]:
        random = np.random.default_rng(0)
        ready: Any
        if case.leaves == 1:
            ready = tf.constant(random.integers(0, 255, case.nbytes, dtype=np.uint8))
        else:
            leaves = {f"leaf{n}": random.integers(0, 1 << 40, LEAF_SHAPE) for n in range(case.leaves)}
            ready = {name: tf.constant(leaf) for name, leaf in leaves.items()}
        served = service.distribute(
            processing_mode=service.ShardingPolicy.OFF,
            service=f"grpc://{self.address}",
            compression=None,
            max_outstanding_requests=OUTSTANDING,
        )
        yield iter(tf.data.Dataset.from_tensors(ready).repeat().apply(served).prefetch(tf.data.AUTOTUNE))


def _dispatcher() -> None:
    config = service.DispatcherConfig(
        port=0, protocol="grpc", job_gc_check_interval_ms=JOB_GONE_MS, job_gc_timeout_ms=JOB_GONE_MS
    )
    server = service.DispatchServer(config)
    print(server.target.rpartition("/")[2], flush=True)
    sys.stdin.read()


def _worker(address: str) -> None:
    server = service.WorkerServer(
        service.WorkerConfig(dispatcher_address=address, worker_address="localhost:%port%", port=0)
    )
    print("up", flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            serve(TfService)
        case ["dispatcher"]:
            _dispatcher()
        case ["worker", where]:
            _worker(where)
