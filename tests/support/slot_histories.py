"""Random histories of a slot: epochs that ended or were abandoned, restart points of every kind, launches, poison
batches; and a walker that replays along a plan as a loader would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from penstock.worker.loader.restart_plan import Target, route
from penstock.worker.loader.restart_points import Launch, RestartPoint, StreamHistory, StreamPosition


@dataclass(frozen=True)
class History:
    """History of a slot, up to some position."""

    lengths: list[int]
    """Batches that each epoch has, were it not abandoned."""
    left: dict[int, int]
    """Epoch -> batches in all where the loop left it."""
    target: Target
    points: list[RestartPoint]
    """Restart points in any order; some may lie where the runner ran ahead of a loop that left the epoch."""
    astray: frozenset[int] = field(default_factory=frozenset)
    """Numbers of the points from which a loader does not lead to the batches that were delivered."""

    def began(self, epoch: int) -> int:
        """Batches in all when an epoch was opened on the loop's way."""
        total = 0
        for number in range(epoch):
            total = self.left.get(number, total + self.lengths[number])
        return total

    def is_on_the_way(self, point: RestartPoint) -> bool:
        """Return True if the target can be reached from a restart point, according to the history itself and not to the
        planning code."""
        epoch, target = point.epoch, self.target
        if epoch > target.epoch or point.began != self.began(epoch):
            return False
        last = target.total if epoch == target.epoch else self.began(epoch + 1)
        return point.began <= point.total <= last

    def walk(self, epoch: int, total: int, target: Target) -> tuple[int, int]:
        """Return the position at which a loader arrives that follows the plan from a position. Fails if it makes a
        batch that was not delivered."""
        walker = _Walker(self, epoch, total)
        for leg in route(epoch, target):
            while walker.total < leg.total:
                if walker.is_over:
                    assert walker.epoch < leg.epoch, f"epoch {walker.epoch} ends at {walker.total}, before {leg}"
                    walker.open_next()
                else:
                    walker.make()
            if leg.abandons:
                walker.catch_up(leg.epoch)
                assert (walker.epoch, walker.total) == (leg.epoch, leg.total)
                walker.open_next()
        walker.catch_up(target.epoch)
        return walker.epoch, walker.total


class _Walker:
    """A loader that goes along: it knows of no epoch that the loop left."""

    def __init__(self, history: History, epoch: int, total: int) -> None:
        self.history, self.epoch, self.total = history, epoch, total
        self.end = history.began(epoch) + history.lengths[epoch]

    @property
    def is_over(self) -> bool:
        return self.total == self.end

    def make(self) -> None:
        self.total += 1
        began, last = self.history.began(self.epoch), self.history.left.get(self.epoch, self.total)
        assert began < self.total <= last, f"batch {self.total} of epoch {self.epoch} was not delivered"

    def open_next(self) -> None:
        self.epoch += 1
        self.end = self.total + self.history.lengths[self.epoch]

    def catch_up(self, epoch: int) -> None:
        while self.epoch < epoch:
            assert self.is_over, f"epoch {self.epoch} goes on after {self.total}"
            self.open_next()


@st.composite
def histories(draw: st.DrawFn) -> History:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    epoch = len(lengths) - 1
    lengths.append(9)  # what comes after the target's epoch, never reached
    left: dict[int, int] = {}
    total = 0
    breaks = draw(st.lists(st.booleans(), min_size=epoch, max_size=epoch))
    for number in range(epoch):
        if breaks[number]:
            left[number] = total + draw(st.integers(0, lengths[number]))
        total = left.get(number, total + lengths[number])
    target = Target(epoch, total + draw(st.integers(0, lengths[epoch])), left, digest=7)
    history = History(lengths, left, target, [])
    points = draw(st.lists(_points(history), max_size=12))
    if draw(st.booleans()):
        points.append(_point(history, 0, 0, 0, origin=True))
    astray = draw(st.frozensets(st.integers(0, max(0, len(points) - 1))))
    return History(lengths, left, target, points, astray)


@st.composite
def _points(draw: st.DrawFn, history: History) -> RestartPoint:
    """An epoch start, or a snapshot; also one that was taken ahead of a loop that then left the epoch."""
    epoch = draw(st.integers(0, history.target.epoch))
    began = history.began(epoch)
    origin = draw(st.booleans())
    if draw(st.booleans()) and history.left:
        number = draw(st.sampled_from(sorted(history.left)))
        began = history.began(number)
        ahead = began + history.lengths[number]
        if draw(st.booleans()):
            return _point(history, number + 1, ahead, ahead, origin=True)
        return _point(history, number, began, draw(st.integers(began, ahead)), origin=False)
    last = history.left.get(epoch, began + history.lengths[epoch])
    if origin or last == began:
        return _point(history, epoch, began, began, origin=True)
    skips = draw(st.lists(st.tuples(st.just(epoch), st.integers(0, 40), st.integers(1, 3)), max_size=2))
    launch = Launch(draw(st.integers(0, 9)), draw(st.integers(0, began)))
    return _point(history, epoch, began, draw(st.integers(began + 1, last)), False, launch, tuple(skips))


def _point(
    history: History,
    epoch: int,
    began: int,
    total: int,
    origin: bool,
    launch: Launch = Launch(),  # noqa: B008 - frozen
    skips: Iterable[tuple[int, int, int]] = (),
) -> RestartPoint:
    past = StreamHistory(launch, tuple((number, at) for number, at in history.left.items() if number < epoch))
    return RestartPoint(
        StreamPosition(epoch, total - began, total, 0),
        None,
        b"",
        b"" if origin else None,
        skips=tuple(skips),
        history=past,
    )
