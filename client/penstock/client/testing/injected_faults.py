"""Faults that a test injects into the runs of a FakeAppliance, each before the batch of a chosen step is delivered."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from penstock.client.in_process import InProcessReader
from penstock.proto.errors import WorkerLostError

__all__ = ["InputError", "LostWorker", "SlowBatch"]


@dataclass(frozen=True)
class SlowBatch:
    """Fault: the batch of this step arrives `seconds` late. If `seconds` is the appliance's `timeout_s` or more, the
    loop gets a DeadlineError. Training may then continue: the next executor gets the batch."""

    step: int
    seconds: float

    def strike(self, reader: InProcessReader) -> None:
        reader.delay(self.seconds)


@dataclass(frozen=True)
class InputError:
    """Fault: input_fn's loader raises `error` (a ValueError by default) while it makes the batch of this step. The loop
    gets an InputFnError with the error's text, and the run ends. After load_state_dict another run can be opened."""

    step: int
    error: Exception = field(default_factory=partial(ValueError, "injected by a test"))

    def strike(self, reader: InProcessReader) -> None:
        raise reader.failed(reader.due.failure(self.error)) from self.error


@dataclass(frozen=True)
class LostWorker:
    """Fault: the worker that is to make the batch of this step dies. By default another worker recovers the slot, with
    a warning and a count in DataExecutor.stats.recoveries. With `for_good` the loop gets a WorkerLostError, and the run
    ends."""

    step: int
    for_good: bool = False

    def strike(self, reader: InProcessReader) -> None:
        why = "its worker was lost (injected by a test)"
        if self.for_good:
            raise reader.failed(
                WorkerLostError(
                    f"{reader.label}: {why}, and no other worker made the batch: load a state to open another run"
                )
            )
        reader.replace_worker(why)
