"""Faults that a test injects into a FakeAppliance's runs, each before a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from penstock.client.in_process import InProcessReader
from penstock.proto.errors import WorkerLostError

__all__ = ["InputError", "LostWorker", "SlowBatch"]


@dataclass(frozen=True)
class SlowBatch:
    """Batch that comes `seconds` late. From the appliance's `timeout_s` on, the loop gets a DeadlineError and may
    then continue: the next executor gets the batch."""

    step: int
    seconds: float

    def strike(self, reader: InProcessReader) -> None:
        reader.delay(self.seconds)


@dataclass(frozen=True)
class InputError:
    """Error (a ValueError) that is raised while the batch of this step is made: the loop gets an InputFnError that
    names it, and the run is over; load_state_dict begins another one."""

    step: int
    error: Exception = field(default_factory=partial(ValueError, "injected by a test"))

    def strike(self, reader: InProcessReader) -> None:
        raise reader.failed(reader.due.failure(self.error)) from self.error


@dataclass(frozen=True)
class LostWorker:
    """Death of the worker that is to make the batch of this step. The slot is created again and brought to its
    position, with a warning and a count in DataExecutor.stats.recoveries; with `for_good` the loop gets a
    WorkerLostError, and the run is over."""

    step: int
    for_good: bool = False

    def strike(self, reader: InProcessReader) -> None:
        why = "its worker was lost (injected by a test)"
        if self.for_good:
            raise reader.failed(WorkerLostError(f"{reader.label}: {why}, and no other one made the batch either"))
        reader.replace_worker(why)
