"""Log of the samples of each training step, to look up for example those of the step at which the loss rose."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from penstock.proto.errors import InvalidArgumentError

__all__ = ["SampleLog"]


class SampleLog:
    """Log of the samples in each batch: a file of lines {"step": 7, "keys": ["0.3.12...", ...]}, one for each step, in
    order. DataLoader.restore_sample reads a sample again by its key.

    A resumed job continues the same file: it replaces the lines of repeated steps, and a line that a crash cut off.
    Each box writes its own file.

    Example::

        with SampleLog("keys/box0.jsonl") as log:
            for batch in executor:
                log.write(executor.step, batch)"""

    def __init__(self, path: str | os.PathLike[str], *, field: str = "key") -> None:
        """
        Args:
            path: path of the file; missing folders are made. The file is opened at the first `write`.
            field: key under which each batch, a dict, has its list of restore keys: the value of the loader's `keys=`.
        """
        self.path, self._field = Path(path), field
        self._file: BinaryIO | None = None
        self._last = 0

    def write(self, step: int, batch: Any) -> None:
        """Write the line of a step: the restore keys in its batch. The first `write` after an opening replaces the
        lines of its step and later ones.

        Raises:
            InvalidArgumentError: the batch has no restore keys, or the step is not above the last one written since
                then.
            OSError: the file cannot be written."""
        keys = batch.get(self._field) if isinstance(batch, Mapping) else None
        if not isinstance(keys, Sequence) or isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
            raise InvalidArgumentError(
                f"the batch must be a dict with a list of restore keys (texts) under {self._field!r}, got "
                f"{_found(batch, self._field)}: make the loader with keys={self._field!r}"
            )
        if self._file is None:
            self._file = self._open(step)
        elif step <= self._last:
            raise InvalidArgumentError(
                f"step must be above {self._last}, the last step in {self.path}, got {step}: write each step once, in "
                "order"
            )
        self._file.write(json.dumps({"step": step, "keys": list(keys)}).encode() + b"\n")
        self._file.flush()
        self._last = step

    def close(self) -> None:
        """Close the file; the next `write` opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, step: int) -> BinaryIO:
        """Open the file to append to it, after deleting the lines of `step` and later steps."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b")
        file.seek(0)
        kept = 0
        for line in file:
            written = _step_of(line)
            if written is None or written >= step:
                break
            kept += len(line)
        file.truncate(kept)
        return file


def _found(batch: Any, field: str) -> str:
    kind = type(batch).__name__
    if not isinstance(batch, Mapping):
        return f"a {kind}"
    if field not in batch:
        return f"a {kind} without this key"
    value = batch[field]
    kinds = {type(key).__name__ for key in value} if isinstance(value, list | tuple) else set()
    return f"a {kind} with a {type(value).__name__}{f' of {min(kinds)}' if kinds else ''} there"


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None
