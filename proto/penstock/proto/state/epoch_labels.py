"""Labels of epochs: the numbers that user code sees, while Penstock counts epochs by their ordinals in the run.

The training loop may give an epoch another number (`DataLoader.set_epoch`), from which later ones count on. A pure
loader makes the epoch of this label. Labels are a dict: ordinal -> label, in rising order, of those that were set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.proto.v1 import records_pb2

MOST_LABELS = 64
"""Number of newest labels that are kept. Older epochs are not made again."""


def label_of(labels: Mapping[int, int], epoch: int) -> int:
    before = max((known for known in labels if known <= epoch), default=-1)
    return epoch if before < 0 else labels[before] + epoch - before


def put_label(labels: dict[int, int], epoch: int, label: int) -> None:
    labels[epoch] = label
    while len(labels) > MOST_LABELS:
        del labels[min(labels)]


def labels_in(messages: Iterable[records_pb2.EpochLabel], last: int | None = None) -> dict[int, int]:
    """Return the labels in messages, up to that of epoch `last`."""
    found: dict[int, int] = {}
    for message in messages:
        if last is None or message.epoch <= last:
            put_label(found, message.epoch, message.label)
    return found


def to_messages(labels: Mapping[int, int]) -> list[records_pb2.EpochLabel]:
    return [records_pb2.EpochLabel(epoch=epoch, label=label) for epoch, label in sorted(labels.items())]
