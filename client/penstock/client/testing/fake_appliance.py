"""Appliance in this process and thread: see penstock.client.testing."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal

import torch

from penstock.client.api.appliance import Appliance
from penstock.client.api.appliance_settings import resolve_given
from penstock.client.in_process import Fault
from penstock.client.states.code_reference import forbid_in_runner
from penstock.proto.errors import InvalidArgumentError

__all__ = ["FakeAppliance"]


class FakeAppliance(Appliance):
    """Appliance with workers in this process and thread, for tests of training loops.

    Example::

        def test_loop_survives_a_lost_worker():
            faults = [LostWorker(step=3)]
            with FakeAppliance(num_workers_per_box=2, seed=7, faults=faults) as appliance:
                executor = DataExecutor(DataLoader(input_fn), num_steps=10, appliance=appliance)
                train(executor)
                assert executor.stats.recoveries == 1

    Use a FakeAppliance like an Appliance: pass it to executors, or open it in a `with`. This process is one box
    (data-parallel rank) of `num_boxes`. A saved state assumes that the other boxes do the same as this box: take the
    same steps, and leave an epoch after the same step. For the other boxes' batches, create a FakeAppliance with
    another `box`.

    A FakeAppliance reads neither environment variables nor the settings file.

    Args:
        num_workers_per_box: number of worker slots (logical workers) of each box (1).
        box, num_boxes: number of this box, and number of boxes (0 of 1).
        job: name of the job (a new name, "test-" and random digits).
        seed: seed of the run, 0 to 2**64 - 1 (that of a loaded state, or a random one).
        device: device where the tensors of a batch arrive (None: the CPU). Batches have memory of their own.
        max_batch_bytes: largest size of a batch in bytes; a larger one is an error (1 GiB).
        digest: bytes that the digest of a batch covers (that of the loaded state, else "sample").
        strict_structure: refuse a batch whose structure or dtypes differ from those of the first batch (False).
        replay: save loaders without state methods too, by counting their batches and making them again (False).
        retention_steps: number of delivered steps for which a state stays available (256).
        timeout_s: deadline of a batch in seconds, for SlowBatch (120).
        faults: faults that happen in each run, each once at its step: InputError, LostWorker, SlowBatch.

    Raises:
        InvalidArgumentError, BoxOutOfRangeError: an argument has an invalid value, as for Appliance; or the step of a
            fault is below 1.
        RuntimeError: called inside a worker, because the main script lacks its main guard.
    """

    def __init__(
        self,
        *,
        num_workers_per_box: int = 1,
        box: int = 0,
        num_boxes: int = 1,
        job: str | None = None,
        seed: int | None = None,
        device: str | torch.device | None = None,
        max_batch_bytes: int = 1 << 30,
        digest: Literal["sample", "full", "rows"] | None = None,
        strict_structure: bool = False,
        replay: bool = False,
        retention_steps: int = 256,
        timeout_s: float = 120.0,
        faults: Sequence[Fault] = (),
    ) -> None:
        forbid_in_runner("creating a FakeAppliance")
        for fault in faults:
            if fault.step < 1:
                raise InvalidArgumentError(
                    f"step of the fault {fault} must be >= 1, got {fault.step}: steps count from 1"
                )
        settings = resolve_given(
            num_workers_per_box=num_workers_per_box,
            box=box,
            num_boxes=num_boxes,
            job=job or f"test-{secrets.token_hex(4)}",
            seed=seed,
            device=device,
            max_batch_bytes=max_batch_bytes,
            digest=digest,
            strict_structure=strict_structure,
            replay=replay,
            retention_steps=retention_steps,
            timeout_s=timeout_s,
        )
        self._describe(settings)
        self.in_process, self._faults = True, tuple(faults)
