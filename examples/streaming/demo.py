"""`make demo-streaming`: train from shards on an HTTP server through worker daemons, and resume on another topology.

    (a) uninterrupted, on 1 box with 2 workers (b) the same up to a step, where it is saved (c) resumed on 2 boxes with
    3 workers each, over the end of the epoch

Then the rows of all batches are compared, by number and checksum: (b) and (c) together must equal (a), bit for bit and
in the same order. The exit status is 1 if they are not.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from demo_cluster import Cluster, DemoError, read_log
from streaming.data import write

SAMPLES = 5000
STEPS, SAVE_AT = 130, 40
"""Number of steps of the runs, and step at which the state is saved; an epoch has 105 steps."""


class _Files(SimpleHTTPRequestHandler):
    requests = 0

    def log_message(self, *_: Any) -> None:
        type(self).requests += 1


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP on this machine, and yield the URL of its files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def rows_of(folder: Path, boxes: int) -> list[list[list[int]]]:
    """Return, for each step, the rows of the global batch in their order (box b has rows b, b + boxes, ...), each as
    the logs have it: number and checksum."""
    logs = [read_log(folder / f"box{box}.jsonl") for box in range(boxes)]
    found = []
    for lines in zip(*logs, strict=True):
        own = [line["rows"] for line in lines]
        found.append([own[at % boxes][at // boxes] for at in range(sum(map(len, own)))])
    return found


def losses_of(folder: Path, boxes: int) -> list[float]:
    logs = [read_log(folder / f"box{box}.jsonl") for box in range(boxes)]
    return [sum(line["loss"] for line in lines) / boxes for lines in zip(*logs, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Streams shards over HTTP, resumes on another topology and compares.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder, emptied first")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    began = time.monotonic()
    write(out / "data", SAMPLES)
    shards = list((out / "data").glob("shard.*"))
    print(f"{SAMPLES} pictures in {len(shards)} shards, {sum(file.stat().st_size for file in shards):,} bytes")
    cluster = Cluster(out)
    try:
        with served(out / "data") as url, cluster.daemons("streaming", slots=3):
            runs = [
                ("a", "(a) uninterrupted, 1 box with 2 workers", 1, 2, STEPS, False),
                ("b", f"(b) up to step {SAVE_AT}", 1, 2, SAVE_AT, False),
                ("c", "(c) from there, 2 boxes with 3 workers each", 2, 3, STEPS, True),
            ]
            for name, title, boxes, workers, steps, resumed in runs:
                if resumed:  # a checkpoint can be copied as an ordinary folder; train.py takes the newest one
                    shutil.copytree(out / "b" / "checkpoints", out / name / "checkpoints")
                command = ["streaming.train", "--data", url, "--cache", str(out / f"cache-{name}")]
                command += ["--steps", str(steps), "--out", str(out / name)]
                seed = {} if resumed else {"PENSTOCK_SEED": "1"}  # a state contains its run's seed
                env = {"PENSTOCK_JOB": name, **seed}
                before = _Files.requests
                cluster.train(name, title, command, boxes=boxes, workers=workers, env=env)
                print(f"    {_Files.requests - before} requests to the server for {len(shards)} shards and the index")
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    a, b, c = rows_of(out / "a", 1), rows_of(out / "b", 1), rows_of(out / "c", 2)
    epoch = sorted(row[0] for rows in a for row in rows)[: 2 * SAMPLES]
    once = sorted({row[0] for rows in a[:105] for row in rows}) == list(range(SAMPLES))
    losses = losses_of(out / "a", 1), losses_of(out / "b", 1) + losses_of(out / "c", 2)
    apart = max(abs(one - other) for one, other in zip(*losses, strict=True))
    claims = [
        (f"the first 105 steps of (a) have each of the {SAMPLES} pictures once ({len(epoch)} rows in all)", once),
        (f"(b) and (c), {len(b)} and {len(c)} steps, have the rows of (a), in its order, to the bit", a == b + c),
        (f"their losses are at most {apart:.1e} apart: gradients of halves are summed in another order", apart < 1e-2),
    ]
    print(f"loss {losses[0][0]:.3f} -> {losses[0][-1]:.3f}; output in {os.path.relpath(out)}")
    for claim, holds in claims:
        print(f"{'ok    ' if holds else 'FAILED'} {claim}")
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if all(holds for _, holds in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
