"""Load generator of benchmarks/fleet.py: a coordinator process, and a fleet that calls it, phase after phase.

    python -m benchmarks.fleet_load --workers 1000 --boxes 100 --seconds 10      ->  one line of JSON

It runs in a process of its own. Another process, the probe, with its own connection, measures how long a heartbeat
takes. The load generator could not: its event loop serves thousands of workers and is late at times, and this delay
would be counted as the coordinator's. The probe's heartbeats are those of a worker that reports a change, so the
coordinator answers them at once.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import gc
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from benchmarks.fleet_peers import JOB, FakeBox, FakeWorker, Payload, Tally
from benchmarks.processes import cpu_s

from penstock.proto.errors import CoordinatorUnavailableError
from penstock.proto.rpc.calls import AsyncCoordinatorClient
from penstock.proto.rpc.channel import connect_aio
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorStub

__all__ = ["Fleet", "main", "percentile"]

WORKERS_PER_BOX = 10
CONNECTIONS = 32
"""Number of connections to the coordinator that all fake workers and boxes share, if not told. What a connection costs
the coordinator is measured separately."""
PROBES_PER_S = 50.0
LARGE = 76_000
"""Size of a large state or snapshot, in bytes."""
MOVES = 40
"""Number of slots that are moved to another worker, one after the other, to measure how long an assignment takes in a
busy fleet."""
START_DEADLINE_S = 60.0
PHASE_DEADLINE_S = 120.0


def percentile(values: Iterable[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Return the median ("p50"), the 99th percentile ("p99"), the largest value ("max") and the number of values
    ("samples")."""
    return {
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": max(values, default=None),
        "samples": len(values),
    }


