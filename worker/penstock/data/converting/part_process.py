"""Process that converts parts. Several such processes share the parts of a conversion.

    python -m penstock.data.converting.part_process PLAN JOBS OUTPUT PARENT

PLAN: descriptor of a file with the plan. JOBS: descriptor of a file with the numbers of the parts, which all processes
read from one common position. OUTPUT: descriptor of a pipe for reports, one JSON object per line. PARENT: id of the
parent process; when it ends, this process ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from penstock.data.converting.conversion_plan import JOB, ConversionPlan
from penstock.data.converting.convert_part import PartConverter
from penstock.proto.errors import PenstockError
from penstock.runtime.process.watch import wait_for_parent_end

__all__ = ["run"]


def run(plan: int, jobs: int, output: int) -> int:
    """Convert parts until none is left; return the exit status. The arguments are those of the module, as
    descriptors."""

    def say(**what: Any) -> None:
        os.write(output, json.dumps(what).encode() + b"\n")

    converter: PartConverter | None = None
    try:
        converter = PartConverter(ConversionPlan.decoded(os.pread(plan, os.fstat(plan).st_size, 0)))
        while job := os.read(jobs, JOB.size):
            (number,) = JOB.unpack(job)
            converter.convert(number)
            say(part=number)
    except PenstockError as error:
        say(error=type(error).__name__, message=error.message)
        return 1
    finally:
        if converter is not None:
            converter.close()
    return 0


def _end_with(parent: int) -> None:
    wait_for_parent_end(parent)
    os._exit(1)


if __name__ == "__main__":
    *descriptors, parent = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    sys.exit(run(*descriptors))
