"""Text that others had a say in, on its way to a log or a terminal.

Names, errors and addresses come from peers, and what a runner prints comes from user code. Written as they are they
could clear a screen, forge a line of the log, or fill a disk. So what is not printable is escaped, a line that goes on
is indented, and a message has an end.
"""

from __future__ import annotations

import logging

__all__ = ["OneLine", "printable"]

LONGEST = 32 << 10
"""Characters of one message: an error with its remote traceback has up to 24 Ki."""


def printable(text: str) -> str:
    """The text with everything escaped that is no printable character of one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class OneLine(logging.Formatter):
    """A formatter whose records begin where its format begins, and nowhere else."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if len(text) > LONGEST:
            text = f"{text[:LONGEST]} ... {len(text) - LONGEST} characters left out"
        return "\n    ".join(map(printable, text.split("\n")))
