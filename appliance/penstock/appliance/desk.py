"""The desk where states are asked for: the gatherings under way, those that are done, and who may ask for which step.

Ranks that ask for one step share one gathering, and those that come later get its result as long as it is kept: every
rank saves the same bytes, and the workers are asked once.
"""

from __future__ import annotations

from collections import OrderedDict

from penstock.appliance.aggregation import Aggregation
from penstock.appliance.books import Books
from penstock.appliance.model import Attempt
from penstock.appliance.states import Gathering, Want
from penstock.proto.errors import StateUnavailableError, SupersededError, UnknownRunError
from penstock.proto.v1 import coordinator_pb2 as pb

_Key = tuple[str, int, int, str]


class Desk:
    def __init__(self, books: Books) -> None:
        self._books = books
        self._open: dict[_Key, Gathering] = {}
        self._finished: OrderedDict[_Key, Gathering] = OrderedDict()

    def wants(self, now: float) -> list[tuple[Want, float]]:
        """All open requests, with the seconds that the most patient asker still has."""
        return [
            (want, max(0.0, gathering.deadline - now))
            for gathering in self._open.values()
            for want in gathering.requests.values()
        ]

    def begin(self, request: pb.FetchStateRequest, asker: int | None, now: float) -> Gathering:
        """`asker`: the box that asks, if one does. Raises StateUnavailableError, UnknownRunError, SupersededError."""
        run = self._books.runs.get(request.run)
        if run is None:
            raise UnknownRunError(f"the coordinator knows no run {request.run!r}")
        attempt = self._books.attempt(run.name, request.attempt or run.attempt)
        boxes = list(attempt.boxes.values())
        going = [box for box in boxes if not box.pass_ended]
        first = max([box.base.step for box in boxes] + [box.step - box.retention for box in going])
        last = max(box.step for box in boxes) if asker is None else attempt.boxes[asker].step
        step = request.step
        if request.newest:
            step = min(box.step for box in going) if going else last
        # Without a report of the asker's own, what was delivered since the last one is not known here.
        last_is_known = asker is not None or request.attempt == 0
        if step < first or (step > last and last_is_known):
            raise StateUnavailableError(
                f"the state of run {run.name} at step {step} cannot be had: steps {first} to {last} can (this attempt "
                f"started at step {boxes[0].base.step}, and retention_steps={boxes[0].retention} steps are kept)"
            )
        key = (run.name, attempt.number, step, "")
        self._forget(attempt, first)
        gathering = self._finished.get(key) or self._open.get(key) or Gathering(*key[:3])
        return self._ask(gathering, now + request.deadline_s)

    def begin_aggregation(self, request: pb.FetchStateRequest, box: int, now: float) -> Gathering:
        """Have a worker of the box aggregate the states in a blob."""
        attempt = self._books.attempt(request.run, request.attempt)
        wanted = Aggregation(attempt.run, attempt.number, request.step, box=box, blob=request.aggregate_blob)
        return self._ask(self._open.get(wanted.key) or wanted, now + request.deadline_s)

    def _ask(self, gathering: Gathering, deadline: float) -> Gathering:
        gathering.askers += 1
        gathering.deadline = max(gathering.deadline, deadline)
        if not gathering.done:
            self._open[gathering.key] = gathering
            self._replan(gathering)
        return gathering

    def end(self, gathering: Gathering) -> None:
        gathering.askers -= 1
        key = gathering.key
        if gathering.askers == 0 and self._open.get(key) is gathering:
            del self._open[key]
            before, gathering.requests = set(gathering.requests.values()), {}
            self._announce(gathering, before)

    def answer(self, answer: pb.StateAnswer, data: bytes) -> None:
        """A request's id names run, attempt and step, so at most one gathering has it."""
        for gathering in list(self._open.values()):
            if answer.request in gathering.requests:
                before = set(gathering.requests.values())
                gathering.answered(self._books.attempt(gathering.run, gathering.attempt), answer, data)
                self._announce(gathering, before)
                if answer.ended:  # an end that the others can use
                    self._books.touched.add((gathering.run, gathering.attempt))

    def settle(self) -> None:
        """Plans again what has been touched since."""
        touched, self._books.touched = self._books.touched, set()
        for gathering in list(self._open.values()):
            if (gathering.run, gathering.attempt) in touched:
                self._replan(gathering)
        for key in [key for key in self._finished if key[:2] in touched]:
            run = self._books.runs.get(key[0])
            if run is None or run.current is None or run.current.number != key[1]:
                del self._finished[key]

    def _replan(self, gathering: Gathering) -> None:
        before = set(gathering.requests.values())
        try:
            gathering.refresh(self._books.attempt(gathering.run, gathering.attempt))
        except (SupersededError, UnknownRunError) as error:
            gathering.fail(error)
        self._announce(gathering, before)

    def _announce(self, gathering: Gathering, before: set[Want]) -> None:
        """Wakes the workers whose requests differ from `before`, and the askers if it is done."""
        for name in sorted({want.worker for want in before ^ set(gathering.requests.values())}):
            worker = self._books.workers.get(name)
            if worker is not None:
                self._books.bump_worker(worker)
        if gathering.done:
            key = gathering.key
            asked = self._open.pop(key, None) is gathering
            if asked and gathering.result is not None and not isinstance(gathering, Aggregation):
                self._finished[key] = gathering
                kept = [finished.result.size for finished in self._finished.values() if finished.result is not None]
                while sum(kept) > self._books.limits.answers_cached:
                    self._finished.popitem(last=False)
                    del kept[0]
            self._books.changed(gathering.topic)

    def _forget(self, attempt: Attempt, first: int) -> None:
        """Drops results out of the window, and those that took for final what a box has since left behind."""
        for key, gathering in list(self._finished.items()):
            if key[:2] != (attempt.run, attempt.number) or gathering.result is None:
                continue
            left_behind = any(attempt.boxes[box].step != step for box, step in gathering.result.finals.items())
            if key[2] < first or left_behind:
                del self._finished[key]
