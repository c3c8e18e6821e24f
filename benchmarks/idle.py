"""What a job costs that takes no batches, beside torch's DataLoader: memory, and wakeups by process and thread.

    python -m benchmarks.idle --rounds 3 --idle-s 10

    embedded    an embedded appliance with four workers
    daemons     the same job with a coordinator and a worker daemon of their own, started and counted here
    unused      those two daemons without any job
    grpc        a gRPC server and, in a process of its own, a connected channel, without any call: the floor of two
                processes that use gRPC
    torch       a torch DataLoader with num_workers=4 and persistent_workers=True, of the same dataset

Each job takes BATCHES batches in its loop, and pauses in it, as a loop that computes for long. Then the whole
tree of processes is read from outside, the training process with it: memory as PSS, which divides what processes share,
and the voluntary context switches of each thread. A switch is a wakeup: a thread that slept for its next work.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.utils.data
from benchmarks.machine import commit, describe
from benchmarks.penstock_path import ROLES
from benchmarks.processes import CONSUMER, adopt_orphans, memory_by_role, role_of, tree
from torch.utils.data import Dataset

__all__ = ["Samples", "count_wakeups", "measure"]

WORKERS = 4
BATCHES = 40
SETTLE_S = 4.0
"""Seconds between the last batch and the first reading, in which the workers fill their rings."""
LOOK_S = 0.2


class Samples(Dataset[Any]):
    """Map-style dataset of 4 KiB samples."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        return torch.full((1_024,), index, dtype=torch.float32)


def batches() -> Any:
    """Return a loader of the dataset: the input_fn for a worker that accepts code by its name alone."""
    return torch.utils.data.DataLoader(Samples(), batch_size=8, shuffle=True)


def _take(batches: Iterator[Any]) -> None:
    """Take BATCHES batches, say so, and pause until standard input ends."""
    for _ in range(BATCHES):
        next(batches)
    print("idle", flush=True)
    sys.stdin.read()


def penstock_job(address: str | None) -> None:
    """Run a job that pauses in its loop. address: of a coordinator; None: embedded."""
    from penstock.client import Appliance, DataExecutor, DataLoader

    with Appliance(address, num_workers_per_box=WORKERS, timeout_s=60, job=f"idle-{os.getpid()}") as appliance:
        if address is None:
            loader = DataLoader(Samples(), batch_size=8, shuffle=True)
        else:
            loader = DataLoader(import_module("benchmarks.idle").batches)
        _take(iter(DataExecutor(loader, appliance=appliance)))


def torch_job() -> None:
    """Run a job of torch's DataLoader that pauses in its loop."""
    from torch.utils.data import DataLoader

    _take(iter(DataLoader(Samples(), batch_size=8, shuffle=True, num_workers=WORKERS, persistent_workers=True)))


