"""Downloads of a shard from S3 by Penstock and by boto3, the vendor's client, in turn.

    PYTHONPATH=tests/support python -m benchmarks.s3_download [--rounds 7] [--mib 32] [--delay-ms 50]

The server is moto's on this machine, in a process of its own, and answers each request after a delay, as a distant one
does. Connections and sessions of both clients exist before the clock starts. boto3 downloads with its defaults (10
threads, pieces of 8 MiB). Prints the median seconds of each, their ratio, and the floor: one request's delay and a copy
of the bytes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s3_server import KEYS, S3Server

from penstock.data.remote.folders import RemoteFolder

__all__ = ["main"]

DEADLINE_S = 60.0


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _floor(delay_s: float, to: Path, data: bytes) -> None:
    time.sleep(delay_s)
    to.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--delay-ms", type=float, default=50.0)
    options = parser.parse_args()
    os.environ.update(KEYS)
    boto3: Any = importlib.import_module("boto3")
    size = options.mib << 20
    data = os.urandom(size)
    with S3Server(delay_s=options.delay_ms / 1000) as server, tempfile.TemporaryDirectory() as scratch:
        client = boto3.client("s3", endpoint_url=server.url)
        client.create_bucket(Bucket="shards")
        client.put_object(Bucket="shards", Key="data/shard.mds", Body=data)
        ours, theirs = Path(scratch, "ours"), Path(scratch, "theirs")
        folder = RemoteFolder("s3://shards/data", {"client_kwargs": {"endpoint_url": server.url}})
        readers: dict[str, Callable[[], object]] = {
            "penstock": lambda: folder.download("shard.mds", ours, expected_size=size, deadline_s=DEADLINE_S),
            "boto3": lambda: client.download_file("shards", "data/shard.mds", str(theirs)),
            "floor": lambda: _floor(options.delay_ms / 1000, theirs, data),
        }
        taken: dict[str, list[float]] = {name: [] for name in readers}
        for number in range(options.rounds + 1):
            for name, read in readers.items():
                seconds = _seconds(read)
                if number:  # the first round opens connections
                    taken[name].append(seconds)
        folder.close()
        if not data == ours.read_bytes() == theirs.read_bytes():
            raise RuntimeError(
                "both clients must read the bytes that were written, got others: a fault of a client, look for it "
                "before measuring"
            )
    medians = {name: statistics.median(values) for name, values in taken.items()}
    print(f"{options.mib} MiB, {options.delay_ms:g} ms a request, median of {options.rounds} rounds (least to most):")
    for name, values in taken.items():
        print(f"  {name:9} {medians[name]:.3f} s ({min(values):.3f} - {max(values):.3f})")
    print(f"  penstock to boto3: {medians['penstock'] / medians['boto3']:.2f} of its time")


if __name__ == "__main__":
    main()