def memory_mib(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


class Probe:
    """Probe: a process that measures how long heartbeats take, and its results so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._times: list[float] = []
        self._took: list[float] = []
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, address: str, workers: int) -> Probe:
        arguments = ["-m", "benchmarks.fleet_load", "--probe", address, "--workers", str(workers)]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
        return cls(process)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            at, took = line.split()
            self._times.append(float(at))
            self._took.append(float(took))

    async def between(self, start: float, end: float) -> list[float]:
        """Return how many seconds each heartbeat took that began from `start` to `end`, both times of time.monotonic().
        Wait until the last of them is reported."""
        until = time.monotonic() + PHASE_DEADLINE_S
        while (not self._times or self._times[-1] < end) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return self._took[bisect.bisect_left(self._times, start) : bisect.bisect_right(self._times, end)]

    async def stop(self) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reading


async def probe(address: str, workers: int) -> None:
    """Run the probe: send heartbeats without end, and print "TIME SECONDS" for each: its start, a time of
    time.monotonic(), and how long it took. `workers`: number of registered workers, of which one is chosen each
    time."""
    rng = random.Random(1)
    async with AsyncCoordinatorClient(
        address, os.environ["PENSTOCK_TOKEN"], deadline_s=PHASE_DEADLINE_S, insecure=True
    ) as client:
        while True:
            name = f"w{rng.randrange(workers):05d}"
            began = time.monotonic()
            with suppress(Exception):  # the coordinator restarts; the gap in the printed times shows it
                await client.heartbeat(pb.HeartbeatRequest(worker=name, session=f"{name}-1"))
            ended = time.monotonic()
            print(f"{began:.6f} {ended - began:.6f}", flush=True)
            await asyncio.sleep(max(0.0, began + 1 / PROBES_PER_S - ended))


class Fleet:
    """Coordinator process, its fleet of fake workers and boxes, and the phases of a measurement.

    lease_s: seconds of silence after which the coordinator takes a worker for dead; None: its default. connections:
    number of connections that all workers and boxes share.
    """

    def __init__(
        self,
        workers: int,
        boxes: int,
        seconds: float,
        lease_s: float | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        self._lease = [] if lease_s is None else ["--worker-lease-s", str(lease_s)]
        self.seconds = seconds
        self.tally = Tally()
        self.payload = Payload()
        self.address = ""
        self._count, self._box_count, self._connections = workers, boxes, connections
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-fleet-"))
        self._coordinator: asyncio.subprocess.Process | None = None
        self._clients: list[AsyncCoordinatorClient] = []
        self._probe: Probe | None = None
        self.workers: list[FakeWorker] = []
        self.boxes: list[FakeBox] = []

    @property
    def pid(self) -> int:
        assert self._coordinator is not None
        return self._coordinator.pid

    async def __aenter__(self) -> Fleet:
        await self.start_coordinator("127.0.0.1:0")
        token = os.environ["PENSTOCK_TOKEN"]
        wait = PHASE_DEADLINE_S
        self._clients = [
            AsyncCoordinatorClient(self.address, token, deadline_s=wait, insecure=True)
            for _ in range(self._connections)
        ]
        spares = max(2, self._count // 100)
        for number in range(self._count + spares):
            client = self._clients[number % self._connections]
            self.workers.append(FakeWorker(f"w{number:05d}", client, self.tally, self.payload))
        each = self._count // self._box_count
        for number in range(self._box_count):
            client = self._clients[number % self._connections]
            self.boxes.append(FakeBox(number, self._box_count, each, client, self.tally))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._probe is not None:
            await self._probe.stop()
        await asyncio.gather(*(worker.stop() for worker in self.workers), *(box.stop() for box in self.boxes))
        await asyncio.gather(*(client.close() for client in self._clients))
        if self._coordinator is not None and self._coordinator.returncode is None:
            self._coordinator.kill()
            await self._coordinator.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def start_coordinator(self, listen: str) -> float:
        """Start the coordinator. Return the seconds until it accepts calls."""
        began = time.monotonic()
        read, write = os.pipe()
        arguments = ["--listen", listen, "--state-dir", str(self._folder), "--ready-fd", str(write), *self._lease]
        self._coordinator = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.appliance", *arguments, pass_fds=[write]
        )
        os.close(write)
        with os.fdopen(read) as pipe:
            line = await asyncio.wait_for(asyncio.to_thread(pipe.readline), START_DEADLINE_S)
        self.address = line.strip()
        if not self.address:
            raise RuntimeError("the coordinator has ended before it listened: see its messages on standard error")
        return time.monotonic() - began

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[dict[str, Any]]:
        """Context manager that measures a phase: what the phase costs the coordinator, and how long heartbeats take
        meanwhile. The figures are in the dict that it yields."""
        found: dict[str, Any] = {}
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # reset the high-water mark
        ours, theirs = cpu_s(os.getpid()), cpu_s(self.pid)
        heartbeats, watches, began = self.tally.heartbeats, self.tally.watches, time.monotonic()
        self.tally.longest_gap_s, self.tally.shortest_margin = 0.0, float("inf")
        yield found
        ended = time.monotonic()
        span = ended - began
        found |= {
            "span_s": span,
            "coordinator_cpu_s": cpu_s(self.pid) - theirs,
            "generator_cpu_s": cpu_s(os.getpid()) - ours,
            "beats_per_s": (self.tally.heartbeats - heartbeats) / span,
            "watches_per_s": (self.tally.watches - watches) / span,
            "longest_gap_s": self.tally.longest_gap_s,
            "shortest_margin": self.tally.shortest_margin,
            "rss_mib": memory_mib(self.pid, "VmRSS"),
            "peak_mib": memory_mib(self.pid, "VmHWM"),
        }
        if self._probe is not None:
            found["heartbeat_s"] = spread(await self._probe.between(began, ended))

    # ---- the phases

    async def register(self) -> dict[str, Any]:
        """Phase: register all workers at the same time. Return its figures."""
        async with self.measured() as found:
            await asyncio.gather(*(worker.start() for worker in self.workers))
        self._probe = await Probe.start(self.address, self._count)
        return found

    async def open(self) -> dict[str, Any]:
        """Phase: open the run on all boxes at once. It ends when every box knows that all its slots are READY. Return
        its figures."""
        async with self.measured() as found:
            await asyncio.gather(*(box.open() for box in self.boxes))
            for box in self.boxes:
                box.start()
            until = time.monotonic() + PHASE_DEADLINE_S
            while len(self.tally.settled) < len(self.boxes) and time.monotonic() < until:
                await asyncio.sleep(0.02)
        opened = {box.number: box.opened_at for box in self.boxes}
        first = min(opened.values())
        slots: dict[tuple[int, int], float] = {}
        for place, at in self.tally.assigned:
            slots.setdefault(place, at)
        found["assignments"] = len(slots)
        found["assigned_s"] = max((at - first for at in slots.values()), default=None)
        found["settled"] = len(self.tally.settled)
        found["retried"] = dict(self.tally.retried)
        found["settled_s"] = max((at - first for _, at in self.tally.settled), default=None)
        found["to_assignment_s"] = spread([at - opened[box] for (box, _), at in slots.items()])
        found["to_settled_s"] = spread([at - opened[box] for box, at in self.tally.settled])
        return found

    async def steady(self) -> dict[str, Any]:
        """Phase: run all workers and boxes without other events. Return its figures."""
        for box in self.boxes:
            box.train()
        # The work that the opening leaves takes at most two heartbeats.
        await asyncio.sleep(min(2.0, self.seconds) + 2 * max(worker.heartbeat_s for worker in self.workers))
        async with self.measured() as found:
            await asyncio.sleep(self.seconds)
        return found

    async def moves(self) -> dict[str, Any]:
        """Phase: drain MOVES workers one after the other, and measure the time until the slot of each is assigned to
        another worker. Return its figures."""
        took = []
        async with self.measured() as found:
            for worker in self.workers[1 : 1 + min(MOVES, self._count - 1)]:
                places = [key[:2] for key in worker.assignments]
                seen, began = len(self.tally.assigned), time.monotonic()
                await worker.drain()
                until = began + 30
                while places and time.monotonic() < until:
                    there = [at for place, at in self.tally.assigned[seen:] if place in places]
                    if len(there) == len(places):
                        took += [at - began for at in there]
                        break
                    await asyncio.sleep(0.001)
                await worker.come_back()
        found["to_assignment_s"] = spread(took)
        return found

    async def states(self, size: int, rounds: int) -> dict[str, Any]:
        """Phase: fetch the state of all workers, of `size` bytes each, at the newest step of a box, `rounds` times.
        Return its figures."""
        self.payload.state = bytes(size)
        first, last, records, nbytes = [], [], 0, 0
        async with connect_aio(self.address) as channel, self.measured() as found:
            stub = CoordinatorStub(channel)
            for _ in range(rounds):
                box = self.boxes[0]
                request = pb.FetchStateRequest(run=f"{JOB}/0", attempt=box.attempt, step=box.step, deadline_s=120)
                request.progress.CopyFrom(box.progress())
                request.step = request.progress.delivered.step
                began = time.monotonic()
                came, size = await self._fetched(stub, request)
                first.append(came[0] - began)
                last.append(time.monotonic() - began)
                records += len(came)
                nbytes += size
                await asyncio.sleep(min(0.5, self.seconds))
        found |= {"first_s": spread(first), "last_s": spread(last), "records": records, "bytes": nbytes}
        return found

    async def _fetched(self, stub: Any, request: pb.FetchStateRequest) -> tuple[list[float], int]:
        """Return the times when the slots' records of a state came, and the bytes of their states. With grpcio 1.74 a
        connection of this process may count as lost while its event loop is busy; then the state is fetched again, as a
        training job does."""
        token = (("authorization", f"Bearer {os.environ['PENSTOCK_TOKEN']}"),)
        until = time.monotonic() + PHASE_DEADLINE_S
        while True:
            came, nbytes = [], 0
            try:
                async for part in stub.FetchState(request, timeout=until - time.monotonic(), metadata=token):
                    if part.HasField("record"):
                        came.append(time.monotonic())
                    nbytes += len(part.data)
                return came, nbytes
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await self.tally.pause(CoordinatorUnavailableError(error.details() or "FetchState"))

    async def snapshots(self, size: int) -> dict[str, Any]:
        """Phase: send snapshots of `size` bytes from all workers, as often as the coordinator allows. Return its
        figures."""
        self.payload.snapshot, self.payload.sending = bytes(size), True
        before = (self.tally.snapshots, self.tally.snapshot_bytes, self.tally.refused)
        async with self.measured() as found:
            await asyncio.sleep(max(self.seconds, 20.0))
        self.payload.sending = False
        found["snapshots_per_s"] = (self.tally.snapshots - before[0]) / found["span_s"]
        found["bytes_per_s"] = (self.tally.snapshot_bytes - before[1]) / found["span_s"]
        found["refused"] = self.tally.refused - before[2]
        found["disk_bytes"] = sum(path.stat().st_size for path in self._folder.iterdir())
        return found

    async def status(self) -> dict[str, Any]:
        """Phase: make the calls of the command `penstock status`. Return its figures."""
        took = []
        client = AsyncCoordinatorClient(self.address, os.environ["PENSTOCK_TOKEN"], insecure=True)
        async with client, self.measured() as found:
            for _ in range(5):
                began = time.monotonic()
                reply = await client.status()
                took.append(time.monotonic() - began)
                await asyncio.sleep(min(0.5, self.seconds))
        found |= {"took_s": spread(took), "bytes": reply.ByteSize()}
        return found

    async def restart(self) -> dict[str, Any]:
        """Phase: kill and restart the coordinator, and wait until all workers and boxes are connected again. Return its
        figures."""
        assert self._coordinator is not None
        moved = self.tally.lost
        self._coordinator.send_signal(signal.SIGKILL)
        await self._coordinator.wait()
        ready_s = await self.start_coordinator(self.address)
        began = time.monotonic()
        async with AsyncCoordinatorClient(
            self.address, os.environ["PENSTOCK_TOKEN"], deadline_s=60, insecure=True
        ) as client:
            live, until = 0, began + 60
            while live < len(self.workers) and time.monotonic() < until:
                await asyncio.sleep(0.2)
                live = sum(worker.live for worker in (await client.status()).workers)
            back_s = time.monotonic() - began
            await asyncio.sleep(self.seconds)
            restarts = sum(
                slot.restarts for run in (await client.status()).runs for box in run.boxes for slot in box.slots
            )
        return {
            "ready_s": ready_s,
            "all_back_s": back_s,
            "live": live,
            "lost": self.tally.lost - moved,
            "restarts": restarts,
            "peak_mib": memory_mib(self.pid, "VmHWM"),
        }


async def connections(count: int) -> dict[str, Any]:
    """Measure what a connection with an open call (long poll) costs the coordinator, over `count` connections. Return
    the figures by name."""
    async with Fleet(2, 1, 0.0) as fleet:
        token = os.environ["PENSTOCK_TOKEN"]
        before = memory_mib(fleet.pid, "VmRSS")
        clients = [AsyncCoordinatorClient(fleet.address, token, insecure=True) for _ in range(count)]
        workers = [FakeWorker(f"w{n:05d}", client, fleet.tally, fleet.payload) for n, client in enumerate(clients)]
        await asyncio.gather(*(worker.start() for worker in workers))
        await asyncio.sleep(2.0)
        found = {"connections": count, "kib_each": (memory_mib(fleet.pid, "VmRSS") - before) * 1024 / count}
        await asyncio.gather(*(worker.stop() for worker in workers))
        await asyncio.gather(*(client.close() for client in clients))
        return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"workers": options.workers, "boxes": options.boxes}
    async with Fleet(options.workers, options.boxes, options.seconds) as fleet:
        phases = {
            "register": fleet.register,
            "open": fleet.open,
            "steady": fleet.steady,
            "moves": fleet.moves,
            "status": fleet.status,
            "state_small": lambda: fleet.states(1024, 5),
            "state_large": lambda: fleet.states(LARGE, 2),
            "snapshots": lambda: fleet.snapshots(LARGE),
            "restart": fleet.restart,
        }
        for name, phase in phases.items():
            if options.phases and name not in options.phases:
                continue
            began = time.monotonic()
            found[name] = await phase()
            print(f"{options.workers} workers: {name}, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        found["failures"] = fleet.tally.failures
        found["lost"] = fleet.tally.lost
        found["retried"] = dict(fleet.tally.retried)
    return found


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.fleet_load", description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--boxes", type=int, default=0, help="boxes; default: one for ten workers")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of the steady phases")
    parser.add_argument("--phases", nargs="*", help="only these (register and open are needed by most)")
    parser.add_argument("--connections", type=int, help="instead measure the cost of this many connections")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    options.boxes = options.boxes or max(1, options.workers // WORKERS_PER_BOX)
    os.environ.setdefault("PENSTOCK_TOKEN", secrets.token_hex(16))
    if options.probe:
        asyncio.run(probe(options.probe, options.workers))
        return 0
    gc.disable()  # the garbage collector would scan all of the fleet every few seconds, and delay heartbeats meanwhile
    result = asyncio.run(connections(options.connections) if options.connections else measure(options))
    print(json.dumps(result), flush=True)
    os._exit(0)  # gRPC may wait forever for thousands of cancelled calls


if __name__ == "__main__":
    sys.exit(main())