@contextlib.contextmanager
def own_daemons() -> Iterator[str]:
    """Start a coordinator and a worker as operators do, and return the coordinator's address."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        token = Path(folder, "token")
        token.write_text("0123456789abcdef0123456789abcdef")
        token.chmod(0o600)
        os.environ |= {"PENSTOCK_TOKEN_FILE": str(token), "PENSTOCK_INSECURE": "true"}
        started = []
        address = ""
        for command in (["coordinator", "--listen", "127.0.0.1:0", "--state-dir", f"{folder}/state"], ["worker"]):
            given = [*command, *(["--coordinator", address, "--allow", "*", "--slots", "8"] if address else [])]
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "penstock.deploy", *given],
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            ending.callback(process.wait)
            ending.callback(process.terminate)
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"penstock {command[0]} did not start")
            address = address or line.strip()
        yield address


def daemons_job() -> None:
    """Run a job with a coordinator and a worker of its own."""
    with own_daemons() as address:
        penstock_job(address)


def unused_daemons() -> None:
    """Run the daemons without a job."""
    with own_daemons():
        print("idle", flush=True)
        sys.stdin.read()


def grpc_alone() -> None:
    """Run a gRPC server and another process with a channel, without a call."""
    import asyncio

    import grpc
    import grpc.aio

    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/socket"
        channel = f"import grpc, sys; c = grpc.insecure_channel({address!r}); grpc.channel_ready_future(c).result(60)"

        async def serve() -> None:
            server = grpc.aio.server()
            server.add_insecure_port(address)
            await server.start()
            other = subprocess.Popen(
                [sys.executable, "-c", f"{channel}; print(flush=True); sys.stdin.read()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert other.stdin is not None
            assert other.stdout is not None
            await asyncio.to_thread(other.stdout.readline)
            print("idle", flush=True)
            await asyncio.to_thread(sys.stdin.read)
            other.stdin.close()
            other.wait()
            await server.stop(0)

        asyncio.run(serve())


PLAYERS: dict[str, Callable[[], None]] = {
    "embedded": lambda: penstock_job(None),
    "daemons": daemons_job,
    "unused": unused_daemons,
    "grpc": grpc_alone,
    "torch": torch_job,
}


def count_wakeups(root: int, seconds: float) -> Counter[tuple[int, str]]:
    """Return the wakeups of the tree of processes below `root` within this time, by process and thread name. Threads
    that begin and end meanwhile are counted too, but for their last LOOK_S."""
    pids, until = list(tree(root)), time.monotonic() + seconds
    before, counted = _switches(pids), Counter[tuple[int, str]]()
    while time.monotonic() < until:
        time.sleep(LOOK_S)
        now = _switches(pids)
        for (pid, thread), (name, count) in now.items():
            counted[pid, name] += count - before.get((pid, thread), ("", 0))[1]
        before = now
    return counted


def _switches(pids: list[int]) -> dict[tuple[int, int], tuple[str, int]]:
    """Return name and voluntary context switches of each thread of the processes, by pid and thread id."""
    found = {}
    for pid in pids:
        for thread in _threads(pid):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines()
                fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                found[pid, thread] = fields["Name"], int(fields["voluntary_ctxt_switches"])
    return found


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def measure(player: str, idle_s: float) -> dict[str, Any]:
    """Run one player once, and return its figures: "wakeups" a second by thread, "memory" by role."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.idle", "--player", player]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "idle\n":
            raise RuntimeError(f"{player} ended before it was idle")
        time.sleep(SETTLE_S)
        counted = count_wakeups(process.pid, idle_s)
        memory, family = memory_by_role(process.pid, ROLES), tree(process.pid)
        process.stdin.close()
        process.wait(60)
    by_thread: Counter[str] = Counter()
    for (pid, name), count in counted.items():
        by_thread[f"{role_of(family[pid], family, process.pid, ROLES) if pid in family else 'ended'}: {name}"] += count
    return {"wakeups": {name: count / idle_s for name, count in by_thread.items() if count}, "memory": memory}


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of the report. `found`: figures of each round, by what was measured."""
    lines = [f"{'':<34}{'wakeups/s':>10}{'PSS MiB':>10}{'of it files':>12}{'processes':>11}"]
    for player, rounds in found.items():
        wakes = [sum(each["wakeups"].values()) for each in rounds]
        sizes = [sum(role["pss"] for role in each["memory"].values()) for each in rounds]
        files = [sum(role["files"] for role in each["memory"].values()) for each in rounds]
        counts = [sum(role["processes"] for role in each["memory"].values()) for each in rounds]
        middle = (statistics.median(each) for each in (wakes, sizes, files, counts))
        lines.append("{:<34}{:>10.1f}{:>10.0f}{:>12.0f}{:>11.0f}".format(player, *middle))
        for role in rounds[0]["memory"]:
            rows = [each["memory"][role] for each in rounds if role in each["memory"]]
            figures = [statistics.median(row[key] for row in rows) for key in ("pss", "files", "processes")]
            own = statistics.median(
                sum(n for name, n in each["wakeups"].items() if name.startswith(f"{role}:")) for each in rounds
            )
            shown = "training process" if role == CONSUMER else role
            lines.append("    {:<30}{:>10.1f}{:>10.0f}{:>12.0f}{:>11.0f}".format(shown, own, *figures))
        names = {name for each in rounds for name in each["wakeups"]}
        rates = {name: statistics.median(each["wakeups"].get(name, 0.0) for each in rounds) for name in names}
        for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
            if rate >= 0.05:
                lines.append(f"        {name:<26}{rate:>10.1f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the costs of an idle job.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", choices=PLAYERS)
    parser.add_argument("--player", choices=PLAYERS, help="run one in this process, until standard input ends")
    options = parser.parse_args()
    if options.player:
        adopt_orphans()
        PLAYERS[options.player]()
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only or PLAYERS}
    for _ in range(options.rounds):
        for name, rows in found.items():
            rows.append(measure(name, options.idle_s))
    machine = describe()
    print(f"{machine['cores']} cores of {machine['processor']}, Python {machine['python']}, commit {commit()}")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
