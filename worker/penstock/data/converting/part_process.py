"""Program of a process that converts parts (see job_processes.py). Several such processes share the parts of a
conversion."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from penstock.data.converting.conversion_plan import ConversionPlan
from penstock.data.converting.convert_part import PartConverter
from penstock.data.job_processes import serve_jobs

__all__ = ["converted"]


@contextlib.contextmanager
def converted(plan: bytes) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yield a function that converts the part with a given number. `plan`: encoded ConversionPlan."""
    converter = PartConverter(ConversionPlan.decoded(plan))

    def convert(number: int) -> dict[str, Any]:
        converter.convert(number)
        return {"part": number}

    try:
        yield convert
    finally:
        converter.close()


if __name__ == "__main__":
    sys.exit(serve_jobs(converted))
