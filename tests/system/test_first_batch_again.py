"""What a new runner compares: an epoch's first batch, if it was made when the loop had taken none; all values."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import first_batches
import pytest
from chains import kill_runners, runners
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import ReplayMismatchError


def killed(appliance: Appliance, make: Any, *, entropy: bool, steps: int = 1, **settings: Any) -> int:
    """Take some batches (one: slot 0's first), kill both runners, and take more. Return the number of recoveries."""
    before = runners()
    with beside(appliance, num_workers_per_box=2, **{"replay": True, **settings}) as here:
        executor = DataExecutor(DataLoader(make, entropy), steps + 5, appliance=here)
        batches = iter(executor)
        assert len(list(islice(batches, steps))) == steps
        time.sleep(0.3)  # slot 1 has made its first batch, too
        kill_runners(before)
        time.sleep(2)  # the loop's process knows that they are lost
        assert len(list(islice(batches, 5))) == 5
        return executor.stats.recoveries


@pytest.mark.filterwarnings("ignore:.*recovered")
def test_other_first_batch_is_an_error(appliance: Appliance) -> None:
    with pytest.raises(ReplayMismatchError, match=r"\(box 0, slot 1\): epoch 0 does not begin with the batch"):
        killed(appliance, first_batches.Kept, entropy=True)
    assert killed(appliance, first_batches.Kept, entropy=False) == 2


@pytest.mark.filterwarnings("ignore:.*recovered")
def test_no_second_instance_of_a_queue_is_compared(appliance: Appliance) -> None:
    assert killed(appliance, first_batches.Queue, entropy=True, replay=False) == 2


@pytest.mark.filterwarnings("ignore:.*recovered")
def test_value_without_rows_is_compared(appliance: Appliance) -> None:
    """With digests that are sums over rows, too."""
    with pytest.raises(ReplayMismatchError, match=r"\(box 0, slot 1\).*has not made the batches"):
        killed(appliance, first_batches.Scalars, entropy=True, steps=4, digest="rows")
