"""Trial of a change of a mixture's weights on a worker, before the change is made.

Only user code knows the sources of a mixture. So a helper process of one slot makes the loader and applies the change.
It returns the change's position in the order of samples, and the weights of all sources. A source that is added may be
missing on a worker, so a change that adds sources is tried on each worker of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.appliance.model.entities import Box, Slot
from penstock.appliance.states.aggregation import Aggregation, AggregationTask
from penstock.proto.v1 import coordinator_pb2 as pb


@dataclass(frozen=True)
class MixtureTask(AggregationTask):
    """Request to one worker to try a change of a mixture. `blob`: key of the change and number of the trial."""

    trial: pb.MixtureTrial = field(default_factory=pb.MixtureTrial, compare=False)

    def request(self, deadline_s: float) -> pb.StateRequest:
        request = super().request(deadline_s)
        request.ClearField("aggregate_blob")
        request.mixture.CopyFrom(self.trial)
        return request


@dataclass(eq=False)
class MixtureTrial(Aggregation):
    """Query for the trial of a change. It sends one request, to one slot of a box. `blob`: key of the change and number
    of the trial, because queries with the same `blob` would count as one query."""

    trial: pb.MixtureTrial = field(default_factory=pb.MixtureTrial)
    slot: int | None = None
    """Number of the slot that is asked; None: the first slot that is ready."""
    epoch: int = 0
    """Epoch in which the boxes are expected to be at the step of the change."""
    changes: int = 0
    """Number of earlier changes of the run's mixture."""

    @property
    def title(self) -> str:
        return f"trial of a change of the mixture of run {self.run}"

    def able(self, box: Box) -> list[Slot]:
        return box.slots if self.slot is None else [box.slots[self.slot]]

    def task(self, *given: Any) -> MixtureTask:
        fields: dict[str, Any] = {"trial": self.trial}
        return MixtureTask(*given, **fields)
