"""Appliance in this process and thread, with faults that a test injects: see penstock.client.testing."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Unpack

from penstock.client.api.appliance import Appliance
from penstock.client.api.appliance_settings import ApplianceOptions, check_names, resolve_given, signature_of
from penstock.client.in_process import Fault, InProcessReader
from penstock.client.states.code_reference import forbid_in_runner
from penstock.proto.errors import InvalidArgumentError, WorkerLostError


class FakeAppliance(Appliance):
    """Appliance with workers in this process and thread, for tests of training loops.

    Example::

        def test_loop_survives_a_lost_worker():
            faults = [LostWorker(step=3)]
            with FakeAppliance(num_workers_per_box=2, seed=7, faults=faults) as appliance:
                executor = DataExecutor(DataLoader(input_fn), num_steps=10, appliance=appliance)
                train(executor)
                assert executor.stats.recoveries == 1

    Use it like an Appliance; it reads neither environment variables nor the settings file. A saved state assumes that
    the other boxes take the same steps, and leave an epoch after the same one. For their batches, create a
    FakeAppliance with another `box`.

    Args:
        faults: faults that happen in each run, each once at its step: InputError, LostWorker, SlowBatch.
        options: see ApplianceOptions in penstock.client.api.appliance_settings. The job's name is by default "test-"
            and random digits, and timeout_s is the deadline for SlowBatch. Batches have memory of their own, on any
            device.

    Raises the errors of Appliance, and InvalidArgumentError if the step of a fault is below 1."""

    def __init__(self, *, faults: Sequence[Fault] = (), **options: Unpack[ApplianceOptions]) -> None:
        forbid_in_runner("creating a FakeAppliance")
        check_names(options)
        for fault in faults:
            if fault.step < 1:
                raise InvalidArgumentError(f"step of the fault {fault} must be >= 1, got {fault.step}")
        job = options.get("job") or f"test-{secrets.token_hex(4)}"
        self._describe(resolve_given(**{**options, "job": job}))
        self.in_process, self._faults = True, tuple(faults)


FakeAppliance.__signature__ = signature_of(FakeAppliance.__init__)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class SlowBatch:
    """Fault: the batch of this step arrives `seconds` late. With `timeout_s` or more, the loop gets a DeadlineError;
    the next executor gets the batch."""

    step: int
    seconds: float

    def strike(self, reader: InProcessReader) -> None:
        reader.delay(self.seconds)


@dataclass(frozen=True)
class InputError:
    """Fault: input_fn's loader raises `error` (by default a ValueError) as it makes the batch of this step. The loop
    gets an InputFnError, and the run ends. After load_state_dict another run can be opened."""

    step: int
    error: Exception = field(default_factory=partial(ValueError, "injected by a test"))

    def strike(self, reader: InProcessReader) -> None:
        raise reader.failed(reader.due.failure(self.error)) from self.error


@dataclass(frozen=True)
class LostWorker:
    """Fault: the worker that is to make the batch of this step dies. Another recovers the slot, with a warning and a
    count in DataExecutor.stats.recoveries. With `for_good` the loop gets a WorkerLostError, and the run ends."""

    step: int
    for_good: bool = False

    def strike(self, reader: InProcessReader) -> None:
        why = "its worker was lost (injected by a test)"
        if self.for_good:
            raise reader.failed(WorkerLostError(f"{reader.label}: {why}, and no other worker made the batch"))
        reader.replace_worker(why)
