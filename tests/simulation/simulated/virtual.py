"""Time and processes that are not real: one heap of events, taken in order, each with the process that it belongs to.

A simulated process is an asyncio event loop without sockets, threads or a clock of its own. So the coordinator's gRPC
edge runs here as it is in life, long polls and deadlines included, and a worker or a training job is written down as
plain coroutines. Several loops share one heap: what is due first runs first, and what is due together runs in the order
in which it was asked for, so a seed decides everything.

To stop a process (SIGSTOP) is to hold its events back; what is due meanwhile happens when it goes on, all at once, as
in life. To kill it (SIGKILL) is to run none of them any more: nobody says goodbye. Its coroutines are closed
afterwards, at a moment when nothing runs, and whatever they still do then reaches neither network nor disk.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import traceback
from asyncio import events
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

__all__ = ["Crash", "Process", "Violation", "World"]


class Crash(BaseException):
    """This process dies here and now, in the middle of what it does."""


class Violation(BaseException):
    """A promise was broken; ends the simulation. No Exception, so that nothing under test catches it."""


class World:
    """The heap, the time, the dice and the diary of one simulation."""

    def __init__(self, seed: int | str, *, tracing: bool = False) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.processes: dict[str, Process] = {}
        """The present incarnation of each name."""
        self.injected: Counter[str] = Counter()
        """Faults, by kind."""
        self.broken = ""
        """The first promise that did not hold: "name: what happened"."""
        self.diary: list[str] | None = [] if tracing else None
        self._heap: list[tuple[float, int, Process, asyncio.Handle]] = []
        self._pushed = 0
        self.fate = self.process("fate")
        """Does what no process of the system does: faults, messages under way, launching jobs."""

    def process(self, name: str) -> Process:
        """A new incarnation of that name."""
        return Process(self, name)  # type: ignore[abstract]  # what else event loops have is sockets and signals

    def note(self, who: str, what: str) -> None:
        """A line for the diary; call it only where one is kept, for making the text costs more than the event."""
        if self.diary is not None:
            self.diary.append(f"{self.now:9.4f} {who:<14} {what}")

    def fault(self, kind: str, where: str = "") -> None:
        self.injected[kind] += 1
        if self.diary is not None:
            self.note("FAULT", f"{kind} {where}")

    def violated(self, promise: str, what: str) -> None:
        """Raises Violation."""
        if not self.broken:
            self.broken = f"{promise}: {what}"
            self.note("VIOLATION", self.broken)
        raise Violation(self.broken)

    def push(self, when: float, process: Process, handle: asyncio.Handle) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (when, self._pushed, process, handle))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Runs until `done`, a violation, or the time is over."""
        heap = self._heap
        running: Process | None = None
        try:
            while heap and not self.broken and heap[0][0] <= until and not done():
                when, _, process, handle = heapq.heappop(heap)
                if handle.cancelled() or not process.alive:
                    continue
                if process.paused:
                    process.held.append(handle)
                    continue
                if when > self.now:
                    self.now = when
                if process is not running:
                    events._set_running_loop(process)
                    running = process
                handle._run()
        finally:
            events._set_running_loop(None)

    def end(self) -> None:
        """Closes what still runs."""
        for process in [*self.processes.values(), self.fate]:
            process.alive = False
            process.bury()
        self._heap.clear()


class Process(asyncio.AbstractEventLoop):
    """Process of one incarnation. `name` is that of its predecessor if it took over from one."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused = False
        self.held: list[asyncio.Handle] = []
        self.on_death: list[Callable[[], None]] = []
        self.serve: Callable[[str, Any], Coroutine[Any, Any, Any]] | None = None
        """Answers calls, by method and request."""
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._disk_free_at = 0.0
        world.processes[name] = self

    # ---- life and death

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the process. An exception that leaves it is a bug, and ends the simulation."""
        task = self.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Crash | Violation) and not self.world.broken:
            text = "".join(traceback.format_exception(error))
            self.world.broken = f"no exception is left over: {self.name} raised {error!r}\n{text}"

    def kill(self) -> None:
        """Stop the process at once, at any point; also from its own code, which then raises Crash."""
        if not self.alive:
            return
        self.alive = False
        self.world.note(self.name, "is dead")
        for told in self.on_death:
            told()
        self.world.fate.call_soon(self.bury)

    def bury(self) -> None:
        """Closes its coroutines; they have no effect any more, but Python wants them ended."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            for task in list(self._tasks):
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    coroutine = task.get_coro()
                    assert isinstance(coroutine, Coroutine)
                    coroutine.close()
            self._tasks.clear()
            self.held.clear()
        finally:
            events._set_running_loop(before)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        for handle in self.held:
            self.world.push(self.world.now, self, handle)
        self.held.clear()

    # ---- what asyncio asks of an event loop

    def time(self) -> float:
        return self.world.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self.alive

    def is_closed(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.world.push(self.world.now, self, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.push(max(when, self.world.now), self, handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.world.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is skipped when its time comes

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        assert not options, options  # eager tasks, from Python 3.13 on: nobody asks for them here
        task = asyncio.Task(coro, loop=self, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Work for the one other thread of a process here, the disk's: one piece at a time, each takes a while."""
        future = self.create_future()
        self._disk_free_at = max(self._disk_free_at, self.world.now) + 0.0002 + 0.004 * self.world.rng.random() ** 4

        def work() -> None:
            try:
                result = func(*args)
            except (Crash, Violation):
                return  # the process is gone
            except Exception as error:
                if not future.cancelled():
                    future.set_exception(error)
                return
            if not future.cancelled():
                future.set_result(result)

        self.call_at(self._disk_free_at, work)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.alive and not self.world.broken and not isinstance(error, Crash | Violation):
            self.world.broken = f"no exception is left over: {self.name}: {context.get('message')}: {error!r}"
