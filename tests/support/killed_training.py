"""A training script of examples/ that kills itself with SIGKILL at a given moment:

    python -m killed_training MODULE MOMENT STEP [the script's arguments]

MOMENT is `step`: right after the line of this step was logged; `part`: when Orbax has written what is trained into the
checkpoint of this step, right before it renames that part's folder; or `save`: when it has written everything, right
before it renames the checkpoint's folder, which completes it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

from integrations.command import StepLog


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    module, moment, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
    sys.argv[1:] = sys.argv[4:]
    if moment == "step":
        write = StepLog.write

        def write_and_die(log: StepLog, number: int, *values: Any) -> None:
            write(log, number, *values)
            if number == step:
                die()

        setattr(StepLog, "write", write_and_die)  # noqa: B010
    else:
        name = f"/{step}" if moment == "save" else f"/{step}.orbax-checkpoint-tmp/training"

        def listen(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "os.rename" and os.fspath(arguments[1]).endswith(name):
                die()

        sys.addaudithook(listen)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
