"""Tests of training loops without daemons: an appliance in this process and thread.

Example::

    from penstock.client.testing import FakeAppliance

    def test_training_survives_a_restart():
        with FakeAppliance(num_workers_per_box=2, seed=7) as appliance:
            loader = DataLoader(input_fn)
            for batch in DataExecutor(loader, num_steps=10, appliance=appliance):
                ...
            state = loader.state_dict()

The appliance has no socket, thread or process: a batch is made when the loop requests it. All other parts are real.
Batches are those that workers would send, with the same positions and seeds, and a state resumes on a real Appliance,
and the reverse. See docs/debugging.md for the differences."""

from penstock.client.in_process import Fault
from penstock.client.testing.fake_appliance import FakeAppliance, InputError, LostWorker, SlowBatch

__all__ = ["FakeAppliance", "Fault", "InputError", "LostWorker", "SlowBatch"]
