"""Completion: what the function of a shell's script is given; what it asks nobody for is not loaded."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def offered(shell: Any, line: str, **environment: str) -> str:
    """Return what the script's function is given for a line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = shell.call(_PENSTOCK_COMPLETE="complete_bash", **words, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return " ".join(done.stdout.split())


def test_commands_options_and_values(shell: Any) -> None:
    for line, found in (
        ("penstock st", "status state"),
        ("penstock config w", "worker"),
        ("penstock doctor machine --sl", "--slots"),
        ("penstock worker --al", "--allow"),
    ):
        assert offered(shell, line) == found


def test_completion_loads_neither_grpc_nor_torch() -> None:
    heavy = ("grpc", "google.protobuf", "torch", "numpy")
    code = f"import sys, penstock.deploy.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
