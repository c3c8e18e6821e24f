"""Player: the process that measures one mode (compared way to deliver batches). It reads JSON requests, one per line,
from standard input, and writes its answers likewise to standard output.

Each player is a process of its own. So the loop that takes a mode's batches is alone in its process, all processes that
the mode starts are its descendants, and another library (peer) runs with the interpreter of its own Python environment.
A player starts once and takes turns with the others; between turns it sleeps.

    {"do": "measure", "case": Case, "times": Times}  ->  what `measure` returns, and `open_s`
    {"do": "hello"}                                  ->  {"versions": {...}}

A failure is an answer too: {"error": traceback}. Output of the mode itself goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Any

from benchmarks.cases import Case, Times
from benchmarks.measure import consume, measure
from benchmarks.processes import Role, adopt_orphans

__all__ = ["Way", "serve"]


class Way(ABC):
    """Way to deliver batches (mode), which a player creates and measures."""

    roles: Sequence[Role] = ()
    """Roles of the processes that this way starts, by which they are told apart."""
    packages: Sequence[str] = ()
    """Names of the packages whose versions are reported."""
    settle_s = 0.0
    """Seconds for which batches are taken before the measurement's own warm-up."""

    @abstractmethod
    def open(self, case: Case) -> AbstractContextManager[Iterator[Any]]:
        """Return a context manager with an endless iterator over the case's batches. Its end stops what it has
        started."""


def _answer(way: Way, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "hello":
        return {"versions": {name: version(name) for name in way.packages}}
    case, times = Case(**request["case"]), Times(**request["times"])
    started = time.perf_counter()
    with way.open(case) as batches:
        next(batches)
        opened = time.perf_counter()
        consume(batches, way.settle_s, 0, times.at_most_s)
        return {**measure(batches, case, times, way.roles), "open_s": opened - started}


def serve(make: Callable[[], Way]) -> None:
    """Run a player: create the way to deliver batches, and answer requests until standard input ends."""
    adopt_orphans()
    # Libraries and their processes print to descriptor 1, so that becomes standard error, and answers go to a copy of
    # standard output.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        way = make()
        for line in sys.stdin:
            try:
                answer = _answer(way, json.loads(line))
            except Exception:
                answer = {"error": traceback.format_exc()}
                traceback.print_exc()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
