"""Log formats of a process, as text or JSON, and the escaping of untrusted text in them.

Names, errors and a runner's output come from peers and user code: they could clear a screen, forge a line of the log,
or fill a disk. So unprintable characters are escaped, continuation lines indented, and messages limited. What a record
is about is in its attributes (`about`): JSON shows all; text adds run, box, slot and step to a message without them."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

LONGEST = 32 << 10
"""Largest number of characters in a message. An error with its remote traceback has up to 24 Ki characters."""
FIELD = 1000
"""Largest number of characters in an attribute of a record. A name has up to 200."""
FIELDS = ("run", "attempt", "box", "slot", "generation", "step", "worker")
"""Names of the attributes that say what a record is about."""
_IN_TEXT = ("run", "box", "slot", "step")


def about(**fields: str | int) -> dict[str, str | int]:
    """Return the argument `extra` of a log call, which says what the record is about: values by the names in FIELDS."""
    assert fields.keys() <= set(FIELDS), "unknown field"
    return fields


class SubjectLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger that adds the same attributes (see `about`) to all its records."""

    def __init__(self, logger: logging.Logger, **fields: str | int) -> None:
        super().__init__(logger, about(**fields))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        assert self.extra is not None
        kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return msg, kwargs


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = {name: vars(record)[name] for name in FIELDS if vars(record).get(name) is not None}
    return {name: _cut(value, FIELD) if isinstance(value, str) else value for name, value in fields.items()}


def _says(message: str, name: str, value: str) -> bool:
    """True if a message already contains an attribute: the run's name, or a text such as "slot 3"."""
    return value in message if name == "run" else re.search(rf"\b{name} {re.escape(value)}\b", message) is not None


def printable(text: str) -> str:
    """Escape all unprintable characters, line breaks included."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def plain(text: str, longest: int = LONGEST) -> str:
    """Shorten a text from a peer, and escape unprintable characters, but not line breaks."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in _cut(text, longest).split("\n"))


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]} ... {len(text) - longest} characters left out"


class RepeatedWarnings:
    """Rate limit for warnings that come again and again, perhaps from unauthenticated peers: in `every_s` seconds one
    for each source, AT_ONCE in all. Each is shortened, and says how many before it were left out."""

    AT_ONCE = 20
    LONGEST = 400

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        *,
        every_s: float = 10.0,
        level: int = logging.WARNING,
    ) -> None:
        self._logger, self._every_s, self._level = logger, every_s, level
        self._clock = clock
        self._logged: dict[str, float] = {}
        self._left_out = 0

    def warning(self, source: str, message: str) -> None:
        now = self._clock()
        self._logged = {known: at for known, at in self._logged.items() if now - at < self._every_s}
        if source in self._logged or len(self._logged) >= self.AT_ONCE:
            self._left_out += 1
            return
        self._logged[source] = now
        more = f" ({self._left_out} similar warnings before this one were left out)" if self._left_out else ""
        self._left_out = 0
        self._logger.log(self._level, "%s%s", _cut(message, self.LONGEST), more)


class OneLine(logging.Formatter):
    """Formatter that indents all lines but the first, so that no text inside looks like another record."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(map(printable, _cut(super().format(record)).split("\n")))


def log_lines(form: str, level: int | str) -> None:
    """Log to standard error from now on, in the format `form` (of Python's logging), with text from peers escaped."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(form))
    logging.basicConfig(level=level, handlers=[handler])


class TextLines(OneLine):
    """Formatter for people. It appends the attributes in `_IN_TEXT` that the message does not contain."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text, said = super().formatMessage(record), record.message
        fields = [(name, value) for name, value in _fields(record).items() if name in _IN_TEXT]
        more = [f"{name}={value}" for name, value in fields if not _says(said, name, str(value))]
        first, newline, rest = text.partition("\n")
        return f"{first} [{' '.join(more)}]{newline}{rest}" if more else text


class JsonLines(logging.Formatter):
    """Formatter for machines: one line of JSON: time (UTC, RFC 3339), level, logger, message, pid, FIELDS, `always`."""

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
