"""Downloads of a shard from S3 by Penstock and by boto3, the vendor's client, in turn.

    python -m benchmarks.s3_download [--rounds 7] [--mib 32] [--delay-ms 50]

The server is moto's on this machine, in a process of its own, and answers each request after a delay, as a distant one
does. Connections and sessions of both clients exist before the clock starts. boto3 downloads with its defaults (10
threads, pieces of 8 MiB). Prints the median seconds of each, their ratio, and the floor: one request's delay and a copy
of the bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.data.remote.folders import RemoteFolder

__all__ = ["main"]

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "example",
    "AWS_DEFAULT_REGION": "us-east-1",
}
SERVER = """
import sys, time
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
application = DomainDispatcherApplication(create_backend_app)
def delayed(environ, start):
    time.sleep(float(sys.argv[2]))
    return application(environ, start)
run_simple("127.0.0.1", int(sys.argv[1]), delayed, threaded=True)
"""
DEADLINE_S = 60.0


@contextlib.contextmanager
def _server(delay_s: float) -> Iterator[str]:
    """Context manager that runs an S3 server, which waits `delay_s` seconds before each answer. Its value is the
    server's URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port), str(delay_s)], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("moto's server must start within a minute: pip install 'moto[server]'")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


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
    with _server(options.delay_ms / 1000) as address, tempfile.TemporaryDirectory() as scratch:
        client = boto3.client("s3", endpoint_url=address)
        client.create_bucket(Bucket="shards")
        client.put_object(Bucket="shards", Key="data/shard.mds", Body=data)
        ours, theirs = Path(scratch, "ours"), Path(scratch, "theirs")
        folder = RemoteFolder("s3://shards/data", {"client_kwargs": {"endpoint_url": address}})
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
