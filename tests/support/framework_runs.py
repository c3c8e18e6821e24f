"""Training scripts of frameworks on daemons of a module's own: killed, resumed, and on other numbers of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import TOKEN, Cluster, running
from interpreters import EXAMPLES
from kill_and_resume import Lines, Training

__all__ = ["check", "daemons", "started"]


@contextmanager
def daemons(state: Path) -> Iterator[Cluster]:
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    with running(state, PYTHONPATH=path) as cluster:
        cluster.add_worker(4, allow="integrations")
        yield cluster


def started(cluster: Cluster, module: str, job: str, out: Path, **environment: str) -> Training:
    variables = {"PENSTOCK_COORDINATOR": cluster.address, "PENSTOCK_TOKEN": TOKEN, "PENSTOCK_SEED": "1"}
    return Training(module, out, {**variables, "PENSTOCK_JOB": job, **environment})


def check(killed: Lines, resumed: Lines, whole: Lines, steps: int) -> None:
    """Both lives of a training are parts of the one that was not killed, and together all of it."""
    assert killed.keys() == resumed.keys() == whole.keys()
    for rank, lines in whole.items():
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        first = resumed[rank][0]["step"]
        assert 1 < first <= len(killed[rank]) + 1, "it goes on from a checkpoint, and leaves out nothing"
        assert killed[rank] == lines[: len(killed[rank])]
        assert resumed[rank] == lines[first - 1 :]
