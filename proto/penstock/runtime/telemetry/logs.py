"""The log of a process, for people and for machines; and text that others had a say in, on its way there.

Names, errors and addresses come from peers, and what a runner prints comes from user code. Written as they are they
could clear a screen, forge a line of the log, or fill a disk. So what is not printable is escaped, a line that goes on
is indented, and a message has an end. As JSON a record is one line of ASCII: whatever is in it, it ends where its
object ends.

Who or what a record is about stands in attributes of the record (`about`), not only in its words: run, attempt, box,
slot, generation, step, worker. Both formats show them, and a formatter of a user's own finds them there.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

__all__ = ["FIELDS", "JsonLines", "OneLine", "RepeatedWarnings", "SubjectLogger", "TextLines", "about", "printable"]

LONGEST = 32 << 10
"""Characters of one message: an error with its remote traceback has up to 24 Ki."""
FIELDS = ("run", "attempt", "box", "slot", "generation", "step", "worker")
"""What a record may be about, as attributes of it."""
_IN_TEXT = ("run", "box", "slot", "step")
"""Those that a person looks for; shown where the message does not say them."""


def about(**fields: str | int) -> dict[str, str | int]:
    """`extra` of a log call: what the record is about, by the names in FIELDS."""
    unknown = fields.keys() - set(FIELDS)
    if unknown:
        raise ValueError(f"records are not about {sorted(unknown)}")
    return fields


class SubjectLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records are all about the same thing."""

    def __init__(self, logger: logging.Logger, **fields: str | int) -> None:
        super().__init__(logger, about(**fields))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """A call's own `extra` wins."""
        assert self.extra is not None
        kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return msg, kwargs


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found = {name: getattr(record, name, None) for name in FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def _says(message: str, name: str, value: str) -> bool:
    """A run is told by its name alone, the others as in "slot 3"."""
    return value in message if name == "run" else re.search(rf"\b{name} {re.escape(value)}\b", message) is not None


def printable(text: str) -> str:
    """The text with everything escaped that is no printable character of one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]} ... {len(text) - longest} characters left out"


class RepeatedWarnings:
    """Warnings that a stranger can cause as often as it likes. Each is cut short. Of each source one is told at once
    and then one in `EVERY_S`, of all sources `AT_ONCE` in that time; the next one says how many were left out.

    clock: monotonic seconds.
    """

    EVERY_S = 10.0
    AT_ONCE = 20
    LONGEST = 400
    """Characters of one."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._told: dict[str, float] = {}
        self._left_out = 0

    def warning(self, source: str, message: str) -> None:
        now = self._clock()
        self._told = {told: at for told, at in self._told.items() if now - at < self.EVERY_S}
        if source in self._told or len(self._told) >= self.AT_ONCE:
            self._left_out += 1
            return
        self._told[source] = now
        more = f" (and {self._left_out} such lines before it that were left out)" if self._left_out else ""
        self._left_out = 0
        self._logger.warning("%s%s", _cut(message, self.LONGEST), more)


class OneLine(logging.Formatter):
    """A formatter whose records begin where its format begins, and nowhere else."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(map(printable, _cut(super().format(record)).split("\n")))


class TextLines(OneLine):
    """For people. What a record is about stands behind its first line, unless the message says it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text, said = super().formatMessage(record), record.message
        fields = _fields(record)
        more = [
            f"{name}={fields[name]}" for name in _IN_TEXT if name in fields and not _says(said, name, str(fields[name]))
        ]
        if not more:
            return text
        first, newline, rest = text.partition("\n")
        return f"{first} [{' '.join(more)}]{newline}{rest}"


class JsonLines(logging.Formatter):
    """For machines: an object a line, with time (UTC, RFC 3339), level, logger, message, pid, and what it is about.

    always: fields that every record of the process has.
    """

    def __init__(self, always: Mapping[str, str | int] | None = None) -> None:
        super().__init__()
        self._always = dict(always or {})

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage()),
            "pid": record.process,
            **self._always,
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = _cut(self.formatException(record.exc_info))
        elif record.exc_text:
            line["exception"] = _cut(record.exc_text)
        return json.dumps(line, ensure_ascii=True, default=str)
