"""PENSTOCK_SYNTHETIC: the first batch of each worker again and again, and nothing to save."""

from __future__ import annotations

from typing import Any

import pytest
from chains import plain
from mapped import mapped
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import NotRestartableError

OPTIONS: dict[str, Any] = {"global_batch_size": 12, "tail": "carry"}


def test_synthetic_input_repeats_and_has_no_state(appliance: Appliance) -> None:
    loader = DataLoader(mapped, **OPTIONS)
    with beside(appliance, num_workers_per_box=2) as usual:
        real = [plain(batch) for batch in DataExecutor(loader, num_steps=3, appliance=usual)]
        state = loader.state_dict()
    loader = DataLoader(mapped, **OPTIONS)
    with beside(appliance, num_workers_per_box=2, synthetic=True) as repeating:
        repeated = [plain(batch) for batch in DataExecutor(loader, num_steps=7, appliance=repeating)]
        with pytest.raises(NotRestartableError, match="PENSTOCK_SYNTHETIC repeats the first batch of each worker"):
            loader.state_dict()
        resumed = DataLoader(mapped, **OPTIONS)
        resumed.load_state_dict(state)
        with pytest.raises(NotRestartableError, match="PENSTOCK_SYNTHETIC cannot resume"):
            next(iter(DataExecutor(resumed, appliance=repeating)))
    assert repeated == [*real[:2] * 3, real[0]]
