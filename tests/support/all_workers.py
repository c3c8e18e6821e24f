"""All workers of a topology, without the processes: the loader that each has, and who takes from whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.proto.state.assignment import Assignment, assigned
from penstock.proto.state.codec import decode_state, encode_state

__all__ = ["AllWorkers", "Shape", "saved"]

Shape = tuple[int, int]
"""(boxes, workers of each)."""


def saved(state: Any) -> Any:
    """Return a state as it comes back from a checkpoint."""
    return decode_state(encode_state(state))


class AllWorkers:
    """Each box takes its batches from its workers in turn."""

    def __init__(
        self,
        made: Callable[[], Any],
        topology: Shape,
        before: AllWorkers | None = None,
        *,
        state: Any = None,
        **load: Any,
    ) -> None:
        """
        Args:
            made: a worker's loader, whose batches are lists.
            before: whose state it goes on from. On the same topology whose turn it was stays, as a box's position does.
            state: aggregated state from which it goes on instead.
            load: arguments of deaggregate_state_dict.
        """
        self.made, self.topology, self.load = made, topology, load
        state = before.state() if before is not None and state is None else state
        boxes, workers = topology
        self.workers: list[Any] = [self._worker(number, state) for number in range(boxes * workers)]
        self.passes: list[Iterator[Any]] = [iter(loader) for loader in self.workers]
        self.step: int = before.step if before is not None and before.topology == topology else 0

    def _worker(self, number: int, state: Any) -> Any:
        boxes, workers = self.topology
        with assigned(Assignment(number // workers, boxes, number % workers, workers, 0, 1)):
            loader = self.made()
            if state is not None:
                loader.load_state_dict(saved(loader.deaggregate_state_dict(state, **self.load)))
        return loader

    def take(self, steps: int) -> list[list[Any]]:
        """Global batches, their rows in the order of the epoch; over the ends of epochs."""
        return [self._batch() for _ in range(steps)]

    def _batch(self) -> list[Any]:
        for _ in range(3):
            rows = self.step_rows()
            if rows is not None:
                boxes = len(rows)
                return [rows[at % boxes][at // boxes] for at in range(sum(map(len, rows)))]
            self.passes, self.step = [iter(loader) for loader in self.workers], 0
        raise AssertionError("two epochs without a batch")

    def step_rows(self) -> list[Any] | None:
        """Each box's batch; None if the epoch is over."""
        boxes, workers = self.topology
        slot = self.step % workers
        rows = [next(self.passes[box * workers + slot], None) for box in range(boxes)]
        if any(row is None for row in rows):
            assert all(row is None for row in rows), "an epoch ended on some boxes and went on on others"
            assert all(next(rest, None) is None for rest in self.passes), "an epoch that ended goes on on others"
            return None
        self.step += 1
        return rows

    def lose(self, number: int) -> None:
        """A worker dies, and another one goes on from its state."""
        state = saved(self.workers[number].state_dict())
        self.workers[number] = self._worker(number, None)
        self.workers[number].load_state_dict(state)
        self.passes[number] = iter(self.workers[number])

    def state(self) -> Any:
        states = [saved(loader.state_dict()) for loader in self.workers]
        return saved(self.made().aggregate_state_dict(states))  # by anybody
