"""Penstock with default settings: embedded, one worker slot. The module is the program of a player, the process that
measures this mode (see serve.py).

    python -m benchmarks.penstock_path auto|tcp

All features are on: round robin, deadlines, digests, the snapshots' cadence, acknowledgements. "auto" is the lane
of the same host; "tcp" sends the same batches over loopback, through sender and receiver, as to another host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

from benchmarks.cases import Case
from benchmarks.loaders import source
from benchmarks.processes import Role
from benchmarks.serve import Way, serve

from penstock.client import Appliance, DataExecutor, DataLoader

__all__ = ["ROLES"]

TIMEOUT_S = 60

ROLES = (
    Role("penstock.worker.runner.fork_server", "fork server", forked="runner"),
    Role("penstock-runner ", "runner"),
    Role("penstock-replayer ", "runner"),
    Role("penstock-helper ", "runner"),
    Role("embedded_daemons.py", "daemons"),
    Role("penstock.worker", "daemon"),
    Role("penstock.appliance", "coordinator"),
    Role("receiver.py", "receiver"),
)


class Penstock(Way):
    roles = ROLES
    packages = ("penstock", "torch", "numpy", "grpcio", "protobuf")

    def __init__(self, lane: Literal["auto", "tcp"]) -> None:
        self.lane: Literal["auto", "tcp"] = lane

    @contextmanager
    def open(self, case: Case) -> Iterator[Iterator[Any]]:
        os.environ["PENSTOCK_LANE"] = self.lane
        # One appliance for each opening: a kept one also keeps what earlier runs left in the daemons.
        with Appliance(num_workers_per_box=1, timeout_s=TIMEOUT_S) as appliance:
            loader = DataLoader(source, **case.to_json())
            executor = DataExecutor(loader, checkpoint_steps=case.checkpoint_every, appliance=appliance)
            batches = cast(Generator[Any, None, None], iter(executor))
            try:
                yield batches
            finally:
                batches.close()
                loader.close()


if __name__ == "__main__":
    serve(lambda: Penstock(cast(Literal["auto", "tcp"], sys.argv[1])))
