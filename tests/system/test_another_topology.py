"""A pure loader with two methods resumes between two epochs on another topology: other data are an error, because one
slot's batch of the saved run is made again there."""

from __future__ import annotations

from typing import Any

import pytest
from chains import plain
from neighbours import beside
from two_methods import STEPS, TwoMethods

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import ReplayMismatchError
from penstock.proto.state.codec import decode_state, encode_state


def resumed(appliance: Appliance, state: Any, *arguments: Any, strict: bool = True) -> list[Any]:
    data = DataLoader(TwoMethods, *arguments)
    data.load_state_dict(state, strict=strict)
    return [plain(batch) for batch in DataExecutor(data, 6, appliance=appliance)]


@pytest.mark.parametrize(("workers", "ahead"), [(3, True), (0, False)])
def test_other_data_are_an_error(appliance: Appliance, workers: int, ahead: bool) -> None:
    """With other workers, and in the training process; saved when the next epoch had begun, and before."""
    here = beside(appliance, num_workers_per_box=workers) if workers else Appliance(num_workers_per_box=0, seed=7)
    with here, beside(appliance, num_workers_per_box=2) as before:
        remembers = workers > 0  # memos of the training process may differ from epoch to epoch
        data = DataLoader(TwoMethods, 0, remembers)
        steps = STEPS + 2 if ahead else STEPS
        assert len(list(DataExecutor(data, steps, appliance=before))) == steps
        state = decode_state(encode_state(data.state_at(STEPS)))
        with pytest.raises(ReplayMismatchError, match="the batch"):
            resumed(here, state, 1, remembers)
        batches = resumed(here, state, 0, remembers)
        assert batches == resumed(here, state, 0, remembers, strict=False), "what is compared leaves nothing behind"
        assert len(resumed(here, state, 1, remembers, strict=False)) == len(batches)
