"""A user's script, run as the interpreter runs one, in a process forked from an interpreter that has imported torch.

Importing torch and Penstock takes two seconds of a core, and is not what a test of a script is about. What the
interpreter does at a regular end (exit hooks, threads) does not happen here.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from interpreters import Forked, start

__all__ = ["outcome", "start_script"]

DEADLINE_S = 120.0


def start_script(script: Path, environment: Mapping[str, str], stderr: int | None = None) -> Forked:
    """Start a script, whose standard output is piped."""
    arguments, imports = [str(script)], ["penstock.client"]
    return start("main_script", arguments, environment, imports=imports, stdout=subprocess.PIPE, stderr=stderr)


def outcome(script: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a script, and return its exit status, standard output and standard error."""
    process = start_script(script, environment, subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        error, output = process.stderr.readall(), process.stdout.readall()
        return process.wait(DEADLINE_S), output.decode(), error.decode()


def main() -> int:
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(script))
    tempfile.tempdir = None  # that of the interpreter, which may have another environment
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != script:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    return 0
