"""Lock that allows one call into a checkpointer at a time, across threads and signal handlers.

A handler runs between any two instructions of the main thread, also within a `save`, and may call `save` itself, as
handlers for preemption do; it would find half-changed data. So while a call holds the lock, signals are recorded, and
their handlers run at its end, before it returns. While a call waits for an earlier save or another thread, handlers run
at once, and so does that of a second signal of one kind, so that a second Ctrl-C always works. (A second SIGTERM says
what the first did: torchrun passes on the one that the ranks have got too, and schedulers repeat theirs.)"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.proto.errors import CheckpointError, InvalidArgumentError

POLL_S = 0.002

Handler = Callable[[int, Any], Any]


class CallLock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._call = ""

    @contextmanager
    def one(self, call: str, *, hold: bool = True) -> Iterator[None]:
        """Hold the lock during the `with`. hold=False: record signals only while it is taken and released, because the
        call waits long. Raises CheckpointError if this thread holds it already: a signal handler or `state_dict` within
        a save calls."""
        held = self._enter(call)
        try:
            if hold:
                held.drops_repeats = False
            else:
                held.restore_handlers()
            yield
        finally:
            if hold:
                held.drops_repeats = True
            else:
                held = _HeldSignals()
            self._owner = 0
            self._lock.release()
            held.restore_handlers()

    def _enter(self, call: str) -> _HeldSignals:
        while True:
            held = _HeldSignals()
            if self._owner == threading.get_ident():
                held.restore_handlers()
                raise CheckpointError(
                    f"{call}() was called within {self._call}() of the same AsyncCheckpointer, by a signal handler or "
                    "a state_dict(), and did nothing: to save after a signal, use on_signal= and signalled()"
                )
            if self._lock.acquire(blocking=False):
                self._owner, self._call = threading.get_ident(), call
                return held
            held.restore_handlers()
            time.sleep(POLL_S)


class _HeldSignals:
    """Recorder that replaces all Python signal handlers until `restore_handlers`."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._recorded: list[int] = []
        self.drops_repeats = True
        """Ignore a second signal of one kind, instead of running its handler at once."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python runs handlers only on the main thread
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._record)
        except BaseException:  # raised by a handler that was not replaced yet
            self.restore_handlers()
            raise

    def _record(self, number: int, frame: Any) -> None:
        if number not in self._recorded:
            self._recorded.append(number)
        elif not self.drops_repeats:
            self._handlers[number](number, frame)

    def restore_handlers(self) -> None:
        """Restore the handlers, and run those of the signals that arrived. Raises the first error after all."""
        raised: BaseException | None = None
        left = [*self._handlers.items()]
        while left:
            try:
                while left:
                    number, handler = left[-1]
                    if signal.getsignal(number) == self._record:
                        signal.signal(number, handler)
                    left.pop()
            except BaseException as error:  # raised by a restored handler; restore the others too
                raised = raised or error
        noted, self._recorded = self._recorded, []
        for number in noted:
            try:
                signal.raise_signal(number)
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised


class SignalWatch:
    """Recorder of signals for a loop that checks `received`. Only a second Ctrl-C acts as it does without it."""

    def __init__(self, numbers: int | Iterable[int]) -> None:
        """Raises InvalidArgumentError outside the main thread, and for a number that cannot be handled."""
        wanted = [numbers] if isinstance(numbers, int) else [*numbers]
        self.received = 0
        self._before: dict[int, Any] = {}
        if wanted and threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError(
                "AsyncCheckpointer(on_signal=...) must be created on the main thread, got another thread"
            )
        for number in wanted:
            try:
                self._before[number] = signal.signal(number, self._record)
            except (OSError, ValueError, TypeError) as error:
                self.close()
                raise InvalidArgumentError(
                    f"AsyncCheckpointer: on_signal must be signals that a process can handle, got {number!r}: {error}"
                ) from error

    def _record(self, number: int, frame: Any) -> None:
        before = self._before[number]
        if self.received and number == signal.SIGINT:
            self._restore(number)
            signal.raise_signal(number)
            return
        self.received = self.received or number
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _restore(self, number: int) -> None:
        if signal.getsignal(number) == self._record:
            before = self._before[number]
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def close(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                self._restore(number)
