"""Out of epochs as the loop left them, by whoever makes a slot's stream again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.proto.errors import ReplayMismatchError
from penstock.proto.state.assignment import assigned, current_assignment
from penstock.proto.state.codec import encode_state
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.restart_points import END
from penstock.worker.loader.slot_loader import SlotLoader
from penstock.worker.loader.travel import catch_up, leave


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    with assigned(current_assignment()):
        yield


def source_of(empty: int) -> SlotLoader:
    arguments = encode_state({"args": (empty,), "kwargs": {}})
    loader = records_pb2.LoaderSpec(input_fn="gappy:gappy", allow=["gappy"], arguments=arguments)
    source = SlotLoader(records_pb2.WorkerAssignment(num_boxes=1, num_workers_per_box=1, loader=loader))
    source.build()
    return source


def first_of_next_pass(source: SlotLoader) -> tuple[int, list[int]]:
    source.open_epoch()
    batch = source.next()
    assert isinstance(batch, torch.Tensor)
    return source.position.epoch, batch.tolist()


@pytest.mark.parametrize("empty", range(4))
def test_epoch_is_abandoned_behind_empty_ones(empty: int) -> None:
    ran = source_of(empty)
    epoch_start = ran.open_epoch()
    for _ in range(empty):
        assert ran.next() is END
        ran.open_epoch()
    leave(ran, empty, 0)
    expected = first_of_next_pass(ran)
    assert expected[0] == empty + 1
    again = source_of(empty)
    again.restore(epoch_start)
    leave(again, empty, 0)
    assert first_of_next_pass(again) == expected


def test_epoch_with_batches_is_not_skipped() -> None:
    source = source_of(2)
    source.open_epoch()
    with pytest.raises(ReplayMismatchError, match="epoch 2 has more batches than before"):
        catch_up(source, 4)
