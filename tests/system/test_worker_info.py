"""torch's get_worker_info(): every sample comes once, however a loader divides its samples among boxes and workers."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dividing
import pytest
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto.errors import InputFnError

COUNT = 96


def samples(appliance: Any, *loader: Any) -> list[int]:
    with appliance:
        return [int(number) for batch in DataLoader(*loader) for number in batch]


def on_two_boxes(appliance: Appliance, job: str, *loader: Any) -> list[int]:
    def box(number: int) -> list[int]:
        return samples(beside(appliance, job=job, box=number, num_boxes=2, num_workers_per_box=2), *loader)

    with ThreadPoolExecutor(2) as pool:
        return [number for numbers in pool.map(box, range(2)) for number in numbers]


ANSWERS = {
    dividing.by_worker_info: "worker's number among all workers of the run",
    dividing.web_shards: "worker's number among all workers of the run",
    dividing.by_node: "worker's number in its box, because the loader reads .box",
    dividing.model_zoo: "None to the loader, because the loader reads its worker's number",
}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "get_worker_info()" in record.message]


def test_each_sample_comes_once(appliance: Appliance, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.client")
    assert sorted(on_two_boxes(appliance, "by_node", dividing.by_node, COUNT)) == list(range(COUNT))
    assert len(told(caplog)) == 2  # once in each box
    assert all(ANSWERS[dividing.by_node] in message for message in told(caplog))


def test_torch_answers_in_worker_processes_of_the_loader(
    appliance: Appliance, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.client")
    assert sorted(on_two_boxes(appliance, "own", dividing.model_zoo, COUNT, 2)) == list(range(COUNT))
    assert not told(caplog)


@pytest.mark.parametrize("pattern", ANSWERS)
def test_workers_of_one_process_are_answered_apart(pattern: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The function get_worker_info was imported long before."""
    caplog.set_level(logging.INFO, "penstock.client")
    boxes = [FakeAppliance(box=box, num_boxes=2, num_workers_per_box=3, seed=1) for box in range(2)]
    numbers = [number for box in boxes for number in samples(box, pattern, COUNT)]
    assert sorted(numbers) == list(range(COUNT))
    assert len(told(caplog)) == 2
    assert all(ANSWERS[pattern] in message for message in told(caplog))


@pytest.mark.parametrize("field", ["slot", "box"])
def test_worker_info_before_the_field_is_an_error(field: str) -> None:
    expected = (
        rf"dividing.py:\d+ reads .{field} of current_assignment\(\) after get_worker_info\(\), at \S*dividing.py:\d+: "
        rf".*Read .{field} first, in input_fn.* step 1\]"
    )
    with pytest.raises(InputFnError, match=expected):
        samples(FakeAppliance(box=1, num_boxes=2, seed=1), dividing.late, COUNT, field)


def test_torchs_collate_does_not_ask() -> None:
    assert sorted(samples(FakeAppliance(num_workers_per_box=3), dividing.collated, COUNT)) == list(range(COUNT))


def test_reads_in_state_methods_do_not_count() -> None:
    """A state tells whose it is; the loader still divides by the worker info, in each launch."""
    loader, again = DataLoader(dividing.saved, COUNT), DataLoader(dividing.saved, COUNT)
    with FakeAppliance(num_workers_per_box=2) as appliance:
        first = [batch.tolist() for batch in DataExecutor(loader, 10, appliance=appliance)]
        state = loader.state_dict()
    again.load_state_dict(state)
    with FakeAppliance(num_workers_per_box=2) as appliance:
        rest = [batch.tolist() for batch in DataExecutor(again, COUNT // 4 - 10, appliance=appliance)]
    assert sorted(number for batch in first + rest for number in batch) == list(range(COUNT))
