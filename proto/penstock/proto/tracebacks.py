"""Shortened tracebacks for users: frames of Penstock become one line, or none at the outer end. Innermost ones are
shown, because the error is then Penstock's own. faulthandler's stacks, innermost first, are shortened alike."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import penstock

_STACK_FRAME = re.compile(r'  File "(?P<file>[^"\n]*)", line (?P<line>\d+) in (?P<name>.*)')
_THREAD = re.compile(r"(Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\):")


def _is_penstock(filename: str) -> bool:
    return filename.startswith(tuple(f"{folder}/" for folder in penstock.__path__))


def format_remote(error: BaseException) -> str:
    """Return the traceback text that is sent with an error, with a PenstockError's remote traceback."""
    whole = traceback.TracebackException.from_exception(error)
    for one in _chain(whole):
        one.stack = _FoldedStack(one.stack)
    return "".join(whole.format())


def _chain(error: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an error, its causes and contexts, and the members of exception groups among them."""
    waiting: list[traceback.TracebackException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None:
            yield one
            waiting += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]


class _FoldedStack(traceback.StackSummary):
    def format(self, **options: Any) -> list[str]:  # 3.13 has options
        runs = [(ours, list(frames)) for ours, frames in groupby(self, key=lambda frame: _is_penstock(frame.filename))]
        lines = []
        for number, (ours, frames) in enumerate(runs):
            if not ours or number == len(runs) - 1:
                lines += traceback.StackSummary.from_list(frames).format(**options)
            elif number:
                lines.append(f"  {_folded(frames)}\n")
        return lines


def fold_stack(text: str) -> str:
    """Shorten faulthandler's stacks, but Penstock's innermost frames are kept. A single thread's title is left out."""
    lines: list[str] = []
    innermost = True
    groups = [(ours, list(frames)) for ours, frames in groupby(_untitled(text.splitlines()), key=_kind)]
    for number, (ours, frames) in enumerate(groups):
        if not ours or innermost:
            lines += frames
        elif number + 1 < len(groups) and groups[number + 1][0] is False:
            lines.append(f"  {_folded(frames)}")
        innermost = ours is None  # what follows a line that is no frame
    return "\n".join(lines)


def _untitled(lines: list[str]) -> list[str]:
    titles = [line for line in lines if _THREAD.fullmatch(line)]
    return lines if len(titles) != 1 else [line for line in lines if line and line not in titles]


def stack_in_a_line(folded: str) -> str:
    """Return the frames of the first thread in a result of `fold_stack` as one line, the innermost frame first."""
    frames: list[str] = []
    for line in folded.splitlines():
        found = _STACK_FRAME.fullmatch(line)
        if found:
            frames.append(f"{found['name']} ({found['file']}:{found['line']})")
        elif frames and _kind(line) is None and not line.startswith("  "):
            break
    return " < ".join(frames)


def _kind(line: str) -> bool | None:
    """True for a frame of Penstock, and `<string>`, which starts the fork server; None for no frame."""
    frame = _STACK_FRAME.match(line)
    return None if frame is None else _is_penstock(frame["file"]) or frame["file"] == "<string>"


def _folded(frames: Iterable[Any]) -> str:
    count = len(list(frames))
    return f"[{count} frame{'s' if count > 1 else ''} of Penstock]"


def middle_out(text: str, keep: int) -> str:
    """Cut the middle of a text to `keep` bytes: beginning and end of a traceback show place and cause of an error."""
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= keep:
        return raw.decode()
    half = keep // 2
    head, tail = raw[:half].decode(errors="ignore"), raw[-half:].decode(errors="ignore")
    return f"{head}\n... {len(raw) - 2 * half} bytes left out ...\n{tail}"


def warn_user(message: str) -> None:
    """Issue a UserWarning at the innermost line that is not in Penstock's code."""
    frame, level = sys._getframe(1), 2
    ours = contextlib.__file__  # between a context manager of ours and the line that enters it
    while frame.f_back is not None and (_is_penstock(name := frame.f_code.co_filename) or name == ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
