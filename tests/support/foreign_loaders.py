"""Loaders of other libraries, each in an interpreter of its own: what they deliver, and the state that they save.

STREAMING_PYTHON, GRAIN_PYTHON or ENERGON_PYTHON names the interpreter; else it is one of .peers, as `make bench-peers`
makes them, or this one. What none of them has is skipped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented import REPO

__all__ = ["deliver", "importable_streaming", "python_of"]

STUBS = REPO / "benchmarks/peers/stubs"
"""Folder with a torchvision that has what mosaicml-streaming imports."""

MODULES = {"streaming": "streaming", "grain": "grain", "energon": "megatron.energon"}


@functools.cache
def python_of(library: str) -> str:
    """An interpreter that has the library."""
    named = os.environ.get(f"{library.upper()}_PYTHON")
    places = (library, "readers")
    several = [named] if named else [*(str(REPO / f".peers/{place}/bin/python") for place in places), sys.executable]
    for python in several:
        found = [python, "-c", f"import importlib.util as u; raise SystemExit(not u.find_spec({MODULES[library]!r}))"]
        if Path(python).exists() and subprocess.run(found, capture_output=True, timeout=60).returncode == 0:
            return python
    pytest.skip(f"no interpreter has {library}: {library.upper()}_PYTHON names one")


def deliver(library: str, folder: Path, ranks: int = 1, **arguments: Any) -> list[int]:
    """Let all ranks of the library deliver, and return the rows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    running = []
    for rank in range(ranks):
        own = {**os.environ, **common, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [python_of(library), str(REPO / "tests/frameworks/delivered_by.py"), library, str(folder)]
        given = folder / f"arguments-{rank}.json"
        given.write_text(json.dumps(arguments))
        with given.open() as stdin, (folder / f"log-{rank}").open("w") as log:
            running.append(subprocess.Popen(command, stdin=stdin, stdout=log, stderr=log, env=own))
    for rank, process in enumerate(running):
        try:
            code = process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        assert code == 0, (folder / f"log-{rank}").read_text()[-3000:]
    return [row for rank in range(ranks) for row in json.loads((folder / f"rows-{rank}.json").read_text())]


@contextlib.contextmanager
def importable_streaming() -> Iterator[None]:
    """Replace a torchvision that was built for another torch: mosaicml-streaming would fail to import it."""
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(pytest.skip.Exception):  # without it, the tests of other libraries run all the same
            checked = [python_of("streaming"), "-c", "import torchvision"]
            if subprocess.run(checked, capture_output=True, timeout=60).returncode != 0:
                patch.setenv("PYTHONPATH", str(STUBS), prepend=os.pathsep)
        yield
