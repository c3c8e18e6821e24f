"""One call of a checkpointer at a time, whatever threads make them and whatever signals come in the middle of one.

A signal handler runs between any two instructions of the main thread, also within a `save`, and may well save itself:
that is what handlers for preemption do. It would find everything half done. So as long as a call holds the checkpointer
signals are noted and their handlers run when it is through, on the same thread and before it returns. That is a matter
of milliseconds: what is waited for, a save under way or another thread, is waited for with signals let through. A
second signal of a kind is let through at any time, so that whoever presses Ctrl-C twice is heard.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.proto.errors import CheckpointError, InvalidArgumentError

__all__ = ["CallLock", "SignalWatch"]

POLL_S = 0.002
"""Between two looks whether another thread is through."""

Handler = Callable[[int, Any], Any]


class CallLock:
    """Lets one call in at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        """The thread that is inside; 0: none."""
        self._call = ""

    @contextmanager
    def one(self, call: str, *, hold: bool = True) -> Iterator[None]:
        """Be the only one inside.

        call: the method, for errors. hold: note signals meanwhile; without it, only while it begins and ends.

        Raises CheckpointError where this thread is inside already: a signal handler, or a `state_dict` that saves.
        """
        held = self._enter(call)
        try:
            if hold:
                held.firm = False
            else:
                held.let_through()
            yield
        finally:
            if hold:
                held.firm = True
            else:
                held = _HeldSignals()
            self._owner = 0
            self._lock.release()
            held.let_through()

    def _enter(self, call: str) -> _HeldSignals:
        while True:
            held = _HeldSignals()
            if self._owner == threading.get_ident():
                held.let_through()
                raise CheckpointError(
                    f"{call}() was called within {self._call}() of the same AsyncCheckpointer, by a signal handler or "
                    "by what is saved: nothing was done. AsyncCheckpointer(on_signal=...) notes signals, to be asked "
                    "for after a step"
                )
            if self._lock.acquire(blocking=False):
                self._owner, self._call = threading.get_ident(), call
                return held
            held.let_through()
            time.sleep(POLL_S)


class _HeldSignals:
    """Notes signals in the place of the program's handlers, from here to `let_through`."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._noted: list[int] = []
        self.firm = True
        """No second signal gets through either."""
        if threading.current_thread() is not threading.main_thread():
            return  # handlers run on the main thread
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # of a handler that was not replaced yet
            self.let_through()
            raise

    def _note(self, number: int, frame: Any) -> None:
        if number not in self._noted:
            self._noted.append(number)
        elif not self.firm:
            self._handlers[number](number, frame)

    def let_through(self) -> None:
        """Put the handlers back, and run those whose signals came. Raises what they raise."""
        raised: BaseException | None = None
        left = [*self._handlers.items()]
        while left:
            try:
                while left:
                    number, handler = left[-1]
                    if signal.getsignal(number) == self._note:
                        signal.signal(number, handler)
                    left.pop()
            except BaseException as error:  # of a handler that is back already; the others are to come back too
                raised = raised or error
        noted, self._noted = self._noted, []
        for number in noted:
            try:
                signal.raise_signal(number)
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised


class SignalWatch:
    """Notes signals for a loop that asks after each step. A second one of a kind acts as it would have without."""

    def __init__(self, numbers: int | Iterable[int]) -> None:
        """Raises InvalidArgumentError for what is no signal, or on a thread that gets none."""
        wanted = [numbers] if isinstance(numbers, int) else [*numbers]
        self.received = 0
        """The last one; 0: none."""
        self._before: dict[int, Any] = {}
        if wanted and threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError("AsyncCheckpointer(on_signal=...): make it on the main thread, which gets them")
        for number in wanted:
            try:
                self._before[number] = signal.signal(number, self._note)
            except (OSError, ValueError, TypeError) as error:
                self.close()
                raise InvalidArgumentError(f"AsyncCheckpointer(on_signal={number!r}): {error}") from error

    def _note(self, number: int, frame: Any) -> None:
        before = self._before[number]
        if self.received:
            self._restore(number)
            signal.raise_signal(number)
            return
        self.received = number
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _restore(self, number: int) -> None:
        if signal.getsignal(number) == self._note:
            before = self._before[number]
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def close(self) -> None:
        """Put the handlers back that there were."""
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                self._restore(number)
