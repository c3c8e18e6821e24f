"""External commands that engines call: sbatch, scancel, squeue, kubectl."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from penstock.deploy.console.exit_codes import USAGE, CommandError
from penstock.proto.errors import DeadlineError, PenstockError

__all__ = ["called"]

DEADLINE_S = 120.0
"""Longest time in seconds of a command that calls a remote service, such as kubectl or sbatch."""


def called(command: Sequence[str], *, stdin: str = "", deadline_s: float = DEADLINE_S) -> str:
    """Run a command and return its output. `stdin`: text for its standard input; secrets are passed there and never as
    an argument.

    Raises CommandError if the command is not installed, PenstockError with its error output if it fails, DeadlineError
    if it takes longer than `deadline_s` seconds."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=deadline_s)
    except FileNotFoundError:
        raise CommandError(
            f"{command[0]} must be installed here. Run this command on a machine that has {command[0]}", USAGE
        ) from None
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"{' '.join(command[:5])} did not answer within {deadline_s:g} s. Check the server that it calls, and try "
            "again"
        ) from None
    if done.returncode:
        raise PenstockError(f"{' '.join(command[:5])} failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
