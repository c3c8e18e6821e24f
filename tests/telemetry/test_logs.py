"""Records of the log as text and as JSON: what they are about, and what peers have a say in."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from penstock.runtime.telemetry.logs import LONGEST, JsonLines, RepeatedWarnings, TextLines, about

NASTY = 'a\n2026-01-01 00:00:00,000 INFO penstock: forged\r\x1b[2J\x00\x9b\u2028\u202e"}\ud800'


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    logger = logging.getLogger("penstock.test")
    return logger.makeRecord("penstock.test", logging.WARNING, __file__, 1, message, args, None, extra=extra)


def test_json_line_has_time_process_and_subject() -> None:
    made = record("lost %s", "it", **about(run="lm/0", attempt=2, box=0, slot=3, generation=4, step=50))
    made.created, made.msecs = 1_000_000_000.25, 250.0
    line = json.loads(JsonLines({"process": "worker", "worker": "w1"}).format(made))
    assert line == {
        "time": "2001-09-09T01:46:40.250Z",
        "level": "warning",
        "logger": "penstock.test",
        "message": "lost it",
        "pid": made.process,
        "process": "worker",
        "worker": "w1",
        "run": "lm/0",
        "attempt": 2,
        "box": 0,
        "slot": 3,
        "generation": 4,
        "step": 50,
    }


def test_json_of_any_record_is_one_ascii_line() -> None:
    try:
        raise ValueError(NASTY)
    except ValueError:
        made = record("%s", NASTY, run=NASTY, box=object())
        made.exc_info = sys.exc_info()
    text = JsonLines().format(made)
    assert text.isascii()
    assert text.isprintable()
    line = json.loads(text)
    assert line["message"] == NASTY
    assert line["run"] == NASTY
    assert line["exception"].startswith("Traceback")


@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
def test_a_message_has_an_end(formatter: logging.Formatter) -> None:
    text = formatter.format(record("x" * 10 * LONGEST))
    assert len(text) < LONGEST + 500
    assert "characters left out" in text


def test_text_cannot_be_forged_by_a_field() -> None:
    first, *more = TextLines().format(record("lost", run="a\nb\x1b")).split("\n")
    assert "\x1b" not in "".join([first, *more])
    assert all(line.startswith("    ") for line in more)


def test_what_strangers_cause_is_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = RepeatedWarnings(logging.getLogger("strangers"), lambda: now[0])

    def lines(*sources: str) -> list[str]:
        caplog.clear()
        for source in sources:
            log.warning(source, f"{source} " + "x" * 1_000)
        return [one.getMessage() for one in caplog.records]

    (first,) = lines(*["a"] * 500)
    assert first == f"a {'x' * 398} ... 602 characters left out"
    (other,) = lines("b", "a")
    assert other.endswith("left out (499 similar warnings before this one were left out)")
    assert len(lines(*map(str, range(10_000)))) == log.AT_ONCE - 2
    now[0] = 10.0
    (again,) = lines("a")
    assert again.endswith(f"({10_000 - log.AT_ONCE + 2} similar warnings before this one were left out)")
