"""What comes after `penstock import-state`: the command itself, and jobs that go on from its state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import moved
import torch
from neighbours import beside
from typer.testing import CliRunner

from penstock.client import Appliance, DataLoader
from penstock.deploy.cli.main import app

__all__ = ["TOPOLOGIES", "each_row_once", "import_state", "refused", "rest_of"]

TOPOLOGIES = [(1, 1), (1, 2), (1, 3), (2, 2), (3, 1)]
"""(boxes, workers of each)."""
_jobs = itertools.count()


def import_state(out: Path, *arguments: object, input_fn: str = "moved:rows") -> dict[str, Any]:
    """Import, and return the report."""
    done = _run(out, input_fn, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def refused(out: Path, *arguments: object, input_fn: str = "moved:rows") -> str:
    """Return why it is refused."""
    done = _run(out, input_fn, arguments)
    assert done.exit_code not in (0, 1), (done.output, done.exception)
    assert not out.exists()
    return " ".join(done.stderr.split())


def _run(out: Path, input_fn: str, arguments: tuple[object, ...]) -> Any:
    command = [
        "import-state",
        *map(str, arguments),
        "--out",
        str(out),
        "--input-fn",
        input_fn,
        "--json",
        "--run-seed",
        "7",
    ]
    return CliRunner().invoke(app, command)


def rest_of(
    appliance: Appliance, report: dict[str, Any], topology: tuple[int, int], input_fn: Callable[..., Any], *given: Any
) -> tuple[list[int], list[int]]:
    """Return the rows of all boxes until the end of the imported epoch, and those of the next one."""
    boxes, workers = topology
    state = torch.load(report["state"], weights_only=True)
    job = f"moved-{next(_jobs)}"
    jobs = [beside(appliance, job=job, num_workers_per_box=workers, box=box, num_boxes=boxes) for box in range(boxes)]
    with ThreadPoolExecutor(boxes) as pool:
        found = list(pool.map(lambda job: _epochs(job, state, input_fn, given, report["step"]), jobs))
    first, second = ([number for box in found for number in box[epoch]] for epoch in range(2))
    return first, second


def _epochs(
    job: Appliance, state: Any, input_fn: Callable[..., Any], given: tuple[Any, ...], step: int
) -> tuple[list[int], list[int]]:
    with job:
        loader = DataLoader(input_fn, *given)
        loader.load_state_dict(state)
        assert loader.step == step
        first = [number for batch in loader for number in moved.numbers(batch)]
        second = [number for batch in loader for number in moved.numbers(batch)]
    return first, second


def each_row_once(delivered: list[int], rest: tuple[list[int], list[int]], rows: int) -> None:
    """What they delivered and what we delivered to the epoch's end is each row once; and so is the next epoch."""
    assert sorted([*set(delivered), *rest[0]]) == list(range(rows))
    assert sorted(rest[1]) == list(range(rows))
