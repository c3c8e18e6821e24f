"""Order of an epoch, computed by another library's own code in an interpreter that has this library.

The library may need other versions of packages than Penstock, so Penstock never imports it. A script of this folder
runs in the other interpreter, which need not have Penstock.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.deploy.import_state.begun_epoch import Ints
from penstock.proto.errors import DeadlineError, InvalidArgumentError, PenstockError
from penstock.runtime.process.end import exit_words

__all__ = ["order_by"]

DEADLINE_S = 3600.0
"""Longest time in seconds that a script may take to list all rows of an epoch."""
OTHER_PYTHON = "Pass --python, the interpreter of the environment in which the state was saved"


def order_by(python: str, script: str, request: Mapping[str, Any]) -> Ints:
    """Run a script of this folder in another interpreter, and return the integers that it writes (row numbers; the
    script of Energon writes two other numbers first); int64, shape (n,).

    Args:
        python: path of the interpreter, which has the other library.
        script: file name of the script, without ".py".
        request: what the script reads as JSON from its standard input.

    Raises InvalidArgumentError if the interpreter is missing, PenstockError with the script's last output if it fails,
    DeadlineError if it takes longer than DEADLINE_S.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-import-") as folder:
        out = Path(folder) / "order.npy"
        command = [python, str(Path(__file__).with_name(f"{script}.py")), str(out)]
        try:
            done = subprocess.run(
                command, input=json.dumps(request), capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder
            )
        except OSError as error:
            raise InvalidArgumentError(
                f"--python must be an interpreter that has the other library, got {python}: {error.strerror}. Pass the "
                "path of its python"
            ) from error
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"{python} did not list the rows of the epoch within {DEADLINE_S:g} s. Run the import on a faster "
                "machine"
            ) from None
        if done.returncode:
            why = done.stderr.strip()[-2000:] or f"it {exit_words(done.returncode)}"
            own = done.stderr and "Error" not in why  # the script's own message has a remedy
            remedy = "" if own else f"\n{OTHER_PYTHON}"
            raise PenstockError(f"{python} could not list the rows of the epoch: {why}{remedy}")
        return np.asarray(np.load(out, allow_pickle=False), np.int64)
