"""Checkpoints in a bucket: the stall of a save beside the same save into a local folder, and its speed beside a plain
multipart upload of the same bytes.

    PYTHONPATH=tests/support python -m benchmarks.checkpoint_bucket [--rounds 5] [--mib 512] [--folder DIR]

In each round the state is saved into the folder and into the bucket, and its files' bytes are uploaded by aiobotocore
alone, one after another in an order that rotates; a round before the first one, which allocates memory and opens
connections, is not counted. The server is moto's on this machine, in a process of its own. The plain upload runs in a
process that does nothing else, with the niceness of a rank's writer, the same files, and as many parts of the same size
at a time; it makes no checksums of its own, no list of contents and no commit. A save's time is that from the call of
`save` until the checkpoint is committed. Processor time is that of the process that uploads. Ratios are those of the
medians.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_modes import make_state
from benchmarks.checkpoint_small import writer_s
from benchmarks.machine import commit, describe
from benchmarks.modes import ROOT
from benchmarks.processes import busy_cores
from benchmarks.report import IDLE_CORES, table
from s3_server import S3Server

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.saving import writer
from penstock.data.remote import bucket

__all__ = ["STALL", "THROUGHPUT", "measure"]

STALL, THROUGHPUT = 1.05, 0.9
"""Targets: largest ratio of the stall to that of a save into a local folder; smallest one of the speed to that of the
plain upload."""
BUCKET = "checkpoints"
BUFFER = 256 << 20
"""Bytes of an object that the server keeps in memory, and not in a file."""


class Plain:
    """Uploads by aiobotocore alone, in a process of their own."""

    def __init__(self, sizes: list[int]) -> None:
        command = [sys.executable, "-m", "benchmarks.checkpoint_bucket", "--plain", json.dumps(sizes)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def upload(self) -> list[float]:
        """Upload once. Return its seconds, and those of the processor."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        found: list[float] = json.loads(self._answer())
        return found

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the plain upload has ended: see its messages")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


async def _plain(sizes: list[int]) -> None:
    aiobotocore: Any = importlib.import_module("aiobotocore.session")
    config: Any = importlib.import_module("aiobotocore.config")
    files = [memoryview(os.urandom(size)) for size in sizes]
    most = config.AioConfig(max_pool_connections=bucket.PARALLEL * len(files))
    url = os.environ["AWS_ENDPOINT_URL"]
    async with aiobotocore.get_session().create_client("s3", endpoint_url=url, config=most) as client:
        free = asyncio.Semaphore(bucket.PARALLEL * len(files))

        async def upload(key: str, data: memoryview) -> None:
            where = {"Bucket": BUCKET, "Key": key}
            where["UploadId"] = (await client.create_multipart_upload(**where))["UploadId"]

            async def part(number: int) -> dict[str, Any]:
                async with free:
                    body = bytes(data[number * bucket.PART : (number + 1) * bucket.PART])
                    done = await client.upload_part(**where, PartNumber=number + 1, Body=body)
                return {"PartNumber": number + 1, "ETag": done["ETag"]}

            parts = await asyncio.gather(*(part(number) for number in range(-(-len(data) // bucket.PART))))
            await client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})

        os.nice(writer.NICENESS)
        print("ready", flush=True)
        for _ in sys.stdin:
            began, processor = time.perf_counter(), time.process_time()
            await asyncio.gather(*(upload(f"plain/{number}", data) for number, data in enumerate(files)))
            print([time.perf_counter() - began, time.process_time() - processor], flush=True)
            for number in range(len(files)):
                await client.delete_object(Bucket=BUCKET, Key=f"plain/{number}")


def measure(rounds: int, nbytes: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each measurement in each round, by name."""
    found: dict[str, list[float]] = {}
    state = make_state(nbytes)
    with S3Server() as server:
        os.environ.update(server.environment)
        server.make_bucket(BUCKET)
        with (
            AsyncCheckpointer(folder, keep_last=1) as local,
            AsyncCheckpointer(f"s3://{BUCKET}/run", keep_last=1) as remote,
        ):
            remote.save(0, state)
            remote.wait()
            plain = Plain([size for key, size in server.objects(BUCKET).items() if key.endswith(".distcp")])

            def saved(checkpointer: AsyncCheckpointer, name: str, number: int) -> dict[str, float]:
                os.sync()
                began, processor = time.perf_counter(), writer_s(checkpointer)
                checkpointer.save(number, state)
                stalled = time.perf_counter() - began
                checkpointer.wait()
                total, processor = time.perf_counter() - began, writer_s(checkpointer) - processor
                return {f"{name}, stall": stalled, f"{name}, total": total, f"{name}, processor": processor}

            try:
                works: list[Callable[[int], dict[str, float]]] = [
                    lambda number: saved(local, "local", number),
                    lambda number: saved(remote, "bucket", number),
                    lambda number: dict(zip(("plain, total", "plain, processor"), plain.upload(), strict=True)),
                ]
                for number in range(rounds + 1):
                    at = number % len(works)
                    for work in works[at:] + works[:at]:
                        for name, seconds in work(number + 1).items():
                            if number:
                                found.setdefault(name, []).append(seconds)
            finally:
                plain.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks/out", help="folder on the disk to measure")
    parser.add_argument("--plain", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        asyncio.run(_plain(options.plain))
        return 0
    warnings.filterwarnings("ignore")
    os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(BUFFER)
    busy = busy_cores(1.0)
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
        found = measure(options.rounds, options.mib << 20, Path(folder))
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    machine = describe()
    print(f"{machine['cores']} cores of {machine['processor']}, commit {commit()}; {busy:.2f} cores busy before")
    if busy > IDLE_CORES:
        print("the machine was not idle", file=sys.stderr)
    print(f"medians of {options.rounds} rounds of {options.mib} MiB\n")
    rows = [
        [name, f"{middle[name]:.3f}", f"{min(seconds):.3f} - {max(seconds):.3f}", f"{options.mib / middle[name]:,.0f}"]
        for name, seconds in found.items()
    ]
    print(table(("", "s", "(from - to)", "MiB/s"), rows))
    stall = middle["bucket, stall"] / middle["local, stall"]
    speed = middle["plain, total"] / middle["bucket, total"]
    print(f"\nstall, to that of a save into a folder: {stall:.2f}x (<= {STALL})")
    print(f"speed, to that of the plain upload: {speed:.2f}x (>= {THROUGHPUT})")
    return int(stall > STALL or speed < THROUGHPUT)


if __name__ == "__main__":
    raise SystemExit(main())
