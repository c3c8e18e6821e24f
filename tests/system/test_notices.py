"""Each epoch of a pure loader begins with what input_fn left. Who may mean something else is told so, once."""

from __future__ import annotations

from itertools import islice

import notices
import pytest
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader


def lines(caplog: pytest.LogCaptureFixture, of: str) -> list[str]:
    return [record.message for record in caplog.records if of in record.message]


def test_who_keeps_a_place_is_told_and_who_is_told_the_epoch_is_not(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with Appliance(num_workers_per_box=2, seed=7, timeout_s=60) as appliance:
        with beside(appliance, num_workers_per_box=1) as alone:
            assert list(DataExecutor(DataLoader(notices.told), 12, appliance=alone))[6] == 101
        assert not lines(caplog, "has state methods and no set_epoch")
        assert "have equal batches" not in capfd.readouterr().err
        loader = DataLoader(notices.places)
        first = list(DataExecutor(loader, appliance=appliance))
        assert list(DataExecutor(loader, appliance=appliance)) == first == [n // 2 + 1 for n in range(12)]
        for _ in range(2):
            next(iter(DataExecutor(loader, appliance=appliance)))
            assert len(list(islice(DataExecutor(loader, appliance=appliance), 3))) == 3
    assert len(lines(caplog, "has state methods and no set_epoch")) == 1
    assert len(lines(caplog, "sets exact_states = True")) == 1
    said = capfd.readouterr().err
    assert said.count("Places.place changed during epoch 0") == 1
    assert said.count("epochs 0 and 1 have equal batches") == 1
