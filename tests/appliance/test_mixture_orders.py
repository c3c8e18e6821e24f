"""Orders to change a mixture, without processes: what they wait for, what refuses them, and what they leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_cluster import FakeBox, FakeCluster, FakeWorker

from penstock.appliance.core.mixture_orders import MixtureOrders, Proposal
from penstock.proto.errors import (
    InvalidArgumentError,
    OverloadedError,
    PenstockError,
    StateUnavailableError,
    SupersededError,
    UnknownRunError,
)
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2


class Stage:
    """A run of two boxes after three steps, and its orders."""

    def __init__(self, world: FakeCluster, workers: int = 1) -> None:
        self.world = world
        self.worker: FakeWorker = world.worker("w")
        more = [world.worker(f"w{number}") for number in range(1, workers)]
        self.boxes = [world.open(box, num_boxes=2) for box in range(2)]
        for worker in (self.worker, *more):
            worker.ready()
        for box in self.boxes:
            box.deliver(3)
        machine = world.state_machine
        self.orders = MixtureOrders(machine.cluster, machine.placement, machine.state_queries)

    def request(self, step: int = 6, key: str = "k") -> pb.ChangeMixtureRequest:
        return pb.ChangeMixtureRequest(run="job", key=key, from_step=step, retired=["a"], deadline_s=5)

    def proposed(self, step: int = 6, key: str = "k") -> Proposal:
        trials = self.orders.trials(self.request(step, key))
        assert [trial.trial and trial.trial.steps for trial in trials] == [step - 1]
        plan = pb.MixturePlan(change=records_pb2.MixtureChange(position=8 * (step - 1)))
        return self.orders.proposed(self.request(step, key), trials, [plan])

    def answer(self, box: FakeBox, taken: int) -> None:
        """Let a box report the fence that it sees."""
        request = box.progress()
        fence = self.world.watch(request).fence
        request.fence_key, request.fence_taken = fence.key, taken
        self.world.watch(request)


@pytest.fixture
def stage() -> Stage:
    return Stage(FakeCluster())


def test_answer_to_an_earlier_try_does_not_count(stage: Stage) -> None:
    first = stage.proposed()
    stage.orders.fence(first)
    stage.answer(stage.boxes[0], 3)
    stage.orders.withdraw(first)
    again = stage.proposed()
    stage.orders.fence(again)
    assert stage.orders.undecided(again) == "the answer of box 0, 1"


def _closed(stage: Stage) -> None:
    stage.boxes[1].close()


def _failed(stage: Stage) -> None:
    report = stage.worker.slot_report(stage.worker.of(0), pb.FAILED)
    stage.worker.heartbeat(report)


def _left(stage: Stage) -> None:
    for box in stage.boxes:
        box.abandon_epoch()


@pytest.mark.parametrize("happens", [_closed, _failed, _left])
def test_change_is_refused_at_its_last_moment(stage: Stage, happens: Callable[[Stage], None]) -> None:
    proposal = stage.proposed()
    stage.orders.fence(proposal)
    for box in stage.boxes:
        stage.answer(box, 3)
    assert stage.orders.undecided(proposal) == ""
    happens(stage)
    with pytest.raises(StateUnavailableError):
        stage.orders.undecided(proposal)
    stage.orders.withdraw(proposal)


def test_change_ends_with_its_attempt(stage: Stage) -> None:
    proposal = stage.proposed()
    stage.orders.fence(proposal)
    stage.world.open(0, num_boxes=2, client_id="next", attempt_key="next")
    with pytest.raises(SupersededError):
        stage.orders.undecided(proposal)


def test_one_change_is_decided_at_a_time(stage: Stage) -> None:
    stage.orders.fence(stage.proposed())
    with pytest.raises(OverloadedError, match="another change of run job/0 is being decided"):
        stage.orders.trials(stage.request(key="other"))


def test_change_during_a_trial_refuses_its_plan(stage: Stage) -> None:
    """The plan's weights are those of a run without the other change."""
    trials = stage.orders.trials(stage.request(key="other"))
    stage.orders.make(stage.proposed())
    with pytest.raises(OverloadedError, match="another change of run job/0 was made meanwhile"):
        stage.orders.proposed(stage.request(key="other"), trials, [pb.MixturePlan()])


def test_each_worker_tries_added_sources() -> None:
    """Other changes are tried by one: it has the sources already."""
    stage = Stage(FakeCluster(), workers=2)
    request = stage.request()
    assert len(stage.orders.trials(request)) == 1
    request.added.add(source="c", function="data:c")
    trials = stage.orders.trials(request)
    attempt = stage.world.state_machine.cluster.open_attempts()[0]
    where = [attempt.boxes[trial.box].slots[trial.slot or 0].worker for trial in trials]
    assert sorted(where) == ["w", "w1"]
    assert len({trial.key for trial in trials}) == 2
    plans = [pb.MixturePlan(order="one"), pb.MixturePlan(order="other")]
    with pytest.raises(InvalidArgumentError, match="all workers must have the same code and data"):
        stage.orders.proposed(request, trials, plans)


def test_epoch_that_ends_during_a_trial_refuses(stage: Stage) -> None:
    """The plan's position is in the epoch before."""
    trials = stage.orders.trials(stage.request())
    for box in stage.boxes:
        box.abandon_epoch()
        box.deliver(1)
    with pytest.raises(StateUnavailableError, match="an epoch of run job/0 ended meanwhile"):
        stage.orders.proposed(stage.request(), trials, [pb.MixturePlan()])
    later = stage.orders.trials(stage.request())[0].trial
    assert later is not None
    assert (later.steps, later.epochs) == (2, 1)


def test_fence_ends_before_the_loops_fail(stage: Stage) -> None:
    assert stage.orders.patience(stage.proposed()) == 20
    (attempt,) = stage.world.state_machine.cluster.open_attempts()
    attempt.boxes[1].opening.loader.options.timeout_s = 5
    assert stage.orders.patience(stage.proposed()) == 2.5


def test_snapshots_of_older_runners_are_dropped(stage: Stage) -> None:
    """Snapshots beyond the change's step are dropped; each slot makes every second batch."""
    state_machine, (slot, *_) = stage.world.state_machine, stage.world.slots()
    header = pb.SnapshotHeader(**slot.key._asdict(), generation=slot.generation, size=1)

    def stored(total: int) -> list[int]:
        header.total = total
        try:
            state_machine.snapshot_stored(header)
        except SupersededError:
            pass
        return [kept.total for kept in state_machine.cluster.snapshot_index.snapshots(slot.key)]

    assert [stored(total) for total in (0, 3, 4)][-1] == [0, 3, 4]
    stage.orders.make(stage.proposed())
    assert stored(0) == [0, 3]
    assert stored(4) == [0, 3]
    assert stored(2) == [0, 2, 3]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"run": "nothing"}, UnknownRunError),
        ({"key": "a\nb"}, InvalidArgumentError),
        ({"deadline_s": float("nan")}, InvalidArgumentError),
        ({"from_step": 1 << 63}, InvalidArgumentError),
        ({"retired": ["a\nb"]}, InvalidArgumentError),
        ({"retired": ["x"] * 300}, InvalidArgumentError),
    ],
)
def test_invalid_orders_are_refused(stage: Stage, change: dict[str, object], error: type[PenstockError]) -> None:
    request = stage.request()
    request.MergeFrom(pb.ChangeMixtureRequest(**change))  # type: ignore[arg-type]
    with pytest.raises(error):
        stage.orders.repeated(request)
