"""Training jobs over tests/inputs/mixed.py, step by step, while their mixture is changed from outside."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

import mixed
from cluster import TOKEN, Cluster

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

__all__ = ["Training", "alone", "order", "ordered", "training"]

DEADLINE_S = 60.0
HELD_S = 10 * DEADLINE_S
"""Longest time in seconds for which a test holds the boxes while it does something else."""
_orders = itertools.count()


def numbers_of(batch: Any) -> list[int]:
    found: list[int] = (batch["batch"] if isinstance(batch, dict) else batch).tolist()
    return found


def alone(
    steps: int, schedule: Mapping[int, Mapping[str, float]], *, more: bool = False, epoch: int = 0
) -> list[list[int]]:
    """Global batches of a run that had the schedule from its beginning, from one loader in this process."""
    loader = mixed.train(schedule, more=more)
    loader.set_epoch(epoch)
    return [numbers_of(batch) for batch in islice(loader, steps)]


def order(job: str, step: int, weights: dict[str, str] | None = None, **more: Any) -> pb.ChangeMixtureRequest:
    request = pb.ChangeMixtureRequest(run=job, key=f"{job} {next(_orders)}", from_step=step, deadline_s=DEADLINE_S)
    request.weights.extend(pb.AskedWeight(source=name, weight=text) for name, text in (weights or {}).items())
    added = more.pop("added", {})
    request.added.extend(records_pb2.AddedSource(source=name, function=fn) for name, fn in added.items())
    for name, value in more.items():
        getattr(request, name).extend(value) if name == "retired" else setattr(request, name, value)
    return request


def ordered(cluster: Cluster, request: pb.ChangeMixtureRequest) -> pb.ChangeMixtureReply:
    with CoordinatorClient(cluster.address, TOKEN, insecure=True) as client:
        return client.change_mixture(request)


class Training:
    """All boxes of a job, each in a thread. They go on as far as `go` lets them."""

    def __init__(self, boxes: int, steps: int, pace_s: float = 0) -> None:
        self.boxes, self.steps, self.pace_s = boxes, steps, pace_s
        self.rows: list[dict[int, list[int]]] = [{} for _ in range(boxes)]
        self.counts: dict[str, int] = {}
        """Samples of box 0 by source."""
        self.state: Any = None
        """State of box 0 at the end."""
        self.states: dict[int, Any] = {}
        """States of box 0 that were saved on the way, by step."""
        self.error: BaseException | None = None
        """Error that a box has raised."""
        self._allowed = 0
        self._moved = threading.Condition()

    def go(self, step: int) -> None:
        """Let all boxes take the batches up to this step, and wait until they have. Raises the error of a box."""
        with self._moved:
            self._allowed = step
            self._moved.notify_all()
            here = self._moved.wait_for(
                lambda: self.error is not None or all(max(rows, default=0) >= step for rows in self.rows), DEADLINE_S
            )
            if self.error is not None:
                raise self.error
            assert here, f"the boxes are at {[max(rows, default=0) for rows in self.rows]}, not {step}"

    def failed(self, error: BaseException) -> None:
        with self._moved:
            self.error = error
            self._moved.notify_all()

    def let(self, step: int) -> None:
        """Let all boxes go on up to this step, without a wait."""
        with self._moved:
            self._allowed = step
            self._moved.notify_all()

    def took(self, box: int, step: int, batch: Any) -> None:
        if self.pace_s:
            threading.Event().wait(self.pace_s)
        with self._moved:
            self.rows[box][step] = numbers_of(batch)
            self._moved.notify_all()
            assert self._moved.wait_for(lambda: step < self._allowed or step >= self.steps, HELD_S)

    def begin(self) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: self._allowed > 0, DEADLINE_S)

    @property
    def global_batches(self) -> list[list[int]]:
        found = []
        for step in sorted(self.rows[0]):
            rows = [of_box[step] for of_box in self.rows]
            found.append([rows[at % self.boxes][at // self.boxes] for at in range(sum(map(len, rows)))])
        return found


def _epoch_left(made: Training, loader: DataLoader, appliance: Appliance, box: int, step: int) -> None:
    """Take an epoch up to a step, and leave it."""
    executor = DataExecutor(loader, appliance=appliance)
    for batch in executor:
        made.took(box, executor.step, batch)
        if executor.step == step:
            break


@contextmanager
def training(
    cluster: Cluster, job: str, boxes: int, workers: int, steps: int, state: Any = None, **settings: Any
) -> Iterator[Training]:
    """A job that has begun, and goes on to its end after the block. `leaves`: step after which it leaves the epoch.
    `every`: steps after which it saves again and again."""
    made = Training(boxes, steps, settings.get("pace_s", 0))

    def one(box: int) -> None:
        try:
            run(box)
        except BaseException as error:
            made.failed(error)
            raise

    def run(box: int) -> None:
        loader = DataLoader(mixed.train, keys="key" if settings.get("keys") else None)
        if state is not None:
            loader.load_state_dict(state)
        with cluster.box(job, box=box, num_boxes=boxes, num_workers_per_box=workers) as appliance:
            made.begin()
            if leaves := settings.get("leaves"):
                _epoch_left(made, loader, appliance, box, leaves)
            executor = DataExecutor(loader, num_steps=steps - (leaves or 0), appliance=appliance)
            for batch in executor:
                made.took(box, executor.step, batch)
                if executor.step % settings.get("every", steps + 1) == 0:
                    saved = loader.state_dict()
                    if box == 0:
                        made.states[executor.step] = saved
            if box == 0:
                made.counts = {name: counts.samples for name, counts in executor.stats.sources.items()}
            saved = loader.state_dict()
            if box == 0:
                made.state = saved

    with ThreadPoolExecutor(boxes) as pool:
        running = [pool.submit(one, box) for box in range(boxes)]
        try:
            yield made
        except BaseException:
            made.let(1 << 60)
            raise
        made.let(1 << 60)
        for each in running:
            each.result(DEADLINE_S)
